"""The numbers that say what an array holds, against NumPy's own on the whole array in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.harness import any_floats

from kvps.arrays.layout import CHUNK_ITEMS
from kvps.arrays.summary import distance, histogram, summary

SHAPES = [(), (1,), (7,), (3, 5), (CHUNK_ITEMS,), (3, CHUNK_ITEMS // 2 + 1)]


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_summary_is_that_of_the_whole_array(shape: tuple[int, ...]) -> None:
    array = normal(shape)
    array[array > 0.9] = 0
    exact, found = array.astype(np.float64), summary(array)
    assert found.norm == pytest.approx(np.linalg.norm(exact.reshape(-1)), rel=1e-12)
    assert found.mean == pytest.approx(exact.mean(), rel=1e-9, abs=1e-12)
    assert (found.least, found.greatest) == (array.min(), array.max())
    assert found.zeros == np.count_nonzero(array == 0)


def test_the_largest_floats_do_not_overflow() -> None:
    array = np.full(1000, np.finfo(np.float32).max)
    assert summary(array).norm == pytest.approx(float(array[0]) * math.sqrt(1000))
    assert distance(array, -array) == pytest.approx(2 * float(array[0]) * math.sqrt(1000))


@pytest.mark.parametrize(("value", "norm", "greatest"), [(np.nan, np.nan, np.nan), (np.inf, np.inf, np.inf)])
def test_what_is_not_finite_is_seen(value: float, norm: float, greatest: float) -> None:
    array = normal((50,))
    array[[3, 9]] = value
    found = summary(array)
    np.testing.assert_equal((found.norm, found.greatest), (norm, greatest))
    assert sum(b.items for b in histogram(array)) == 48
    array[9] = -value
    assert math.isnan(summary(array).mean)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_item_is_in_one_bin(shape: tuple[int, ...]) -> None:
    array = normal(shape, 1)
    found = histogram(array, 7)
    whole, edges = np.histogram(array.astype(np.float64), 7)
    assert [b.items for b in found] == whole.tolist()
    assert [b.low for b in found] + [found[-1].high] == edges.tolist()


def test_a_histogram_of_nothing_and_of_one_value() -> None:
    assert histogram(np.full(3, np.nan, np.float32)) == []
    assert sum(b.items for b in histogram(np.full(9, 2.5, np.float32))) == 9
    floats = any_floats(3, 10_000)
    assert sum(b.items for b in histogram(floats)) == np.isfinite(floats).sum()


def test_a_distance_is_that_of_the_arrays() -> None:
    one, other = normal((2, CHUNK_ITEMS)), normal((2, CHUNK_ITEMS), 1)
    assert distance(one, other) == pytest.approx(np.linalg.norm((one.astype(np.float64) - other).reshape(-1)))
    assert distance(one, one) == 0
