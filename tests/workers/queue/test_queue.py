"""Training tasks in RQ's queues: each step is one step, and an order is kept. On every server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Started
from helpers.harness import model
from kvps_workers.queue import host as host_module
from kvps_workers.queue.liveness import LivenessTracker
from kvps_workers.queue.queue import SCRIPTS, TaskQueue
from kvps_workers.training import Started as Execution

import kvps
from kvps.store import Store

RQ = str(Path(sys.executable).with_name("rq"))
Start = Callable[..., Started]


def waiting(raw: Any) -> list[str]:
    return [id.decode().partition("-")[2] for id in raw.lrange("rq:queue:kvps", 0, -1)]


# -- the queue -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_the_header_holds_against_the_body(name: str) -> None:
    """Every key and argument that the body uses is in the header, and every code it returns."""
    text = (Path(host_module.__file__).parent / "lua" / f"{name}.lua").read_text()
    header = "\n".join(line for line in text.splitlines() if line.startswith("--"))
    body = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    assert text.startswith(f"-- {name}: ")
    for kind, part in (("KEYS", header.partition("ARGV")[0]), ("ARGV", header.partition("ARGV")[2])):
        for number in re.findall(rf"{kind}\[(\d+)\]", body):
            assert re.search(rf"\[{number}(\]|\.\.\.)", part), f"{kind}[{number}]"
    codes = set(re.findall(r"return \{ '([A-Z]+)'", body)) | {"WRONGTYPE"}
    assert codes == set(re.findall(r"\{([A-Z]+)\b", header.partition("Returns")[2]))


def test_jobs_stand_in_the_order_of_their_submission_also_what_is_put_back(
    store: Store, queue: TaskQueue, raw: Any
) -> None:
    for name in ("b", "a", "c"):
        queue.submit(store.create_job(name, model(), workers=2))
    assert waiting(raw) == ["b-w0", "b-w1", "a-w0", "a-w1", "c-w0", "c-w1"]
    queue.arrive()
    taken = [(queue.take(str(i)), str(i)) for i in range(5)]
    assert waiting(raw) == ["c-w1"]
    for number in (3, 1, 4, 0, 2):
        found, execution = taken[number]
        assert found
        assert queue.release(found[0], execution, "queued") == "queued"
    jobs = [id.rpartition("-")[0] for id in waiting(raw)]
    assert jobs == ["b", "b", "a", "a", "c", "c"]
    assert raw.zcard("rq:wip:kvps") == 0
    assert raw.keys("rq:execution:*") == []
    queue.depart()


def test_a_task_is_in_the_queue_or_somebodys_and_put_back_once(store: Store, queue: TaskQueue, raw: Any) -> None:
    queue.submit(store.create_job("job", model(), workers=2))
    queue.arrive()
    raw.set("rq:suspended", 1)
    assert queue.take("one") is None, "rq suspend"
    raw.delete("rq:suspended")
    queue.await_task(60)  # comes back at once: something waits, and stays where it is
    assert waiting(raw) == ["job-w0", "job-w1"]
    first = queue.take("one")
    assert first
    assert queue.take("one") == first, "who asks again is answered again"
    (started,) = queue.started()
    assert (started.id, started.name) == (first[0], "one")
    assert started.identity["pid"] == os.getpid()
    with ThreadPoolExecutor(8) as pool:
        became = list(pool.map(lambda _: queue.release(first[0], "one", "queued"), range(40)))
    assert sorted(became) == [""] * 39 + ["queued"]
    assert len(waiting(raw)) == 2
    queue.depart()


def test_what_only_seems_to_run_is_not_lost(store: Store, queue: TaskQueue, raw: Any) -> None:
    """An execution that nobody began, noted by another program."""
    queue.submit(store.create_job("job", model(), workers=1))
    id = raw.lindex("rq:queue:kvps", 0).decode()
    raw.zadd("rq:wip:kvps", {f"{id}:planted": 1})
    queue.arrive()
    assert queue.take("one") == (id, None)
    assert queue.take("one") is None
    assert queue.release(id, "planted", "queued") == "queued"
    assert queue.release(id, "planted", "finished") == ""
    found = queue.take("one")
    assert found
    assert found[1]
    queue.depart()


def test_a_task_that_is_lost_again_and_again_without_progress_fails(store: Store, queue: TaskQueue) -> None:
    queue.submit(store.create_job("job", model(), workers=1))
    queue.arrive()
    became = []
    for number, version in enumerate(["3", "4", "4", "4", "", "4", "4"]):
        found = queue.take(str(number))
        assert found
        became.append(queue.release(found[0], str(number), "queued", "killed", version))
    assert became == ["queued"] * 6 + ["failed"]
    (seen,) = queue.seen()
    assert (seen.state, seen.what and seen.what.worker) == ("failed", "w0")
    assert "lost 5 times" in seen.more
    queue.depart()


def test_cancel_takes_one_jobs_tasks_and_no_others(store: Store, queue: TaskQueue, raw: Any) -> None:
    for name in ("a", "a-w0", "a-b"):
        queue.submit(store.create_job(name, model(), workers=2))
    queue.arrive()
    found = queue.take("one")
    assert found
    assert queue.cancel("a") == (1, 1)
    assert waiting(raw) == ["a-w0-w0", "a-w0-w1", "a-b-w0", "a-b-w1"]
    assert queue.beat((found[0], "one")) == (True, True, raw.lindex("rq:queue:kvps", 0).decode())
    assert queue.release(found[0], "one", "queued") == "canceled", "who is lost meanwhile is not put back"
    assert queue.beat((found[0], "one")).mine is False
    queue.depart()


def test_who_is_silent_is_lost_but_not_because_the_looker_was_away() -> None:
    lookout, identity = LivenessTracker(), kvps.machine.process.identity()
    other = Execution("task", "one", "host", "beat", {})
    assert lookout.lost([other], 100.0) == []
    for second in range(101, 110):
        assert lookout.lost([other], float(second)) == []
    assert lookout.lost([other._replace(beat="other")], 110.0) == []
    for second in range(111, 120):
        assert lookout.lost([other._replace(beat="other")], float(second)) == []
    assert lookout.lost([other._replace(beat="other")], 121.0) == [other._replace(beat="other")]
    assert lookout.lost([other], 200.0) == [], "nobody looked since"
    assert lookout.lost([other._replace(identity=identity)], 201.0) == []
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = other._replace(identity=identity | {"pid": dead.pid})
    assert lookout.lost([gone], 201.0) == [gone], "one of this machine is known to be dead at once"
