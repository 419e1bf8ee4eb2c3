"""Starts the processes of a job on this machine, reads what they print, and starts those again that are killed."""

from __future__ import annotations

import logging
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
from typing import NamedTuple

from kvps.config import JobConfig
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.machine import launcher, process
from kvps.protocol.job_state import State
from kvps.protocol.scripts import ServerRestarted
from kvps.store import Store

log = logging.getLogger("kvps.supervise")

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
    own: bool  # whether it is a command of kvps, and no program of the user's
    killed_by: str = ""  # what sent the signal, if that is known
    version: int = 0
    fruitless: int = 0
    finished: bool = False  # its worker has done all its rounds

    def __str__(self) -> str:
        return f"{self.name} (process {self.process.pid})"

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


class Line(NamedTuple):
    """What a child has printed; `own` as in `Child`."""

    text: str
    own: bool


class Supervisor:
    """Starts the processes of a job, with the server's URL in their environment, and knows at once when one dies.

    `command` is what launches them, as "kvps up". `find` looks for the job, and returns None as long as it is not made.
    With `gives_up` a child that is killed again and again before anything is committed is not started once more.
    `options` are given to each kvps command that it starts. Every kill and what is done about it is logged.
    """

    def __init__(
        self,
        store: Store,
        command: str,
        find: Callable[[], Job | None],
        gives_up: bool = True,
        options: Sequence[str] = (),
    ) -> None:
        self.children: dict[str, Child] = {}
        self._options = options
        self._ended: dict[str, str] = {}  # mark -> which process that was, and how it ended
        self._find = find
        self._job: Job | None = None
        self._gives_up = gives_up
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
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
        return self._run(name, [sys.executable, "-P", "-m", "kvps", *arguments, *self._options], {}, own=True)

    def run(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Run a user's command as child `name`, with this environment beside ours."""
        return self._run(name, command, environment, own=False)

    def _run(self, name: str, command: Sequence[str], environment: Mapping[str, str], own: bool) -> Child:
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
            child = self.children[name] = Child(name, command, environment, popen, mark, heard, own)
        else:
            child.process, child.mark, child.heard, child.killed_by = popen, mark, heard, ""
        log.debug("%s: started: %s", child, " ".join(command))
        threading.Thread(target=self._hear, args=(child, popen, heard), name=f"kvps-hear-{name}", daemon=True).start()
        return child

    def _hear(self, child: Child, popen: subprocess.Popen[str], heard: threading.Event) -> None:
        """Hear a process out, until it has ended. What it has started itself ends with it, and may hold its pipe."""
        reader = threading.Thread(target=self._read, args=(child, popen), name=f"kvps-read-{child.name}", daemon=True)
        reader.start()
        popen.wait()
        _signal_group(popen, signal.SIGKILL)
        reader.join(_LAST_WORDS_S)  # who began a session of his own may hold it for ever
        heard.set()
        self._died.set()

    def _read(self, child: Child, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        with popen.stdout:
            for line in popen.stdout:
                self._lines.put(Line(f"{child.name}: {line.rstrip()}", child.own))

    def said(self) -> list[Line]:
        """The lines that came since the last call."""
        out = list[Line]()
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
            done = dict[str, list[str]]()
            if job := self.job:  # looked for behind their ends: a quick child may have made it, and finished
                done = bury(job, {child.mark for child in ended})
                state = job.state()
                for child in ended:
                    child.finished = _has_finished(child.name, state, job.config)
            for child in ended:
                if child.killed:
                    end, deeds = self._note(child), done.get(child.mark, [])
                    self._restart(child)
                    log.info("%s: %s", end, "; ".join([*deeds, f"started again as process {child.process.pid}"]))
                elif child.signal and child.mark not in self._ended:
                    log.info("%s after its last round: not started again", self._note(child))

    def _note(self, child: Child) -> str:
        """Remember how a child was killed: a sentence without its full stop."""
        killed = f"was killed ({child.signal}{f', by {child.killed_by}' if child.killed_by else ''})"
        self._ended[child.mark] = f"{child}, which {killed}"
        return f"{child} {killed}"

    def who(self, holder: str) -> str:
        """Which process holds a lease, for a message."""
        return next((str(child) for child in self.children.values() if child.mark == _mark(holder)), holder)

    def who_and_why(self, holder: str) -> str:
        """Which process held a lease, and why it does not any more, for a message."""
        running = any(child.mark == _mark(holder) and child.running for child in self.children.values())
        why = "whose lease ran out" if running else "which has ended"
        return self._ended.get(_mark(holder)) or f"{self.who(holder)}, {why}"

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
        self._run(child.name, child.command, child.environment, child.own)

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


def _mark(holder: str) -> str:
    """The process that holds a lease."""
    return holder.rpartition(":")[0]


def bury(job: Job, dead: set[str]) -> dict[str, list[str]]:
    """Have the job go on at once without these dead processes: their workers evicted, their shards free to take.

    What was done, by process.
    """
    done: dict[str, list[str]] = {}
    for member in job.state().members.values():
        mark = f"{member.host}:{member.pid}:{member.process['start']}"
        if member.active and mark in dead:
            job.evict(member)
            done.setdefault(mark, []).append("evicted")
    holders, terms = job.holders(), job.terms()
    for shard, holder in enumerate(holders):
        mark = _mark(holder)
        if mark in dead:
            with suppress(ServerRestarted):  # which ends all leases
                job.scripts.renew(shard, holder, terms[shard], 0)
                done.setdefault(mark, []).append(f"its lease of shard {shard} ended")
    return done
