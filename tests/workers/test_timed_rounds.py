"""Rounds that end by the clock: workers take as many local steps as they have time for, and count each sample once."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers.commands import KVPS, Started
from helpers.digits_job import digits_job, proved, run_workers, training
from helpers.each_sample import (
    ADDS,
    BATCH,
    EPOCHS,
    SAMPLES,
    Each,
    assert_a_quorum_had_all_its_samples,
    assert_each_sample_counts_once_an_epoch,
    each_job,
)
from helpers.faults import MortalServer
from helpers.harness import abandoned, aggregating, await_version, check_chain
from helpers.internals import abandon, fall_silent, lose_next_answer, segments_of
from helpers.servers import private_directory
from helpers.waiting import eventually
from kvps_aggregator import Outcome
from kvps_aggregator.shard import mirror
from kvps_cli.prove.verify import proof_of
from kvps_workers.contributions import Contributions
from kvps_workers.local_steps import LocalSteps
from kvps_workers.rounds import Rounds
from kvps_workers.training_loop import train

import kvps
from kvps.arrays.layout import Layout
from kvps.config import JobConfig
from kvps.device.base import CPU
from kvps.history.checkpoint import Checkpoint, sums_without
from kvps.job import Job
from kvps.optim.schedules import LinearLR
from kvps.store import Store
from kvps.transport import shared_memory


def use(monkeypatch: pytest.MonkeyPatch, task: Any) -> Any:
    for module in ("kvps_workers.training_loop", "kvps_cli.prove.verify"):
        monkeypatch.setattr(f"{module}.load_task", lambda name: task)
    return task


@pytest.fixture
def each(own_rules: Path, monkeypatch: pytest.MonkeyPatch) -> Each:
    """The task, in a directory with the reduction that adds up."""
    (own_rules / "adds.py").write_text(ADDS)
    return use(monkeypatch, Each())  # type: ignore[no-any-return]


def slowly(job: Job, worker: str, slow: float) -> Callable[[], None]:
    return lambda: train(job, CPU, worker, slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"quorum": 2, "late": "drop", "transport": "redis", "shards": 2},
        {"staleness": 2, "transport": "shm"},
        {"staleness": -1},
        {"quorum": 2, "late": "next"},
    ],
    ids=str,
)
def test_each_sample_counts_once_an_epoch_whatever_the_speeds(store: Store, each: Each, settings: Any) -> None:
    """A fast, a slow and a very slow worker, of which one is evicted though it lives."""
    job = each_job(store, **settings)
    evicted = threading.Event()

    def evict() -> None:
        while job.state().version < 3:
            job.await_change(job.state())
        member = job.state().members["w1"]
        job.access.scripts.evict("w1", member.incarnation)
        evicted.set()

    run_workers(job, slowly(job, "w0", 1), slowly(job, "w1", 3), slowly(job, "w2", 12), evict)
    assert evicted.is_set()
    (assert_a_quorum_had_all_its_samples if job.config.quorum else assert_each_sample_counts_once_an_epoch)(job)
    assert proved(job).by == "recomputed"
    of = {
        worker: [c.weight for commit in job.log() for c in commit.plan.contributions if c.worker == worker]
        for worker in ("w0", "w2")
    }
    assert max(of["w0"]) > np.median(of["w2"]), "the fast worker takes more steps in a round"


@pytest.mark.slow  # its workers are processes
def test_workers_that_are_killed_go_on_at_the_right_batch(
    store: Store, own_rules: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    (own_rules / "each_task.py").write_text("from helpers.each_sample import Each\n")
    (own_rules / "adds.py").write_text(ADDS)
    job = each_job(store, task="each_task:Each", workers=2, round_ms=15, transport=transport)
    monkeypatch.setenv("KVPS_REDIS_URL", store.url)

    def started(worker: str, slow: str) -> Started:
        return Started([*KVPS, "worker", "--job", job.name, "--id", worker, "--slow", slow])

    with aggregating(job):
        running = {"w0": started("w0", "1x"), "w1": started("w1", "4x")}
        for worker, version in (("w0", 2), ("w1", 5), ("w0", 8)):
            await_version(job, version)
            running[worker].end(9)
            running[worker] = started(worker, "2x")
        assert [process.wait() for process in running.values()] == [0, 0]
        assert job.await_finished()
    assert_each_sample_counts_once_an_epoch(job)
    assert proved(job).by == "recomputed"


@pytest.mark.slow  # a server of its own
def test_a_server_that_is_killed_leaves_out_no_sample_and_has_none_twice(each: Each) -> None:
    with ExitStack() as stack:
        mortal = stack.enter_context(MortalServer(stack.enter_context(private_directory())))
        store = stack.enter_context(kvps.connect(mortal.url))
        job = each_job(store, lease_ms=300, transport="redis")

        def kill() -> None:
            for version in (3, 7):
                assert eventually(lambda v=version: job.state().version >= v)
                mortal.kill()
                mortal.start()

        run_workers(job, slowly(job, "w0", 1), slowly(job, "w1", 4), slowly(job, "w2", 8), kill)
        assert_each_sample_counts_once_an_epoch(job)
        assert proved(job).by == "recomputed"


def test_what_is_lost_with_shared_memory_is_trained_again(
    store: Store, each: Each, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers go on at the batch behind the last version that Redis was given."""
    monkeypatch.setattr(mirror, "EVERY_S", 1e6)
    job = each_job(store, workers=2, lease_ms=300, transport="shm")
    with abandoned(job) as aggregator:
        sessions = [job.join(worker) for worker in ("w0", "w1")]
        for number in range(7):
            for session in sessions:
                _one_round(job, each, session)
            while aggregator.work() is Outcome.COMMITTED:
                pass
            if number == 3:
                aggregator.held.flush()
    kept, before = job.kept(99), job.state()
    assert segments_of(job)
    shared_memory.forget(segments_of(job).folder)
    for session in sessions:
        abandon(session)
        fall_silent(session)
    with aggregating(job):
        assert eventually(lambda: job.state().history != before.history)
        assert job.state().version == kept < before.version
        with job.join("w0") as again:
            assert again.weight_sum == 6 * kept
            again.leave(finished=False)
    run_workers(job, *training(job, "w0", "w1"))
    assert_each_sample_counts_once_an_epoch(job)
    assert proved(job).by == "recomputed"


