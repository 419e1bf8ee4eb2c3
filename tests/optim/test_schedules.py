"""Schedules: what they return, that Redis keeps every bit, and what is refused."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvps
from kvps.config import JobConfig
from kvps.optim import schedules
from kvps.optim.schedules import (
    CosineAnnealingLR,
    ExponentialLR,
    InverseSquareRootLR,
    InverseTimeLR,
    LinearLR,
    PolynomialLR,
    Schedule,
    SequentialLR,
    StepLR,
    TableLR,
)

WARM_UP = SequentialLR([LinearLR(0.0, 0.5, over=10), CosineAnnealingLR(0.5, over=20)], milestones=[10])


def test_each_schedule_begins_at_its_milestone() -> None:
    for progress, rate in {0: 0.0, 5: 0.25, 9.5: 0.475, 10: 0.5, 20: 0.25, 30: 0.0, 99: 0.0}.items():
        assert WARM_UP.at(progress) == pytest.approx(rate)
    steps = SequentialLR([StepLR(1.0, 1), StepLR(2.0, 1), StepLR(3.0, 1)], [3, 4.5])
    assert [steps.at(p) for p in (3, 4.49, 4.5, 5.5)] == pytest.approx([2.0, 0.2, 3.0, 0.3])


def test_a_table_holds_its_last_value() -> None:
    assert [TableLR([3, 2, 1]).at(p) for p in (0, 0.9, 1, 2, 3, 1e300)] == [3, 3, 2, 1, 1, 1]
    assert [TableLR([3, 2, 1], every=5).at(p) for p in (4.9, 5, 10, 15)] == [3, 2, 1, 1]
    assert TableLR([3, 1], every=1e-300).at(1e300) == 1


@settings(max_examples=50)
@given(st.lists(st.floats(-0.0, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_redis_keeps_every_bit_of_a_table(values: list[float]) -> None:
    config = JobConfig(optimizer=kvps.SGD(lr=TableLR(values, every=3)))
    read = JobConfig.from_hash(config.to_hash()).optimizer.lr
    assert isinstance(read, TableLR)
    assert list(map(str, read.values)) == list(map(str, values)), "also the sign of a zero"
    assert read.every == 3


def test_schedules_of_others_survive_redis() -> None:
    for schedule in (WARM_UP, SequentialLR([TableLR([1, 2]), StepLR(1.0, 5)], [2])):
        config = JobConfig(optimizer=kvps.Adam(groups=(kvps.ParameterGroup("b", lr=schedule),)))
        assert JobConfig.from_hash(config.to_hash()) == config


def test_a_long_table_is_compact_and_shown_in_one_short_line() -> None:
    cosine = CosineAnnealingLR(0.1, over=100_000)
    table = TableLR([cosine.at(step) for step in range(100_000)])
    assert len(json.dumps(table.to_json())) < 1.1e6
    assert str(table) == f"table(steps=100000, first=0.1, last={cosine.at(99_999)})"
    assert len(repr(table)) < 100
    assert str(WARM_UP) == (
        "sequential(linear(initial=0.0, final=0.5, over=10), cosine(initial=0.5, over=20), milestones=[10])"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TableLR([]), "there must be 1 to 262144 values, not 0"),
        (lambda: TableLR([0.1] * (schedules.MOST_STEPS + 1)), "there must be 1 to 262144 values, not 262145"),
        (lambda: TableLR([0.1, float("nan")]), "values must be finite numbers"),
        (lambda: TableLR([0.1, -1e-9]), "values must not be negative, one is -1e-09"),
        (lambda: TableLR("123"), "values must be a list of numbers"),
        (lambda: TableLR([1], every=0), "every must be above 0"),
        (lambda: CosineAnnealingLR(0.1, over=0), "cosine: over must be above 0, it is 0"),
        (lambda: PolynomialLR(0.1, over="3"), "over must be a finite number"),
        (lambda: PolynomialLR(0.1, over=1, power=0), "power must be above 0"),
        (lambda: StepLR(-1, every=3), "initial must not be negative, it is -1"),
        (lambda: LinearLR(0.1, final=-1, over=4), "linear: final must not be negative, it is -1"),
        (lambda: StepLR(0.1, every=1, factor=-1), "step: factor must be 0 or more"),
        (lambda: SequentialLR([], []), "there must be 1 to 64 schedules, not 0"),
        (lambda: SequentialLR(WARM_UP, []), "schedules must be a list of schedules"),
        (lambda: SequentialLR([WARM_UP], []), "each of schedules must be one of kvps.schedules, and no SequentialLR"),
        (lambda: SequentialLR([StepLR(1, 1)], [5]), "there must be a milestone between any two schedules"),
        (lambda: SequentialLR([StepLR(1, 1)] * 3, [5, 5]), "each above the one before"),
        (lambda: SequentialLR([StepLR(1, 1)] * 2, [0]), "milestones must be numbers above 0"),
        (lambda: SequentialLR([StepLR(1, 1)] * 2, 3), "milestones must be a list of numbers"),
    ],
)
def test_schedules_that_are_refused(make: Any, words: str) -> None:
    with pytest.raises(kvps.InvalidSetting) as caught:
        make()
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    "change",
    [
        {"values": packed(b"\0" * 17)},
        {"values": packed(b"\0" * (1 << 24))},
        {"values": packed(b"\xff" * 16)},
        {"values": packed(b"\0" * 16)[:-4]},
        {"values": "é"},
        {"values": base64.b64encode(b"no zlib").decode()},
        {"values": [0.1, 0.2]},
        {"steps": 0},
        {"steps": 2**60},
        {"steps": True},
        {"every": "1"},
        {"every": -1},
        {"more": 1},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_damaged_table_is_refused_in_one_line(change: dict[str, Any]) -> None:
    """A text that would unpack to far more than it says is unpacked no further."""
    honest = TableLR([0.1, 0.2]).to_json()
    assert schedules.from_json(honest) == TableLR([0.1, 0.2])
    with pytest.raises(kvps.InvalidSetting, match=r"^table") as caught:
        schedules.from_json(honest | change)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("change", [{"schedules": 3}, {"schedules": [3]}, {"milestones": None}, {"schedules": [{}]}])
def test_damaged_schedules_of_others_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(kvps.InvalidSetting):
        schedules.from_json(WARM_UP.to_json() | change)


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        (StepLR(1.0, every=10, factor=0.5), {0: 1.0, 9.9: 1.0, 10: 0.5, 25: 0.25}),
        (ExponentialLR(1.0, every=10, factor=0.25), {0: 1.0, 5: 0.5, 10: 0.25}),
        (LinearLR(0.0, 1.0, over=10), {0: 0.0, 5: 0.5, 10: 1.0, 99: 1.0}),
        (CosineAnnealingLR(1.0, over=10, final=0.5), {0: 1.0, 5: 0.75, 10: 0.5, 99: 0.5}),
        (PolynomialLR(1.0, over=10), {0: 1.0, 5: 0.5, 10: 0.0, 99: 0.0}),
        (PolynomialLR(1.0, over=10, power=2.0, final=0.5), {0: 1.0, 5: 0.625, 10: 0.5, 99: 0.5}),
        (InverseSquareRootLR(1.0, over=10), {0: 1.0, 30: 0.5, 80: 1 / 3}),
        (InverseTimeLR(1.0, over=10), {0: 1.0, 10: 0.5, 30: 0.25}),
    ],
    ids=str,
)
def test_a_formula_at_known_points(schedule: Schedule, points: dict[float, float]) -> None:
    for progress, rate in points.items():
        assert schedule.at(progress) == pytest.approx(rate)
