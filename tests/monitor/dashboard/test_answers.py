"""What the API answers agrees with what Redis itself says, and refuses what it cannot answer in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.dashboards import Dashboard, dashboard
from helpers.harness import aggregating, gradient, model
from helpers.servers import running_server
from helpers.waiting import eventually

import kvps
from kvps.history.events import EventLog
from kvps.job import Job
from kvps.protocol.phases import SHARD_PHASES, WORKER_PHASES
from kvps.session import iteration
from kvps.store import Store


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """A job of two workers that have done six rounds and stay, on a server of its own; tests only read it."""
    with pytest.MonkeyPatch.context() as patch, running_server() as url, kvps.connect(url) as store:
        patch.setattr(iteration, "SEND_EVERY_S", 0.0)
        job = store.create_job("j", model(), workers=2, shards=2, staleness=1)
        with aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
            for number in range(6):
                for session in (w0, w1):
                    session.push(gradient(session.pull(), session.rank, number), loss=1 / (number + 1))
            assert eventually(lambda: sum(job.state().clock.values()) == 12)
            yield job


@pytest.fixture(scope="module")
def shown(job: Job) -> Iterator[Dashboard]:
    with dashboard(job.access.client.url) as found:
        yield found


def test_a_job_is_the_same_in_the_list_by_itself_and_in_its_stream(shown: Dashboard, job: Job) -> None:
    assert shown.json("/api/jobs/j")["head"] == job.state().head
    with shown.frames("/api/jobs/j/events") as frames:
        seen = next(frames)
    assert seen["job"]["version"] == job.state().version
    [listed] = shown.json("/api/jobs")
    assert (listed["job"], listed["active"], listed["version"]) == ("j", 2, seen["job"]["version"])
    assert listed["loss"] == pytest.approx(0.2)
    assert 0 <= listed["silent_s"] <= listed["age_s"]
    assert listed["commits_per_s"] >= 0


def test_all_pages_of_the_log_are_the_log(shown: Dashboard, job: Job) -> None:
    all_events = EventLog(job.access.client, job.access.keys).newest(0)
    pages, before = list[Any](), ""
    while True:
        page = shown.json(f"/api/jobs/j/log?count=3&before={before}")
        pages += page["events"]
        before = page["before"]
        if not before:
            break
    assert [{k: v for k, v in event.items() if k != "id"} for event in reversed(pages)] == [
        {"at_ms": e.at_ms, "event": e.kind, **e.facts} for e in all_events
    ]
    assert {event["event"] for event in pages} == {"create", "join", "take", "commit"}


def test_the_log_of_a_worker_is_its_own(shown: Dashboard, job: Job) -> None:
    page = shown.json("/api/jobs/j/log?worker=w1&count=200")
    assert page["before"] is None
    counted = [c for event in page["events"] for c in event.get("contributions", ())]
    assert [c["worker"] for c in counted] == ["w1"] * 6
    assert sorted(c["round"] for c in counted) == [1, 2, 3, 4, 5, 6]
    assert [event["worker"] for event in page["events"] if event["event"] == "join"] == ["w1"]
    assert shown.json("/api/jobs/j/log?worker=nobody")["events"] == []


def test_spans_are_in_lanes_and_do_not_overlap(shown: Dashboard, job: Job) -> None:
    assert eventually(
        lambda: all(job.access.client.call("XLEN", job.access.keys.shard_trace(shard)) for shard in (0, 1))
    )
    said = shown.json("/api/jobs/j/spans")
    assert [lane["lane"] for lane in said["lanes"]] == ["shard 0", "shard 1", "w0", "w1"]
    for lane in said["lanes"]:
        phases = SHARD_PHASES if lane["lane"].startswith("shard") else WORKER_PHASES
        assert lane["spans"], lane["lane"]
        last = 0.0
        for phase, start, ms, *_ in lane["spans"]:
            assert 0 <= phase < len(phases)
            assert start >= last - 0.02
            last = start + ms
    part = shown.json("/api/jobs/j/spans?first=2&count=1")
    assert ([lane["lane"] for lane in part["lanes"]], part["all"]) == (["w0"], 4)
    later = shown.json(f"/api/jobs/j/spans?after={said['at_ms'] + 60_000}")
    assert [lane["spans"] for lane in later["lanes"]] == [[], [], [], []]


def test_the_iterations_of_a_worker(shown: Dashboard, job: Job) -> None:
    said = shown.json("/api/jobs/j/workers/w0")
    assert [each["round"] for each in said["iterations"]] == [5, 4, 3, 2, 1], "the last goes with the next push"
    assert said["iterations"][0]["loss"] == pytest.approx(0.2)
    assert all(len(each["phases"]) == len(said["phases"]) == 5 for each in said["iterations"])


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/jobs/none", 404, "no job"),
        ("/api/jobs/none/log", 404, "no job"),
        ("/api/jobs/none/spans", 404, "no job"),
        ("/api/jobs/a%3Cb/spans", 404, "no job has such a name"),
        ("/api/jobs/j%0a/events", 404, "no job has such a name"),
        ("/api/jobs/j/workers/none", 404, "no worker 'none'"),
        ("/api/jobs/j/log?count=0", 400, "count must be from 1 to 200, not 0"),
        ("/api/jobs/j/log?count=1e9", 400, "count must be a number, not '1e9'"),
        ("/api/jobs/j/log?before=%2B", 400, "'+' is no id of an entry"),
        ("/api/jobs/j/log?before=1-1%20COUNT", 400, "is no id of an entry"),
        ("/api/jobs/j/spans?first=-1", 400, "first must be a number"),
        ("/api/jobs/j/spans?count=65", 400, "count from 1 to 64"),
        ("/api/jobs/j/spans?after=nan", 400, "after must be a number"),
    ],
)
def test_what_cannot_be_answered(shown: Dashboard, path: str, status: int, words: str) -> None:
    answer, body = shown.ask(path)
    assert answer.status == status, body
    assert words in json.loads(body)["error"]


@pytest.mark.slow
def test_a_job_that_cannot_be_read_is_listed_with_its_reason(store: Store, raw: Any) -> None:
    bad, good = store.create_job("bad", model()), store.create_job("good", model())
    raw.hset(bad.access.keys.config, "workers", "many")
    with dashboard(store.url) as shown:
        said = {each["job"]: each for each in shown.json("/api/jobs")}
        assert said["bad"]["state"] == "unreadable"
        assert "many" in said["bad"]["reason"]
        assert said["good"]["version"] == good.state().version
        assert shown.ask("/api/jobs/bad")[0].status == 500
        assert "many" in json.loads(shown.ask("/api/jobs/bad")[1])["error"]
