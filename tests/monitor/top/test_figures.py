"""Numbers as short text: each is as long as its column, and none is wrong by a unit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvps_monitor.top.figures import curve, duration, loss, per_second, share, size, stacked


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (size(0), "0 B"),
        (size(999.6), "1.00 kB"),
        (size(1_234_567), "1.23 MB"),
        (size(99_960_000_000), "100 GB"),
        (duration(0.0), "0 us"),
        (duration(164e-6), "0.2 ms"),
        (duration(0.9996), "1.0 s"),
        (duration(99.6), "2 min"),
        (duration(1e6), "11 days"),
        (duration(None), "-"),
        (per_second(12.34), "12.3"),
        (share(0.125), "12%"),
        (loss(1e-9), "1.0e-09"),
        (loss(-12345.0), "-1.2e+04"),
        (loss(None), "-"),
    ],
)
def test_a_number_has_the_unit_that_suits_it(shown: str, wanted: str) -> None:
    assert shown == wanted


@given(st.floats(0, 1e17), st.floats(0, 1e8), st.floats(allow_nan=False, allow_infinity=False))
def test_what_is_shown_fits_its_column(count: float, seconds: float, value: float) -> None:
    assert len(size(count)) <= 7
    assert len(duration(seconds)) <= (6 if seconds < 99 * 60 else 11)
    assert len(loss(value)) <= 9


def test_a_curve_goes_from_its_least_to_its_greatest() -> None:
    assert curve([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert curve([4, 2, 0], 8) == "█▅▁"
    assert curve([1, 1], 8) == "▅▅"
    assert curve([], 8) == ""
    assert curve([0, 0, 10, 0, 10, 10], 3) == "▁▅█", "a block is the mean of its values"
    assert curve([0, None, 7], 3) == "▁·█", "a gap where a loss is no number"
    assert curve([None, None], 3) == "··"


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)), max_size=60), st.integers(1, 30)
)
def test_any_losses_have_a_curve_of_as_many_blocks_as_fit(values: list[float | None], width: int) -> None:
    drawn = curve(values, width)
    assert len(drawn) == min(width, len(values))
    assert set(drawn) <= set("▁▂▃▄▅▆▇█·")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), st.floats(0, 2), st.integers(1, 40))
def test_the_parts_of_a_bar_are_as_long_as_their_sum(parts: list[float], more: float, width: int) -> None:
    total = sum(parts) * (1 + more)
    drawn = stacked([(str(n), part) for n, part in enumerate(parts)], total, width)
    wanted = round(width * sum(parts) / total) if total else 0
    assert sum(length for _, length in drawn) == min(width, wanted)
    for (_, length), part in zip(drawn, parts, strict=True):
        assert length >= 0
        assert not total or math.isclose(length, width * part / total, abs_tol=1.01)
