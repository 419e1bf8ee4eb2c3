"""The queue of tasks: each step is one step, and an order is kept. On every server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from helpers.harness import model
from helpers.lua_sources import Sources
from helpers.servers import running_server
from kvps_workers.queue.liveness import LivenessTracker
from kvps_workers.queue.queue import SCRIPTS, QueueRow, TaskQueue
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from kvps.machine import process
from kvps.store import Store

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """One server of the run's program: RQ has no clusters."""
    with running_server() as url:
        yield url


def waiting(raw: Any) -> list[str]:
    return [id.decode().partition("-")[2] for id in raw.lrange("rq:queue:kvps", 0, -1)]


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_the_header_holds_against_the_body(name: str) -> None:
    """Each has the keys, arguments, includes and answers of the other."""
    assert "  ".join(Sources("kvps_workers.queue").misfits(name)) == ""


def test_jobs_stand_in_the_order_of_their_submission_also_what_is_put_back(
    store: Store, queue: TaskQueue, raw: Any
) -> None:
    for name in ("b", "a", "c"):
        queue.submit(store.create_job(name, model(), workers=2))
    assert waiting(raw) == ["b-w0", "b-w1", "a-w0", "a-w1", "c-w0", "c-w1"]
    taken = [(queue.take(str(i)), str(i)) for i in range(5)]
    assert waiting(raw) == ["c-w1"]
    for number in (3, 1, 4, 0, 2):
        found, execution = taken[number]
        assert found
        assert queue.release(found[0], execution, "queued") == "queued"
    jobs = [id.rpartition("-")[0] for id in waiting(raw)]
    assert jobs == ["b", "b", "a", "a", "c", "c"]
    assert raw.zcard("rq:wip:kvps") == 0


def test_a_task_is_in_the_queue_or_somebodys_and_put_back_once(store: Store, queue: TaskQueue, raw: Any) -> None:
    queue.submit(store.create_job("job", model(), workers=2))
    raw.set("rq:suspended", 1)
    assert queue.take("one") is None, "rq suspend"
    raw.delete("rq:suspended")
    queue.await_task(60)  # comes back at once: something waits, and stays where it is
    assert waiting(raw) == ["job-w0", "job-w1"]
    first = queue.take("one")
    assert first
    assert queue.take("one") == first, "who asks again is answered again"
    running, _ = queue.look()[1]
    assert (running.state, running.held) == ("runs", (first[0], "one"))
    assert running.host == f"{process.host()}:{os.getpid()}"
    with ThreadPoolExecutor(8) as pool:
        became = list(pool.map(lambda _: queue.release(first[0], "one", "queued"), range(40)))
    assert sorted(became) == [""] * 39 + ["queued"]
    assert len(waiting(raw)) == 2


def test_what_only_seems_to_run_is_put_back(store: Store, queue: TaskQueue, raw: Any) -> None:
    """An execution that nobody began, noted by another program."""
    queue.submit(store.create_job("job", model(), workers=1))
    id = raw.lpop("rq:queue:kvps").decode()
    raw.zadd("rq:wip:kvps", {f"{id}:planted": 1})
    assert queue.take("one") is None
    assert queue.release(id, "planted", "queued") == "queued"
    assert queue.release(id, "planted", "finished") == ""
    found = queue.take("one")
    assert found
    assert found[1]


def test_what_others_plant_beside_a_task_is_gone_when_it_is_taken(store: Store, queue: TaskQueue, raw: Any) -> None:
    queue.submit(store.create_job("job", model(), workers=1))
    id = raw.lindex("rq:queue:kvps", 0).decode()
    raw.hset(f"rq:job:{id}", mapping={"failure_callback_name": "os.system", "meta": b"\x80", "timeout": "soon"})
    assert queue.take("one")
    assert queue.release(id, "one", "failed", "ung\N{LATIN SMALL LETTER U WITH DIAERESIS}ltig") == "failed"
    job = RqJob.fetch(id, connection=raw, serializer=JSONSerializer)
    assert (job.func_name, job.meta, job.failure_callback, job.webhooks) == ("kvps.train", {}, None, [])
    assert job.kwargs["worker"] == "w0"
    assert queue.look()[1][0].why == "ung\\xfcltig"


def test_a_task_that_is_lost_again_and_again_without_progress_fails(store: Store, queue: TaskQueue) -> None:
    queue.submit(store.create_job("job", model(), workers=1))
    became = []
    for number, version in enumerate(["3", "4", "4", "4", "", "4", "4"]):
        found = queue.take(str(number))
        assert found
        became.append(queue.release(found[0], str(number), "queued", "killed", version))
    assert became == ["queued"] * 6 + ["failed"]
    (row,) = queue.look()[1]
    assert (row.state, row.task and row.task.worker) == ("failed", "w0")
    assert "lost 5 times" in row.why


