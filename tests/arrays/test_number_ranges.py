"""Sets of parameters and counts of them as text."""

from __future__ import annotations

import json

import pytest

import kvps
from kvps.arrays.number_ranges import counts_as_text, counts_in, in_all, numbers_in, ranges_of
from kvps.parsing import Fields


@pytest.mark.parametrize("text", ["0", "0-3,7", "5,7-9,20", "0-1048575"])
def test_a_set_comes_back(text: str) -> None:
    assert ranges_of(numbers_in(text)) == text


@pytest.mark.parametrize("text", ["1,1", "3-2", "2,1", "1-3,3", "0-1048576", "9999999"])
def test_lists_that_do_not_ascend_or_are_too_long_are_refused(text: str) -> None:
    with pytest.raises(kvps.CorruptData, match="is no list of ascending numbers"):
        numbers_in(text)


def test_what_is_in_all_sets() -> None:
    assert in_all(("0-4", "2-9", "3,8")) == {3}


def test_a_set_of_too_many_runs_is_refused_in_one_line() -> None:
    with pytest.raises(kvps.LayoutMismatch, match="are in 20,000 runs, and a contribution names fewer: give zeros"):
        ranges_of(range(0, 40_000, 2))


def test_counts_come_back_and_others_are_refused() -> None:
    counts = {0: 3, 1: 3, 2: 1, 9: 3}
    stored = counts_as_text(counts)
    assert stored == {"0-1,9": 3, "2": 1}
    assert counts_in(Fields.of_json(json.dumps(stored), "it"), 3, 10) == counts
    for wrong in ({"0-1,9": 4}, {"10": 1}, {"x": 1}, {"0": 0}, {"2-1": 1}):
        with pytest.raises(kvps.CorruptData):
            counts_in(Fields.of_json(json.dumps(wrong), "it"), 3, 10)