@pytest.mark.parametrize(
    "settings",
    [
        {
            "weight_format": "int8",
            "gradient_format": "int8",
            "optimizer": kvps.SGD(lr=0.7, momentum=0.9, nesterov=True),
            "shards": 2,
        },
        {"inner_optimizer": kvps.SGD(lr=LinearLR(0.5, 0.1, 12)), "staleness": -1},
    ],
    ids=str,
)
def test_what_was_trained_is_computed_again(store: Store, settings: Mapping[str, Any]) -> None:
    local = {"local_steps": "auto", "round_ms": 20, "reduction": "weighted", "inner_optimizer": kvps.SGD(lr=0.5)}
    job = digits_job(store, **{"optimizer": kvps.SGD(lr=1.0)} | local | settings)
    run_workers(job, *training(job, "w0", "w1", "w2"))
    proof = proved(job)
    assert proof.by == "recomputed"
    weights = [c.weight for commit in job.log() for c in commit.plan.contributions]
    assert sum(weights) == 3 * 1438


# -- the sum of weights --------------------------------------------------------------------------------------------


def test_a_push_whose_reply_is_lost_adds_its_weight_once(store: Store, each: Each) -> None:
    job = each_job(store, workers=1)
    ones = {"x": np.ones(SAMPLES, np.float32)}
    with aggregating(job), job.join("w0") as session:
        for sent, weight in enumerate((6, 9), 1):
            session.pull()
            lose_next_answer()
            with pytest.raises(kvps.ServerLost):
                session.push(ones, weight=weight)
            assert session.push(ones, weight=weight) == sent
        assert session.weight_sum == 15
        session.leave(finished=False)
        with job.join("w0") as again:
            assert again.weight_sum == 15
            fall_silent(again)
            abandon(again)
        with job.join("w0", takeover=True) as third:
            assert (third.clock, third.weight_sum) == (2, 15)
        await_version(job, 2)
    assert [c.weight for commit in job.log() for c in commit.plan.contributions] == [6, 9]


