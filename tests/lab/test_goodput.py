"""kvps_bench goodput: a tiny run with every kind of fault, its arithmetic, and its options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.commands import bench_run
from kvps_bench.fleet import fleet
from kvps_bench.goodput import RULES, Setting
from kvps_bench.paced_learner import Orders, Pace
from kvps_bench.progress import Fire, Made, Progress

from kvps.store import Store

TINY = Setting(workers=4, quorum=3, grace_ms=10, local_steps=5, step_ms=4, kill_every_s=0.7, slow=3, seconds=3)


@pytest.mark.slow  # each starts many processes
@pytest.mark.parametrize("name", ["lock-step", "timed-next", "drop"])
def test_nothing_is_lost_or_counted_twice_under_fire(store: Store, name: str) -> None:
    rule = RULES[name]
    with fleet(store, TINY.pace, TINY.job(rule, TINY.workers, TINY.quorum)) as made:
        progress = made.progress(made.train(TINY.seconds, Fire(TINY.kill_every_s, seed=1)))
        end = made.end()
        assert made.kills >= 2
    assert progress.samples_per_s > 0
    assert (end.verdict.lost, end.verdict.twice, end.differs) == (0, 0, "")
    assert end.verdict.acknowledged >= len(progress.versions)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lock-step", "drop"])
def test_a_quorum_goes_on_while_a_learner_is_stopped(store: Store, name: str) -> None:
    """By counts: rounds of a quorum make 20 versions more; rounds of all stand still."""
    rule = RULES[name]
    with fleet(store, TINY.pace, TINY.job(rule, TINY.workers, TINY.quorum)) as made:
        with made.stopped(0):
            if rule.quorum:
                made.await_more(20)
            else:
                made.train(0.5)
                standing = made.train(1.0)
                assert made.made_in(standing) == 0
        made.await_more(3)  # it goes on with them, or without it
        end = made.end()
    assert (end.verdict.lost, end.verdict.twice, end.differs) == (0, 0, "")


@pytest.mark.slow
def test_both_outputs_of_a_tiny_run(home: Path) -> None:
    tiny = ["-w", "4", "--quorum", "3", "--local-steps", "5", "--step-ms", "4", "--kill-every", "0.5", "--seconds", "2"]
    done = bench_run("goodput", *tiny, "--cases", "next", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    measured = found["rows"]
    assert [(row["case"], row["state"]) for row in measured] == [("next", "undisturbed"), ("next", "under fire")]
    assert [row["kills"] > 0 for row in measured] == [False, True]
    assert all((row["lost"], row["twice"], row["replay"]) == (0, 0, "identical") for row in measured)
    assert [bar["bar"] for bar in found["bars"]] == [17, 18, 18]


def test_goodput_counts_whole_versions() -> None:
    """A version belongs to the time since the one before it, so the edges of a window cost nothing."""
    progress = Progress([Made(1000, 50), Made(2000, 100), Made(3000, 100), Made(5000, 40), Made(6000, 7)])
    window = progress.within(1500, 4500)
    assert [version.at_ms for version in window.versions] == [1000, 2000, 3000, 5000]
    assert window.intervals() == [1.0, 1.0, 2.0]
    assert (window.samples_per_s, window.versions_per_s) == (240 / 4, 3 / 4)


def test_one_learner_is_slow_at_a_time() -> None:
    pace = Pace(step_ms=10, slow=5, slow_every_s=2)
    assert [pace.step_s(rank, 3, -1) for rank in range(3)] == [0.01, 0.01, 0.01]
    slow = [[rank for rank in range(3) if pace.step_s(rank, 3, at) > 0.01] for at in (0.0, 1.9, 2.0, 4.1, 6.5)]
    assert slow == [[0], [0], [1], [2], [0]]
    assert pace.step_s(0, 3, 0.0) == pytest.approx(0.05)


def test_orders_reach_a_learner_that_starts_later(tmp_path: Path) -> None:
    Orders(tmp_path).be_slow()
    assert 0 <= Orders(tmp_path).slow_for_s() < 60
    assert not Orders(tmp_path).stopped
    Orders(tmp_path).stop()
    assert Orders(tmp_path).stopped


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--quorum", "9", "--quorum must be from 2 to --workers 8, not 9"),
        ("--local-steps", "1", "--local-steps must be from 2 to 10000"),
        ("--step-ms", "nan", "--step-ms must be from 1 to 10000, not nan"),
        ("--slow", "0.5", "--slow must be from 1 to 1000, not 0.5"),
        ("--grace", "-1", "--grace must be from 0 to 60, not -1"),
        ("--kill-every", "0", "--kill-every must be from 0.05 to 3600 seconds, not 0"),
        ("--cases", "asp", "--cases must be of lock-step, next"),
        ("--workers", "65", "--workers must be from 1 to 64, not 65"),
    ],
)
@pytest.mark.slow
def test_a_wrong_option_is_told_in_one_line(option: str, value: str, words: str) -> None:
    done = bench_run("goodput", option, value)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr
