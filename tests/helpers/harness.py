"""Helpers of many tests: an aggregator on a thread, workers on threads, and judges that read only the commit log."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import lru_cache
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from kvps_aggregator import Aggregator, AggregatorOptions
from kvps_aggregator.checkpoints import AS_USUAL, Checkpoints, KeptLog
from kvps_aggregator.nearness import Near
from kvps_aggregator.version_maker import Outcome
from kvps_monitor.spans import Traces

import kvps
from kvps.arrays.layout import CHUNK_ITEMS
from kvps.connection.sockets import connection_settings
from kvps.device.base import CPU, Device
from kvps.errors import KvpsError
from kvps.history.commit_log import Log
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.optim import SGD
from kvps.protocol.answers import ServerRestarted
from kvps.protocol.job_state import Entry
from kvps.protocol.plan import Contribution, Plan
from kvps.session.session import Session

Params = dict[str, np.ndarray]


@contextmanager
def aggregating(
    job: Job,
    shards: list[int] | None = None,
    checkpoints: Checkpoints | None = None,
    device: Device = CPU,
    memory_lost: bool = False,
    near: Near | None = None,
    record: Path | None = None,
    log: KeptLog = AS_USUAL,
) -> Iterator[Aggregator]:
    """Serve the job with an aggregator inside the block, and commit what is complete at its end. Raise the aggregator's
    error after it."""
    stop = threading.Event()
    aggregator = _Thorough(job, stop, shards, AggregatorOptions(record, checkpoints, device, memory_lost, near, log))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(aggregator.run, until_finished=False)
        try:
            yield aggregator
        finally:
            stop.set()
            while not running.done():
                _unblock(job)
                wait([running], 0.2)
    running.result()


def _unblock(job: Job) -> None:
    """End all waits at the job's server, as if their time were over: a loop that waits sees only then that it is to
    stop. A user with fewer rights may not do that."""
    if connection_settings(job.access.client.url).get("username"):
        return
    with suppress(KvpsError), job.access.client.twin(0.1) as other:
        server = other.node(job.access.keys.version)
        for client in server.call("CLIENT LIST"):
            if "b" in client["flags"]:
                server.call("CLIENT UNBLOCK", client["id"])


class _Thorough(Aggregator):
    """An aggregator that ends only when there is nothing to do: an acknowledged push may not be committed yet."""

    def _loop(self, until_finished: bool, idle_s: float) -> None:
        super()._loop(until_finished, idle_s)
        with suppress(KvpsError, ServerRestarted):
            self.hold(at_once=True)
            while self.work() is not Outcome.IDLE:
                pass


class _Abandoned(Aggregator):
    def __enter__(self) -> Aggregator:
        self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self.held.shards.values():
            shard.storage.close()
        self.held.leases._keeper.remove(self.held.leases)


def abandoned(job: Job, near: Near | None = None, record: Path | None = None, log: KeptLog = AS_USUAL) -> _Abandoned:
    """Return an aggregator that ends with its `with` block as if its process had been killed."""
    return _Abandoned(job, threading.Event(), options=AggregatorOptions(record, near=near, log=log))


def work(job: Job, rounds: int, step: Callable[[Session, Params, int], Params], workers: int) -> None:
    """Run workers w0, w1, ... on threads; each does `rounds` rounds of ``step(session, params, round)``."""
    together = threading.Barrier(workers)

    def run(number: int) -> None:
        with job.join(f"w{number}") as session:
            together.wait(120)
            for round_ in range(rounds):
                session.push(step(session, session.pull(), round_))

    with ThreadPoolExecutor(workers) as pool:
        for result in [pool.submit(run, number) for number in range(workers)]:
            result.result()


def ends_of_units(**settings: Any) -> Params:
    """Return the weights that a job of units has if one worker does all of them with this module's `gradient`."""
    with kvps.local(model(), optimizer=SGD(lr=0.05), **settings) as job:
        with job.join() as session:
            while (unit := session.next_unit()) is not None:
                session.push(gradient(session.pull(), 0, unit))
        assert job.await_finished()
        return job.snapshot()[1]


def work_on(job: Job, worker: str, rounds: int) -> list[int]:
    """Do `rounds` rounds as one worker, joining again when evicted; return the acknowledged clocks, in order."""
    clocks = []
    while True:
        try:
            with job.join(worker) as session:
                while session.round < rounds:
                    params = session.pull()
                    clocks.append(session.push(gradient(params, session.rank, session.round)))
                return clocks
        except kvps.WorkerEvicted:
            continue


def log_entries(job: Job, after: str = "0-0") -> Iterator[Entry]:
    """Yield the entries of the job's log in Redis after the entry `after`."""
    return LogStream(job.access).entries(after)


def next_lr(job: Job) -> float:
    """Return the learning rate of the job's next version."""
    return job.state().learning_rate(job.config)


