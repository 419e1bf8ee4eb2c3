"""Delay compensation: held against its formula on random arrivals, through takeovers, restores, replays and devices."""

from __future__ import annotations

import math
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import hostcupy
from helpers.digits_job import digits_job, proved, run_workers, task_gradient, training
from helpers.harness import Params, abandoned, any_floats, await_version, gradient, large_model, model
from helpers.internals import held_by, segments_of
from helpers.slowly import slowly
from helpers.waiting import eventually
from kvps_aggregator import Outcome
from kvps_aggregator.step.clipping import scale_of, square_sum
from kvps_aggregator.step.compensate import compensate
from kvps_aggregator.step.device_step import DeviceStep
from kvps_aggregator.step.reduce import reduce
from kvps_aggregator.step.shard_arrays import ShardArrays
from kvps_cli.prove.verify import proof_of

import kvps
from kvps.arrays.layout import Layout
from kvps.config import JobConfig
from kvps.device.base import Cuda, Exact
from kvps.history.checkpoint import Checkpoint
from kvps.job import Job
from kvps.optim import reductions
from kvps.protocol.job_state import Commit
from kvps.protocol.plan import Contribution, Plan
from kvps.session.session import Session
from kvps.staleness import admits
from kvps.store import Store
from kvps.transport import shared_memory

LR, LAMBDA = 0.05, 0.5
STRENGTH, SMALL = np.float32(LAMBDA), np.float32(1e-17)  # products of large numbers would overflow, version by version
Gradients = dict[tuple[str, int], np.ndarray]
"""What a worker pushed in a round, flat."""

# -- the formula, in a plain loop over the log -----------------------------------------------------------------------


def flat(params: Params) -> np.ndarray:
    return np.concatenate([np.asarray(value).reshape(-1) for value in params.values()])


def scaled(gradient: np.ndarray, config: JobConfig, stale: int) -> np.ndarray:
    factor = {"none": 1.0, "inverse": 1 / (1 + stale), "inverse-sqrt": (1 + stale) ** -0.5}[config.staleness_scaling]
    return gradient * np.float32(factor)


def reduced(config: JobConfig, workers: list[str], rows: list[np.ndarray]) -> np.ndarray:
    """As kvps promises; a worker's weight is its rank + 1, and all workers are members."""
    if config.reduction == "median":
        return np.median(np.stack(rows), axis=0).astype(np.float32)
    shares = [int(worker[1:]) + 1 if config.reduction == "weighted" else 1 for worker in workers]
    total = rows[0] * np.float32(shares[0])
    for row, share in zip(rows[1:], shares[1:], strict=True):
        total = total + row * np.float32(share)
    members = len(rows) if config.quorum else config.workers
    divisor = {"mean": members, "sum": 1, "weighted": sum(shares)}[config.reduction]
    return total / np.float32(divisor)


def sequential(config: JobConfig, first: np.ndarray, commits: list[Commit], pushed: Gradients) -> list[np.ndarray]:
    """The weights of each version, by the formula of DC-ASGD and plain SGD with momentum."""
    versions, momentum = [first], np.zeros_like(first)
    kept = config.delay_versions
    for commit in commits:
        now, rows = versions[-1], []
        for c in commit.plan.contributions:
            g, stale = pushed[c.worker, c.round], len(versions) - 1 - c.base
            if stale:
                before = versions[len(versions) - 1 - min(stale, kept)]
                g = g + (now - before) * g * STRENGTH * g
            rows.append(scaled(g, config, stale))
        total = reduced(config, [c.worker for c in commit.plan.contributions], rows)
        if config.optimizer.clip_norm:
            total = total * scale_of(config.optimizer.clip_norm, [square_sum(total)])
        if config.optimizer.momentum:
            total = momentum = momentum * np.float32(config.optimizer.momentum) + total
        versions.append(now - total * np.float32(LR))
    return versions


# -- random arrivals -------------------------------------------------------------------------------------------------


