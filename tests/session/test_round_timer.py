"""When a round ends by the clock: a clock that the test moves, and no time that passes."""

from __future__ import annotations

import pytest

import kvps
from kvps.session import round_timer
from kvps.session.round_timer import RoundTimer


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(round_timer, "time", made)
    return made


def timed(staleness: int = 0) -> kvps.JobConfig:
    """Rounds of a second."""
    return kvps.JobConfig(local_steps="auto", round_ms=1_000, reduction="weighted", staleness=staleness)


def steps_of(timer: RoundTimer, clock: Clock, step_s: float, age_s: float = 0.0) -> int:
    """Take steps until a round is over; return how many."""
    timer.begin(lambda: age_s)
    taken = 0
    while True:
        clock.now += step_s
        taken += 1
        if timer.over():
            return taken


@pytest.mark.parametrize(
    ("step_s", "wanted"), [(0.125, 8), (0.25, 4), (1.0, 1), (0.3, 3), (0.45, 2), (0.7, 1), (5.0, 1), (0.0625, 16)]
)
def test_a_round_has_the_steps_that_end_nearest_to_its_time(clock: Clock, step_s: float, wanted: int) -> None:
    """Of 0.3 s each, three end 0.1 s early; a fourth would end 0.2 s late. At least one is taken."""
    timer = RoundTimer(timed())
    assert [steps_of(timer, clock, step_s) for _ in range(3)] == [wanted] * 3


def test_who_begins_late_ends_with_the_others(clock: Clock) -> None:
    timer = RoundTimer(timed())
    assert [steps_of(timer, clock, 0.125, age_s) for age_s in (0.0, 0.5, 0.875, 1.0, 60.0)] == [8, 4, 1, 1, 1]


@pytest.mark.parametrize("staleness", [2, -1])
def test_out_of_step_a_round_is_counted_from_its_pull(clock: Clock, staleness: int) -> None:
    """A worker of ASP pulls right after its push, a version that may be as old as a round: every second one had one
    step."""
    timer = RoundTimer(timed(staleness))
    assert [steps_of(timer, clock, 0.125, age_s) for age_s in (0.0, 0.5, 1.0, 60.0)] == [8] * 4


def test_one_long_step_is_not_taken_for_the_pace(clock: Clock) -> None:
    """An evaluation in the middle of a round ends that round, and not the next one early."""
    timer = RoundTimer(timed())
    assert steps_of(timer, clock, 0.125) == 8
    timer.begin(lambda: 0.0)
    clock.now += 30.0
    assert timer.over()
    assert steps_of(timer, clock, 0.125) == 8


def test_a_worker_that_becomes_slow_is_held_for_slow_within_five_steps(clock: Clock) -> None:
    timer = RoundTimer(timed())
    assert steps_of(timer, clock, 0.125) == 8
    assert [steps_of(timer, clock, 0.7) for _ in range(4)][-1] == 1
    assert [steps_of(timer, clock, 0.125) for _ in range(3)][-1] == 8


def test_the_time_between_rounds_is_no_part_of_a_step(clock: Clock) -> None:
    timer = RoundTimer(timed())
    for _ in range(3):
        assert steps_of(timer, clock, 0.25) == 4
        clock.now += 3.0
