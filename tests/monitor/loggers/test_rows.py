"""Each version is one row, with what the commit log and the traces say of it, and not before all of that is there."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from helpers.harness import aggregating, await_version, gradient, log_entries, model
from helpers.internals import grow_with_each_read
from helpers.waiting import eventually
from kvps_aggregator.checkpoints import Checkpoints
from kvps_monitor.loggers.rows import Row, RowReader

import kvps
from kvps.errors import CorruptData
from kvps.job import Job
from kvps.optim.schedules import StepLR
from kvps.session.session import Session
from kvps.store import Store

ROUNDS = 6


def loss_of(rank: int, round_: int) -> float:
    return 10 * (rank + 1) + round_


def trained(store: Store, staleness: int, checkpoints: Checkpoints | None = None) -> Job:
    """Three workers that say their losses."""
    optimizer = kvps.SGD(lr=StepLR(0.8, every=2, factor=0.5))
    job = store.create_job("j", model(), workers=3, staleness=staleness, optimizer=optimizer)

    def run(number: int) -> None:
        with job.join(f"w{number}") as session:
            together.wait(120)
            for round_ in range(ROUNDS):
                push(session, loss_of(number, round_))

    together = threading.Barrier(3)
    with aggregating(job, checkpoints=checkpoints), ThreadPoolExecutor(3) as pool:
        for result in [pool.submit(run, number) for number in range(3)]:
            result.result()
        assert eventually(lambda: job.state().settled)
    return job


def push(session: Session, loss: float) -> None:
    session.push(gradient(session.pull(), session.rank, session.round), loss)


@pytest.mark.parametrize("losses", [(math.inf, -math.inf), (1.7e308, 1.7e308), (math.nan, 1.0)])
def test_a_loss_that_has_diverged_is_a_row_too(store: Store, losses: tuple[float, float]) -> None:
    """The sum of the losses may be no number though each is one, and the rows before and after it are there."""
    job = store.create_job("j", model(), workers=2)
    with aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
        for each in ((1.0, 2.0), losses, (3.0, 4.0)):
            push(w0, each[0])
            push(w1, each[1])
        await_version(job, 3)
    rows = RowReader(job, 0).read()
    assert [row.values["loss"] for row in rows[::2]] == [1.5, 3.5]
    found = rows[1].values["loss"]
    assert found == pytest.approx(1.7e308) if losses[0] == losses[1] else math.isnan(found)


@pytest.mark.parametrize("staleness", [0, -1])
def test_rows_are_what_the_log_says(store: Store, staleness: int) -> None:
    job = trained(store, staleness)
    rows, commits = RowReader(job, 0).read(), list(job.log())
    assert [row.version for row in rows] == [commit.version for commit in commits] != []
    times = [int(fields["at_ms"]) for _, fields in log_entries(job) if fields["kind"] == "commit"]
    assert [row.at_ms for row in rows] == times
    for row, commit in zip(rows, commits, strict=True):
        plan, found = commit.plan, row.values
        late = {c.worker: commit.version - 1 - c.base for c in plan.contributions}
        if len(late) == len(plan.contributions):  # none has two
            assert {w: found[f"staleness/{w}"] for w in late} == late
            losses = {c.worker: loss_of(int(c.worker[1:]), c.round - 1) for c in plan.contributions}
            assert {w: found[f"loss/{w}"] for w in losses} == losses
            assert found["loss"] == pytest.approx(fmean(losses.values()))
            assert found["staleness/mean"] == pytest.approx(fmean(late.values()))
            assert found["staleness/max"] == max(late.values())
        assert found["contributions"] == len(plan.contributions)
        assert found["learning_rate"] == pytest.approx(0.8 * 0.5 ** (plan.progress / 3 // 2))
    assert [row.version for row in RowReader(job, rows[-3].version).read()] == [row.version for row in rows[-2:]]
    assert len({row.values["learning_rate"] for row in rows}) == 3
    assert sum(row.values["contributions"] for row in rows) == 3 * ROUNDS


def test_a_row_waits_for_its_loss(store: Store) -> None:
    job = store.create_job("j", model(), workers=1)
    reader = RowReader(job, 0)
    with aggregating(job):
        with job.join("w0") as session:
            push(session, 3.5)
            await_version(job, 1)
            assert eventually(lambda: job.access.client.call("XLEN", job.access.keys.shard_trace(0)) == 1)
            assert reader.read() == [], "its loss comes with the second push"
            push(session, 2.5)
            assert [(row.version, row.values["loss"]) for row in reader.read()] == [(1, 3.5)]
            await_version(job, 2)
            assert reader.read() == []
        assert [(row.version, row.values["loss"]) for row in reader.read()] == [(2, 2.5)]
        assert reader.read() == []


@pytest.mark.parametrize("shards", [1, 2])
def test_the_norm_is_that_of_the_averaged_gradient(store: Store, shards: int) -> None:
    job = store.create_job("j", model(), workers=2, shards=shards)
    norms = []
    with aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
        for round_ in range(4):
            both = [gradient(session.pull(), rank, round_) for rank, session in enumerate((w0, w1))]
            mean = [(a.astype(np.float64) + b) / 2 for a, b in zip(*(g.values() for g in both), strict=True)]
            norms.append(math.sqrt(sum(float(np.sum(np.square(each))) for each in mean)))
            for session, each in zip((w0, w1), both, strict=True):
                session.push(each)
            await_version(job, round_ + 1)
    rows = RowReader(job, 0).read()
    assert [row.values["gradient_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)


def test_the_rows_of_a_log_that_grows_with_each_read_of_it_are_returned(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that commits faster than a reader reads."""
    job = trained(store, 0)
    grow_with_each_read(monkeypatch, job)
    assert [row.version for row in RowReader(job, 0).read()][-1] == ROUNDS


def test_what_a_lost_worker_did_not_say_is_left_out(store: Store) -> None:
    job = store.create_job("j", model(), workers=1)
    with aggregating(job):
        session = job.join("w0")
        push(session, 3.5)
        await_version(job, 1)
        job.evict(job.state().members["w0"])
        reader, rows = RowReader(job, 0), list[Row]()
        assert eventually(lambda: bool(rows.extend(reader.read()) or rows))
    (row,) = rows
    assert "loss" not in row.values
    assert row.values["staleness/w0"] == 0


@pytest.mark.slow
def test_what_was_moved_into_a_file_is_read_there(store: Store, tmp_path: Path) -> None:
    job = trained(store, 0, Checkpoints(tmp_path, 2, 1))
    assert job.state().moved, "the aggregator has moved a part of the log"
    whole, part = RowReader(job, 0, checkpoints=tmp_path), RowReader(job, 0)
    rows = whole.read()
    assert [row.version for row in rows] == list(range(1, ROUNDS + 1))
    assert (whole.missing, [row.values["loss"] for row in rows]) == ([], [fmean((10, 20, 30)) + n for n in range(6)])
    left: list[Row] = part.read()
    assert part.missing == [(1, left[0].version - 1)], "said, and not made up"


def test_a_trace_of_another_program_is_refused(store: Store) -> None:
    job = trained(store, 0)
    job.access.client.call("XADD", job.access.keys.trace("w1"), "*", "round", "many", "loss", "1")
    with pytest.raises(CorruptData, match="the trace of worker 'w1'"):
        RowReader(job, 0).read()