class Fleet:
    """Workers that pull and push in a random order, and an aggregator that is killed now and then. A standby follows
    it, and knows only what Redis or shared memory has."""

    def __init__(self, job: Job, seed: int, record: Path | None = None) -> None:
        self.pushed: Gradients = {}
        self._job = job
        self._record = record
        self._random = np.random.default_rng(seed)
        self._pulled: dict[str, Params] = {}
        self._held = ExitStack()
        self._begin()
        self._sessions = [job.join(f"w{rank}") for rank in range(job.config.workers)]

    def _begin(self) -> None:
        self._aggregator = self._held.enter_context(abandoned(self._job, record=self._record))
        shards = set(range(self._job.layout.shards))
        assert eventually(lambda: [self._aggregator.hold(at_once=True), held_by(self._aggregator)][1] == shards)

    def run(self, steps: int) -> None:
        turns = [self._sessions[0], *self._sessions[1:] * 3, None, None, None]  # the first worker is slow
        for _ in range(steps):
            session = turns[self._random.integers(len(turns))]
            if session:
                self._act(session)
            else:
                self.commit()

    def kill(self) -> None:
        self._held.close()
        self._begin()

    def commit(self) -> None:
        while self._aggregator.work() is not Outcome.IDLE:
            pass

    def flush(self) -> None:
        """Have Redis be given what is in shared memory."""
        self._aggregator.held.flush()

    def _act(self, session: Session) -> None:
        """Let a worker push what it has computed; or pull, if its bound and its contributions that wait let it."""
        members, config = self._job.state().members, self._job.config
        if params := self._pulled.pop(session.worker, None):
            grads = gradient(params, session.rank, session.round)
            self.pushed[session.worker, session.round + 1] = flat(grads)
            session.push(grads, weight=session.rank + 1 if config.reduction == "weighted" else None)
        elif members[session.worker].pending < config.max_pending and (
            config.quorum or admits(session.round, [m.round for m in members.values()], config.staleness)
        ):
            self._pulled[session.worker] = {name: np.array(value) for name, value in session.pull().items()}

    def end(self) -> None:
        self.commit()
        for session in self._sessions:
            session.leave(finished=False)
        self._held.close()


def check_past(made: Checkpoint, versions: list[np.ndarray]) -> None:
    """Assert that a checkpoint has the weights of the versions before it, and zeros where there was none."""
    for ago in range(1, made.config.delay_versions + 1):
        want = versions[-1 - ago] if ago < len(versions) else np.zeros_like(versions[0])
        np.testing.assert_array_equal(made.slots[f"past{ago}"], want)


def check(job: Job, pushed: Gradients) -> int:
    """Assert that all is as the plain loop makes it; return how stale the stalest contribution was."""
    commits = list(job.log())
    versions = sequential(job.config, flat(model()), commits, pushed)
    assert len(versions) == len(commits) + 1 > 10
    made = job.checkpoint()
    assert made.weights.tobytes() == versions[-1].tobytes()
    check_past(made, versions)
    return max(commit.version - 1 - c.base for commit in commits for c in commit.plan.contributions)


MOMENTUM = kvps.SGD(lr=LR, momentum=0.9, clip_norm=3.0)


@pytest.mark.parametrize(
    ("staleness", "shards", "settings"),
    [
        (-1, 2, {"reduction": "sum", "staleness_scaling": "inverse", "optimizer": MOMENTUM}),
        (2, 3, {"reduction": "weighted", "optimizer": MOMENTUM}),
        *slowly(
            [
                (-1, 1, {"reduction": "weighted", "delay_versions": 1, "staleness_scaling": "inverse-sqrt"}),
                (-1, 1, {"reduction": "median", "delay_versions": 2}),
            ]
        ),
        (-1, 1, {"transport": "shm", "reduction": "sum"}),
        (0, 2, {"quorum": 1, "delay_versions": 1}),
    ],
)
def test_random_arrivals_are_compensated_as_in_a_sequential_loop(
    store: Store, tmp_path: Path, staleness: int, shards: int, settings: dict[str, Any]
) -> None:
    """The holder is killed twice and a standby goes on. The record replays to the same bits."""
    settings = {"optimizer": kvps.SGD(lr=LR), "delay_compensation": LAMBDA, "lease_ms": 200} | settings
    job = store.create_job(
        "job", model(), workers=4, staleness=staleness, shards=shards, worker_timeout_ms=60_000, **settings
    )
    fleet = Fleet(job, staleness + 10 * shards, tmp_path)
    fleet.run(70)
    fleet.kill()
    middle = job.checkpoint()
    fleet.run(70)
    fleet.kill()
    fleet.run(70)
    fleet.end()
    stalest = check(job, fleet.pushed)
    assert stalest > 1
    assert stalest > job.config.delay_versions or job.config.delay_versions > 2
    assert proved(job, tmp_path).by == "recorded"
    _, proof = proof_of(job, tmp_path, None, middle)
    assert (proof.differs, proof.replayed) == ("", proof.commits - middle.version)
    assert middle.version > 3


