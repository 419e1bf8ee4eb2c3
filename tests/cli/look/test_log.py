"""`kvps log`: each thing that happens to a job is a line, in its order, and nobody's text is obeyed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.commands import KVPS, Started, kvps_run, refused
from helpers.digits_job import digits_job
from helpers.harness import aggregating, await_version, gradient, model, work_on
from helpers.waiting import eventually
from kvps_aggregator.checkpoints import KeptLog

import kvps
from kvps.errors import counted
from kvps.history.events import EventLog
from kvps.job import Job
from kvps.store import Store

Lines = Callable[..., list[str]]


@pytest.fixture
def log(store: Store, printed: Callable[..., str]) -> Lines:
    """A function that returns the lines that `kvps log` prints."""
    return lambda *arguments: printed("log", *arguments, KVPS_REDIS_URL=store.url).splitlines()


def trained(store: Store, **settings: Any) -> Job:
    """Three rounds of two workers, of which w1 leaves."""
    job = store.create_job("j", model(), workers=2, **settings)
    with aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
        for round_ in range(3):
            for rank, session in enumerate((w0, w1)):
                session.push(gradient(session.pull(), rank, round_))
            await_version(job, round_ + 1)
        assert eventually(lambda: sum(job.state().clock.values()) == 6), "in SSP they make more versions"
        w1.leave()
    return job


def test_what_happened_is_a_line_each_in_its_order(store: Store, log: Lines) -> None:
    trained(store)
    lines = log("j")
    told = [line.split("  ", 2)[1:] for line in lines]
    kinds = [kind.strip() for kind, _ in told]
    assert kinds[0] == "create"
    assert sorted(kinds) == sorted(["create", "take", "release", *["join", "leave"] * 2, *["commit"] * 3])
    assert [words.strip() for kind, words in told if kind.strip() == "commit"] == [
        f"version {n}: w0 round {n}, w1 round {n}" for n in (1, 2, 3)
    ]
    assert [line.split("  ")[0] for line in lines] == sorted(line.split("  ")[0] for line in lines)


def test_a_unit_that_was_handed_out_a_second_time_is_told_in_plain_words(store: Store, log: Lines) -> None:
    job = store.create_job("j", model(), workers=2, units=2, units_per_round=2, worker_timeout_ms=60_000)
    with job.join("w0") as w0, job.join("w1") as w1:
        for session, unit in ((w0, 0), (w1, 1)):
            assert session.next_unit() == unit
            session.pull()
        for unit in (1, 0):
            w1.push(gradient(w1.pull(), 1, unit))
            if unit:
                assert w1.next_unit() == 0, "as soon as it is late"
        w0.push(gradient(w0.pull(), 0, 0))
        for session in (w0, w1):
            session.leave(finished=False)
    told = {line.split("  ")[1].strip(): line.split("  ", 2)[2].strip() for line in log("j")}
    assert re.fullmatch(r"unit 0 to w1 too: w0 has had it for \d+\.\d\d s", told["backup"])
    assert told["duplicate"] == "unit 0 of w0: another worker had pushed it before"


@pytest.mark.slow
def test_versions_that_are_not_in_redis_any_more_are_said(store: Store) -> None:
    job = store.create_job("j", model())
    with aggregating(job, log=KeptLog(2)):
        work_on(job, "w0", 9)
        assert eventually(lambda: job.state().moved >= 6)
    done = kvps_run("log", "j", KVPS_REDIS_URL=store.url)
    assert done.stderr == (
        f"versions before {job.state().moved} are not in Redis any more: the aggregator moved them to its "
        f"--checkpoints DIR, or had none and deleted them\n"
    )
    assert f"version {job.state().moved}: w0" in done.stdout


@pytest.mark.slow
def test_json_has_the_facts(store: Store, log: Lines) -> None:
    job = trained(store, staleness=1, reduction="weighted")
    with aggregating(job):
        assert eventually(lambda: all(job.access.reader.holders()))
    found = [json.loads(line) for line in log("j", "-n", "0", "--json")]
    at, commits = [one["at_ms"] for one in found], [one for one in found if one["event"] == "commit"]
    assert at == sorted(at)
    assert abs(at[-1] / 1000 - int(job.access.client.call("TIME")[0])) < 60
    assert [one["version"] for one in commits] == list(range(1, len(commits) + 1))
    counted = [c for one in commits for c in one["contributions"]]
    assert len(counted) == 6
    for one in commits:
        for c in one["contributions"]:
            assert (c["weight"], c["unit"], c["part"]) == (1, None, "")
            assert c["staleness"] == one["version"] - 1 - c["base"] >= 0
    assert [(one["shard"], one["term"]) for one in found if one["event"] == "take"] == [(0, 1), (0, 2)]
    assert {one["worker"] for one in found if one["event"] == "join"} == {"w0", "w1"}
    for last in (1, 4, len(found), 1_000):
        assert [json.loads(line) for line in log("j", "--json", "--last", str(last))] == found[-last:]


@pytest.mark.slow
def test_what_is_not_ordinary_is_said(store: Store, log: Lines) -> None:
    job = store.create_job("j", model(), workers=2, staleness=-1, reduction="weighted")
    with aggregating(job):
        slow, fast = job.join("w0"), job.join("w1")
        with fast:
            params = slow.pull()
            for version in (1, 2):  # one by one: two that arrive together would share a version
                fast.push(gradient(fast.pull(), 1, 0), weight=7)
                await_version(job, version)
            slow.push(gradient(params, 0, 0))
            await_version(job, 3)
    text = "\n".join(log("j", "-n", "0"))
    assert "w1 round 1 (weight 7)" in text
    assert "version 3: w0 round 1 (staleness 2)" in text
    slow.leave()


@pytest.mark.slow
def test_parts_and_units_are_named(store: Store, log: Lines) -> None:
    job = store.create_job("j", model(), parts={"all": "*"}, workers=1, missing="skip")
    first = next(iter(model()))
    with aggregating(job), job.join("w0") as session:
        grads = gradient(session.pull("all"), 0, 0)
        session.push({first: grads[first]}, part="all")
        await_version(job, 1)
    lacks = f"lacks {counted(len(model()) - 1, 'parameter')}"
    assert any(f"version 1: w0 round 1 (part all, {lacks})" in line for line in log("j"))
    job = digits_job(store, units=4, workers=1)
    with aggregating(job), job.join("w0") as session:
        number = session.next_unit()
        session.push({name: np.zeros_like(a) for name, a in session.pull().items()})
        await_version(job, 1)
    assert any(f"version 1: w0 unit {number}" in line for line in log(job.name))


@pytest.mark.slow
def test_it_follows_as_it_happens_and_ends_with_the_job(store: Store) -> None:
    job = store.create_job("j", model(), workers=1)
    following = Started([*KVPS, "log", "j", "--follow", "--redis", store.url])
    assert "create" in following.until("create")
    with aggregating(job), job.join("w0") as session:
        assert "w0, rank 0" in following.until("join")
        session.push(gradient(session.pull(), 0, 0))
        assert "w0 round 1" in following.until("version 1:")
    store.remove_job("j")
    assert "'j'" in following.until("kvps: error:").splitlines()[-1]
    assert following.wait() == 1


@pytest.mark.parametrize(
    ("stream", "entry", "words"),
    [
        ("commits", ("*", "kind", "\x1b[2J"), "kind must be one of"),
        (
            "commits",
            ("*", "kind", "join", "worker", "\x1b[31m", "rank", "0", "round", "0", "clock", "0"),
            "worker must",
        ),
        (
            "commits",
            ("*", "kind", "reject", "worker", "w0", "round", "x", "reason", "r"),
            "round must be a whole number",
        ),
        ("commits", ("*", "kind", "commit", "version", "1"), "commit 1 cannot be read"),
        ("commits", ("*", "other", "x"), "kind is missing"),
        ("commits", (f"{2**63}-1", "kind", "leave", "worker", "w0"), "the time of entry"),
        ("leases", ("*", "kind", "release", "holder", "me", "term", "1-x-2"), "'1-x-2', and that is none"),
    ],
)
def test_what_another_program_wrote_is_refused(store: Store, stream: str, entry: tuple[str, ...], words: str) -> None:
    job = store.create_job("j", model())
    job.access.client.call("XADD", getattr(job.access.keys, stream), *entry)
    with pytest.raises(kvps.CorruptData, match=words):
        EventLog(job.access.client, job.access.keys).newest(5)


@pytest.mark.slow
def test_what_cannot_be_shown_is_one_line(store: Store) -> None:
    job = store.create_job("j", model())
    job.access.client.call("XADD", job.access.keys.commits, "*", "kind", "\x1b[2J")
    line = refused("log", "j", code=1, KVPS_REDIS_URL=store.url)
    assert "job 'j'" in line
    assert "\x1b" not in line
    assert "no job 'nothing'" in refused("log", "nothing", code=1, KVPS_REDIS_URL=store.url)
