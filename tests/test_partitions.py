"""Static partitions, by property: what is a worker's part, for any number of samples and workers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kvps
from kvps.partitions import SCHEMES, Division, UnitBatches, unit_seed

DISJOINT = [scheme for scheme in SCHEMES if scheme != "overlap"]
SAMPLES, WORKERS = st.integers(0, 300), st.integers(1, 12)
SEEDS, EPOCHS = st.integers(0, 2**32 - 1), st.integers(0, 100)


@pytest.mark.parametrize("scheme", DISJOINT)
@given(samples=SAMPLES, workers=WORKERS, seed=SEEDS, epoch=EPOCHS)
def test_each_row_belongs_to_one_worker_and_parts_are_even(
    scheme: str, samples: int, workers: int, seed: int, epoch: int
) -> None:
    parts = [kvps.partition(samples, workers, rank, scheme=scheme, seed=seed, epoch=epoch) for rank in range(workers)]
    assert sorted(np.concatenate(parts)) == list(range(samples))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(part.dtype == np.int64 for part in parts)


@given(samples=SAMPLES, workers=WORKERS, seed=SEEDS, epoch=EPOCHS)
def test_with_overlap_each_worker_has_every_row_once(samples: int, workers: int, seed: int, epoch: int) -> None:
    for rank in range(workers):
        rows = kvps.partition(samples, workers, rank, scheme="overlap", seed=seed, epoch=epoch)
        assert sorted(rows) == list(range(samples))


def test_what_seed_epoch_and_rank_change() -> None:
    def rows(scheme: str, rank: int = 0, **said: int) -> list[int]:
        return kvps.partition(500, 4, rank, scheme=scheme, **said).tolist()

    for scheme in ("contiguous", "round-robin"):
        assert rows(scheme) == rows(scheme, seed=1) == rows(scheme, epoch=1)
    for scheme in ("random", "overlap"):
        different = [rows(scheme), rows(scheme, seed=1), rows(scheme, epoch=1), rows(scheme, epoch=2, seed=1)]
        assert len({tuple(each) for each in different}) == 4
    assert rows("overlap") != rows("overlap", rank=1)


def test_the_plain_schemes_are_slices() -> None:
    assert kvps.partition(10, 3, 1).tolist() == [1, 4, 7]
    assert [kvps.partition(10, 3, rank, scheme="contiguous").tolist() for rank in range(3)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8, 9],
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": -1}, "samples must be a whole number from 0, not -1"),
        ({"workers": 0}, "workers must be a whole number from 1, not 0"),
        ({"rank": 3}, "rank must be a whole number from 0 to 2, not 3"),
        ({"rank": -1}, "rank must be a whole number from 0 to 2, not -1"),
        ({"rank": True}, "rank must be a whole number from 0 to 2, not True"),
        ({"samples": 2.0}, "samples must be a whole number from 0, not 2.0"),
        ({"seed": -1}, "seed must be a whole number from 0, not -1"),
        ({"epoch": None}, "epoch must be a whole number from 0, not None"),
        ({"scheme": "even"}, "scheme must be one of contiguous, round-robin, random, overlap, not 'even'"),
        ({"scheme": None}, "scheme must be one of"),
    ],
)
def test_a_wrong_argument_is_one_line(changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"samples": 10, "workers": 3, "rank": 0} | changes
    with pytest.raises(kvps.InvalidSetting) as caught:
        kvps.partition(**given)
    assert words in str(caught.value)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32, np.int64, np.uint64])
def test_numpys_integers_give_the_rows_of_pythons(scheme: str, kind: type[np.integer[Any]]) -> None:
    """Their products overflow: of 60 million rows over 50 workers, some workers had none, and others rows below 0."""
    given_, plain = ({"samples": each(200), "workers": each(7), "rank": each(6)} for each in (kind, int))
    rows = kvps.partition(**given_, scheme=scheme, seed=kind(3), epoch=kind(2))
    np.testing.assert_array_equal(rows, kvps.partition(**plain, scheme=scheme, seed=3, epoch=2))


def test_too_many_samples_are_refused() -> None:
    with pytest.raises(
        kvps.InvalidSetting, match="samples must be at most 9223372036854775807, not 9223372036854775808"
    ):
        kvps.partition(2**63, 1, 0)


@settings(max_examples=30)
@given(
    samples=st.integers(1, 200),
    size=st.integers(1, 50),
    epochs=st.integers(1, 4),
    per_unit=st.integers(1, 5),
    seed=SEEDS,
    drop_last=st.booleans(),
)
def test_units_have_each_sample_of_each_epoch_once(
    samples: int, size: int, epochs: int, per_unit: int, seed: int, drop_last: bool
) -> None:
    used = samples // size * size if drop_last else samples
    division = Division(math.ceil(used / size), epochs, per_unit)
    assume(used)
    batches = UnitBatches(samples, size, division, seed)
    numbers = [number for unit in range(division.units) for number in division.of(unit)]
    assert numbers == list(range(division.batches * epochs))
    assert [unit for unit in range(division.units) for _ in division.of(unit)] == [*map(division.unit, numbers)]
    for epoch in range(epochs):
        of_epoch = [number for number in numbers if batches.epoch(number) == epoch]
        rows = np.concatenate([batches.rows(number) for number in of_epoch])
        assert len(set(rows)) == len(rows) == used
        if division.units_per_epoch:
            assert {division.unit(number) // division.units_per_epoch for number in of_epoch} == {epoch}
    seeds = [seed_of(number) for seed_of in (batches.seed, batches.loading_seed) for number in numbers]
    assert len(set(seeds)) == len(seeds)
    assert all(batches.seed(division.of(unit)[0]) == unit_seed(seed, unit) for unit in range(division.units))