def test_a_restored_job_goes_on_with_its_past_weights(store: Store, tmp_path: Path) -> None:
    """With another number of shards; and a new checkpoint has the weights of versions that only the old job made."""
    job = store.create_job(
        *("job", model()), workers=2, staleness=-1, optimizer=kvps.SGD(lr=LR), delay_compensation=LAMBDA,
        delay_versions=16, lease_ms=200, worker_timeout_ms=60_000,
    )  # fmt: skip
    fleet = Fleet(job, 3)
    fleet.run(60)
    fleet.end()
    made = job.checkpoint()
    made.write(tmp_path / made.filename)
    again = store.restore_job(Checkpoint.load(tmp_path / made.filename), "again", 3)
    later = Fleet(again, 4)
    later.run(25)
    later.end()
    new = list(again.log())
    assert 0 < len(new) < 16
    versions = sequential(job.config, flat(model()), [*job.log(), *new], fleet.pushed | later.pushed)
    ended = again.checkpoint()
    assert ended.weights.tobytes() == versions[-1].tobytes()
    check_past(ended, versions)


def test_lost_memory_loses_no_past_weights_of_the_version_that_redis_has(store: Store) -> None:
    """Redis is given them with the weights, and the next holder goes on with them."""
    settings = {"optimizer": kvps.SGD(lr=LR), "delay_compensation": LAMBDA, "delay_versions": 16}
    job = store.create_job(
        "job", model(), workers=2, staleness=-1, transport="shm", lease_ms=200, worker_timeout_ms=60_000, **settings
    )
    fleet = Fleet(job, 1)
    fleet.run(40)
    fleet.commit()
    fleet.flush()
    fleet.end()
    segments = segments_of(job)
    assert segments
    given = job.state().version
    shared_memory.forget(segments.folder)
    later = Fleet(job, 2)
    later.run(12)
    later.end()
    check(job, fleet.pushed | later.pushed)
    assert 3 < given < job.state().version < given + 16


@pytest.mark.parametrize(("staleness", "gradient_format"), [(1, "fp32"), (-1, "int8")])
def test_a_run_of_a_task_is_computed_again(store: Store, tmp_path: Path, staleness: int, gradient_format: str) -> None:
    job = digits_job(
        store, staleness=staleness, shards=2, delay_compensation=2, gradient_format=gradient_format, epochs=1
    )

    def late() -> None:
        with job.join("w2") as session:
            grads = task_gradient(job, session)
            await_version(job, 1)
            session.push(grads)

    run_workers(job, *training(job, "w0", "w1"), late, record=tmp_path)
    assert max(commit.version - 1 - c.base for commit in job.log() for c in commit.plan.contributions) > 0
    assert (proved(job).by, proved(job, tmp_path).by) == ("recomputed", "recorded")


# -- arithmetic ------------------------------------------------------------------------------------------------------


def _plan(version: int, *bases: int) -> Plan:
    both = tuple(Contribution(f"w{i}", "1-0", version, version, base, 1, "", None) for i, base in enumerate(bases))
    return Plan(version, version, "", "", 2, 2 * (version - 1), both, ())