def test_what_came_late_and_was_dropped_does_not_count(store: Store, each: Each) -> None:
    job = each_job(store, workers=2, quorum=1, late="drop")
    ones = {"x": np.ones(SAMPLES, np.float32)}
    with aggregating(job), job.join("w0") as fast, job.join("w1") as slow:
        fast.pull()
        slow.pull()
        fast.push(ones, weight=6)
        await_version(job, 1)
        with pytest.raises(kvps.ContributionLate):
            slow.push(ones, weight=9)
        assert (fast.weight_sum, slow.weight_sum) == (6, 0)
        slow.pull()
        slow.push(ones, weight=3)
        assert slow.weight_sum == 3


def test_sums_are_exact_up_to_what_lua_can_hold(store: Store, each: Each) -> None:
    job = each_job(store, workers=1, staleness=2)
    ones = {"x": np.ones(SAMPLES, np.float32)}
    with job.join("w0") as session:
        entry = json.loads(job.access.client.call("HGET", job.access.keys.workers, "w0"))
        near = json.dumps(entry | {"weight_sums": "9007199250000000"})
        job.access.client.call("HSET", job.access.keys.workers, "w0", near)
        for weight, wanted in ((1, 9007199250000001), (2**31, 2**53 - 1), (5, 2**53 - 1)):
            session.pull()
            session.push(ones, weight=weight)
            assert session.weight_sum == wanted
        session.leave(finished=False)


@pytest.mark.parametrize("sums", ["480 x", "0 " * 20_000])
def test_sums_that_another_program_wrote_are_one_line(store: Store, each: Each, sums: str) -> None:
    job = each_job(store, workers=1)
    with job.join("w0") as session:
        session.leave(finished=False)
    entry = json.loads(job.access.client.call("HGET", job.access.keys.workers, "w0"))
    job.access.client.call("HSET", job.access.keys.workers, "w0", json.dumps(entry | {"weight_sums": sums}))
    with pytest.raises(kvps.CorruptData, match="the weights of worker 'w0' must be a whole number") as caught:
        job.join("w0")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_restored_job_goes_on_at_the_right_batch(store: Store, each: Each, tmp_path: Path, staleness: int) -> None:
    """What waited in the inbox is done again, and the log of both jobs is computed again."""
    job = each_job(store, workers=2, staleness=staleness)

    # The first round is committed; then more is pushed than is ever committed.
    sessions = [job.join(worker) for worker in ("w0", "w1")]
    with aggregating(job):
        for session in sessions:
            _one_round(job, each, session)
        await_version(job, 1)
    for session in sessions:
        _one_round(job, each, session)
        assert session.weight_sum == 12
    path = tmp_path / "checkpoint.safetensors"
    job.checkpoint().write(path)
    checkpoint = Checkpoint.load(path)
    committed = sum(c.weight for commit in job.log() for c in commit.plan.contributions)
    assert sum(checkpoint.weight_sums.values()) == committed
    restored = store.restore_job(checkpoint, "restored")
    run_workers(restored, *training(restored, "w0", "w1"))
    np.testing.assert_array_equal(restored.snapshot()[1]["x"], np.full(SAMPLES, -EPOCHS, np.float32))
    state, proof = proof_of(restored, start=checkpoint)
    assert (proof.differs, proof.by) == ("", "recomputed")
    assert proof.replayed == state.version - checkpoint.version
    for session in sessions:
        session.leave(finished=False)


def _one_round(job: Job, task: Any, session: kvps.Session) -> None:
    contributions = Contributions(job, task, session.rank, CPU)
    params, first = session.pull(), contributions.next(session)
    assert first is not None
    _, grads, had = contributions.compute(params, first, session.sequence, lambda had: had >= 6)
    session.push(grads, weight=had)


def test_sums_go_back_by_what_is_undone() -> None:
    assert [sums_without("0 480 960", undone) for undone in range(3)] == ["0 480 960", "0 480", "0"]
    for sums, undone in (("0 480", 2), ("0", -1), (480, 0), (None, 0)):
        with pytest.raises(kvps.CorruptData, match="do not go back by"):
            sums_without(sums, undone)


