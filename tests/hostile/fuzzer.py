"""Runs readers on mutations, and judges each: its errors, time and memory, what it wrote, how the neighbour fared."""

from __future__ import annotations

import logging
import resource
import signal
import tempfile
import threading
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import redis
from helpers.paths import ROOT
from helpers.servers import running_server

from hostile.calls import LONGEST_MS, Call, SlowCalls
from hostile.mutations import Mutation, file_mutation_of, mutation_of
from hostile.readers import READERS, Reader, hurry
from hostile.scene import NEIGHBOUR, NEIGHBOURS_KEYS, SCENES, GaveUp, HurriedClient, Scene, scene
from kvps.errors import KvpsError
from kvps.job import Job
from kvps.protocol.keys import JOBS

_IN_ONE_SCENE = 50  # mutations in a row
_SPACE = 4 << 30  # bytes of address space beyond those at the start
_IDLE = 20  # times as long may it take as it may work
_GROWTH = 64 << 20  # bytes that one reader may add to the peak, besides twice the scene's size


class Hung(BaseException):
    """A reader did not end in time. No `except Exception` of the code under test catches it."""


@dataclass
class Failure:
    """What must not be: `what` in one line, `place` is where, to count failures of one cause together."""

    number: int
    scene: str
    reader: str
    mutation: str
    what: str
    place: str
    trace: str = field(repr=False, default="")


@dataclass
class Tally:
    """What was run: how often each reader, and each kind of mutation; and what failed."""

    mutations: int = 0
    readers: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    growth: int = 0
    longest: tuple[Call, int] = (Call(), 0)  # of all calls of scripts, and the number of its mutation

    def add(self, other: Tally) -> None:
        self.mutations += other.mutations
        self.readers += other.readers
        self.refused += other.refused
        self.kinds += other.kinds
        self.failures += other.failures
        self.growth = max(self.growth, other.growth)
        self.longest = max(self.longest, other.longest)


