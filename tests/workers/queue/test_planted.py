"""What others plant in the queue's keys does not run and does not stop a host: each is refused in a line."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Started, kvps_run
from kvps_workers.queue.queue import TaskQueue
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from kvps.job import Job

Start = Callable[..., Started]
# Each starts whole commands, and a busy machine starts a process in seconds.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def waiting(raw: Any) -> list[str]:
    return [id.decode().partition("-")[2] for id in raw.lrange("rq:queue:kvps", 0, -1)]


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch exploded",)


PICKLE = pickle.dumps(("os.system", None, ("touch exploded",), {}))
GOOD = {"job": "good", "id": "x", "worker": "w0", "slow": 1.0, "prefetch": False}


def call(function: Any = "kvps.train", instance: Any = None, args: Any = (), **kwargs: Any) -> bytes:
    return json.dumps([function, instance, args, GOOD | kwargs]).encode()


PAYLOADS = {
    "a pickle": PICKLE,
    "a pickle, as RQ compresses it": zlib.compress(PICKLE),
    "a pickle that runs when it is read": pickle.dumps(_Bomb()),
    "os.system": call("os.system", None, ["touch exploded"]),
    "os.system, compressed": zlib.compress(call("os.system", None, ["touch exploded"])),
    "a method": call("kvps.train", "os"),
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "nothing": b"",
    "a number": b"1",
    "deep": b"[" * 10000,
    "a bomb": zlib.compress(b"[" + b" " * 10_000_000),
    "long": b" " * 20_000 + call(),
    "broken compression": b"x\x9cbroken",
    "a path": call(job="../../etc"),
    "an id with braces": call(id="{x}"),
    "a number for a worker": call(worker=0),
    "a list for a job": call(job=["good"]),
    "a flag for a factor": call(slow=True),
    "slow for ever": call(slow=1e300),
    "not a number": call(slow=float("nan")),
    "one argument more": call(acks="/etc/passwd"),
    "one argument less": json.dumps(["kvps.train", None, [], {"job": "good"}]).encode(),
    "arguments by place": call(args=["good"]),
    "a job that is not there": call(job="missing"),
    "a job that was another": call(job="good", id="11111111"),
    "a job under a key of another type": call(job="string"),
    "a job of nonsense": call(job="nonsense"),
}
FIELDS = {
    **{f"{when}_callback_name": "os.system" for when in ("success", "failure", "stopped")},
    "meta": PICKLE,
    "result": PICKLE,
    "exc_info": PICKLE,
    "created_at": "yesterday",
    "status": "surprised",
    "timeout": "soon",
    "retries_left": "7",
    "repeats_left": "7",
    "webhooks": '[{"url": "http://127.0.0.1:1/", "job_status": "failed"}]',
    "dependency_ids": '["os"]',
    "group_id": "os",
    "worker_name": PICKLE,
    "kvps_process": "[" * 5000,
    "kvps_losses": "nan",
    "kvps_version": "0",
}
RUN = {"missing", "good", "string", "nonsense"}  # jobs that a task process finds to be gone or another, or cannot read
KEPT = {b"description", b"status", b"origin", b"timeout", b"worker_name", b"started_at"}


def plant_jobs(raw: Any) -> None:
    """Keys of jobs that are none."""
    raw.set("kvps:{string}:config", PICKLE)
    raw.hset("kvps:{nonsense}:config", mapping={"workers": "many", "task": "os:system"})
    raw.set("kvps:{nonsense}:layout", PICKLE)
    raw.sadd("kvps:jobs", "string", "nonsense")


def plant_tasks(raw: Any, disallowed: bytes) -> tuple[set[str], int]:
    """Tasks in the queue: the ids of all that have a payload, and how many must be refused or passed over."""
    refused, ran = set(), set()
    for number, (name, payload) in enumerate(PAYLOADS.items()):
        (ran if name.startswith("a job ") else refused).add(id := f"planted-{number}")
        planted = FIELDS if number % 2 or id in ran else {}
        raw.hset(f"rq:job:{id}", mapping=planted | {"data": payload, "origin": "kvps"})
        raw.rpush("rq:queue:kvps", id)
    raw.hset("rq:job:disallowed", mapping=FIELDS | {"data": disallowed})
    raw.hset("rq:job:with a space:and:colons", mapping={"data": PICKLE})
    raw.hset(b"rq:job:\xff\x00\n", mapping={"data": PICKLE})
    raw.hset("rq:job:nodata", mapping=FIELDS)
    raw.set("rq:job:string", PICKLE)
    raw.rpush("rq:job:list", PICKLE)
    no_ids = ["with a space:and:colons", b"\xff\x00\n", "nodata", "string", "list", "unknown", "", PICKLE]
    raw.rpush("rq:queue:kvps", "disallowed", *no_ids, "last")
    return refused | ran | {"disallowed"}, len(refused) + len(no_ids) + 1


def plant_registries(raw: Any, ids: list[str]) -> None:
    """What else a host, or a worker of RQ's, reads."""
    raw.rpush("rq:queue:kvps:intermediate", *ids, PICKLE)
    raw.zadd("rq:wip:kvps", {f"{ids[0]}:x": 1, "nonsense": 1, PICKLE: 1, f"{ids[1]}:y": 1, ":": 1, "gone:z": 1})
    raw.set("rq:execution:gone:z", PICKLE)
    for registry in ("finished", "canceled", "scheduled", "deferred"):
        raw.set(f"rq:{registry}:kvps", PICKLE)
    raw.zadd("rq:failed:kvps", {PICKLE: 1e12})
    raw.sadd("rq:workers:kvps", PICKLE, "rq:worker:planted", "\n")
    raw.hset("rq:worker:planted", mapping={"birth": PICKLE, "current_job": PICKLE})


