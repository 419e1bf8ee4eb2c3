"""A job that a learner publishes, as all screens see it."""

from __future__ import annotations

import asyncio
import json
from threading import Lock
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers.experience import experienced
from kvps_monitor import palette
from kvps_monitor.dashboard.answers import job_list
from kvps_monitor.dashboard.frames import Look, frame
from kvps_monitor.dashboard.watches import Watches
from kvps_monitor.graph import as_json, as_svg
from kvps_monitor.job_now import JOB_WORDS, LACKS_LEARNER, RUNS
from kvps_monitor.live import KEPT, JobWatch
from kvps_monitor.metrics.job_reader import JobReader
from kvps_monitor.top import rows

from kvps.store import Store


def weights(number: float) -> dict[str, np.ndarray]:
    return {"x": np.full(3, number, np.float32)}


def test_a_view_has_what_its_learner_said_and_nothing_of_workers(store: Store) -> None:
    with store.publisher("job", weights(0)) as policy:
        watch = JobWatch(policy.job)
        assert (watch.look().loss, watch.look().losses, watch.look().state) == (None, [], RUNS)
        for number in range(1, KEPT + 5):
            policy.publish(weights(number), loss=1 / number if number % 2 else None)
            if number % 10 == 0:
                watch.look()
        view = watch.look()
        said = [(number, 1 / number) for number in range(1, KEPT + 5) if number % 2]
        assert view.losses == said[-KEPT:]
        assert view.loss == said[-1][1]
        late = JobWatch(policy.job).look()
        assert late.losses == [(version, loss) for version, loss in said if version > 4]
        assert (view.expected_workers, view.workers, view.gradient_norms) == (0, [], [])
        assert view.optimizer == view.settings["optimizer"] == "its learner's own optimizer"
        assert view.published_by == f"published by {view.shards[0].holder}"
        assert palette.present(view.state, 0, view.expected_workers) == "-"
        line = rows.header(view, 200)[1].plain
        assert view.published_by in line
        assert "workers" not in line
    left = JobWatch(policy.job).look()
    assert (left.state, left.why, left.published_by) == ("finished", "", "no learner publishes it now")
    policy.job.resume()
    assert JobWatch(policy.job).look().state == LACKS_LEARNER in JOB_WORDS
    assert palette.tone(LACKS_LEARNER) == "warn"


def test_the_graph_has_a_learner_to_whom_no_gradients_go(store: Store) -> None:
    with store.publisher("job", weights(0), shards=2) as policy:
        policy.publish(weights(1))
        graph = as_json(policy.job, JobWatch(policy.job).look())
    assert [(a["is"], a["shards"]) for a in graph["aggregators"]] == [("learner", [0, 1])]
    drawn = as_svg(graph)
    words = {
        "".join(each.itertext()) for each in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"learner", "holds shard 0, 1"} <= words
    assert "aggregator" not in words
    assert drawn.count("url(#fetch)") == 2
    assert "url(#push)" not in drawn


@pytest.mark.slow
def test_the_dashboard_has_its_losses_by_version(store: Store) -> None:
    with store.publisher("job", weights(0)) as policy:
        for number in (1, 2):
            policy.publish(weights(number), loss=number)

        async def scene() -> None:
            watches = Watches(store)
            frames = await watches.frames("job")
            first = json.loads((await anext(frames)).decode().removeprefix("data: "))
            assert first["job"]["published_by"] == f"published by {first['shards'][0]['holder']}"
            assert first["series"]["loss"]["points"] == [[1, 1, 1, 1], [2, 2, 2, 2]]
            assert first["series"]["lr"]["points"] == []
            policy.publish(weights(3), loss=3)
            points: list[list[float]] = []
            while not points:
                frame = json.loads((await anext(frames)).decode().removeprefix("data: "))
                points = frame["series"].get("loss", {"points": []})["points"]
            assert points == [[3, 3, 3, 3]]
            await frames.aclose()
            watches.close()

        asyncio.run(asyncio.wait_for(scene(), 60))
        [line] = job_list(store)
        assert (line["state"], line["workers"], line["loss"], line["optimizer"]) == (
            RUNS,
            0,
            3.0,
            "its learner's own optimizer",
        )


def test_experience_is_in_a_view_and_in_frames_as_long_as_any_has_come(store: Store) -> None:
    with experienced(store) as (policy, quick, _):
        watch = JobWatch(policy.job)
        views = [watch.look(), watch.look()]
        assert views[1].rollouts
        assert views[1].rollouts.brief == {"waiting": 1, "taken": 2, "dropped": 4, "actors": 2}
        assert not views[1].rollouts.staleness, "no item is read for it"
        first, second = (Look(number, 1, view, {}, {}, {}) for number, view in enumerate(views, 1))
        rows = [(each["name"], each["version"], each["unit"], each["items"]) for each in first.facts["actors"]]
        assert rows == [("quick", 3, 4, 7), ("slow", 0, None, 2)]
        assert first.facts["rollouts"] == views[0].rollouts.brief
        assert "actors" not in json.loads(frame(first, second)[6:])["job"], "nothing has changed"
        quick.rollouts.put({"reward": 1.0}, version=3)
        third = json.loads(frame(second, Look(3, 1, watch.look(), {}, {}, {}))[6:])["job"]
        assert (third["rollouts"]["waiting"], third["actors"][0]["items"]) == (2, 8)
    with store.publisher("other", weights(0)) as policy:
        facts = Look(1, 1, JobWatch(policy.job).look(), {}, {}, {}).facts
        assert (facts["rollouts"], facts["actors"]) == (None, [])


def test_metrics_of_experience_never_go_back(store: Store) -> None:
    with experienced(store) as (policy, *_):
        reader = JobReader(policy.job, Lock())
        reader.read(lambda: None)
        assert reader.totals.fates == {"trained": 2, "stale": 2, "rejected": 2}
        store.client.call("HSET", policy.job.access.keys.rollouts, "trained", 1)
        reader.read(lambda: None)
        assert reader.totals.fates["trained"] == 2
        assert reader.rollouts
        assert (reader.rollouts.waiting, reader.rollouts.trained) == (1, 1)
