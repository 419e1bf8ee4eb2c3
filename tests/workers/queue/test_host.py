"""Jobs handed out to hosts: real servers, real processes, real signals; what is planted is not run."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import TINY, Started, kvps_run
from helpers.harness import check_chain
from helpers.paths import ROOT
from helpers.servers import BINARIES, ONE_AND_SLOWLY_ALL, running_server
from helpers.waiting import eventually
from kvps_workers import load_task
from kvps_workers.queue.queue import TaskQueue
from rq.job import Job as RqJob
from rq.registry import FailedJobRegistry
from rq.serializers import JSONSerializer

import kvps
from kvps.cli.fault_injection import judge
from kvps.job import Job
from kvps.store import Store

RQ = str(Path(sys.executable).with_name("rq"))
Start = Callable[..., Started]


@pytest.fixture(params=ONE_AND_SLOWLY_ALL, scope="module")
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with running_server(BINARIES[request.param]) as url:
        yield url


@pytest.fixture
def digits(store: Store, monkeypatch: pytest.MonkeyPatch, home: Path) -> Callable[..., Job]:
    """Jobs of the digits on the test's server, which is that of all commands."""
    monkeypatch.setenv("KVPS_REDIS_URL", store.url)
    task = load_task("digits")

    def make(name: str, **settings: Any) -> Job:
        chosen = {"task": "digits", "batch_size": 48, "epochs": 2, "optimizer": kvps.SGD(lr=0.5)} | settings
        return store.create_job(name, task.parameters(0), **chosen)

    return make


def waiting(raw: Any) -> list[str]:
    return [id.decode().partition("-")[2] for id in raw.lrange("rq:queue:kvps", 0, -1)]


def accuracy(job: Job) -> float:
    return load_task("digits").evaluate(job.snapshot()[1], np)["accuracy"]


# -- hosts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ONE_AND_SLOWLY_ALL)
@pytest.mark.parametrize("victim", [pytest.param("nobody", marks=pytest.mark.slow), "host", "horse"])
def test_three_hosts_train_the_digits_and_one_is_killed(
    home: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, kind: str, victim: str
) -> None:
    """On the private server; judged from the log: all that was acknowledged counts, once; its replay is the same."""
    monkeypatch.setenv("KVPS_REDIS_SERVER", BINARIES[kind])
    assert kvps_run("server", "start").returncode == 0
    try:
        aggregator = start("aggregator", "start", "--job", "digits")
        done = kvps_run("submit", "digits", "--workers", "3", "--epochs", "15", "--slow", "w1=3x")
        assert done.returncode == 0, done.stderr
        assert "it begins when 3 hosts serve the queue kvps; now 0 do" in done.stderr
        hosts = [start("worker", "--queue", "--burst", "--acks", f"acks{i}") for i in range(3)]
        with kvps.connect() as store:
            job = store.job("digits")
            assert eventually(lambda: job.state().version > 20)
            if victim != "nobody":
                member = job.state().members["w1"]
                horse = member.pid
                parent = int(Path(f"/proc/{horse}/stat").read_text().rpartition(")")[2].split()[1])
                os.kill(parent if victim == "host" else horse, signal.SIGKILL)
            codes = sorted(host.wait() for host in hosts)
            assert codes == ([-signal.SIGKILL, 0, 0] if victim == "host" else [0, 0, 0])
            assert aggregator.wait() == 0, "the job is finished"
            assert accuracy(job) > 0.95
            lives = {m.worker: m.incarnation.partition("-")[0] for m in job.state().members.values()}
            assert lives == {"w0": "1", "w1": "1" if victim == "nobody" else "2", "w2": "1"}
            verdict = judge(tmp_path.glob("acks*"), job)
            assert verdict.acknowledged > 300
            assert (verdict.lost, verdict.twice) == (0, 0)
            check_chain(job)
        proved = kvps_run("verify", "digits")
        assert proved.returncode == 0, proved.stderr
        shown = kvps_run("queue")
        assert shown.stdout == ("kvps: 1 host\n" if victim == "host" else ""), "a lost one counts for a while"
    finally:
        assert kvps_run("server", "stop").returncode == 0


