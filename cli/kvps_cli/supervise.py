"""Starts the processes of a job on this machine, reads their output, and restarts those that are killed or evicted."""

from __future__ import annotations

import io
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import IO, NamedTuple

from kvps.config import JobConfig
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.machine import launcher, memory, process
from kvps.protocol.answers import ServerRestarted
from kvps.protocol.job_state import Member, State
from kvps.store import Store
from kvps_cli.child import SUSPENDED, Child, Line, signal_group

log = logging.getLogger("kvps.supervise")

# Several workers compute at once: with more than one thread each, their thread pools compete for the cores. And what
# the number of threads or the workspace of cuBLAS decides must not differ: the bits of a gradient may depend on it.
SAME_BITS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
GRACE_S = 30.0
"""How long a child that was asked to end has, before it is killed, unless the user says otherwise."""
_LAST_WORDS_S = 1.0
_FRUITLESS = 5  # so many kills in a row, without a version in between, are no accident
_NO_INPUT = ("EOFError: EOF when reading a line", "bdb.BdbQuit")  # how input() and breakpoint() end


class Care(NamedTuple):
    """How a supervisor treats its children.

    gives_up     whether the run ends if a child is killed again and again before anything is committed
    grace_s      how many seconds a child that was asked to end has, before it is killed
    restarts     how many ends of the user's programs with an error of their own are forgiven: they are started again
    share_cores  whether several workers compute at once: see SAME_BITS
    options      what is added to each command of kvps that is started
    """

    gives_up: bool = True
    grace_s: float = GRACE_S
    restarts: int = 0
    share_cores: bool = True
    options: tuple[str, ...] = ()


