"""Sizes and times as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from kvps_simulate.units import parse_size, parse_time, seconds, size

from kvps.errors import InvalidSetting


def test_sizes_and_times_are_read() -> None:
    assert [parse_size("--size", t) for t in ("10GB", "1.5 MB", "4MiB", "7")] == [1e10, 1.5e6, 4 * 1024**2, 7]
    assert [parse_size("--bandwidth", t) for t in ("25Gb", "1", "100M")] == [25e9, 1, 1e8]
    times = [parse_time("--compute", t) for t in ("50us", "100 ms", "2s", "1.5min", "1h")]
    assert times == pytest.approx([5e-5, 0.1, 2, 90, 3600])


@pytest.mark.parametrize(
    ("parse", "option", "texts"),
    [
        (parse_size, "--size", ("10Gb", "much", "-1GB")),
        (parse_size, "--bandwidth", ("25GB",)),
        (parse_time, "--compute must be a time with a unit", ("", "10", "-1s", "5 days")),
    ],
)
def test_a_wrong_size_or_time_is_refused(parse: Any, option: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        with pytest.raises(InvalidSetting, match=option):
            parse(option.partition(" ")[0], text)


def test_values_are_shown_with_a_unit_that_suits_them() -> None:
    assert [seconds(s) for s in (0, 5e-5, 0.0123, 1.0, 90, 7200)] == [
        "0 us",
        "50 us",
        "12.3 ms",
        "1 s",
        "1.5 min",
        "2 h",
    ]
    assert [size(b) for b in (0, 1500, 4e7, 1e13)] == ["0 B", "1.5 kB", "40 MB", "10 TB"]
