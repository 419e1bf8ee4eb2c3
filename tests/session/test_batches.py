"""`kvps.batches`: rows of NumPy arrays, each batch once, whoever computes it."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.digits_job import run_workers
from helpers.harness import check_chain

import kvps
from kvps.store import Store

SAMPLES = 30
X = np.arange(SAMPLES)
DATA = {"samples": SAMPLES, "batch_size": 8, "epochs": 2, "units_per_round": 3}


def create(store: Store, name: str = "job", **settings: Any) -> kvps.Job:
    settings = DATA | {"optimizer": kvps.SGD(lr=1.0), "reduction": "sum", "worker_timeout_ms": 60_000} | settings
    return store.create_job(name, {"done": np.zeros(SAMPLES, np.float32)}, **settings)


def train(job: kvps.Job, name: str, randoms: dict[tuple[int, ...], tuple[float, float]]) -> None:
    with job.join(name) as session:
        for params, x, twice in kvps.batches(session, X, 2 * X):
            np.testing.assert_array_equal(twice, 2 * x)
            grad = np.zeros_like(params["done"])
            grad[x] = -1
            if not randoms.get(tuple(x)):
                randoms[tuple(x)] = (random.random(), np.random.random())
            session.push({"done": grad})


def test_each_batch_of_each_epoch_counts_once_with_the_random_numbers_of_its_unit(store: Store) -> None:
    randoms = dict[tuple[int, ...], tuple[float, float]](), dict[tuple[int, ...], tuple[float, float]]()
    for name, seen in zip("ab", randoms, strict=True):
        job = create(store, name)
        run_workers(job, partial(train, job, "w0", seen))
        used = Counter(c.unit for commit in job.log() for c in commit.plan.contributions)
        assert used == dict.fromkeys(range(8), 1)
        np.testing.assert_array_equal(job.snapshot()[1]["done"], 2)
        check_chain(job)
    assert randoms[0] == randoms[1]
    assert len({*randoms[0].values()}) == 8


def test_two_workers_share_the_batches(store: Store) -> None:
    job = create(store, workers=2)
    run_workers(job, *(partial(train, job, f"w{n}", {}) for n in range(2)))
    np.testing.assert_array_equal(job.snapshot()[1]["done"], 2)
    assert job.state().units_done == 8


def test_a_batch_that_was_not_pushed_comes_again_but_not_for_ever(store: Store) -> None:
    with create(store).join() as session, pytest.raises(kvps.WrongOrder, match="unit 0 came 50 times"):
        for _ in kvps.batches(session, X):
            pass


@pytest.mark.parametrize(
    ("settings", "arrays", "how", "why"),
    [
        ({}, [X, X[1:]], {}, "arrays of one length"),
        ({}, [], {}, "arrays of one length"),
        ({}, [X[1:]], {}, "29 samples"),
        ({}, [X], {"epochs": 3}, "epochs is 3 here"),
        ({"samples": 0, "units_per_round": 0}, [X], {}, "samples=len"),
        ({"local_steps": 2}, [X], {}, "local_steps"),
    ],
)
def test_what_does_not_fit_is_refused(
    store: Store, settings: dict[str, Any], arrays: list[Any], how: dict[str, Any], why: str
) -> None:
    with create(store, **settings).join() as session, pytest.raises(kvps.InvalidSetting, match=why):
        kvps.batches(session, *arrays, **how)
