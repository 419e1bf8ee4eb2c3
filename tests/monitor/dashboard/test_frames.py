"""What viewers are sent: changes that make the same of an older look as the whole newer one, in few bytes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
from helpers.harness import aggregating, gradient, model
from helpers.waiting import eventually
from kvps_monitor.dashboard.frames import Look, Trouble, as_json, frame
from kvps_monitor.dashboard.history import MOST, History, Series
from kvps_monitor.live import JobWatch
from kvps_monitor.spans import Iteration, VersionFigures, versions_of
from kvps_monitor.views import event_json

from kvps.history.evaluations import Evaluation
from kvps.history.events import Event
from kvps.job import Job
from kvps.store import Store


def looks_at(job: Job, count: int, between: Any) -> list[Look]:
    """Return so many looks at a job; `between` is called before each but the first."""
    watch, history, found = JobWatch(job), History(), []
    for number in range(1, count + 1):
        if number > 1:
            between(number)
        view = watch.look()
        history.add(number, watch.made(), list(watch.kept()[0].values()))
        found.append(Look(number, 1, view, history.snapshot(), *watch.kept()))
    return found


def read(text: bytes) -> dict[str, Any]:
    assert text.startswith(b"data: ")
    assert text.endswith(b"\n\n")
    assert text.count(b"\n") == 2, "a line break would end the event"
    found: dict[str, Any] = json.loads(text[6:])
    return found


def state_after(*frames: bytes) -> dict[str, Any]:
    """Return what a page makes of frames, as stream.js does."""
    page: dict[str, Any] = {"job": {}, "workers": [], "events": [], "series": {}, "shards": []}
    for each in map(read, frames):
        page["job"] |= each["job"]
        page["workers"] = [list(row) for row in each.get("workers", page["workers"])]
        for place, *changes in each.get("changes", ()):
            for field, value in zip(changes[::2], changes[1::2], strict=True):
                page["workers"][place][field] = value
        page["shards"] = each.get("shards", page["shards"])
        page["events"] += each["events"]
        for name, part in each["series"].items():
            known = {} if part.get("all") else page["series"].get(name, {})
            page["series"][name] = known | {x: values for x, *values in part["points"]}
    return page


def test_changes_since_any_look_make_the_newest(store: Store) -> None:
    job = store.create_job("j", model(), workers=3, staleness=-1, shards=2)
    sessions: dict[str, Any] = {}

    def between(number: int) -> None:
        if number == 2:
            sessions.update({name: job.join(name) for name in ("w0", "w1", "w2")})
        for session in sessions.values():
            session.push(gradient(session.pull(), session.rank, number), loss=1 / number)
        if number == 4:
            job.report(0, {"loss": 0.5, "far": math.inf})
        if number == 6:
            sessions.pop("w1").leave()

    with aggregating(job):
        looks = looks_at(job, 8, between)
        for session in sessions.values():
            session.leave()
    for last in range(1, len(looks)):
        whole = state_after(frame(None, looks[last]))
        for first in range(last):
            page = state_after(frame(None, looks[first]), frame(looks[first], looks[last]))
            for part in ("job", "workers", "shards", "series"):
                assert page[part] == whole[part], (first, last, part)
            assert page["events"][-len(whole["events"]) :] == whole["events"]
        if last >= 3:
            assert whole["job"]["evaluation_text"].startswith("evaluation of version 0: loss 0.5, far inf, by ")
        one = read(frame(looks[0], looks[last], worker="w0"))
        assert [row[0] for row in one["workers"]] == ["w0"]


def test_a_look_at_a_job_that_began_anew_is_sent_whole(store: Store) -> None:
    job = store.create_job("j", model())
    one, two = looks_at(job, 2, lambda number: None)
    again = Look(3, 3, two.view, two.series, two.iterations, two.versions)
    assert "full" not in read(frame(one, two))
    assert read(frame(two, again))["full"]


def test_a_quiet_job_costs_few_bytes_whatever_its_workers(store: Store) -> None:
    job = store.create_job("j", {"x": np.zeros(8, np.float32)}, workers=300, worker_timeout_ms=3_600_000)
    for number in range(300):
        job.access.scripts.join(f"w{number}", "n", "", {"host": "h", "pid": number, "device": "cpu"})
    _, two = looks_at(job, 2, lambda number: None)
    assert len(frame(None, two)) < 300 * 250
    # Not while they become silent, one after another: they joined once, and give no sign of life.
    assert eventually(lambda: len(frame(*looks_at(job, 2, lambda number: None))) < 1000)
    assert len(frame(None, two, "w7")) < 5000


def test_numbers_that_json_has_not_are_null() -> None:
    assert as_json({"a": float("nan"), "b": [1.5, float("inf")], "c": (2,)}) == b'{"a":null,"b":[1.5,null],"c":[2]}'
    assert read(frame(None, Trouble(3, "gone", "a\nb"))) == {"n": 3, "trouble": "gone", "message": "a\nb"}


def test_an_event_of_many_contributions_is_short() -> None:
    contributions = [{"worker": f"w{n}"} for n in range(1000)]
    event = Event(5, "commit", {"version": 1, "contributions": contributions, "rejected": []})
    short = event_json(event, lambda each: each[:6])
    assert short["contributions"] == contributions[:6]
    assert (short["contributions_in_all"], short["rejected_in_all"]) == (1000, 0)


def test_a_series_has_a_bounded_number_of_points_and_keeps_its_ends() -> None:
    series = Series()
    for x in range(5 * MOST):
        series.put(x, x, (float(x),))
    points = series.points()
    assert len(points) <= MOST
    assert (points[0].x, points[-1].x) == (0, 5 * MOST - 1)
    assert [p.x for p in points] == sorted(p.x for p in points)
    assert series.rewritten > 0


def look_after(store: Store, *losses: tuple[str, float]) -> Look:
    """A look at a job behind rounds of these workers with these losses."""
    job = store.create_job("j", model(), workers=2, staleness=-1)
    with aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
        # A trace goes with the next push.
        for worker, loss in (*losses, ("w0", None), ("w1", None)):
            session = {"w0": w0, "w1": w1}[worker]
            session.push(gradient(session.pull(), session.rank, 0), loss=loss)
        assert eventually(lambda: sum(job.state().clock.values()) == len(losses) + 2)
        [look] = looks_at(job, 1, lambda number: None)
    return look


def test_every_chart_is_of_the_whole_run_by_version(store: Store) -> None:
    """The traces keep the last thousand versions; the job itself has every fourth one of 2,500."""
    job = store.create_job("j", model(), shards=2)
    entries = [
        f"version {n} at {1_000_000 * n} contributions 2 received 10 stored 20 square_sum {n * n / 2} "
        f"progress {2 * n - 2} late 3 latest 2 lr 0.5"
        for n in range(1, 2501)
    ]
    for shard in range(2):
        job.access.scripts.trace(shard, entries)
    job.report(0, {"loss": 0.5})
    found = versions_of(job)
    assert [v.version for v in found] == list(range(4, 2501, 4))
    assert found[1] == VersionFigures(8, 8e6, 2, 14, 3, 2, 0.5, 20.0, 40.0, 8.0)
    history = History()
    history.add(1, found, evaluations=[Evaluation(4, {"loss": 0.25, "far": math.inf}, "me", 1)])
    series = {name: {p.x: p.values for p in of.points} for name, of in history.snapshot().items()}
    assert series["norm"][2500] == (2500.0,)
    assert series["lr"][8] == (0.5,)
    assert series["staleness"][8] == (1.5, 2.0)
    assert series["rate"][12] == (1.0, 2.0), "a version a second, of two contributions"
    assert series["traffic"][12] == (20.0, 40.0)
    assert series["made"][12] == (8000, 24)
    assert (series["eval.loss"], series["eval.far"]) == ({4: (0.25,)}, {4: (None,)})
    history.add(2, found)
    assert all(of.rewritten < 2 for of in history.snapshot().values()), "what was added is left out"


def test_a_job_behind_a_checkpoint_has_each_of_its_first_versions(store: Store) -> None:
    made = replace(store.create_job("before", model()).checkpoint(), version=5_000)
    job = store.restore_job(made, "behind")
    entries = [
        f"version {n} at 1 contributions 1 received 1 stored 1 square_sum 1 progress 1" for n in range(5_001, 5_901)
    ]
    job.access.scripts.trace(0, entries)
    assert [v.version for v in versions_of(job)] == list(range(5_001, 5_901))


def test_a_worker_that_has_gone_leaves_no_gap_in_the_losses() -> None:
    """Of the others, only the newest iterations are there any more."""

    def trace(worker: str, versions: range) -> list[Iteration]:
        return [Iteration.of(worker, (f"{v}-0", {"round": f"{v}", "version": f"{v}", "loss": "5"})) for v in versions]

    history = History()
    iterations = [trace("gone", range(20, 30)), trace("w0", range(900, 950))]
    history.add(1, [], iterations, losses=[(v, 1.0, 0.5, 2.0) for v in range(1, 951)])
    shown = {p.x: p.values[0] for p in history.snapshot()["loss"].points}
    assert shown == dict.fromkeys(range(1, 901), 1.0) | dict.fromkeys(range(901, 951), 5.0)


def test_losses_are_those_of_all_workers_by_the_version_that_they_lead_to(store: Store) -> None:
    look = look_after(store, ("w0", 1.0), ("w0", 0.5), ("w1", 3.0), ("w1", float("nan")))
    last = look.series["loss"].points[-1]
    assert last.values == (0.5, 0.5, 0.5), "a loss that is no number is not counted"
    assert 1 <= last.x <= look.view.version
    norms = {p.x: p.values for p in look.series["norm"].points}
    assert norms == {version: (norm,) for version, norm in look.view.gradient_norms}