def _parts(layout: Layout, **settings: Any) -> list[ShardArrays]:
    """A shard in host memory and its twin on a device, with any weights. Past weights are NaN: nobody has made them."""
    config = JobConfig(workers=2, staleness=-1, delay_compensation=LAMBDA, **settings)
    parts = [ShardArrays(config, layout, 1), DeviceStep(config, layout, 1, Cuda(hostcupy, 0))]
    for part in parts:
        np.copyto(part.weights, SMALL * any_floats(0, part.size))
        for slot in config.past_slots:
            part.state[slot].fill(np.nan)
        part.loaded()
    return parts


@pytest.mark.parametrize("settings", [{}, {"reduction": "median"}, {"staleness_scaling": "inverse"}], ids=str)
def test_a_device_makes_the_same_bits_and_nothing_reads_what_was_never_written(settings: dict[str, Any]) -> None:
    """Of numbers of many magnitudes, in the first versions too, and when a version has no step."""
    layout = Layout.of(large_model(), shards=2)
    parts = _parts(layout, delay_versions=2, optimizer=kvps.SGD(lr=0.1, momentum=0.9), **settings)
    made: dict[int, bytes] = {0: parts[0].weights.tobytes()}
    for version in range(1, 7):
        plan = _plan(version, version - 1, max(0, version - 3)) if version != 4 else _plan(version)
        for chunk in parts[0].chunks:
            grads = [SMALL * any_floats(10 * version + i, chunk.stop - chunk.start) for i in range(2)]
            with np.errstate(under="ignore", invalid="raise"):
                for part in parts:
                    part.step(plan, chunk, grads if plan.contributions else [])
        here, there = ([bytes(m) for c in part.chunks for m in part.made(c).values()] for part in parts)
        assert here == there
        for part in parts:
            part.promote()
        made[version] = parts[0].weights.tobytes()
        for ago in range(1, min(version, 2) + 1):
            assert parts[0].state[f"past{ago}"].tobytes() == made[version - ago]
    assert np.isfinite(parts[0].weights).all()


def test_cutting_changes_no_bit_and_weights_that_did_not_move_change_no_gradient() -> None:
    g, now, before = (any_floats(seed, 1001) for seed in range(3))
    out = np.empty_like(g)
    with np.errstate(all="ignore"):
        compensate(LAMBDA, g, now, before, out)
        for low, high in ((0, 1), (1, 500), (500, 1001)):
            part = np.empty(high - low, np.float32)
            compensate(LAMBDA, g[low:high], now[low:high], before[low:high], part)
            assert part.tobytes() == out[low:high].tobytes()
    compensate(LAMBDA, g := np.float32([1e20, -1e30, 0.0, 3.0]), now[:4], now[:4], out[:4])
    np.testing.assert_array_equal(out[:4], g)


def test_what_overflows_leaves_the_other_items_of_a_users_reduction_alone(own_rules: Path) -> None:
    """A replay reduces all chunks at once, an aggregator one by one: an item may not depend on its neighbours."""
    rows = np.random.default_rng(0).standard_normal((3, 10), np.float32)
    rows[1, 4], rows[2, 7] = np.inf, np.nan
    mine, outs = reductions.parse("own_rules:median"), []
    for cuts in ([0, 10], [0, 4, 5, 10]):
        out = np.empty(10, np.float32)
        sums = [
            reduce(mine, [row[low:high] for row in rows], [1, 1, 1], 3, out[low:high]) for low, high in pairwise(cuts)
        ]
        assert any(map(math.isnan, sums))
        outs.append(out.tobytes())
    there, exact = hostcupy.empty(10, np.float32), Exact(hostcupy)
    assert math.isnan(reduce(mine, [hostcupy.asarray(row) for row in rows], [1, 1, 1], 3, there, exact))
    hostcupy.get_current_stream().synchronize()
    assert outs[0] == outs[1] == there.values.tobytes()
    np.testing.assert_array_equal(np.frombuffer(outs[0], np.float32)[:4], np.median(rows[:, :4], axis=0))