def test_two_jobs_of_three_on_three_hosts_do_not_keep_each_other_from_starting(
    digits: Callable[..., Job], start: Start, queue: TaskQueue
) -> None:
    aggregator = start("aggregator", "start")
    jobs = [digits(name, workers=3) for name in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(queue.submit, jobs))
    for host in [start("worker", "--queue", "--burst") for _ in range(3)]:
        assert host.wait() == 0
    assert eventually(lambda: all(job.state().finished(job.config) for job in jobs))
    assert aggregator.end() == 128 + signal.SIGTERM


def test_who_waits_in_a_later_job_makes_way_for_an_older_one_that_lost_a_host(
    digits: Callable[..., Job], start: Start, queue: TaskQueue
) -> None:
    """Three hosts, jobs of two and two: the later has one of its workers, when a host of the older one is lost."""
    older, later = digits("older", workers=2), digits("later", workers=2)
    queue.submit(older)
    queue.submit(later)
    hosts = [start("worker", "--queue") for _ in range(3)]
    assert eventually(lambda: (len(older.state().members), len(later.state().members)) == (2, 1))
    victim = next(s for s in queue.started() if s.id.endswith("older-w1"))
    os.kill(victim.identity["pid"], signal.SIGKILL)
    assert eventually(lambda: older.state().members["w1"].incarnation.startswith("2-"))
    assert [m.active for m in later.state().members.values()] == [False]
    aggregator = start("aggregator", "start")
    assert eventually(lambda: older.state().finished(older.config) and later.state().finished(later.config))
    assert aggregator.end() == 128 + signal.SIGTERM
    codes = [host.end() if host.process.poll() is None else host.wait() for host in hosts]
    assert sorted(codes) == [-signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGTERM]


def test_a_job_wider_than_the_hosts_waits_and_says_so_and_can_be_cancelled(
    digits: Callable[..., Job], start: Start, queue: TaskQueue, raw: Any
) -> None:
    job = digits("wide", workers=3)
    queue.submit(job)
    host = start("worker", "--queue")
    host.until("joined as w0")
    shown = kvps_run("queue").stdout
    assert re.findall(r"wide +(w\d) +kvps +(\w+)", shown) == [("w0", "runs"), ("w1", "waits"), ("w2", "waits")]
    assert "kvps: 1 host; more hosts than that are needed by wide (3): kvps worker --queue" in shown
    said = host.until("waits: 1 of 3 workers have joined")
    assert "wide w0: " in said
    info = subprocess.run([RQ, "info", "--url", queue_url(raw)], capture_output=True, text=True)
    assert info.returncode == 0, info.stderr
    assert "2, 1 executing, 0 finished, 0 failed" in info.stdout
    assert "busy kvps" in info.stdout
    cancelled = kvps_run("cancel", "wide")
    assert "job wide: 2 taken out of the queue, 1 told to leave" in cancelled.stderr
    host.until("wide w0: canceled")
    assert not any(m.active for m in job.state().members.values())
    again = kvps_run("cancel", "wide")
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert host.end() == 128 + signal.SIGTERM
    assert sorted(key for key in raw.keys("rq:*") if b":job:" not in key) == [b"rq:canceled:kvps", b"rq:queues"]


def queue_url(raw: Any) -> str:
    return f"unix://{raw.connection_pool.connection_kwargs['path']}"


def test_a_task_that_fails_before_its_job_began_cancels_the_rest(
    digits: Callable[..., Job], start: Start, queue: TaskQueue, tmp_path: Path
) -> None:
    """A task that this host's operator did not allow, though its module lies there."""
    (tmp_path / "mine.py").write_text("open('imported', 'w').close()")
    queue.submit(digits("job", workers=2, task="mine:Line"))
    host = start("worker", "--queue", "--burst")
    said = host.until("job job is cancelled, for it cannot begin without w0")
    assert "not allowed on this host" in said
    assert host.wait() == 0
    assert not (tmp_path / "imported").exists()
    assert "not allowed" in kvps_run("queue").stdout