# -- odd ends ------------------------------------------------------------------------------------------------------


def test_a_rejected_contributions_batches_are_done_and_the_rest_is_computed_again(store: Store, each: Each) -> None:
    """As in rounds of a fixed length: its samples are lost, and the next batches are those behind it."""
    job = each_job(store, workers=2, transport="redis")
    with job.join("w0") as first, job.join("w1") as second:
        for session in (first, second):
            _one_round(job, each, session)
        job.access.client.call("SETRANGE", job.access.keys.gradient(0, "w1", second.incarnation, 1, 0), 0, "bad!")
        with aggregating(job):
            await_version(job, 1)
        for session in (first, second):
            session.leave(finished=False)
    run_workers(job, *training(job, "w0", "w1"))
    (rejected,) = [c for commit in job.log() for c in commit.plan.rejected]
    assert rejected.weight == 6
    counted = sum(c.weight for commit in job.log() for c in commit.plan.contributions)
    assert counted == EPOCHS * SAMPLES - 6
    assert proved(job).by == "recomputed"


@pytest.mark.filterwarnings("ignore:overflow")
class Overflows(Each):
    """Its gradients are finite, and some of them are more than a float32 holds."""

    def gradient(self, params: Mapping[str, Any], batch: Any, xp: ModuleType) -> Any:
        return super().gradient(params, batch, xp)[0], {"x": np.full(SAMPLES, 3e38, np.float32)}


@np.errstate(over="ignore")
def test_a_round_that_overflows_counts_as_zeros_of_its_weight() -> None:
    """Weight 0 would have the worker compute the same batches for ever."""
    settings = {"local_steps": "auto", "round_ms": 10, "reduction": "weighted", "inner_optimizer": kvps.SGD(lr=1.0)}
    config, task = JobConfig(nonfinite="skip", **settings), Overflows()
    local = LocalSteps(task, config, Layout.of(task.parameters(0), 1), CPU)
    batches = [(float(n), (np.arange(3),)) for n in range(2)]
    _, pseudo = local.pseudo_gradient({"x": np.zeros(SAMPLES, np.float32)}, batches, 0)
    np.testing.assert_array_equal(pseudo["x"], 0)
    fixed = JobConfig(nonfinite="skip", **settings | {"local_steps": 2, "round_ms": 0})
    other = LocalSteps(task, fixed, Layout.of(task.parameters(0), 1), CPU)
    _, pseudo = other.pseudo_gradient({"x": np.zeros(SAMPLES, np.float32)}, batches, 0)
    assert math.isinf(pseudo["x"][0])


def test_a_contribution_of_another_program_is_told_in_one_line(store: Store, each: Each) -> None:
    """Whose weight is in the middle of a batch: neither a worker nor a replay knows what comes next."""
    job = each_job(store, workers=1)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.push({"x": np.zeros(SAMPLES, np.float32)}, weight=7)
        session.leave(finished=False)
        await_version(job, 1)
        with pytest.raises(kvps.CorruptData, match=r"weigh 7, and that is no whole number of its batches") as caught:
            train(job, CPU, "w0")
    assert "\n" not in str(caught.value)
    _, proof = proof_of(job)
    assert "it weighs 7 after 0 samples of its worker, and that is no whole number of batches" in proof.differs
    check_chain(job)


def test_the_batch_after_so_many_samples() -> None:
    """67 rows are 22 batches of 3 and one of 1, in each of 3 epochs."""
    config = JobConfig(task="each", workers=3, batch_size=BATCH, epochs=EPOCHS)
    rounds = Rounds(Each(), config, 0, np)
    assert (rounds.samples_in_all, rounds.batches_per_epoch, rounds.total) == (3 * 67, 23, 69)
    samples = 0
    for number in range(rounds.total):
        assert rounds.after(samples) == number
        samples += len(rounds.rows(number))
    assert samples == 3 * 67
    assert rounds.after(samples) is None
    assert rounds.after(10**9 * 67) is None
    for within in (1, 2, 68, 67 * 2 + 4):
        with pytest.raises(kvps.CorruptData, match=f"weigh {within}, and that is no whole number"):
            rounds.after(within)
