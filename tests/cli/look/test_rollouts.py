"""`kvps rollouts`, and what other commands say of experience: it is what Redis has, and none is shown where none is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from helpers.experience import experienced, weights
from helpers.harness import model

from kvps.errors import CorruptData, InvalidSetting, UsageError
from kvps.store import Store

Said = Callable[..., str]


@pytest.fixture
def said(store: Store, printed: Said) -> Said:
    """A function that runs a command on the server, and returns what it says."""
    return lambda *words: printed(*words, KVPS_REDIS_URL=store.url).strip()


def test_it_shows_what_is_there_who_sends_it_and_each_fate(store: Store, said: Said) -> None:
    with experienced(store) as (policy, quick, _):
        first, fates, prompts, title, bar, *actors = said("rollouts").splitlines()
        assert re.fullmatch(
            r"job  1 waiting, 2 taken, 0 on their way: 3 of 32 items, [1-9][0-9.]* k?B of 1\.1 GB", first
        )
        assert fates == "2 trained, 2 stale, 2 rejected"
        assert prompts == "prompts: 5 of 5 handed out, 3 done"
        assert title.endswith("(at most 1)")
        assert bar.split() == ["0", "3", "█" * 40]
        assert [row.split()[0] for row in actors] == ["actor", "quick", "slow"]
        assert [row.split()[1] for row in actors[1:]] == ["7", "2"]
        assert [row.split()[3:5] for row in actors[1:]] == [["3", "4"], ["0", "-"]]
        found = json.loads(said("rollouts", "job", "--json"))
        assert (found["waiting"], found["taken"], found["closed"], found["staleness"]) == (1, 2, 3, {"0": 3})
        by_name = {each["name"]: each for each in found["actors"]}
        assert by_name["quick"]["items_per_s"] == pytest.approx(2 * by_name["slow"]["items_per_s"])
        ids = [item.id for item in policy.rollouts.take(groups=1, wait=0)]
        assert ids == [], "one is missing"
        lines = said("rollouts", "job", "--fates").splitlines()
        assert [line.split("  ")[1:] for line in lines] == [
            *[["trained", "in version 1", "prompt 0"]] * 2,
            *[["rejected", "after version 1", "prompt 1", "no advantage"]] * 2,
            *[["stale", "after version 3", "prompt 2", "drop"]] * 2,
            *[["taken", "prompt 3"]] * 2,
            ["waiting", "prompt 4"],
        ]
        fate = json.loads(said("rollouts", "job", "--fates", "--json").splitlines()[0])
        assert (fate["fate"], fate["version"], fate["unit"]) == ("trained", 1, 0)
        assert fate["id"] in lines[0]
        quick.rollouts.put({"reward": 1.0}, version=0)
        bars = [line.split()[:2] for line in said("rollouts").splitlines()[4:8]]
        assert bars == [["0", "3"], ["1", "0"], ["2", "0"], ["3", "1"]]


def test_a_histogram_has_few_bars_whatever_the_server_says(store: Store, said: Said) -> None:
    with experienced(store) as (policy, *_):
        policy.job.access.client.call("HSET", policy.job.access.keys.items, "a.1-x:1", f"{2**52} 1 1 x 0")
        lines = said("rollouts").splitlines()
        bars = [line for line in lines if " to " in line]
        assert len(bars) <= 13
        assert sum(int(bar.split()[3]) for bar in bars) == 4
        policy.job.access.client.call("ZADD", policy.job.access.keys.actor_beats, "-inf", "slow")
        with pytest.raises(CorruptData, match="a sign of life"):
            said("rollouts")


def test_other_commands_have_a_line_of_it(store: Store, said: Said) -> None:
    there = "1 waiting, 2 taken, 4 dropped, 2 actors"
    with experienced(store):
        assert f"rollouts {there}" in said("status", "job").splitlines()
        assert f"rollouts {there}" in said("top", "job", "--once").splitlines()
        assert f"  {there}  " in said("jobs").splitlines()[1]
        [listed] = json.loads(said("jobs", "--json"))
        assert listed["rollouts"] == {"waiting": 1, "taken": 2, "dropped": 4, "actors": 2}
        assert json.loads(said("top", "job", "--json"))["rollouts"]["actors"][0]["name"] == "quick"
        told = [line.split("  ", 2)[1:] for line in said("log", "job").splitlines()]
        words = {kind.strip(): text.strip() for kind, text in told}
        assert words["rejected"] == "2 items after version 1: no advantage"
        assert words["stale"] == "2 items, too old after version 3"
        assert any(text.endswith(", loss 0.5, trained on 2 items") for _, text in told)
        events = [json.loads(line) for line in said("log", "job", "--json").splitlines()]
        assert [each["trained"] for each in events if each["event"] == "commit" and "trained" in each] == [2]


def test_a_job_to_which_nobody_sends_has_no_line_and_one_of_workers_takes_none(store: Store, said: Said) -> None:
    with store.publisher("job", weights(0)) as policy:
        policy.publish(weights(1))
        assert "rollouts" not in said("status", "job") + said("top", "job", "--once") + said("jobs")
        assert said("rollouts", "job").splitlines()[1:] == ["0 trained, 0 stale, 0 rejected", "no actor is there"]
    store.create_job("trained", model())
    with pytest.raises(UsageError, match="job 'trained' takes no experience"):
        said("rollouts", "trained")
    with pytest.raises(InvalidSetting, match="--checkpoints is for --fates"):
        said("rollouts", "job", "--checkpoints", ".")