def test_a_task_of_the_users_own_is_allowed_by_name(
    digits: Callable[..., Job], start: Start, raw: Any, tmp_path: Path
) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tasks.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(code[0])
    submitted = kvps_run("submit", "mine:Line", "-w", "1", "--epochs", "1", "--job", "line")
    assert submitted.returncode == 0, submitted.stderr
    assert kvps_run("submit", "digits", "-w", "1", "--gpus", "--job", "fast").returncode == 0
    aggregator = start("aggregator", "start", "--job", "line")
    done = kvps_run("worker", "--queue", "--burst", "--allow", "mine:Line")
    assert done.returncode == 0, done.stderr
    assert "line w0: finished" in done.stderr
    assert raw.llen("rq:queue:kvps-gpu") == 1, "for others"
    assert aggregator.wait() == 0
    wrong = kvps_run("worker", "--queue", "--allow", "mine:Nothing")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


@pytest.mark.slow
def test_the_queue_may_be_on_another_server(digits: Callable[..., Job], start: Start, store: Store, raw: Any) -> None:
    with running_server(next(iter(BINARIES.values()))) as other:
        aggregator = start("aggregator", "start", "--job", "far")
        where = ["--queue-redis", other]
        assert kvps_run("submit", "digits", "-w", "1", "--job", "far", *TINY, *where).returncode == 0
        assert "far" in kvps_run("queue", KVPS_QUEUE_URL=other).stdout
        assert kvps_run("worker", "--queue", "--burst", *where).returncode == 0
        assert aggregator.wait() == 0
    assert raw.keys("rq:*") == []
    lost = kvps_run("submit", "digits", "--job", "none", "--queue-redis", "redis://:hush@127.0.0.1:1")
    assert (lost.returncode, lost.stderr.count("\n")) == (1, 1)
    assert "hush" not in lost.stderr
    assert "none" not in store.jobs()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["worker", "--burst"], "--queue"),
        (["worker", "--queue", "--job", "x"], "kvps submit"),
        (["submit", "digits", "--slow", "w9=2x"], "w2"),
        (["submit", "digits", "--prefetch"], "SSP"),
        (["cancel", "a b"], "1 to 64"),
    ],
    ids=" ".join,
)
def test_usage_errors_are_one_line_and_exit_2(home: Path, arguments: list[str], words: str) -> None:
    done = kvps_run(*arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert words in done.stderr


def test_the_password_stands_in_no_command_line_and_no_environment(home: Path, start: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    host = start("worker", "--queue", "--listen", f"127.0.0.1:{port}")
    url = re.findall(r"KVPS_REDIS_URL=(\S+)", host.until("join from elsewhere"))[0]
    password = url.split("@")[0].rpartition(":")[2]
    assert len(password) > 20
    assert kvps_run("submit", "digits", "-w", "2", "--job", "job").returncode == 0
    host.until("joined as w0")
    mine = f"KVPS_RUNTIME_DIR={home}\0".encode()
    horses = [p for p in Path("/proc").glob("[0-9]*") if b"kvps_workers.horse" in _bytes(p / "cmdline")]
    (horse,) = [p for p in horses if mine in _bytes(p / "environ")]
    for process in (horse, Path(f"/proc/{host.process.pid}")):
        for file in ("cmdline", "environ"):
            assert password.encode() not in _bytes(process / file)
    assert host.end() == 128 + signal.SIGTERM


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# -- what others plant -------------------------------------------------------------------------------------------


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
CALLBACKS = {f"{when}_callback_name": "os.system" for when in ("success", "failure", "stopped")}
FIELDS = {
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
    "kvps_losses": "nan",
    "kvps_version": "0",
}


GONE = ("missing", "good")  # jobs that a horse finds not to be there, or to be other ones
RUN = (*GONE, "string", "nonsense")  # and that it cannot read


def test_nothing_that_is_planted_runs_or_stops_the_host(
    digits: Callable[..., Job], start: Start, queue: TaskQueue, raw: Any, tmp_path: Path
) -> None:
    """In every key and queue that a host reads. Each is refused in a line; what is right is trained all the same."""
    good = digits("good", workers=1, epochs=1)
    evil = digits("evil", workers=1, task="evil:Task")
    (tmp_path / "evil.py").write_text("open('exploded', 'w').close()")
    raw.set("kvps:{string}:config", PICKLE)
    raw.hset("kvps:{nonsense}:config", mapping={"workers": "many", "task": "os:system"})
    raw.set("kvps:{nonsense}:layout", PICKLE)
    raw.sadd("kvps:jobs", "string", "nonsense")

    ids = []
    for number, payload in enumerate(PAYLOADS.values()):
        for fields in ({}, FIELDS | CALLBACKS):
            ids.append(f"planted-{number}-{len(fields)}")
            raw.hset(f"rq:job:{ids[-1]}", mapping={"data": payload, "origin": "kvps"} | fields)
    raw.hset("rq:job:disallowed", mapping={"data": call(job="evil", id=evil.state().id)} | CALLBACKS)
    raw.hset("rq:job:with a space:and:colons", mapping={"data": PICKLE})
    raw.hset(b"rq:job:\xff\x00\n", mapping={"data": PICKLE})
    raw.hset("rq:job:nodata", mapping=FIELDS | CALLBACKS)
    raw.set("rq:job:string", PICKLE)
    raw.rpush("rq:job:list", PICKLE)
    others = [
        "disallowed",
        "with a space:and:colons",
        b"\xff\x00\n",
        "nodata",
        "string",
        "list",
        "unknown",
        "",
        PICKLE,
        "last",
    ]
    raw.rpush("rq:queue:kvps", *ids, *others)
    raw.rpush("rq:queue:kvps:intermediate", *ids, PICKLE)
    raw.zadd("rq:wip:kvps", {f"{ids[0]}:x": 1, "nonsense": 1, PICKLE: 1, f"{ids[1]}:y": 1, ":": 1, "gone:z": 1})
    raw.hset(f"rq:execution:{ids[0]}:x", mapping={"kvps_process": "[" * 5000, "last_heartbeat": PICKLE})
    raw.hset(f"rq:execution:{ids[1]}:y", "kvps_process", json.dumps({"pid": "1e9", "space": [], "start": {}}))
    raw.set("rq:execution:gone:z", PICKLE)
    for registry in ("finished", "canceled", "scheduled", "deferred"):
        raw.set(f"rq:{registry}:kvps", PICKLE)
    raw.zadd("rq:failed:kvps", {PICKLE: 1e12})
    raw.sadd("rq:workers:kvps", PICKLE, "rq:worker:planted", "\n")
    raw.hset("rq:worker:planted", mapping={"birth": PICKLE, "current_job": PICKLE})
    queue.submit(good)

    aggregator = start("aggregator", "start", "--job", "good")
    host = start("worker", "--queue")
    said = host.until("passed over 'last'")
    assert aggregator.wait() == 0
    assert "good w0: finished" in said, "it was submitted at a time that its id says; what says none comes behind it"
    refused = set(re.findall(r"^(?:refused|passed over) b?'(.*)': ", said, re.MULTILINE))
    ran = set(re.findall(r"^(\S+) w0: (?:failed|canceled) \(", said, re.MULTILINE))
    assert len(refused) == len(ids) + len(others) - len(RUN) * 2 - 1
    assert ran == {"missing", "good", "string", "nonsense", "evil"}
    name = next(k for k in raw.keys("rq:worker:kvps-*")).decode().rpartition(":")[2]
    for message in (PICKLE, b"{", json.dumps({"command": "shutdown"}), json.dumps({"command": "kill-horse"})):
        assert raw.publish(f"rq:pubsub:{name}", message) == 0, "nobody listens to commands"
    assert "Traceback" not in said
    raw.lpush("rq:queue:kvps", "again")
    host.until("passed over 'again'")

    raw.zrem("rq:failed:kvps", PICKLE)
    failed = FailedJobRegistry("kvps", connection=raw, serializer=JSONSerializer)
    found = {id: RqJob.fetch(id, connection=raw, serializer=JSONSerializer) for id in failed.get_job_ids() if id in ids}
    notes = {id: job for id, job in found.items() if (job.description or "").startswith("refused: ")}
    ended = len(ids) - 2 * len(GONE)
    assert ended - 2 <= len(found) <= ended, "two are said to run, until they are lost"
    assert len(notes) == len(found) - 2 * (len(RUN) - len(GONE))
    for job in found.values():
        result = job.latest_result()
        assert (job.func_name, job.meta, job.failure_callback, job.webhooks) == ("kvps.train", {}, None, [])
        assert result
        assert result.exc_string
    raw.delete("rq:finished:kvps", "rq:canceled:kvps", "rq:scheduled:kvps", "rq:deferred:kvps")
    raw.delete("rq:worker:planted")
    shown = kvps_run("queue")
    assert (shown.returncode, shown.stderr) == (0, "")
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