def test_cancel_takes_one_jobs_tasks_and_no_others(store: Store, queue: TaskQueue, raw: Any) -> None:
    for name in ("a", "a-w0", "a-b", "a.b", "a_b"):
        queue.submit(store.create_job(name, model(), workers=2))
    found = queue.take("one")
    assert found
    assert queue.cancel("a") == (1, 1)
    assert queue.cancel("a.b") == (2, 0)
    assert waiting(raw) == ["a-w0-w0", "a-w0-w1", "a-b-w0", "a-b-w1", "a_b-w0", "a_b-w1"]
    running = queue.look()[1][0]
    assert (running.held, running.cancelled) == ((found[0], "one"), True)
    assert queue.release(found[0], "one", "queued") == "canceled", "who is lost meanwhile is not put back"
    assert "runs" not in [row.state for row in queue.look()[1]]


def test_rqs_own_cancel_ends_a_task(store: Store, queue: TaskQueue, raw: Any) -> None:
    queue.submit(store.create_job("job", model(), workers=2))
    found = queue.take("one")
    assert found
    for id in (found[0], raw.lindex("rq:queue:kvps", 0).decode()):
        RqJob.fetch(id, connection=raw, serializer=JSONSerializer).cancel()
    (row,) = queue.look()[1]
    assert (row.held, row.cancelled) == ((found[0], "one"), True)
    assert queue.release(*row.held, "queued") == "canceled"


def test_a_host_is_there_while_it_gives_signs_of_life(queue: TaskQueue, raw: redis.Redis) -> None:
    queue.beat(busy=False)
    assert queue.hosts() == 1
    (host,) = raw.smembers("rq:workers:kvps")
    assert 0 < raw.ttl(host) <= 15
    raw.delete(host)
    assert queue.hosts() == 0
    queue.beat(busy=True)
    assert queue.hosts() == 1
    queue.depart()
    assert raw.keys("rq:*") == []


def test_who_is_silent_is_lost_but_not_because_the_looker_was_away() -> None:
    tracker, me = LivenessTracker(), process.identity()
    other = QueueRow("task", "runs", None, "one", False, {}, "beat", "")
    later = other._replace(beat="other")
    assert tracker.lost([other], 100.0) == []
    for second in range(101, 110):
        assert tracker.lost([other], float(second)) == []
    for second in range(110, 120):
        assert tracker.lost([later], float(second)) == []
    assert tracker.lost([later], 121.0) == [later]
    assert tracker.lost([other], 200.0) == [], "nobody looked since"
    assert tracker.lost([other._replace(process=me)], 201.0) == []
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = other._replace(process=me | {"pid": dead.pid})
    assert tracker.lost([gone], 201.0) == [gone], "one of this machine is known to be dead at once"


@pytest.mark.parametrize(
    "noted",
    [
        "[" * 400,
        "{}",
        '{"pid": 1e999, "host": "h", "space": "", "start": ""}',
        {"pid": float("inf")},
        {"pid": 10**100},
        {"pid": {"deep": [1]}},
        {"host": "\x1b[2J"},
        {"start": "\ud800"},
        {"space": "\n"},
    ],
)
def test_a_process_that_another_program_noted_is_unknown(
    store: Store, queue: TaskQueue, raw: Any, noted: str | dict[str, Any]
) -> None:
    queue.submit(store.create_job("job", model(), workers=1))
    found = queue.take("one")
    assert found
    text = noted if isinstance(noted, str) else json.dumps(process.identity() | noted)
    raw.hset(f"rq:job:{found[0]}", "kvps_process", text)
    (row,) = queue.look()[1]
    assert (row.process, row.host) == ({}, "?")
    LivenessTracker().lost([row])


@pytest.mark.parametrize("id", ["x" * 5000, "\x1b[2J", b"\xff\xfe", "a:b", "\u202e"])
def test_ids_that_another_program_wrote_are_cut_shown_plainly_and_dropped(
    store: Store, queue: TaskQueue, raw: Any, id: str | bytes
) -> None:
    """Also as a task that is said to run: nobody could release it under the id that is shown."""
    name = id if isinstance(id, bytes) else id.encode()
    raw.zadd("rq:wip:kvps", {name + b":one": 1, b"task:" + name: 1})
    raw.hset(b"rq:job:" + name, "data", '["kvps.train", null, [], {}]')
    raw.rpush("rq:queue:kvps", name)
    (row,) = queue.look()[1]
    assert row.state == "waits"
    assert len(row.id) <= 200
    assert row.id.isprintable()
    found = queue.take("two")
    assert found
    assert (found[0], found[1]) == (row.id, None)
