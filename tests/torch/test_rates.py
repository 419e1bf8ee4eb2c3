"""Rates that schedulers of PyTorch set through kvps.torch.Optimizer: those of plain PyTorch, whoever is killed, comes
back or resumes; what cannot be so is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.digits_job import run_workers
from helpers.harness import aggregating, next_lr
from helpers.schedulers import SCHEDULERS, STEPS
from torch import nn
from torch.optim import lr_scheduler

import kvps
import kvps.torch
from kvps.store import Store

LR = 0.1
Make = Callable[[Any], Any]


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 1)


def create(store: Store, workers: int = 1) -> kvps.Job:
    model = make_model()
    rule = kvps.torch.optimizer(model, sgd_of(model))
    settings = {"workers": workers, "transport": "redis", "worker_timeout_ms": 60_000}
    return store.create_job("job", kvps.torch.parameters(model), optimizer=rule, **settings)


def plain_rates(make: Make) -> list[float]:
    """The rate of each step of PyTorch."""
    sgd = sgd_of(make_model())
    scheduler, rates = make(sgd), []
    for _ in range(STEPS + 1):
        rates.append(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()
    return rates


def rates_of(job: kvps.Job) -> list[float]:
    """The rate of each version, as its plan has it."""
    return [LR if commit.plan.lr is None else commit.plan.lr for commit in job.log()]


class Copy:
    """A process that trains: its optimizer, and a scheduler that was made for that, perhaps from a saved state."""

    def __init__(self, job: kvps.Job, make: Make, saved: Any = None, worker: str = "w0", **join: Any) -> None:
        self.model = make_model()
        self.optimizer = kvps.torch.Optimizer(sgd_of(self.model), self.model, job=job, worker=worker, **join)
        self.scheduler = make(self.optimizer)
        if saved:
            self.optimizer.load_state_dict(saved[0])
            self.scheduler.load_state_dict(saved[1])

    def step(self) -> float:
        """Take a step, and return the rate that was shown before it."""
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 3)).sum().backward()
        shown: float = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        return shown

    def steps(self, count: int) -> list[float]:
        shown = []
        for _ in range(count):
            shown.append(self.step())
            self.scheduler.step()
        return shown

    def saved(self) -> Any:
        return copy.deepcopy((self.optimizer.state_dict(), self.scheduler.state_dict()))

    def end(self) -> None:
        self.optimizer.close(finished=False)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_comes_back_or_resumes_has_the_rates_of_plain_pytorch(store: Store, name: str) -> None:
    """It is made anew, and loaded from a state that is older than the job, or just as old."""
    make = SCHEDULERS[name]
    job, rates = create(store), plain_rates(make)
    with aggregating(job):
        first = Copy(job, make)
        assert first.steps(6) == rates[:6]
        at_6 = first.saved()
        first.steps(4)
        first.end()
        again = Copy(job, make)
        assert again.steps(4)[1:] == rates[11:14]
        again.end()
        resumed = Copy(job, make, at_6)
        assert resumed.steps(9) == rates[6:15]
        at_15 = resumed.saved()
        resumed.end()
        resumed = Copy(job, make, at_15)
        assert resumed.steps(3) == rates[15:STEPS]
        assert resumed.scheduler.get_last_lr() == [rates[STEPS]]
        resumed.end()
    assert rates_of(job) == rates[:STEPS]


@pytest.mark.parametrize("name", ["LinearLR", "LambdaLR", "SequentialLR", "ChainedScheduler"])
def test_each_of_two_workers_shows_the_jobs_rates_whichever_comes_back(store: Store, name: str) -> None:
    make = SCHEDULERS[name]
    job, rates = create(store, workers=2), plain_rates(make)
    shown: dict[int, list[float]] = {}

    def run(number: int, killed_at: int) -> None:
        copy = Copy(job, make, worker=f"w{number}")
        shown[number] = copy.steps(killed_at)
        again = Copy(job, make, worker=f"w{number}", takeover=True)
        copy.end()
        shown[number] += again.steps(12 - killed_at)
        assert again.scheduler.get_last_lr() == [rates[12]]
        assert again.scheduler.optimizer is again.optimizer
        again.optimizer.close()
        del shown[number][killed_at]  # it comes back to the schedule with its first step

    run_workers(job, partial(run, 0, 7), partial(run, 1, 5))
    assert rates_of(job) == rates[:12]
    assert shown == {0: rates[:7] + rates[8:12], 1: rates[:5] + rates[6:12]}


def test_a_worker_that_begins_late_has_the_users_own_rate_as_base(store: Store) -> None:
    """Rank 0 has set 0, with which a warm-up begins: each rate of the other was 0."""
    job = create(store, workers=2)
    with aggregating(job):
        job.set_lr(0.0)
        late = Copy(job, SCHEDULERS["LambdaLR"], worker="w1")
        assert (late.scheduler.base_lrs, late.optimizer.param_groups[0]["initial_lr"]) == ([LR], LR)
        late.end()


def test_a_rate_that_is_written_by_hand_begins_with_the_jobs(store: Store) -> None:
    job = create(store)
    with aggregating(job):
        first = Copy(job, lambda _: None)
        first.optimizer.param_groups[0]["lr"] *= 0.5
        first.step()
        saved = copy.deepcopy(first.optimizer.state_dict())
        first.end()
        job.set_lr(0.04)
        for load in (False, True):
            again = Copy(job, lambda _: None)
            if load:
                again.optimizer.load_state_dict(saved | {"kvps": saved["kvps"] | {"clock": 2, "steps": 2, "step": 2}})
            again.optimizer.param_groups[0]["lr"] *= 0.5
            again.step()
            again.end()
    assert rates_of(job) == [0.05, 0.02, 0.01]


def test_a_worker_that_comes_back_says_that_a_rate_after_the_last_step_is_lost(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """`g["lr"] *= 0.5` behind each step: what a killed process wrote last is nowhere."""
    job = create(store)
    with aggregating(job):
        for stop in (True, False):
            copy_ = Copy(job, lambda _: None)
            for _ in range(2):
                copy_.step()
                copy_.optimizer.param_groups[0]["lr"] *= 0.5
            assert ("the learning rate that was set: if the script wrote another one after" in caplog.text) != stop
            copy_.end()
        caplog.clear()
        told = Copy(job, lambda _: None)
        told.optimizer.param_groups[0]["lr"] = 0.03  # before its step, as a loop does that derives it from the step
        told.step()
        told.end()
    assert not caplog.records
    assert rates_of(job) == [LR, LR / 2, LR / 2, LR / 4, 0.03]


def epochs_of_three(scheduler: Any, step: int) -> None:
    if step % 3 == 2:
        scheduler.step()


def test_a_scheduler_that_comes_back_and_does_not_step_with_each_step_is_refused(store: Store) -> None:
    """By its rates, or, if they do not tell, as soon as it does not step; and two of them in any case. One that its
    user has brought to where it was goes on there."""
    job = create(store)
    refused = pytest.raises(
        kvps.InvalidSetting, match=r"comes back after 5 steps, and where its StepLR was is not known, .* every=N\)"
    )

    def by_epochs(o: Any) -> Any:
        return lr_scheduler.StepLR(o, 1, 0.5)

    def rarely(o: Any) -> Any:
        return lr_scheduler.StepLR(o, 10, 0.5)

    with aggregating(job):
        first = Copy(job, by_epochs)
        for step in range(5):
            first.step()
            epochs_of_three(first.scheduler, step)
        first.end()
        again = Copy(job, by_epochs)
        with refused:
            again.step()
        again.end()
        both = Copy(job, lambda o: [lr_scheduler.StepLR(o, 1, 0.5), lr_scheduler.ExponentialLR(o, 1.0)])
        with refused:
            both.step()
        both.end()
        job.set_lr(LR)
        again = Copy(job, rarely)
        again.steps(1)
        again.step()
        with pytest.raises(kvps.InvalidSetting, match="where its StepLR was is not known"):
            again.step()
        again.end()
        brought = Copy(job, by_epochs)
        with pytest.warns(UserWarning, match="before `optimizer.step"):  # as PyTorch warns of that
            brought.scheduler.step()
        brought.scheduler.step()
        brought.step()
        brought.end()
    assert rates_of(job) == [LR] * 3 + [LR / 2] * 2 + [LR] * 2 + [LR / 4]


def test_a_plateau_that_comes_back_says_that_it_has_forgotten(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """It goes on with the job's rate, and from its state, if it has that."""

    def make(o: Any) -> Any:
        return lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0)

    job = create(store)
    with aggregating(job):
        first = Copy(job, make)
        for loss in (1.0, 2.0, 2.0):
            first.step()
            first.scheduler.step(loss)
        first.optimizer.worker.state = {name: vars(first.scheduler)[name] for name in ("best", "num_bad_epochs")}
        first.step()
        first.end()
        loaded = Copy(job, make)
        vars(loaded.scheduler).update(loaded.optimizer.worker.state)
        loaded.scheduler.step(2.0)
        loaded.step()
        assert not caplog.records
        loaded.end()
        again = Copy(job, make)
        again.step()
        assert "its ReduceLROnPlateau goes on with the job's rate, and has forgotten its best value" in caplog.text
        again.end()
    assert rates_of(job) == [LR, LR, LR / 2, LR / 4, LR / 8, LR / 8]


