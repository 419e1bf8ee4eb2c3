"""The processes of one job on this machine: started, heard, started again when they are killed, ended with this one."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvps.config import JobConfig
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.machine import launcher, process
from kvps.protocol.job_state import State
from kvps.protocol.scripts import ServerRestarted
from kvps.store import Store

# Gradients of several workers at once: one thread each, or their thread pools fight for the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_END_S = 10.0
_LAST_WORDS_S = 1.0
_FRUITLESS = 5  # a process killed so often in a row, without a version in between, is not killed by chance


@dataclass
class Child:
    """A process of the job; it is the same child when it is started again."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    process: subprocess.Popen[str]
    mark: str
    heard: threading.Event  # to its end
    version: int = 0
    fruitless: int = 0
    finished: bool = False  # its worker has done all its rounds

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def code(self) -> int | None:
        """How it ended, as Popen has it: a signal's number is negative. None until all that it said was heard."""
        return self.process.poll() if self.heard.is_set() else None

    @property
    def killed(self) -> bool:
        """Whether a signal ended it before its worker had finished; then it is started again."""
        return (self.code or 0) < 0 and not self.finished

    @property
    def done(self) -> bool:
        """Whether it has ended, and is not started again."""
        return self.code is not None and not self.killed

    @property
    def failed(self) -> bool:
        """Whether it ended with an error of its own."""
        return (self.code or 0) > 0

    @property
    def signal(self) -> str:
        """The signal that ended it, as "SIGKILL"; "" if none did."""
        return signal.Signals(-self.process.returncode).name if (self.code or 0) < 0 else ""


class Supervisor:
    """Starts the processes of a job with the server's URL in their environment; knows at once when one dies.

    `command` is what launches them, as "kvps up". `find` looks for the job, and returns None as long as it is not made.
    With `gives_up` a child that is killed again and again before anything is committed is not started once more.
    """

    def __init__(self, store: Store, command: str, find: Callable[[], Job | None], gives_up: bool = True) -> None:
        self.children: dict[str, Child] = {}
        self._find = find
        self._job: Job | None = None
        self._gives_up = gives_up
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._died = threading.Event()
        told = {"KVPS_REDIS_URL": store.url, launcher.VARIABLE: launcher.this_process(command)}
        self._environment = ONE_THREAD | os.environ | told

    @property
    def job(self) -> Job | None:
        """The job, once it is made."""
        self._job = self._job or self._find()
        return self._job

    def start(self, name: str, *arguments: str) -> Child:
        """Run ``kvps *arguments`` as child `name`."""
        # -P, for a redis.py or random.py that lies in the user's directory is not meant.
        return self.run(name, [sys.executable, "-P", "-m", "kvps", *arguments, "--quiet"])

    def run(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Run a command as child `name`, with this environment beside ours."""
        environment = environment or {}
        popen = subprocess.Popen(
            process.ending_with_this(command),
            env={**self._environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",  # a task prints what it likes, and must never find its pipe full
            start_new_session=True,  # so that Ctrl-C comes to the children once, from here
        )
        mark, heard = process.mark(popen.pid), threading.Event()
        child = self.children.get(name)
        if child is None:
            child = self.children[name] = Child(name, command, environment, popen, mark, heard)
        else:
            child.process, child.mark, child.heard = popen, mark, heard
        threading.Thread(target=self._hear, args=(name, popen, heard), name=f"kvps-hear-{name}", daemon=True).start()
        return child

    def _hear(self, name: str, popen: subprocess.Popen[str], heard: threading.Event) -> None:
        """Hear a process out, until it has ended. What it has started itself ends with it, and may hold its pipe."""
        reader = threading.Thread(target=self._read, args=(name, popen), name=f"kvps-read-{name}", daemon=True)
        reader.start()
        popen.wait()
        _signal_group(popen, signal.SIGKILL)
        reader.join(_LAST_WORDS_S)  # who began a session of his own may hold it for ever
        heard.set()
        self._died.set()

    def _read(self, name: str, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        with popen.stdout:
            for line in popen.stdout:
                self._lines.put(f"{name}: {line.rstrip()}")

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
            ended = [child for child in self.children.values() if child.code is not None]
            if job := self.job:  # looked for behind their ends: a quick child may have made it, and finished
                bury(job, {child.mark for child in ended})
                state = job.state()
                for child in ended:
                    child.finished = _has_finished(child.name, state, job.config)
            for child in ended:
                if child.killed:
                    self._restart(child)

    def _restart(self, child: Child) -> None:
        job = self.job
        version = job.state().version if job else 0
        child.fruitless = child.fruitless + 1 if version == child.version else 0
        child.version = version
        if child.fruitless == _FRUITLESS and self._gives_up:
            number = -child.process.returncode
            raise KvpsError(
                f"{f'job {job.name}' if job else 'the run'} ends: {child.name} was killed {_FRUITLESS} times in a row "
                f"by signal {number} ({child.signal}) before anything was committed"
            )
        self.run_again(child)

    def run_again(self, child: Child) -> None:
        """Start a child again that has ended."""
        self.run(child.name, child.command, child.environment)

    def await_end(self, names: Iterable[str], timeout_s: float) -> None:
        """Let children that are about to end by themselves do so."""
        deadline = time.monotonic() + timeout_s
        for name in names:
            with suppress(subprocess.TimeoutExpired):
                self.children[name].process.wait(max(0, deadline - time.monotonic()))

    def end(self) -> None:
        """End what still runs: asked first, made to after a while."""
        for child in self.children.values():
            if child.running:
                _signal_group(child.process, signal.SIGTERM)
        deadline = time.monotonic() + _END_S
        for child in self.children.values():
            try:
                child.process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
            child.heard.wait()


def _signal_group(popen: subprocess.Popen[str], number: int) -> None:
    """Signal a process and what it has started: each of ours leads a group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, number)


def _has_finished(worker: str, state: State, config: JobConfig) -> bool:
    """Whether this worker would find nothing left to do. An aggregator is no worker, and always has something."""
    member = state.members.get(worker)
    return member is not None and (member.finished or state.finished(config))


def bury(job: Job, dead: set[str]) -> None:
    """Have the job go on at once without these dead processes: their workers evicted, their shards free to take."""
    for member in job.state().members.values():
        if member.active and f"{member.host}:{member.pid}:{member.process['start']}" in dead:
            job.evict(member)
    holders, terms = job.holders(), job.terms()
    for shard, holder in enumerate(holders):
        if holder.rpartition(":")[0] in dead:
            with suppress(ServerRestarted):  # which ends all leases
                job.scripts.renew(shard, holder, terms[shard], 0)
