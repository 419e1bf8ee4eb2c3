"""The batches of rounds: each row once an epoch, and training that can be replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from helpers.digits_job import digits_job, proved, run_workers, training
from helpers.harness import check_chain
from helpers.tasks import Good
from hypothesis import given, settings
from hypothesis import strategies as st
from kvps_cli.prove.verify import proof_of
from kvps_workers.rounds import Rounds
from kvps_workers.task import CheckedTask

import kvps
from kvps.config import JobConfig, Metadata, division_of
from kvps.store import Store


class Numbered(Good):
    """A task whose samples are their own row numbers. It divides them in its own way: in runs."""

    def __init__(self, samples: int) -> None:
        self._rows = np.arange(samples)

    def data(self, rank: int, workers: int, xp: Any) -> Any:
        return (np.array_split(self._rows, workers)[rank],)

    def gradient(self, params: Mapping[str, Any], batch: Any, xp: Any) -> Any:
        return 0.0, {"x": params["x"] - np.float32(batch[0].mean())}


def _rounds(samples: int, rank: int = 0, **said: Any) -> Rounds:
    config = JobConfig(**({"batch_size": 4, "epochs": 2} | said), metadata=Metadata(task="numbered"))
    return Rounds(CheckedTask("numbered", Numbered(samples)), config, rank, np)


def _rows(rounds: Rounds, epoch: int) -> list[list[int]]:
    """The samples of each batch of an epoch, with the rounds in their order."""
    each = rounds.total // 2
    numbers = range(each * epoch, each * (epoch + 1))
    return [rounds.samples(rounds.rows(number))[0].tolist() for number in numbers]


@settings(max_examples=20)
@given(
    samples=st.integers(6, 60),
    workers=st.integers(1, 6),
    batch_size=st.integers(1, 9),
    epoch=st.integers(0, 2),
)
def test_each_epoch_has_each_row_once(samples: int, workers: int, batch_size: int, epoch: int) -> None:
    said = {"workers": workers, "batch_size": batch_size}
    each = [_rounds(samples, rank, **said) for rank in range(workers)]
    rows = [[row for batch in _rows(rounds, epoch) for row in batch] for rounds in each]
    assert sorted(row for own in rows for row in own) == list(range(samples))
    for rounds, own in zip(each, rows, strict=True):
        assert rounds.total == division_of(len(own), JobConfig(epochs=2, **said)).units
        sizes = [len(batch) for batch in _rows(rounds, epoch)]
        assert all(size == batch_size for size in sizes[:-1])
        assert 0 < sizes[-1] <= batch_size


def test_units_are_the_pushes_of_all_data() -> None:
    config = JobConfig(batch_size=4, epochs=2)
    rounds = _rounds(50, rank=1, workers=2, units=division_of(50, config).units)
    assert rounds.total == division_of(50, config).units == 2 * 13
    for epoch in range(3):
        assert sorted(row for batch in _rows(rounds, epoch) for row in batch) == list(range(50))


def test_a_worker_without_a_sample_is_told_of() -> None:
    with pytest.raises(kvps.TaskFailed, match=r"^task 'numbered' failed: data\(2, 3\) returned no samples"):
        _rounds(2, rank=2, workers=3)
    with pytest.raises(kvps.InvalidSetting, match="needs a batch_size from 1, and its job has 0"):
        _rounds(2, batch_size=0)


def test_a_job_of_local_steps_is_none_for_a_task(store: Store) -> None:
    job = digits_job(store, local_steps=4)
    with pytest.raises(kvps.InvalidSetting, match="takes 4 local steps, and a task's worker pushes each gradient"):
        training(job, "w0")[0]()
    assert job.state().members == {}


# -- on a real server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"staleness": 1},
        {"gradient_format": "int8"},
        {"units": 45},
        {"staleness": -1, "optimizer": kvps.Adagrad()},  # Downpour SGD
    ],
)
def test_what_was_trained_is_computed_again(store: Store, said: dict[str, Any]) -> None:
    job = digits_job(store, **said)
    run_workers(job, *training(job, "w0", "w1", "w2"))
    proof = proved(job)
    assert proof.by == "recomputed"
    assert proof.contributions == 3 * 3 * 5
    check_chain(job)


def test_a_job_whose_replay_has_another_batch_size_or_seed_differs(store: Store) -> None:
    """The settings belong to the proof: whoever changes them in Redis is found out."""
    job = digits_job(store)
    run_workers(job, *training(job, "w0", "w1", "w2"))
    proved(job)
    job.access.client.call("DEL", job.access.keys.made_with)
    for field, value in (("batch_size", "48"), ("seed", "1")):
        before = job.access.client.call("HGET", job.access.keys.config, field)
        job.access.client.call("HSET", job.access.keys.config, field, value)
        assert "gives another gradient here" in proof_of(store.job("digits"))[1].differs
        job.access.client.call("HSET", job.access.keys.config, field, before)
    proved(store.job("digits"))