@pytest.mark.parametrize(("every", "steps_each"), [(1, 3), (3, 1)])
def test_a_given_scheduler_that_does_not_step_as_the_jobs_schedule_is_refused(
    store: Store, every: int, steps_each: int
) -> None:
    """Its loop would show other rates than those that train."""
    model = make_model()
    sgd = sgd_of(model)
    scheduler = lr_scheduler.StepLR(sgd, 2, 0.5)
    rule = kvps.torch.optimizer(model, sgd, scheduler, every)
    job = store.create_job("job", kvps.torch.parameters(model), optimizer=rule, workers=1, transport="redis")
    with aggregating(job), kvps.torch.Optimizer(sgd, model, scheduler, job, every=every) as optimizer:

        def train() -> None:
            for step in range(9):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                if step % steps_each == steps_each - 1:
                    scheduler.step()

        with pytest.raises(kvps.InvalidSetting, match=rf"in the job it takes one after each {every}: say every="):
            train()


def test_a_given_scheduler_comes_back_to_where_the_job_is(store: Store) -> None:
    """It belongs to the distributed optimizer, as libraries ask. Where one beside it was, no rate of the job shows."""
    model = make_model()
    sgd = sgd_of(model)
    rule = kvps.torch.optimizer(model, sgd, lr_scheduler.StepLR(sgd, 2, 0.5), 3)
    job = store.create_job("job", kvps.torch.parameters(model), optimizer=rule, workers=1, transport="redis")
    shown = []
    with aggregating(job):
        for _ in range(2):
            model = make_model()
            sgd = sgd_of(model)
            scheduler = lr_scheduler.StepLR(sgd, 2, 0.5)
            optimizer = kvps.torch.Optimizer(sgd, model, scheduler, job, worker="w0", every=3)
            assert scheduler.optimizer is optimizer
            for _ in range(9):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                if optimizer.worker.session.clock % 3 == 0:
                    scheduler.step()
                shown.append(scheduler.get_last_lr()[0])
            optimizer.close(finished=False)
        sgd = sgd_of(model)
        optimizer = kvps.torch.Optimizer(sgd, model, lr_scheduler.StepLR(sgd, 2, 0.5), job, worker="w0", every=3)
        beside = lr_scheduler.ExponentialLR(optimizer, 0.9)
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(kvps.InvalidSetting, match="where its ExponentialLR was is not known"):
            optimizer.step()
        optimizer.close(finished=False)
        del beside
    assert shown == [LR / 2 ** (step // 6) for step in range(1, 19)]
    assert math.isclose(next_lr(job), LR / 8)