def test_nothing_that_is_planted_runs_or_stops_the_host(
    digits: Callable[..., Job], start: Start, queue: TaskQueue, raw: Any, tmp_path: Path
) -> None:
    """In every key and queue that a host reads. Each is refused in a line; a real job trains all the same."""
    good = digits("good", workers=1, epochs=1)
    evil = digits("evil", workers=1, task="evil:Task")
    (tmp_path / "evil.py").write_text("open('exploded', 'w').close()")
    plant_jobs(raw)
    ids, refusals = plant_tasks(raw, call(job="evil", id=evil.id))
    plant_registries(raw, sorted(ids))
    queue.submit(good)

    aggregator = start("aggregator", "start", "--job", "good")
    host = start("worker", "--queue")
    said = host.until("passed over 'last'")
    assert aggregator.wait() == 0
    assert "good w0: finished" in said, "it was submitted at a time that its id says; what says none comes behind it"
    assert len(set(re.findall(r"^(?:refused|passed over) (['\"].*['\"]): ", said, re.MULTILINE))) == refusals
    assert set(re.findall(r"^(\S+) w0: (?:failed|canceled) \(", said, re.MULTILINE)) == RUN | {"evil"}
    name = next(k for k in raw.keys("rq:worker:kvps-*")).decode().rpartition(":")[2]
    for message in (PICKLE, b"{", json.dumps({"command": "shutdown"}), json.dumps({"command": "kill-horse"})):
        assert raw.publish(f"rq:pubsub:{name}", message) == 0, "nobody listens to commands"
    assert "Traceback" not in said
    raw.lpush("rq:queue:kvps", "again")
    host.until("passed over 'again'")

    for id in ids:
        left = {field for field in raw.hkeys(f"rq:job:{id}") if not field.startswith(b"kvps_")}
        assert left <= KEPT | {b"data"}, "nothing is left that RQ's tools would unpickle or call"
        if b"data" in left:
            assert RqJob.fetch(id, connection=raw, serializer=JSONSerializer).func_name == "kvps.train"
    raw.zrem("rq:failed:kvps", PICKLE)
    shown = kvps_run("queue")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "refused: " in shown.stdout
    assert host.end() == 128 + signal.SIGTERM
    assert not (tmp_path / "exploded").exists()
    assert good.state().clock == {"w0": good.state().version}


def test_keys_of_another_type_are_said_once_and_do_not_stop_the_host(
    digits: Callable[..., Job], start: Start, queue: TaskQueue, raw: Any
) -> None:
    raw.set("rq:queue:kvps", PICKLE)
    refused = kvps_run("submit", "digits", "--job", "x")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "key rq:queue:kvps is a string, not a list" in refused.stderr
    assert kvps_run("jobs").stdout == ""
    host = start("worker", "--queue")
    host.until("kvps: error")
    raw.delete("rq:queue:kvps")
    queue.submit(digits("job", workers=2))
    said = host.until("joined as w0")
    assert "kvps: error" not in said
    assert host.end() == 128 + signal.SIGTERM
    assert sorted(waiting(raw)) == ["job-w0", "job-w1"], "a host that ends gives back what it has"
    assert raw.zcard("rq:wip:kvps") == queue.hosts() == 0
