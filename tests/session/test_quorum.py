"""Rounds that close with a quorum: what is in each version, who waits for whom, and what becomes of late ones."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from helpers.digits_job import ROUNDS, digits_job, proved, task_gradient, task_weight, training
from helpers.harness import Params, aggregating, await_version, gradient, model
from helpers.pages import python_in
from helpers.waiting import eventually
from kvps_aggregator import Aggregator, Outcome

import kvps
from kvps.config import JobConfig
from kvps.job import Job
from kvps.session.session import Session
from kvps.store import Store

pytestmark = pytest.mark.contract

LR = 0.1
FALLING = kvps.schedules.ExponentialLR(LR, every=10, factor=0.5)


Arrival = tuple[int, int, Params]
"""The rank of a worker, the version it computed on, and its gradient."""


def reduced(reduction: str, ranks: list[int], rows: list[np.ndarray]) -> np.ndarray:
    """The textbook's formula, in the order that kvps promises. A worker's weight is its rank + 1."""
    one = np.float32
    weights = [one(rank + 1 if reduction == "weighted" else 1) for rank in ranks]
    total = rows[0] * weights[0]
    for weight, row in zip(weights[1:], rows[1:], strict=True):
        total = total + row * weight
    return total if reduction == "sum" else total / sum(weights, one(0))


@dataclass
class Simulation:
    """A job in one process. `made` has, of each version, the ranks and bases of what it is made of."""

    weights: list[Params]
    config: JobConfig
    inbox: list[Arrival] = field(default_factory=list)
    planned: list[Arrival] = field(default_factory=list)
    made: list[list[tuple[int, int]]] = field(default_factory=list)

    @property
    def version(self) -> int:
        return len(self.made)

    def waits(self, rank: int) -> bool:
        return any(waiting == rank for waiting, *_ in self.inbox + self.planned)

    def push(self, arrival: Arrival) -> bool:
        """Take a contribution, or return False for one that is late and dropped."""
        if self.config.late == "drop" and (arrival[1] < self.version or self.planned):
            return False
        self.inbox.append(arrival)
        return True

    def plan(self) -> bool:
        """Close the round if it is due: what comes from here on is late. Return whether it is closed."""
        if not self.planned and len(self.inbox) >= self.config.quorum:
            self.planned, self.inbox = sorted(self.inbox, key=lambda arrival: arrival[0]), []
        return bool(self.planned)

    def commit(self) -> None:
        """Make all versions that are due, by SGD whose learning rate falls from round to round."""
        while self.plan():
            ranks, reduction = [rank for rank, *_ in self.planned], self.config.reduction
            after = {}
            for name, value in self.weights[-1].items():
                gradient = reduced(reduction, ranks, [grads[name] for *_, grads in self.planned])
                after[name] = value - np.float32(FALLING.at(self.version)) * gradient
            self.weights.append(after)
            self.made.append([(rank, base) for rank, base, _ in self.planned])
            self.planned = []


@dataclass
class Actor:
    """A worker that is told when to pull and when to push."""

    session: Session
    base: int | None = None
    grads: Params = field(default_factory=dict)


@pytest.mark.parametrize(
    ("late", "workers", "quorum", "shards", "reduction"),
    [
        ("next", 3, 2, 1, "weighted"),
        ("drop", 3, 2, 2, "sum"),
        ("next", 4, 1, 2, "mean"),
        ("drop", 4, 1, 1, "weighted"),
        ("next", 3, 3, 1, "sum"),
        ("drop", 3, 3, 2, "mean"),
    ],
)
def test_versions_are_those_of_a_sequential_simulation(
    store: Store, late: str, workers: int, quorum: int, shards: int, reduction: str
) -> None:
    """In a random order that is the same each time, workers pull and push, and an aggregator plans and commits."""
    rng = np.random.default_rng((workers, quorum, shards))
    settings = {"workers": workers, "quorum": quorum, "late": late, "shards": shards, "reduction": reduction}
    job = store.create_job("job", model(), optimizer=kvps.SGD(lr=FALLING), **settings)
    simulation = Simulation([model()], job.config)
    aggregator = Aggregator(job, threading.Event())
    actors = [Actor(job.join(f"w{rank}")) for rank in range(workers)]
    aggregator.hold()
    dropped = 0
    for _ in range(200):
        rank = int(rng.integers(workers + 2))
        if rank == workers:
            job.access.scripts.plan()
            simulation.plan()
        elif rank > workers:
            while aggregator.work() is not Outcome.IDLE:
                pass
            simulation.commit()
        else:
            dropped += not _acts(actors[rank], simulation, rank)
    assert simulation.version > 5
    assert (dropped > 0) == (late == "drop" and quorum < workers)
    commits = list(job.log())
    assert [[(int(c.worker[1:]), c.base) for c in commit.plan.contributions] for commit in commits] == simulation.made
    assert all(commit.plan.divisor == len(commit.plan.contributions) for commit in commits)
    version, weights = job.snapshot()
    for name, expected in simulation.weights[version].items():
        np.testing.assert_array_equal(weights[name], expected)
    for actor in actors:
        actor.session.leave(finished=False)
    aggregator.release()


def _acts(actor: Actor, simulation: Simulation, rank: int) -> bool:
    """Let a worker push what it has computed, or pull if its bound lets it. Return False if what it pushed was late."""
    if actor.base is None:
        if not simulation.waits(rank) and simulation.version >= actor.session.round:
            params = actor.session.pull()
            actor.base = actor.session.version
            assert actor.base == actor.session.round == simulation.version
            actor.grads = gradient(params, rank, simulation.version)
        return True
    base, actor.base = actor.base, None
    weight = rank + 1 if simulation.config.reduction == "weighted" else None
    if simulation.push((rank, base, actor.grads)):
        actor.session.push(actor.grads, weight=weight)
        return True
    with pytest.raises(kvps.ContributionLate, match="go on with the round that is open"):
        actor.session.push(actor.grads, weight=weight)
    assert actor.session.round == base + 1
    return False


def _round(session: Session) -> None:
    session.push(gradient(session.pull(), session.rank, session.round))


def test_a_quorum_gives_the_others_their_grace_and_no_more(store: Store) -> None:
    job = store.create_job("job", model(), workers=2, quorum=1, grace_ms=3_600_000)
    with job.join("w0") as first, job.join("w1") as second:
        _round(first)
        planned = job.access.scripts.plan()
        assert planned.plan is None
        assert 3_500_000 < planned.grace_ms <= 3_600_000
        _round(second)
        assert len((job.access.scripts.plan().plan or pytest.fail("nobody is missing")).contributions) == 2


def _in_an_hour(job: Job) -> int:
    seconds, _ = job.access.client.call("TIME")
    return int(seconds) * 1000 + 3_600_000


def test_grace_is_given_though_the_clock_was_set_back(store: Store) -> None:
    """Ids of a stream never go back, so for as long as that was they are no times."""
    job = store.create_job("job", model(), workers=2, quorum=1, grace_ms=3_600_000)
    inbox = job.access.keys.inbox
    job.access.client.call("XDEL", inbox, job.access.client.call("XADD", inbox, f"{_in_an_hour(job)}-0", "a", "b"))
    with job.join("w0") as first, job.join("w1"):
        _round(first)
        planned = job.access.scripts.plan()
        assert planned.plan is None
        assert 3_500_000 < planned.grace_ms <= 3_600_000


@pytest.mark.parametrize("time_field", [True, False], ids=["now", "as an earlier version of kvps wrote it"])
def test_who_arrived_in_the_future_arrives_now(store: Store, time_field: bool) -> None:
    """The clock was set back between the arrival and the plan: the grace begins, and ends, by the clock as it is."""
    job = store.create_job("job", model(), workers=2, quorum=1, grace_ms=300)
    keys, client, later = job.access.keys, job.access.client, _in_an_hour(job)
    with job.join("w0") as first, job.join("w1"):
        _round(first)
        [(id, fields)] = client.call("XRANGE", keys.inbox, "-", "+")
        fields.pop("arrived", None)
        client.call("XDEL", keys.inbox, id)
        fields |= {"arrived": later} if time_field else {}
        client.call("XADD", keys.inbox, f"{later}-0", *(part for pair in fields.items() for part in pair))
        assert 0 < job.access.scripts.plan().grace_ms <= 300
        assert eventually(lambda: job.access.scripts.plan().plan is not None)


def test_after_its_grace_a_version_is_made_though_nobody_else_pushes(store: Store) -> None:
    job = store.create_job("job", model(), workers=2, quorum=1, grace_ms=300)
    with aggregating(job), job.join("w0") as first, job.join("w1"):
        _round(first)
        await_version(job, 1)
        assert [c.worker for c in next(job.log()).plan.contributions] == ["w0"]


@pytest.mark.slow
def test_a_short_grace_time_costs_no_more_than_that(store: Store) -> None:
    """An idle server ends a wait of 20 ms up to 100 ms late: rounds with such a grace time took five times as long."""
    seconds = {}
    for grace_ms in (20, 200):
        job = store.create_job(f"g{grace_ms}", model(), workers=3, quorum=2, grace_ms=grace_ms)
        with aggregating(job):
            a, b, _ = (job.join(f"w{rank}") for rank in range(3))
            ends = []
            for _ in range(11):
                for session in (a, b):
                    session.pull()
                ends.append(time.monotonic())
                for session in (a, b):
                    session.push(model())
            seconds[grace_ms] = min(end - began for began, end in pairwise(ends))
    assert seconds[20] < seconds[200] / 4


def test_a_quorum_waits_for_nobody_who_is_gone(store: Store) -> None:
    """Also if it is of all workers: one leaves, another is evicted, and a third has left what still counts."""
    job = store.create_job("job", model(), workers=4, quorum=4, worker_timeout_ms=500)
    with aggregating(job), job.join("w0") as first:
        job.join("w1").leave(finished=False)
        with job.join("w2") as third:
            _round(third)
        job.join("w3")  # and falls silent, because nobody holds it
        assert eventually(
            lambda: [job.access.scripts.evict(), job.access.client.call("ZCARD", job.access.keys.pushed)][1] == 1
        )
        for version in range(1, 4):
            _round(first)
            await_version(job, version)


def test_a_quorum_collects_in_asp(store: Store) -> None:
    """FedBuff's buffer: each version is made of as many contributions, whoever made them."""
    job = store.create_job("job", model(), workers=3, staleness=-1, quorum=3, optimizer=kvps.SGD(lr=LR))
    with aggregating(job), job.join("w0") as fast, job.join("w1") as slow, job.join("w2"):
        _round(fast)
        _round(fast)
        assert job.access.scripts.plan().plan is None
        _round(slow)
        await_version(job, 1)
    plan = next(job.log()).plan
    assert [(c.worker, c.round) for c in plan.contributions] == [("w0", 1), ("w0", 2), ("w1", 1)]
    assert plan.divisor == 3