def newest_losses(job: Job) -> dict[str, float | None]:
    """Return what each worker has said last of its loss, by the traces."""
    iterations, _ = Traces(job).read(job.state().members)
    return {worker: its[-1].loss for worker, its in iterations.items() if its}


def check_chain(job: Job, directory: Path | None = None) -> int:
    """Assert that the commit log is one unbroken chain from its begin to the job's head; return its last version."""
    state = job.state()
    log = Log(LogStream(job.access), state, directory)
    version, head, _ = log.begin
    for commit in log.commits():
        if version == state.version:
            break  # the job has gone on since
        assert commit.follows(head), f"version {commit.version} does not follow {head}"
        assert commit.version == version + 1
        head, version = commit.head, commit.version
    assert (version, head) == (state.version, state.head)
    return version


def commit_steadily(url: str, done: Event, begun: Event) -> None:
    """Commit versions of the job named "job" as fast as it goes, in a process: each adds 1 to every weight, where the
    optimizer is SGD(lr=1.0). `begun` is set after 20 of them."""
    with kvps.connect(url) as store:
        job = store.job("job")
        grads = {p.name: np.full(p.shape, -1, np.float32) for p in job.layout.parameters}
        with aggregating(job), job.join("w0") as session:
            while not done.is_set():
                session.pull()
                session.push(grads)
                if session.clock > 20:
                    begun.set()


def await_version(job: Job, version: int) -> None:
    """Wait for a version. In SSP and ASP several rounds may be one version, so that there are fewer than rounds."""
    deadline = time.monotonic() + 120
    while (state := job.state()).version < version:
        assert time.monotonic() < deadline, f"version {version} does not come: {state}"
        job.access.reader.await_change(state)


def staleness_used(job: Job, workers: int) -> int:
    """Return the largest lag of any logged contribution's weights: (its round - 1) - the smallest clock they held."""
    clocks: list[Mapping[str, int]] = [defaultdict(int)]
    worst = -1
    for commit in job.log():
        now = defaultdict(int, clocks[-1])
        for c in commit.plan.contributions:
            held = min(clocks[c.base][f"w{i}"] for i in range(workers))
            worst = max(worst, c.round - 1 - held)
            now[c.worker] += 1
            assert now[c.worker] == c.round, "without anyone leaving, rounds are clocks"
        clocks.append(now)
    return worst


def model(seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    return {
        "W": rng.normal(size=(37, 11)).astype(np.float32),
        "b": rng.normal(size=11).astype(np.float32),
        "scale": np.float32(rng.normal(size=())).reshape(()),
    }


def any_floats(seed: int, shape: tuple[int, ...] | int) -> np.ndarray:
    """Return floats of all magnitudes, also subnormal ones and those whose squares overflow."""
    rng = np.random.default_rng(seed)
    return np.ldexp(rng.standard_normal(shape, np.float32), rng.integers(-150, 60, shape, np.int32))


def large_model(seed: int = 0) -> Params:
    """Return a model of several chunks, of which some hold more than one parameter."""
    return {name: array.copy() for name, array in _large_model(seed).items()}


@lru_cache(32)
def _large_model(seed: int) -> Params:
    rng = np.random.default_rng(seed)
    shapes = {"W": (70, 100), "b": (1000,), "scale": (), "V": (2, CHUNK_ITEMS)}
    return {name: np.asarray(rng.standard_normal(shape, np.float32)) for name, shape in shapes.items()}


def gradient(params: Params, rank: int, round_: int) -> Params:
    """Return a deterministic gradient that depends on the weights, so that any wrong bit or wrong version grows."""
    rng = np.random.default_rng((rank, round_))
    return {
        name: np.asarray(0.1 * value + rng.normal(size=value.shape).astype(np.float32), np.float32)
        for name, value in params.items()
    }


def a_plan(version: int) -> Plan:
    """Return a plan of two contributions, as plan.lua makes it."""
    both = tuple(Contribution(f"w{i}", "1-0", version, version, version - 1, 1, "", "") for i in range(2))
    return Plan(version, version, "", "", 2, 2 * (version - 1), both, ())


def plain_loop(params: Params, workers: int, rounds: int, lr: float) -> Params:
    """Return the weights that BSP promises, computed in a few lines of NumPy."""
    for round_ in range(rounds):
        grads = [gradient(params, rank, round_) for rank in range(workers)]
        for name in params:
            total = grads[0][name].copy()
            for other in grads[1:]:
                total = total + other[name]
            if workers > 1:
                total = total / np.float32(workers)
            params = params | {name: params[name] - np.float32(lr) * total}
    return params


def push_until_given_up(job: Job, session: Session, *numbers: float) -> None:
    """Push gradients that are one number everywhere, and wait until no aggregator holds the job."""
    for number in numbers:
        session.push({name: np.full_like(value, number) for name, value in session.pull().items()})
    seen = "0-0"
    while any(job.access.reader.holders()):
        seen = job.access.client.wait({job.access.keys.leases: seen}).get(job.access.keys.leases, seen)
