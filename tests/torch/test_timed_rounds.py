"""Rounds of PyTorch that end by the clock: counts from the log, and no times."""

from __future__ import annotations

import time
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ddp import loss_of, net, train_on, weights_of
from helpers.digits_job import proved, run_workers
from helpers.harness import aggregating, await_version, check_chain
from helpers.internals import lose_next_answer

import kvps
import kvps.torch
from kvps.job import Job
from kvps.store import Store
from kvps.torch.session import TorchSession

AUTO = {"local_steps": "auto", "round_ms": 100, "reduction": "weighted", "optimizer": kvps.SGD(lr=1.0)}


def create(store: Store, **settings: Any) -> Job:
    settings = {"workers": 1, "transport": "redis", "worker_timeout_ms": 60_000} | AUTO | settings
    return store.create_job("job", kvps.torch.parameters(net()), **settings)


def joined(job: Job, model: torch.nn.Module, worker: str = "w0", **options: Any) -> TorchSession:
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    return kvps.torch.join(job, model, worker, inner=inner, **options)


def weights_in(job: Job, worker: str) -> list[int]:
    return [c.weight for commit in job.log() for c in commit.plan.contributions if c.worker == worker]


def plain(job: Job) -> dict[str, np.ndarray]:
    """The same in PyTorch alone, with as many steps in each round as the log says: the mean of the learners' weights,
    each by its steps."""
    main, taken = net(), [0] * job.config.workers
    for commit in job.log():
        ends, steps = [], []
        for rank, contribution in enumerate(commit.plan.contributions):
            replica = net()
            replica.load_state_dict(main.state_dict())
            inner = torch.optim.SGD(replica.parameters(), lr=0.05)
            for number in range(taken[rank], taken[rank] + contribution.weight):
                inner.zero_grad()
                loss_of(replica, rank, number).backward()
                inner.step()
            taken[rank] += contribution.weight
            ends.append([contribution.weight * p.detach() for p in replica.parameters()])
            steps.append(contribution.weight)
        with torch.no_grad():
            for number, parameter in enumerate(main.parameters()):
                parameter.copy_(torch.stack([end[number] for end in ends]).sum(0) / sum(steps))
    return weights_of(main)


def trained(
    job: Job, rounds: int, sleeps: dict[str, float], record: Path | None = None, **steps: Any
) -> dict[str, int]:
    """Train until each worker has done so many rounds, with a pause in each batch; return how many steps each took."""

    taken_by = {}

    def work(worker: str, sleep_s: float) -> None:
        model, taken = net(), 0
        with joined(job, model, worker, local_steps=steps.get(worker)) as session:
            while session.session.round < rounds:
                time.sleep(sleep_s)  # what a step takes
                train_on(session, model, taken)
                taken += 1
        taken_by[worker] = taken

    run_workers(job, *(partial(work, worker, sleep_s) for worker, sleep_s in sleeps.items()), record=record)
    check_chain(job)
    return taken_by


@pytest.mark.slow
def test_a_fast_learner_takes_more_steps_in_a_round_than_a_slow_one(
    store: Store, tmp_path: Path, transport: str
) -> None:
    job = create(store, workers=2, transport=transport, round_ms=400)
    taken = trained(job, 5, {"w0": 0.001, "w1": 0.15}, record=tmp_path)
    fast, slow = weights_in(job, "w0"), weights_in(job, "w1")
    assert (len(fast), len(slow)) == (5, 5)
    assert median(fast) > 2 * median(slow) >= 2
    assert (sum(fast), sum(slow)) == (taken["w0"], taken["w1"]), "each step without a weight weighs 1"
    assert proved(job, tmp_path).by == "recorded"
    for name, array in plain(job).items():
        np.testing.assert_allclose(job.snapshot()[1][name], array, atol=1e-5)


def test_a_worker_may_take_a_number_of_steps_of_its_own(store: Store) -> None:
    """Its steps weigh as much as those of the others."""
    job = create(store, workers=2)
    trained(job, 3, {"w0": 0.001, "w1": 0.001}, w1=3)
    assert weights_in(job, "w1") == [3, 3, 3]
    assert len(weights_in(job, "w0")) == 3


def test_the_weights_of_a_round_add_up(store: Store) -> None:
    job, model, given = create(store, round_ms=60), net(), [5, None, 7, 1]
    sums, added = [0], 0
    with aggregating(job), joined(job, model) as worker:
        for number, weight in enumerate(cycle(given)):
            before = worker.session.clock
            clock = train_on(worker, model, number, weight)
            sums[-1] += weight or 1
            if clock > before:
                added += 1
                assert worker.session.weight_sum == sum(sums)
                sums.append(0)
            if added == 3:
                break
        await_version(job, 3)
    assert weights_in(job, "w0") == sums[:3]


def test_a_round_whose_reply_was_lost_is_pushed_again_and_takes_no_other_step(store: Store) -> None:
    job, model = create(store, round_ms=1), net()
    with aggregating(job), joined(job, model) as worker:
        worker.pull()
        loss_of(model, 0, 0).backward()
        lose_next_answer()
        with pytest.raises(kvps.ServerLost):
            worker.step(weight=4)
        ours = weights_of(model)
        assert worker.step(weight=9) == 1
        for name, array in weights_of(model).items():
            np.testing.assert_array_equal(array, ours[name])
        assert worker.session.weight_sum == 4
        worker.pull()
        loss_of(model, 0, 1).backward()
        assert worker.step() == 2
        assert worker.session.weight_sum == 5
        await_version(job, 2)
    assert weights_in(job, "w0") == [4, 1]


def test_leaving_in_the_middle_of_a_round_pushes_its_steps(store: Store) -> None:
    job, model = create(store, round_ms=86_400_000), net()
    with aggregating(job):
        with joined(job, model) as worker:
            for number in range(3):
                assert train_on(worker, model, number) == 0
        assert job.await_finished()
    assert weights_in(job, "w0") == [3]


def test_who_joins_long_after_the_commit_takes_one_step(store: Store) -> None:
    """The others end the round now, or have ended it."""
    job, model = create(store, round_ms=50), net()
    with aggregating(job):
        with joined(job, model) as worker:
            while not worker.session.clock:
                train_on(worker, model, 0)
            worker.leave(finished=False)
        await_version(job, 1)
        time.sleep(0.06)  # the round's time, by any clock
        with joined(job, model) as worker:
            assert train_on(worker, model, 1) == 2
        await_version(job, 2)
    assert weights_in(job, "w0")[1] == 1
