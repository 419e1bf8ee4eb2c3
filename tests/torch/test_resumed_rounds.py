"""Local steps of a loop that is resumed from its own state: each counts once, or a line says why not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from helpers.harness import aggregating
from helpers.waiting import eventually
from torch import nn

import kvps
import kvps.torch
from kvps.store import Store


def create(store: Store, **settings: Any) -> kvps.Job:
    model = counter()
    rule = kvps.torch.optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    settings = {"workers": 1, "local_steps": 4, "worker_timeout_ms": 60_000} | settings
    return store.create_job("job", kvps.torch.parameters(model), optimizer=rule, **settings)


def counter() -> nn.Linear:
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


@contextmanager
def resumed(job: kvps.Job, state: dict[str, Any] | None = None) -> Iterator[kvps.torch.Optimizer]:
    """The next process of the only worker, which is not closed."""
    model = counter()
    sgd, inner = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    optimizer = kvps.torch.Optimizer(sgd, model, job=job, inner=inner, worker="w0", takeover=True)
    if state:
        optimizer.load_state_dict(state)
    yield optimizer
    optimizer.worker.session.leave(finished=False)
    with suppress(kvps.WrongOrder):
        optimizer.close(finished=False)


def steps(optimizer: kvps.torch.Optimizer, first: int, last: int) -> dict[int, dict[str, Any]]:
    """Take these steps, each of which moves every weight by 1. Return the state before each, and after the last."""
    states = {}
    for number in range(first, last):
        states[number] = optimizer.state_dict()
        for p in optimizer.param_groups[0]["params"]:
            p.grad = -torch.ones_like(p)
        optimizer.step()
    return states | {last: optimizer.state_dict()}


def counted(job: kvps.Job) -> int:
    """Return how many steps are in the job, all of whose contributions are committed."""
    assert eventually(lambda: all(member.pending == 0 for member in job.state().members.values()))
    (count,) = set(job.snapshot()[1]["weight"].ravel().tolist())
    return int(count)


@pytest.mark.parametrize("saved", [0, 3, 8, 9, 10])
@pytest.mark.parametrize("settings", [{}, {"fragments": 1, "staleness": 1}])
def test_a_loop_goes_on_behind_a_round_that_was_short(store: Store, saved: int, settings: dict[str, Any]) -> None:
    """The first process leaves after 10 steps, of which the last round has two. The second one is killed before it has
    saved a state, and the third one begins where the second did."""
    job = create(store, **settings)
    with aggregating(job):
        with resumed(job) as optimizer:
            states = steps(optimizer, 0, 10)
            optimizer.close(finished=False)
        with resumed(job, states[saved]) as optimizer:
            assert optimizer.worker.done == 10
            optimizer.worker.state = {"epoch": 1}
            steps(optimizer, saved, 14)
        assert eventually(lambda: counted(job) == 14)
        with resumed(job, states[saved]) as optimizer:
            assert (optimizer.worker.done, optimizer.worker.state) == (14, {"epoch": 1})
            later = steps(optimizer, saved, 20)
            optimizer.close()
        assert eventually(lambda: counted(job) == 20)
        assert later[20]["kvps"]["step"] == 20


def test_steps_that_a_kill_took_along_are_not_taken_for_done(store: Store) -> None:
    job = create(store)
    with aggregating(job):
        with resumed(job) as optimizer:
            states = steps(optimizer, 0, 10)
        refused = pytest.raises(kvps.InvalidSetting, match=r"of step 10 of this worker, and the job has 8: .* every 4")
        with refused, resumed(job, states[10]):
            pass
        with resumed(job, states[7]) as optimizer:
            steps(optimizer, 7, 20)
        assert eventually(lambda: counted(job) == 20)


def test_a_round_that_is_under_way_stays_as_it_is(store: Store) -> None:
    """A loop that goes back in the middle of a round is told, because its weights are of more steps."""
    job = create(store)
    with aggregating(job), resumed(job) as optimizer:
        states = steps(optimizer, 0, 6)
        optimizer.load_state_dict(states[6])
        for other in (5, 3):
            with pytest.raises(kvps.InvalidSetting, match=r"this process has trained on .* cannot go back"):
                optimizer.load_state_dict(states[other])
        steps(optimizer, 6, 8)
        assert eventually(lambda: counted(job) == 8)


def test_fragments_have_shorter_rounds(store: Store) -> None:
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 1, bias=False))
    sgd, inner = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    rule = kvps.torch.optimizer(model, sgd)
    job = store.create_job("job", kvps.torch.parameters(model), optimizer=rule, workers=1, local_steps=4, fragments=2)
    with aggregating(job), kvps.torch.Optimizer(sgd, model, job=job, inner=inner) as optimizer:
        states = steps(optimizer, 0, 4)
        assert [states[number]["kvps"]["step"] for number in range(5)] == [0, 1, 2, 3, 4]
        assert optimizer.worker.steps_of_push == 2
