"""Whether arrays are finite, and how long they are."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import hostcupy

from kvps.arrays.digest import finite, finite_square_sum

ITEMS = (1 << 18) + 3
"""One piece and a bit."""


def test_the_sum_of_squares_is_numpys() -> None:
    array = np.random.default_rng(1).standard_normal(ITEMS, np.float32)
    assert finite_square_sum(array) == pytest.approx(float(np.sum(np.square(array, dtype=np.float64))), rel=1e-5)
    assert finite_square_sum(hostcupy.asarray(array)) == pytest.approx(finite_square_sum(array), rel=1e-5)
    assert finite_square_sum(array[:0]) == finite_square_sum(hostcupy.asarray(array[:0])) == 0


@pytest.mark.parametrize("where", [0, 5, ITEMS - 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_item_that_is_not_finite_is_seen_wherever_it_is(bad: float, where: int) -> None:
    array = np.full(ITEMS, 2e19, np.float32)  # whose squares overflow in a sum, before or after the item is met
    array[where] = bad
    assert not finite(array)
    with np.errstate(over="ignore"):
        assert math.isnan(finite_square_sum(array))
        assert math.isnan(finite_square_sum(hostcupy.asarray(array)))


def test_a_sum_that_overflows_is_not_taken_for_an_item_that_is_not_finite() -> None:
    array = np.full(ITEMS, 3e38, np.float32)
    assert finite_square_sum(array) == math.inf
    assert finite(array)
    assert finite(array[:0])
