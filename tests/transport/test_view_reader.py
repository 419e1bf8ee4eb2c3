"""Workers that pull differences hold the same bits, those of a plain simulation, whoever joins, dies or takes over."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import saved
from helpers.digits_job import digits_job, proved, run_workers
from helpers.harness import abandoned, aggregating, await_version, gradient
from helpers.internals import abandon
from kvps_workers.training_loop import train

import kvps
from kvps.arrays.digest import weights_sha256
from kvps.arrays.formats import format_of
from kvps.device.base import open_device
from kvps.history.checkpoint import Checkpoint
from kvps.job import Job
from kvps.session.session import Session
from kvps.store import Store
from kvps.transport.stored_view import StoredView

SHARDS, LR = 3, 0.05
SIZE = 800_000  # of each shard more than a chunk
PATIENT = {"worker_timeout_ms": 60_000, "lease_ms": 2_000}

Params = dict[str, np.ndarray]


def start() -> Params:
    return {"x": np.random.default_rng(0).normal(size=SIZE).astype(np.float32)}


def pull_of(rank: int, view: np.ndarray) -> np.ndarray:
    """Return a gradient that depends on the bits of the view."""
    grad: np.ndarray = (view - np.float32(rank)) * np.float32(0.5)
    return grad


def pushed(session: Session) -> str:
    """Do a round, and return the digest of the weights that it was computed on."""
    view = session.pull()["x"]
    session.push({"x": pull_of(session.rank, view)})
    return weights_sha256(view)


def int8(values: np.ndarray) -> np.ndarray:
    """What int8 leaves of a chunk, by definition."""
    out = np.empty_like(values)
    for i in range(0, values.size, 1024):
        block = values[i : i + 1024]
        scale = np.abs(block).max() / np.float32(127)
        out[i : i + 1024] = np.rint(block / scale).astype(np.float32) * scale if scale else 0
    return out


def top_tenth(values: np.ndarray) -> np.ndarray:
    """What topk:0.1 leaves of a chunk, by definition."""
    out = np.zeros_like(values)
    places = np.argsort(-np.abs(values), kind="stable")[: math.ceil(0.1 * values.size)]
    out[places] = values[places]
    return out


PLAIN: dict[str, Callable[[np.ndarray], np.ndarray]] = {"int8": int8, "topk:0.1": top_tenth}


def simulated(weight_format: str, workers: int, rounds: int) -> list[str]:
    """EF21-P in a dozen lines of NumPy: return the digest of the view of each version."""
    weights = start()["x"]
    view, out = weights.copy(), []
    shards = [(SIZE * i // SHARDS, SIZE * (i + 1) // SHARDS) for i in range(SHARDS)]
    chunks = [slice(at, min(at + (1 << 18), high)) for low, high in shards for at in range(low, high, 1 << 18)]
    for _ in range(rounds):
        out.append(weights_sha256(view))
        total = pull_of(0, view)
        for rank in range(1, workers):
            total = total + pull_of(rank, view)
        weights = weights - total / np.float32(workers) * np.float32(LR)
        for chunk in chunks:
            view[chunk] += PLAIN[weight_format](weights[chunk] - view[chunk])
    return out


def made(store: Store, weight_format: str, workers: int = 2, **settings: Any) -> Job:
    settings = PATIENT | {"shards": SHARDS, "optimizer": kvps.SGD(lr=LR)} | settings
    return store.create_job("job", start(), workers=workers, weight_format=weight_format, **settings)


def joined(store: Store, worker: str, **settings: Any) -> tuple[Session, Callable[[], tuple[int, int]]]:
    """Join with a connection of its own. Return the session, and a function that returns how many views it has read
    whole, and how many differences."""
    job = store.job("job")
    return job.join(worker, **settings), lambda: (job.access.reader.reads, job.access.reader.differences)


def rounds_of(sessions: list[Session], rounds: int) -> list[str]:
    """Do rounds with all sessions in turn; assert that all compute on the same bits, and return their digests."""
    out = []
    for _ in range(rounds):
        digests = {pushed(session) for session in sessions}
        assert len(digests) == 1
        out.append(digests.pop())
    return out


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", PLAIN)
def test_who_comes_later_is_killed_or_takes_over_changes_no_bit(store: Store, weight_format: str) -> None:
    job, wanted = made(store, weight_format), simulated(weight_format, 2, 8)
    (one, reads_of_one), other = joined(store, "w0"), job.join("w1")
    with abandoned(job) as killed:
        assert pushed(one) == pushed(other) == wanted[0]
        while job.state().version < 1:
            killed.work()
        assert pushed(one) == pushed(other) == wanted[1]
        killed.work()  # it may have staged what it does not commit
    with aggregating(job):
        assert rounds_of([one, other], 2) == wanted[2:4]
        abandon(other)
        again, reads_of_next = joined(store, "w1", takeover=True)  # its next incarnation reads a whole version
        with again:
            assert rounds_of([one, again], 2) == wanted[4:6]
            assert (reads_of_next(), reads_of_one()) == ((1, 1), (1, 5))
    with aggregating(job), job.join("w1") as again:  # another holder, from Redis
        assert rounds_of([one, again], 2) == wanted[6:]
        exact = job.snapshot()[1]["x"]
        assert weights_sha256(exact) != weights_sha256(one.pull()["x"]), "readers get the weights themselves"
    one.leave()


@pytest.mark.contract
def test_a_checkpoint_goes_on_with_the_view(store: Store, tmp_path: Path) -> None:
    job, wanted = made(store, "int8"), simulated("int8", 2, 6)
    with aggregating(job), job.join("w0") as one, job.join("w1") as other:
        assert rounds_of([one, other], 3) == wanted[:3]
        await_version(job, 3)
        path = saved(job, tmp_path)
    restored = store.restore_job(Checkpoint.load(path), "again")
    with aggregating(restored), restored.join("w0") as one, restored.join("w1") as other:
        assert rounds_of([one, other], 3) == wanted[3:]


@pytest.mark.parametrize(("weight_format", "most"), [("int8", 0.26), ("topk:0.01", 0.022), ("topk:0.1", 0.21)])
def test_a_pull_moves_no_more_than_its_format_says(store: Store, raw: Any, weight_format: str, most: float) -> None:
    """Bytes that the server sent, while nobody but the worker asks."""
    job = made(store, weight_format, workers=1)
    sent = []
    with job.join("w0") as session:
        for version in range(1, 4):
            with aggregating(job):
                pushed(session)
                await_version(job, version)
            before = raw.info("stats")["total_net_output_bytes"]
            view = session.pull()["x"]
            sent.append((raw.info("stats")["total_net_output_bytes"] - before) / view.nbytes)
    assert max(sent) < most, sent


@pytest.mark.contract
@pytest.mark.parametrize(("staleness", "prefetch"), [(1, True), (-1, False)])
def test_runs_with_a_bound_or_none_are_replayed(store: Store, staleness: int, prefetch: bool) -> None:
    """A worker that missed a version reads a whole one; all of them compute on views that a replay makes too."""
    job = digits_job(store, workers=2, shards=2, staleness=staleness, weight_format="int8")
    run_workers(job, *[lambda w=w: train(job, open_device(None), w, prefetch=prefetch) for w in ("w0", "w1")])
    assert proved(job).by == "recomputed"


def test_damaged_differences_are_said_in_a_line(store: Store, raw: Any) -> None:
    job = made(store, "topk:0.1", workers=1)
    with aggregating(job), job.join("w0") as session:
        assert [pushed(session), pushed(session)] == simulated("topk:0.1", 1, 2)
        await_version(job, 2)
        raw.setrange(job.access.keys.pulled(0, job.state().names[0], 0), 0, b"\xff" * 8)
        for _ in range(2):  # the difference, and then the whole view that it is a part of
            with pytest.raises(kvps.CorruptData, match="a place is not in the chunk; something else wrote"):
                session.pull()


def test_a_whole_view_is_there_at_every_version(store: Store) -> None:
    """Also for a holder that follows another, and whether the view was stored whole just now, or long before."""
    job, wanted = made(store, "int8", workers=1), simulated("int8", 1, 14)
    flat = np.empty(SIZE, np.float32)
    session, reads = joined(store, "w0")
    with session:
        for versions in (range(6), range(6, 14)):
            with aggregating(job):
                for version in versions:
                    assert pushed(session) == wanted[version]
                    read = job.access.reader.view(job.access.reader.round_state(), flat, None)
                    assert read.version in (version, version + 1)
                    assert weights_sha256(flat) in wanted
        assert reads() == (1, 13)


def test_who_missed_a_few_versions_adds_them_and_who_missed_more_reads_all(store: Store, raw: Any) -> None:
    job = made(store, "int8", staleness=-1)
    slow, reads = joined(store, "w0")
    with aggregating(job), slow, job.join("w1") as fast:

        def other_rounds(count: int) -> None:
            for _ in range(count):
                before = job.state().version
                pushed(fast)
                await_version(job, before + 1)

        for version, session in enumerate([slow, fast], 1):
            pushed(session)
            await_version(job, version)
        assert weights_sha256(slow.pull()["x"]) == weights_sha256(fast.pull()["x"])
        whole, followed = reads()
        other_rounds(2)
        assert weights_sha256(slow.pull()["x"]) == weights_sha256(fast.pull()["x"])
        assert reads() == (whole, followed + 2)
        other_rounds(5)
        assert weights_sha256(slow.pull()["x"]) == weights_sha256(fast.pull()["x"])
        assert reads()[0] == whole + 1, "five differences take more bytes than the view"
        name = job.state().names[2]
        version = int(name.partition(".")[0])
        first = StoredView(job.access.client, job.access.keys, job.layout, format_of("int8")).begins([(2, name)])[0]
        other_rounds(first + 4 - version + 1)
        raw.delete(
            job.access.keys.pulled(2, f"{first + 4}.{name.partition('.')[2]}", 1)
        )  # as if slower, and after others
        assert weights_sha256(slow.pull()["x"]) == weights_sha256(fast.pull()["x"])
        assert reads()[0] == whole + 2


@pytest.mark.slow
def test_a_view_takes_no_more_memory_than_it_needs(store: Store, raw: Any) -> None:
    """No bytes of old views stay: not while a job runs, not after a holder that was killed, not at the end."""
    job = made(store, "int8", workers=1)

    def stored(kind: str) -> int:
        return len({key.split(b":")[-2] for key in raw.scan_iter(f"{job.access.keys.slot(0)}{kind}:*")})

    def rounds_with(session: Session, count: int) -> None:
        for _ in range(count):
            pushed(session)
            await_version(job, session.clock)
            assert stored("opt.view") <= 5
            assert stored("p") <= 14

    with abandoned(job) as killed, job.join("w0") as session:
        pushed(session)
        while not job.state().version:
            killed.work()
    with job.join("w0") as session:
        for _ in range(2):
            with aggregating(job):
                rounds_with(session, 9)
    store.remove_job("job")
    assert not list(store.client.scan("kvps:{job*"))


def test_a_model_of_one_request_has_a_view_too(store: Store) -> None:
    """So small that a version is stored together with its commit."""
    params = {"x": np.linspace(-1, 1, 40).astype(np.float32)}
    job = store.create_job("job", params, workers=1, weight_format="int8", **PATIENT)
    session, reads = joined(store, "w0")
    with aggregating(job), session:
        for _ in range(20):
            view = session.pull()
            session.push(gradient(view, 0, session.round))
        state = job.state()
        np.testing.assert_allclose(session.pull()["x"], job.snapshot()[1]["x"], atol=1e-2)
        assert reads()[1] >= 19, state.version