def run(seed: int, numbers: list[int]) -> Tally:
    """Run the mutations of these numbers on a server of their own. Ends this process's own limits on memory."""
    hurry()
    logging.disable()  # what is logged about thousands of damaged jobs
    tally = Tally()
    for which in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(which, _hung)
    limit = _virtual() + _SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with running_server() as url, tempfile.TemporaryDirectory() as folder:
        by_scene: dict[tuple[int, str], list[int]] = {}
        names = list(SCENES)
        for number in numbers:
            block = number // _IN_ONE_SCENE
            by_scene.setdefault((block, names[block % len(names)]), []).append(number)
        ready: dict[str, Scene] = {}
        with ExitStack() as made, redis.Redis.from_url(url) as raw:
            slow = SlowCalls(raw)
            for (_, name), some in by_scene.items():
                if name not in ready:
                    ready[name] = made.enter_context(scene(name, url, Path(folder) / str(len(ready))))
                ready[name].restore()
                slow.longest()
                for number in some:
                    trial = _Trial(ready[name], name, number, Random(f"{seed}/{number}"), tally)
                    trial.run()
                    trial.judge(slow.longest())
    return tally


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit(seconds: float) -> None:
    """Raise Hung after so many seconds of work, or many times as long: a busy machine leaves it little of its time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _IDLE * seconds)


def _hung(signal: int, frame: FrameType | None) -> None:
    raise Hung


@dataclass
class _Trial:
    """One mutation of a scene, and the readers that are run on it."""

    scene: Scene
    name: str
    number: int
    random: Random
    tally: Tally

    def run(self) -> None:
        scene, random, tally = self.scene, self.random, self.tally
        of_files = random.random() < 0.1
        mutations = [self._draw(of_files) for _ in range(random.choice((1, 1, 1, 1, 2, 3)))]
        shown = "; ".join(map(str, mutations))
        tally.mutations += 1
        for mutation in mutations:
            tally.kinds[mutation.kind] += 1
        chosen = [
            (name, reader)
            for name, reader in READERS.items()
            if (reader.of == "files" if of_files else reader.of in ("keys", self.name))
            and random.random() < 1 / reader.every
        ]
        looks = [(name, reader) for name, reader in chosen if not reader.writes]
        opened = [scene.opened() if random.random() < 0.5 else None for _ in looks]  # before somebody wrote there
        self._apply(mutations)
        before = scene.digest() if looks else {}
        for (name, reader), job in zip(looks, opened, strict=True):
            self._read(name, reader, shown, job)
        if looks and (keys := scene.changed(before, scene.digest())):
            names = ", ".join(name for name, _ in looks)
            self._fail(names, shown, f"one of these wrote {keys}", "a reader that writes")
        for name, reader in chosen:
            if reader.writes:
                scene.restore()
                job = scene.opened() if random.random() < 0.5 else None
                self._apply(mutations)
                self._read(name, reader, shown, job)
                neighbour = scene.digest(NEIGHBOURS_KEYS)
                if name != "aggregator of all" and scene.changed(scene.neighbour, neighbour):
                    self._fail(name, shown, "it changed the neighbour", f"neighbour in {name}")
        scene.restore()

    def judge(self, call: Call) -> None:
        """Note the longest call of a script. Meanwhile the server served no other job."""
        self.tally.longest = max(self.tally.longest, (call, self.number))
        if call.ms > LONGEST_MS:
            self._fail(call.script, "", f"a call of it took {call.ms:.0f} ms", f"a long call of {call.script}")

    def _draw(self, of_files: bool) -> Mutation:
        if of_files:
            return file_mutation_of(self.random, self.scene.files)
        return mutation_of(self.random, self.scene.content, self.scene.absent)

    def _apply(self, mutations: list[Mutation]) -> None:
        pipe = self.scene.raw.pipeline(transaction=False)
        for mutation in mutations:
            if mutation.commands:
                for command in mutation.commands:
                    pipe.execute_command(*command)
            else:
                (self.scene.folder / mutation.key.decode()).write_bytes(mutation.data)
        pipe.sadd(JOBS, NEIGHBOUR)  # a hidden job is nothing to wonder at
        pipe.execute(raise_on_error=False)  # the first of two mutations may have made the second impossible

    def _read(self, name: str, reader: Reader, shown: str, opened: Job | None) -> None:
        tally = self.tally
        tally.readers[name] += 1
        client = self.scene.store.client
        assert isinstance(client, HurriedClient)
        client.begin()
        peak = _peak()
        threads: list[Any] = []
        threading.excepthook = threads.append
        _limit(reader.seconds)
        try:
            reader.run(self.scene, (lambda: opened) if opened else self.scene.opened)
        except KvpsError as error:
            tally.refused[name] += 1
            odd = [c for c in str(error) if not c.isprintable() and c != "\n"]
            if odd:
                self._fail(name, shown, f"the message has {odd}", f"message of {type(error).__name__}")
        except GaveUp:
            pass
        except Hung as error:
            self._fail(
                name, shown, f"it did not end in {reader.seconds:g} s of work", f"hang at {_place(error)}", error
            )
        except Exception as error:
            at = f"{type(error).__name__} at {_place(error)}"
            self._fail(name, shown, f"{type(error).__name__}: {str(error)[:200]}", at, error)
        finally:
            _limit(0)
        for thread in threads:
            if not isinstance(thread.exc_value, GaveUp):
                at = f"{thread.exc_type.__name__} at {_place(thread.exc_value)} on a thread"
                self._fail(name, shown, f"{thread.exc_value!r} on thread {thread.thread}", at, thread.exc_value)
        growth = _peak() - peak
        tally.growth = max(tally.growth, growth)
        if growth > _GROWTH + 2 * self.scene.size:
            self._fail(name, shown, f"its peak memory grew by {growth >> 20} MiB", f"memory in {name}")

    def _fail(self, reader: str, shown: str, what: str, place: str, error: BaseException | None = None) -> None:
        trace = "".join(traceback.format_exception(error)[-6:]) if error else ""
        self.tally.failures.append(Failure(self.number, self.name, reader, shown, what, place, trace))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _place(error: BaseException) -> str:
    """Return the innermost line of kvps that an error passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if str(ROOT) in f.filename]
    inside = [f for f in frames if "/tests/" not in f.filename] or frames
    if not inside:
        return "?"
    last = inside[-1]
    return f"{Path(last.filename).relative_to(ROOT)}:{last.lineno} {last.name}"
