"""The processes of one job on this machine: started, heard, started again when they are killed, ended with this one."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from kvps import process
from kvps.cli.common import ONE_THREAD
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.store import Store

_END_S = 10.0
_FRUITLESS = 5  # a process killed so often in a row, without a version in between, is not killed by chance


@dataclass
class Child:
    """A process of the job; it is the same child when it is started again."""

    name: str
    arguments: tuple[str, ...]
    process: subprocess.Popen[str]
    mark: str
    reader: threading.Thread
    version: int = 0
    fruitless: int = 0

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def failed(self) -> bool:
        """Whether it ended with an error of its own; who was killed is started again instead."""
        return (self.process.poll() or 0) > 0


class Supervisor:
    """Starts the processes of a job with the server's URL in their environment; knows at once when one dies.

    With `gives_up` a child that is killed again and again before anything is committed is not started once more.
    """

    def __init__(self, store: Store, job: Job, gives_up: bool = True) -> None:
        self.children: dict[str, Child] = {}
        self._job = job
        self._gives_up = gives_up
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._died = threading.Event()
        self._environment = ONE_THREAD | os.environ
        self._environment |= {"KVPS_REDIS_URL": store.url, "KVPS_PARENT_PID": str(os.getpid())}

    def start(self, name: str, *arguments: str) -> None:
        """Run ``kvps *arguments`` as child `name`."""
        child = self.children.get(name)
        popen, reader = self._run(name, arguments)
        if child is None:
            self.children[name] = Child(name, arguments, popen, process.mark(popen.pid), reader)
        else:
            child.process, child.mark, child.reader = popen, process.mark(popen.pid), reader

    def _run(self, name: str, arguments: tuple[str, ...]) -> tuple[subprocess.Popen[str], threading.Thread]:
        # -P, for a redis.py or random.py that lies in the user's directory is not meant.
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvps", *arguments, "--quiet"],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",  # a task prints what it likes, and must never find its pipe full
            start_new_session=True,  # so that Ctrl-C comes to the children once, from here
        )
        reader = threading.Thread(target=self._read, args=(name, popen), daemon=True)
        reader.start()
        return popen, reader

    def _read(self, name: str, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        with popen.stdout:
            for line in popen.stdout:
                self._lines.put(f"{name}: {line.rstrip()}")
        popen.wait()
        self._died.set()

    def said(self) -> list[str]:
        """The lines that came since the last call."""
        out = []
        while not self._lines.empty():
            out.append(self._lines.get())
        return out

    def watch(self, timeout_s: float) -> None:
        """Wait until a child ends, but not longer than `timeout_s`; who was killed is replaced at once.

        The others need not wait for a timeout: this process knows for sure that its child is dead. Raises KvpsError
        for a child that is killed again and again before anything is committed.
        """
        if self._died.wait(timeout_s):
            self._died.clear()
            killed = [child for child in self.children.values() if (child.process.poll() or 0) < 0]
            if killed:
                bury(self._job, {child.mark for child in killed})
            for child in killed:
                self._restart(child)

    def _restart(self, child: Child) -> None:
        version = self._job.state().version
        child.fruitless = child.fruitless + 1 if version == child.version else 0
        child.version = version
        if child.fruitless == _FRUITLESS and self._gives_up:
            number = -child.process.returncode
            raise KvpsError(
                f"job {self._job.name} ends: {child.name} was killed {_FRUITLESS} times in a row by signal {number} "
                f"({signal.Signals(number).name}) before anything was committed"
            )
        self.start(child.name, *child.arguments)

    def await_end(self, names: Iterable[str], timeout_s: float) -> None:
        """Let children that are about to end by themselves do so."""
        for name in names:
            with suppress(subprocess.TimeoutExpired):
                self.children[name].process.wait(timeout_s)

    def end(self) -> None:
        """End what still runs: asked first, made to after a while."""
        for child in self.children.values():
            if child.running:
                child.process.terminate()
        for child in self.children.values():
            try:
                child.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.reader.join()


def bury(job: Job, dead: set[str]) -> None:
    """Have the job go on at once without these dead processes: their workers evicted, their shards free to take."""
    for member in job.state().members.values():
        if member.active and f"{member.host}:{member.pid}:{member.process['start']}" in dead:
            job.scripts.evict(member.worker, member.incarnation)
    holders, terms = job.holders(), job.terms()
    for shard, holder in enumerate(holders):
        if holder.rpartition(":")[0] in dead:
            job.scripts.renew(shard, holder, terms[shard], 0)