class Supervisor:
    """The supervisor of the processes of a run. They get the server's URL in their environment; it sees each death at
    once.

    `launched_by` is the text by which they know the command that launches them. `jobs` returns the jobs of the run that
    were made so far, the newest last. Every kill is logged, with what was done about it.
    """

    def __init__(
        self, store: Store, launched_by: str, jobs: Callable[[], Sequence[Job]], care: Care | None = None
    ) -> None:
        self.children: dict[str, Child] = {}
        self.jobs = jobs
        self._ended: dict[str, str] = {}  # mark -> the process, and how it ended
        self._care = care or Care()
        self._forgiven = 0
        self._memory_kills = memory.kills()  # that happened before, or are told of a child
        self._stopping = False
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._died = threading.Event()
        own = {"KVPS_REDIS_URL": store.url, launcher.VARIABLE: launched_by}
        self._environment = (SAME_BITS if self._care.share_cores else {}) | os.environ | own

    def start(self, name: str, *arguments: str) -> Child:
        """Run ``kvps *arguments`` as child `name`."""
        # -P keeps a redis.py or random.py in the user's directory from being imported instead of the real module.
        return self._run(name, [sys.executable, "-P", "-m", "kvps", *arguments, *self._care.options], {}, own=True)

    def run(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Run a user's command as child `name`, with `environment` added to ours."""
        return self._run(name, command, environment, own=False)

    def _run(self, name: str, command: Sequence[str], environment: Mapping[str, str], own: bool) -> Child:
        popen = subprocess.Popen(
            process.ending_with_this(command),
            env={**self._environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches the children once, from here
        )
        mark, heard = process.mark(popen.pid), threading.Event()
        child = self.children.get(name)
        if child is None:
            child = self.children[name] = Child(name, command, environment, popen, mark, heard, own)
        else:
            child.process, child.mark, child.heard, child.killed_by = popen, mark, heard, ""
            child.judged = child.evicted = child.recalled = child.retried = child.goes_on = False
            child.leaving = 0.0
        log.debug("%s: started: %s", child, " ".join(command))
        threading.Thread(target=self._hear, args=(child, popen, heard), name=f"kvps-hear-{name}", daemon=True).start()
        return child

    def _hear(self, child: Child, popen: subprocess.Popen[bytes], heard: threading.Event) -> None:
        """Wait for a process to end, kill its descendants, which may hold its pipes, and hear the rest of them."""
        assert popen.stdout is not None
        assert popen.stderr is not None
        pipes = (_text(popen.stdout), not child.own), (_text(popen.stderr), False)
        readers = [threading.Thread(target=self._read, args=(child, *pipe), daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        if popen.wait() == -signal.SIGKILL and not child.leaving and memory.kills() > self._memory_kills:
            self._memory_kills += 1
            child.killed_by = f"the kernel: {memory.ran_out()}"
        signal_group(popen, signal.SIGKILL)
        deadline = time.monotonic() + _LAST_WORDS_S
        for reader in readers:  # a descendant in its own session survives, and may hold a pipe for ever
            reader.join(max(0, deadline - time.monotonic()))
        heard.set()
        self._died.set()

    def _read(self, child: Child, pipe: IO[str], result: bool) -> None:
        with pipe:
            bar = ""
            for line in pipe:
                if line.endswith("\r"):  # what follows is drawn over it: a progress bar
                    bar = child.bar = line.strip() or bar
                    continue
                bar = child.bar = ""
                self._lines.put(Line(f"{child.name}: {line.rstrip()}", result))
                if not result and any(end in line for end in _NO_INPUT):
                    alone = "kvps worker on a terminal of its own" if child.own else "the script without kvps run"
                    hint = f"it has no terminal to read from: for input() and breakpoint(), run {alone}"
                    self._lines.put(Line(f"{child.name}: kvps: {hint}", False))
            if bar:  # its last line has no other end
                self._lines.put(Line(f"{child.name}: {bar}", result))

    @property
    def waiting_lines(self) -> int:
        """How many lines children have printed since the last call of `new_lines`."""
        return self._lines.qsize()

    def new_lines(self, most: int | None = None) -> list[Line]:
        """Return the lines that children have printed since the last call, or the `most` oldest of them."""
        return [self._lines.get() for _ in range(self.waiting_lines if most is None else most)]

    def watch(self, timeout_s: float) -> None:
        """Wait until a child ends, but not longer than `timeout_s`, and replace a killed or an evicted child at once.
        Kill a child that was asked to leave and has not done so in the time of grace.

        The other processes need not wait for a timeout, because this one knows for sure that its child is dead.
        Raises KvpsError for a child that ends so again and again before anything is committed.
        """
        if self._died.wait(timeout_s):
            self._died.clear()
            ended = [child for child in self.children.values() if child.code is not None]
            # Looked up after the ends: a quick child may have made a job and finished. A copy that was killed while all
            # stop keeps its place: without its gradient there is no next version.
            jobs, dead = self.jobs(), {child.mark for child in ended if child.own or not self._stopping}
            released = defaultdict[str, list[str]](list)
            for job in jobs:
                for mark, done in release_dead(job, dead).items():
                    released[mark] += done
            states = [(job.state(), job.config) for job in jobs]
            for child in ended if jobs else ():
                child.finished = all(_has_finished(child.name, state, config) for state, config in states)
                if not child.judged:  # later it is evicted all the same, by this process
                    evicted = any(_was_evicted(child, state) for state, _ in states)
                    child.evicted = child.mark not in released and evicted
                    child.goes_on = child.finished and self._may_have_more(child)
            for child in ended:
                if not child.judged:
                    child.retried = self._forgives(child)
                child.judged = True
                if child.restarts:
                    end, done = self._note(child), released.get(child.mark, [])
                    number = f" (restart {self._forgiven} of {self._care.restarts})" if child.retried else ""
                    restart = self.run_again if child.leaving or child.retried else self._restart
                    restart(child)
                    log.info("%s: %s", end, "; ".join([*done, f"started again as process {child.process.pid}{number}"]))
                elif self._is_to_be_said(child):
                    end = self._note(child)
                    late = " after its last round" if child.signal else ""
                    why = "" if child.leaving else f"{late}: not started again"
                    if not (self._stopping and child.code in (0, SUSPENDED)):
                        log.info("%s%s", end, why)
        for child in self.children.values():
            if child.leaving and child.running and time.monotonic() - child.leaving > self._care.grace_s:
                signal_group(child.process, signal.SIGKILL)

    def _may_have_more(self, child: Child) -> bool:
        """Return whether a copy that was killed behind its last round is started again: while others run, the script
        may come to another job, for which they would wait. It passes through those that are finished."""
        others = any(other.running for other in self.children.values() if not other.own and other is not child)
        return others and not child.own and not self._stopping and child.fruitless < _FRUITLESS - 1

    def _is_to_be_said(self, child: Child) -> bool:
        """Return whether nobody knows yet that a child has ended, for good. A command of kvps says itself why."""
        failed = child.failed and not child.own
        return bool(child.leaving or child.signal or failed) and child.mark not in self._ended

    def _forgives(self, child: Child) -> bool:
        """Return whether a child that has ended with an error of its own is started again, and count that. After its
        last round it is not, as after a kill."""
        forgiven = child.failed and not child.own and not child.finished and self._forgiven < self._care.restarts
        self._forgiven += forgiven
        return forgiven

    def _note(self, child: Child) -> str:
        """Remember how a child ended, and return it as a sentence without its full stop."""
        end = f"was killed ({child.kill})" if child.signal else f"was evicted, and ended with code {child.code}"
        if child.retried or child.failed:
            end = f"ended with code {child.code}"
        if child.leaving:
            late = f"was killed after {self._care.grace_s:g} s" if child.code == -signal.SIGKILL else "left"
            if self._stopping and child.code != -signal.SIGKILL:
                late = f"ended with code {child.code}"
            end = f"was asked to leave, and {late}"
        self._ended[child.mark] = f"{child}, which {end}"
        return f"{child} {end}"

    def _child(self, holder: str) -> Child | None:
        return next((child for child in self.children.values() if child.mark == _mark(holder)), None)

    def name_of(self, holder: str) -> str:
        """Return which process holds a lease, for a message."""
        return str(self._child(holder) or holder)

    def loss_of(self, holder: str) -> str:
        """Return which process held a lease and why it lost the lease, for a message."""
        child = self._child(holder)
        why = "whose lease ran out" if child and child.running else "which has ended"
        return self._ended.get(_mark(holder)) or f"{child or holder}, {why}"

    def _restart(self, child: Child) -> None:
        jobs = self.jobs()
        version = sum(job.state().version for job in jobs)
        child.fruitless = child.fruitless + 1 if version == child.version else 0
        child.version = version
        if child.fruitless == _FRUITLESS and self._care.gives_up:
            how = f"killed {_FRUITLESS} times in a row by signal {-child.process.returncode} ({child.kill})"
            raise KvpsError(
                f"{f'job {jobs[-1].name}' if jobs else 'the run'} ends: {child.name} was "
                f"{how if child.signal else f'evicted {_FRUITLESS} times in a row'} before anything was committed"
            )
        self.run_again(child)

    def run_again(self, child: Child) -> None:
        """Restart a child that has ended."""
        self._run(child.name, child.command, child.environment, child.own)

    def dismiss(self, child: Child) -> None:
        """Ask a child to leave, for good."""
        child.leaving, child.recalled = time.monotonic(), False
        signal_group(child.process, signal.SIGTERM)

    def stop(self) -> None:
        """Restart no program of the user any more, because the job has told them to end.

        Pass SIGTERM on to those that catch it: any other would die of it, in the middle of its round. Those that have
        not ended after the time of grace are killed by `watch`.
        """
        self._stopping = True
        for child in self.children.values():
            if not child.own and not child.judged:
                child.leaving, child.recalled = child.leaving or time.monotonic(), False
                if process.catches(child.process.pid, signal.SIGTERM):
                    child.process.terminate()

    def recall(self, child: Child) -> None:
        """Restart a child that has ended, or one that was asked to leave as soon as it has."""
        if child.judged:
            self.run_again(child)
        else:
            child.recalled = True

    def await_end(self, names: Iterable[str], timeout_s: float) -> None:
        """Wait, `timeout_s` in all, for children that are about to end by themselves."""
        deadline = time.monotonic() + timeout_s
        for name in names:
            with suppress(subprocess.TimeoutExpired):
                self.children[name].process.wait(max(0, deadline - time.monotonic()))

    def end(self) -> None:
        """End the running children with SIGTERM, and after the time of grace with SIGKILL."""
        for child in self.children.values():
            if child.running:
                signal_group(child.process, signal.SIGTERM)
        deadline = time.monotonic() + self._care.grace_s
        for child in self.children.values():
            try:
                child.process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s did not end within %g s and was killed (SIGKILL)", child, self._care.grace_s)
                child.process.kill()
            child.heard.wait()


def _text(pipe: IO[bytes]) -> IO[str]:
    """Return a pipe as lines that end as they were written, some with \\r alone."""
    return io.TextIOWrapper(pipe, errors="replace", newline="")  # a decoding error would end the reader


def _has_finished(worker: str, state: State, config: JobConfig) -> bool:
    """Return whether a worker has nothing left to do. For an aggregator, which is no member, return False."""
    member = state.members.get(worker)
    return member is not None and (member.finished or state.finished(config))


def _was_evicted(child: Child, state: State) -> bool:
    """Return whether a child's worker is out of the vector clock without having left, or cut off by a restart of the
    server."""
    member = state.members.get(child.name)
    return member is not None and _mark_of(member) == child.mark and (member.evicted or member.state == "rejoining")


def _mark_of(member: Member) -> str:
    """Return the mark of a worker's process."""
    return f"{member.host}:{member.pid}:{member.process['start']}"


def _mark(holder: str) -> str:
    """Return the mark of the process that holds a lease."""
    return holder.rpartition(":")[0]


def release_dead(job: Job, dead: set[str]) -> dict[str, list[str]]:
    """Evict the workers of dead processes and end their leases, so that the job need not wait for a timeout.

    `dead` holds marks. Return mark -> what was done.
    """
    released = defaultdict[str, list[str]](list)
    for member in job.state().members.values():
        mark = _mark_of(member)
        if member.active and mark in dead:
            job.evict(member)
            released[mark].append("evicted")
    reader = job.access.reader
    for shard, (holder, term) in enumerate(zip(reader.holders(), reader.terms(), strict=True)):
        if _mark(holder) in dead:
            with suppress(ServerRestarted):  # a restart ends all leases
                job.access.scripts.renew(shard, holder, term, 0)
                released[_mark(holder)].append(f"its lease of shard {shard} ended")
    return released
