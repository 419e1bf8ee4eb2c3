"""The examples of actors and a learner, in small settings, and what became of each item that their actors have put."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from helpers.paths import ROOT

from kvps.job import Job
from kvps.store import Store

pytestmark = pytest.mark.slow  # each starts several processes, which import large libraries


def run(store: Store, example: str, *arguments: str) -> str:
    """Run an example on a server that stays, as a job of its name, and return what it printed."""
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py"), f"--job={example}", *arguments]
    done = subprocess.run(command, env=os.environ | {"KVPS_REDIS_URL": store.url}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fates(job: Job) -> Counter[str]:
    """Return how many items had which fate. Each has one, and none was trained on that was too old."""
    each = job.rollouts.fates()
    assert len({fate.id for fate in each}) == len(each)
    trained = [item for commit in job.log() for item in commit.plan.trained]
    assert sorted(item.id for item in trained) == sorted(fate.id for fate in each if fate.fate == "trained")
    late = [commit.version - 1 - item.base for commit in job.log() for item in commit.plan.trained]
    assert max(late) <= job.rollouts.settings.max_staleness
    return Counter(fate.fate for fate in each)


@pytest.mark.parametrize("how", [[], ["--kills"]])
def test_cartpole_is_learned(store: Store, how: list[str]) -> None:
    """To 170 or so; by chance a pole falls after 22 steps."""
    printed = run(store, "cartpole", "--versions=30", *how)
    assert float(re.findall(r"mean return ([\d.]+)", printed)[-1]) > 100, printed
    job = store.job("cartpole")
    state = job.state()
    assert (state.version, state.finished(job.config)) == (30, True)
    assert fates(job)["trained"] == 30 * 8


def test_a_language_model_is_rewarded_more_after_three_groups_of_each_prompt(store: Store) -> None:
    printed = run(store, "small_lm", "--epochs=3")
    before, after = (float(text) for text in re.findall(r"GRPO: mean reward ([\d.]+)", printed))
    assert before + 0.03 < after, printed
    job = store.job("small_lm")
    assert job.rollouts.now().closed == 300
    had = fates(job)
    assert had["trained"] + had["rejected"] == 2400, had


@pytest.mark.parametrize(("example", "lines"), [("cartpole", 12), ("small_lm", 10)])
def test_the_lines_of_an_example_that_are_kvpss(example: str, lines: int) -> None:
    code = (ROOT / "examples" / f"{example}.py").read_text().partition('"""\n\n')[2]
    own = re.findall(r"^.*(?:\bkvps\.|\bkvps$|\bpolicy\.(?!\d)).*$", code, re.MULTILINE)
    assert len(own) == lines, own
