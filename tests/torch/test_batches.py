"""`worker.batches`: the batches of a data set, each once and with the same bits, whoever computes them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.arrays import assert_same_bits
from helpers.counting import BATCH, EPOCHS, SAMPLES, UNITS, Count, Numbers, Sharded, count, counting, create, once
from helpers.digits_job import run_workers
from helpers.noisy_digits import NoisyDigits, cnn
from helpers.waiting import eventually
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import kvps
import kvps.torch
from kvps.store import Store


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of floats depend on how many threads share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


# -- the same bits -------------------------------------------------------------------------------------------------


def classify(job: kvps.Job, name: str, model: nn.Module, **how: Any) -> None:
    data = how.pop("data", None) or NoisyDigits(SAMPLES)
    with kvps.torch.join(job, model, name) as worker:
        for x, y in worker.batches(data, **how):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            worker.step(loss)


def alone(job: kvps.Job, **how: Any) -> dict[str, np.ndarray]:
    run_workers(job, partial(classify, job, "w0", cnn(), **how))
    return job.snapshot()[1]


def test_one_worker_with_and_without_loader_processes_and_two_processes_of_a_job(store: Store) -> None:
    """Noise in the loader's processes and dropout in the training depend on the unit alone."""
    weights = alone(create(store, cnn(), "a"), num_workers=2)
    assert_same_bits(alone(create(store, cnn(), "b")), weights)
    other = alone(create(store, cnn(), "c", seed=1))
    assert any((other[name] != weights[name]).any() for name in weights)


@pytest.mark.parametrize(
    ("workers", "data"), [(2, NoisyDigits(SAMPLES)), (3, NoisyDigits(SAMPLES)), (3, Sharded(NoisyDigits(SAMPLES)))]
)
def test_workers_one_after_another_end_with_the_weights_of_one(store: Store, workers: int, data: Any) -> None:
    """They take turns in one thread, because threads share the random numbers that `batches` seeds."""
    expected = alone(create(store, cnn(), "alone"), data=data)
    job, models = create(store, cnn(), "shared", workers=workers), [cnn() for _ in range(workers)]

    def take_turns() -> None:
        joined = [kvps.torch.join(job, model, f"w{number}") for number, model in enumerate(models)]
        turns = random.Random(workers)
        loops = [iter(worker.batches(data)) for worker in joined]
        done = 0
        while done < UNITS:  # another one would wait for a version that this thread must not wait for
            number = turns.randrange(workers)
            x, y = next(loops[number])
            loss = nn.functional.cross_entropy(models[number](x), y)
            loss.backward()
            joined[number].step(loss)
            done += 1
        for loop, worker in zip(loops, joined, strict=True):
            assert next(loop, None) is None
            worker.leave()

    run_workers(job, take_turns)
    assert_same_bits(job.snapshot()[1], expected)
    assert len({c.worker for commit in job.log() for c in commit.plan.contributions}) == workers


def test_the_epoch_is_that_of_the_batch_where_it_ends_within_a_unit(store: Store) -> None:
    job, model, seen = create(store, Count(), local_steps=5, optimizer=kvps.SGD(lr=1.0)), Count(), list[Any]()

    def work() -> None:
        with kvps.torch.join(job, model, inner=torch.optim.SGD(model.parameters(), lr=1.0)) as worker:
            batches = worker.batches(Numbers())
            for numbers in batches:
                seen.append((batches.epoch, batches.unit))
                model(numbers).backward()
                worker.step()

    run_workers(job, work)
    assert seen == [(batch // 6, batch // 5) for batch in range(12)]
    pushed = [c.unit for commit in job.log() for c in commit.plan.contributions]
    assert pushed == [0, 1, 2], "the last unit is shorter, and counts once"


# -- exactly once --------------------------------------------------------------------------------------------------


def test_two_workers_of_different_speeds_do_each_batch_once(store: Store) -> None:
    job = counting(store, workers=2, backup_after=0)
    slow, quick = list[Any](), list[Any]()

    def wait() -> None:
        assert eventually(lambda: len(quick) >= 3), "of a round of four the other worker does the rest"

    run_workers(job, partial(count, job, "w0", slow, wait), partial(count, job, "w1", quick))
    once(job)
    assert len(slow) + len(quick) == UNITS


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_worker_breaks_off_is_done_by_another(store: Store, fails: bool) -> None:
    """Whether it leaves, or fails, with a loader process that has read more, and comes back."""
    job = counting(store, workers=2)
    seen = list[Any]()

    def leaves_early() -> None:
        model = Count()
        with suppress(ZeroDivisionError), kvps.torch.join(job, model, "w0") as worker:
            for numbers in worker.batches(Numbers(), num_workers=int(fails)):
                model(numbers).backward()
                if fails:
                    raise ZeroDivisionError
                break
        if fails:
            count(job, "w0", seen)

    run_workers(job, leaves_early, partial(count, job, "w1", seen))
    once(job)
    assert len(seen) == UNITS


def test_a_batch_without_a_step_comes_again_but_not_for_ever(store: Store) -> None:
    job, model = counting(store), Count()

    def work() -> None:
        with kvps.torch.join(job, model) as worker:
            batches = iter(worker.batches(Numbers()))
            first, again = next(batches), next(batches)
            assert first is again
            with pytest.raises(kvps.WrongOrder, match="unit 0 came 50 times"):
                list(batches)
        count(job, "w0", [])

    run_workers(job, work)
    once(job)


def test_each_epoch_has_all_samples_in_an_order_of_its_own(store: Store) -> None:
    seen = list[Any]()
    job = counting(store)
    run_workers(job, partial(count, job, "w0", seen, batch_size=BATCH, epochs=EPOCHS))
    assert [len(numbers) for numbers in seen] == 2 * [8, 8, 8, 8, 8, 5]
    epochs = [torch.cat(seen[:6]).tolist(), torch.cat(seen[6:]).tolist()]
    assert epochs == [np.random.default_rng((0, epoch)).permutation(SAMPLES).tolist() for epoch in range(2)]


# -- loading ahead -------------------------------------------------------------------------------------------------


def test_loader_processes_load_all_but_the_first_batch_of_one_worker_ahead(store: Store) -> None:
    job, model = counting(store), Count()
    places = list[tuple[int, int]]()

    def work() -> None:
        with kvps.torch.join(job, model) as worker:
            batches = worker.batches(Numbers(), num_workers=2, collate_fn=torch.tensor)
            assert batches.unit is None
            for numbers in batches:
                assert isinstance(batches.unit, int)
                places.append((batches.epoch, batches.unit))
                model(numbers).backward()
                worker.step()
            assert (batches.loaded_ahead, batches.loaded_late) == (UNITS - 1, 1)

    run_workers(job, work)
    once(job)
    assert places == [(unit // 6, unit) for unit in range(UNITS)]


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "how", "why"),
    [
        (Endless(), {}, "iterate.shard, offset"),
        (DataLoader(Numbers()), {}, "makes the DataLoader itself"),
        (3, {}, "not int"),
        (Numbers(44), {}, "44 samples, and the job was created with samples=45"),
        (Numbers(), {"drop_last": True}, "of which drop_last leaves 40"),
        (Numbers(), {"batch_size": 9}, "batch_size is 9 here and 8 in the job"),
        (Numbers(), {"epochs": 1}, "epochs is 1 here and 2 in the job"),
        (Numbers(), {"shuffle": True}, "shuffle is not for batches"),
        (Numbers(), {"prefetch_factor": 2}, "a DataLoader, which says"),
        (Numbers(), {"nonsense": 2}, "a DataLoader, which says"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(store: Store, dataset: Any, how: dict[str, Any], why: str) -> None:
    with kvps.torch.join(counting(store), Count(), "w0") as worker:
        with pytest.raises(kvps.InvalidSetting, match=why) as raised:
            worker.batches(dataset, **how)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"samples": 0}, "create it with samples=len"),
        ({"staleness": -1}, "staleness -1 has not"),
    ],
)
def test_a_job_that_hands_out_no_batches_is_refused(store: Store, settings: dict[str, Any], why: str) -> None:
    settings |= {} if settings.get("samples", 1) else {"units_per_round": 0}
    with (
        kvps.torch.join(create(store, Count(), **settings), Count(), "w0") as worker,
        pytest.raises(kvps.InvalidSetting, match=why),
    ):
        worker.batches(Numbers())
