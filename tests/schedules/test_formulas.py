"""Schedules that are formulas, at a few points that are known."""

from __future__ import annotations

import pytest

import kvps
from kvps.schedules import InverseSquareRootLR, InverseTimeLR, LinearLR, PolynomialLR, Schedule, SequentialLR, StepLR


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
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


def test_the_schedule_of_the_transformer() -> None:
    """Vaswani et al., 2017, equation 3: min(step ** -0.5, step * warmup ** -1.5), up to a factor."""
    lr = SequentialLR([LinearLR(0.0, 1.0, over=40), InverseSquareRootLR(1.0, over=40)], milestones=[40])
    for step in range(1, 400):
        assert lr.at(step) == pytest.approx(40**0.5 * min(step**-0.5, step * 40**-1.5))


def test_a_learning_rate_below_zero_is_refused() -> None:
    for make in (lambda: LinearLR(-0.1, 1.0, over=4), lambda: StepLR(-1, every=3)):
        with pytest.raises(kvps.InvalidSetting, match="initial must not be negative, it is -"):
            make()
    for kind in (LinearLR, PolynomialLR):
        with pytest.raises(kvps.InvalidSetting, match=f"{kind.kind}: final must not be negative, it is -1"):
            kind(0.1, final=-1, over=4)


@pytest.mark.parametrize("kind", [PolynomialLR, InverseSquareRootLR, InverseTimeLR])
def test_a_formula_over_nothing_is_refused(kind: type[Schedule]) -> None:
    for over in (0, -1, float("nan"), "3"):
        with pytest.raises(kvps.InvalidSetting, match="over must be"):
            kind(0.1, over=over)
    with pytest.raises(kvps.InvalidSetting, match="power must be above 0"):
        PolynomialLR(0.1, over=1, power=0)
