"""What every scenario gets: processes, a folder, a server and a seed; and a job's training, until it is judged."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from helpers.harness import model
from helpers.internals import segments_of
from helpers.servers import private_directory, running_server
from helpers.waiting import eventually

import kvps
from chaos.crew import Crew
from chaos.processes import Processes
from chaos.report import Result
from chaos.verdict import Verdict, examine, remains
from kvps.connection.client import Client
from kvps.job import Job
from kvps.store import Store

MODES = {"BSP": 0, "SSP": 2, "ASP": -1}
Servers = TypeVar("Servers")
TIMEOUTS = {"lease_ms": 300, "worker_timeout_ms": 600}


def share_of(mode: int, faults: int) -> int:
    """Return how many of all faults the mode of this number gets."""
    return faults // len(MODES) + (mode < faults % len(MODES))


def shared_out(faults: int, first: int) -> Iterator[tuple[str, int, int]]:
    """Yield each mode that gets any of this many faults, with its staleness and its share of them.

    `first`, as a seed, says which mode comes first: with few faults, runs with other seeds have other modes.
    """
    modes = list(MODES.items())
    for number in range(len(modes)):
        mode, staleness = modes[(first + number) % len(modes)]
        if share := share_of(number, faults):
            yield mode, staleness, share


class Arena:
    """One scenario's surroundings. `say` prints its progress."""

    def __init__(self, processes: Processes, folder: Path, seed: int, loud: bool = True) -> None:
        self.processes = processes
        self.folder = folder
        self.seed = seed
        self.random = random.Random(seed)
        self._loud = loud
        self.memory: set[Path] = set()  # the folders of its jobs' segments
        self._jobs = 0
        self._began = time.monotonic()

    def say(self, message: str) -> None:
        if self._loud:
            print(f"  {time.monotonic() - self._began:6.1f} s  {message}", flush=True)

    @contextmanager
    def server(self, *arguments: str) -> Iterator[Store]:
        """Start a Redis that saves nothing; after the block no other client may be connected, and no key left."""
        with running_server(*arguments) as url, Store(Client(url)) as store:
            yield store
            left = set(store.client.call("KEYS", "*")) - {"kvps:jobs", "kvps:preflight"}
            store.client.close()
            assert not left, f"keys are left: {left}"
            with Client(url) as last:  # a child's own children may end after it, and their connections with them
                alone = eventually(lambda: len(last.call("CLIENT LIST")) == 1)
                assert alone, f"connections are left: {last.call('CLIENT LIST')}"

    def job(self, store: Store, **settings: Any) -> Job:
        """Create a job of the small model, in 2 shards, with momentum, so that there is optimizer state."""
        self._jobs += 1
        defaults: dict[str, Any] = {"shards": 2, "workers": 3, "optimizer": kvps.SGD(lr=0.05, momentum=0.5)} | TIMEOUTS
        job = store.create_job(f"chaos-{self._jobs}", model(), **defaults | settings)
        if segments_of(job):
            self.memory.add(segments_of(job).folder.parent)
        return job

    @contextmanager
    def crew(self, job: Job, result: Result | None = None, **options: Any) -> Iterator[Crew]:
        """Yield the children of `job`. The block leaves no child behind and, if it fails, no segment. Behind it the job
        is brought to its end and judged, if its `result` counts."""
        crew = Crew(self.processes, self.folder, job, options.pop("url", job.access.client.url), **options)
        with ExitStack() as failed:
            if segments_of(job):
                failed.callback(segments_of(job).remove)
            failed.callback(crew.end)
            yield crew
            if result:
                crew.finish()
            failed.pop_all()
        crew.end()
        if result:
            result.verdict.add(self._verdict(crew))

    def _verdict(self, crew: Crew) -> Verdict:
        """Examine a finished job, then remove it and its files."""
        verdict = examine(crew.job, crew.acks, frozenset(crew.forgiven))
        verdict.problems += remains(Store(crew.job.access.client), crew.job)
        verdict.problems = [f"{crew.job.name}: {problem}" for problem in verdict.problems]
        for file in crew.acks:
            file.unlink()
        return verdict

    def under_faults(
        self,
        result: Result,
        faults: int,
        serve: Callable[[], AbstractContextManager[tuple[Servers, Store]]],
        fault: Callable[[Servers, Crew, int], None],
        ended: Callable[[Crew], None] = lambda crew: None,
        mutants: tuple[str, ...] = (),
        **settings: Any,
    ) -> None:
        """In each mode train a job on servers of its own, under its share of the faults, to its end, and judge it.

        serve  starts the servers inside a block, and yields them with a store on them
        fault  causes the fault of this number, over all modes, and waits until the servers are as before
        ended  looks at the job when it has ended
        """
        numbers = itertools.count()
        for mode, staleness, share in shared_out(faults, self.seed):
            with serve() as (servers, store):
                job = self.job(store, staleness=staleness, **settings)
                with self.crew(job, result, mutants=mutants) as crew:
                    crew.start_all(3, job.layout.shards, log=True)
                    crew.until(lambda j=job: j.state().version > 3)
                    for number in itertools.islice(numbers, share):
                        fault(servers, crew, number)
                    crew.finish()
                    ended(crew)
            self.say(f"{mode}: {share} faults, {result.verdict.contributions} contributions")


@contextmanager
def arena(seed: int, loud: bool = True) -> Iterator[Arena]:
    """Yield an arena. The block must leave no process, no file and no shared memory behind."""
    before = _traces()
    with private_directory() as folder:
        with Processes(folder / "log") as processes:
            here = Arena(processes, folder, seed, loud)
            yield here
        running = [entry.parent.name for entry in Path("/proc").glob("[0-9]*/cmdline") if _mentions(entry, folder)]
        assert not running, f"processes are left: {running}"
    left = (_traces() - before) | {memory for memory in here.memory if memory.exists()}
    assert not left, f"left behind: {left}"


def _traces() -> set[Path]:
    """Return what a scenario could leave outside its folder, without what other programs make meanwhile."""
    return set(Path("/dev/shm").glob("kvps*")) - {Path(f"/dev/shm/kvps-{os.getuid()}")}


def _mentions(cmdline: Path, folder: Path) -> bool:
    with suppress(OSError):
        return str(folder).encode() in cmdline.read_bytes()
    return False