@pytest.mark.parametrize(("late", "versions"), [("drop", ROUNDS), ("next", ROUNDS + 1)])
def test_a_run_ends_with_the_rounds_of_its_job(
    store: Store, late: str, versions: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A straggler did all its own rounds afterwards, in versions of one contribution: a quorum saved no time."""
    job = digits_job(store, quorum=2, late=late)
    with aggregating(job):
        with pytest.raises(kvps.ContributionLate) if late == "drop" else nullcontext(), job.join("w2") as straggler:
            gradient = task_gradient(job, straggler)
            with ThreadPoolExecutor() as pool:
                for worker in [pool.submit(run) for run in training(job, "w0", "w1")]:
                    worker.result()
            await_version(job, ROUNDS)
            straggler.push(gradient)
        with caplog.at_level("INFO", "kvps.worker"):
            training(job, "w2")[0]()
        assert job.await_finished()
    undone = ROUNDS - (late == "next")
    assert f"worker w2 has {undone} of its {ROUNDS} rounds in no version" in caplog.text
    assert job.state().version == versions
    proved(job)


def test_the_loop_of_the_modes_page_adds_no_version(store: Store) -> None:
    job = store.create_job("job", model(), workers=2, quorum=1)
    with aggregating(job), job.join("w0") as straggler, job.join("w1") as other:
        for _ in range(5):
            _round(other)
        await_version(job, 5)
        names = {"session": straggler, "rounds": 5, "gradient": lambda params, _: params, "batch_of": lambda _: None}
        exec(python_in("docs/modes.md")[0], names)
        assert (straggler.round, straggler.sequence) == (5, 0)


def test_a_late_push_gets_the_same_answer_again_and_leaves_nothing(store: Store) -> None:
    job = store.create_job("job", model(), workers=2, quorum=1, late="drop")
    with aggregating(job), job.join("w0") as first, job.join("w1") as second:
        second.pull()
        _round(first)
        await_version(job, 1)
        with pytest.raises(kvps.ContributionLate):
            second.push(model())
        assert (second.clock, second.round, second.sequence) == (0, 1, 1)
        with pytest.raises(kvps.ContributionLate):
            job.access.scripts.ask("w1", second.incarnation, 1)
        with pytest.raises(kvps.ContributionLate):
            job.access.scripts.push("w1", second.incarnation, 1, 1, 1, "00", job.state().history)
        assert job.state().members["w1"].pending == 0
        assert not list(job.access.client.scan(job.access.keys.gradient(0, "w1", second.incarnation, 1, 0)))
        with pytest.raises(kvps.WrongOrder):
            second.push(model())
        _round(second)
        assert second.clock == 1


def test_a_unit_that_came_late_is_computed_again(store: Store) -> None:
    job = store.create_job("job", model(), workers=2, quorum=1, late="drop", units=3)
    with aggregating(job), job.join("w0") as first, job.join("w1") as second:
        assert (first.next_unit(), second.next_unit()) == (0, 1)
        second.pull()
        _round(first)
        await_version(job, 1)
        with pytest.raises(kvps.ContributionLate):
            second.push(model())
        assert second.next_unit() == 1
        _round(second)
        await_version(job, 2)
        assert first.next_unit() == 2
        _round(first)
        assert eventually(lambda: job.state().version == 3)
    assert [c.unit for commit in job.log() for c in commit.plan.contributions] == [0, 1, 2]


@pytest.mark.parametrize(
    ("format", "reduction"), [("int8", "mean"), ("topk:0.1", "weighted"), ("fp32", "median"), ("fp32", "trimmed:0.4")]
)
def test_a_run_that_dropped_contributions_is_replayed(store: Store, format: str, reduction: str) -> None:
    """A lossy format's residual stays as it was when a contribution is dropped, and when the worker comes back."""
    job = digits_job(store, workers=2, quorum=1, late="drop", gradient_format=format, reduction=reduction)
    with aggregating(job), job.join("w0") as first:
        second = job.join("w1")
        for round_ in range(6):
            late, weight = task_gradient(job, second), task_weight(job, second)
            own = task_gradient(job, first)
            first.push(own, weight=task_weight(job, first))
            await_version(job, first.clock + second.clock)
            with pytest.raises(kvps.ContributionLate):
                second.push(late, weight=weight)
            if round_ % 2:
                own = task_gradient(job, second)
                second.push(own, weight=task_weight(job, second))
                await_version(job, first.clock + second.clock)
            if round_ == 3:
                second.leave(finished=False)
                second = job.join("w1")
        second.leave()
    proof = proved(job)
    assert (proof.differs, proof.by, proof.replayed) == ("", "recomputed", 9)
