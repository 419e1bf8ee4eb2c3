"""Jobs handed out to hosts: real servers, real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import waiting as waiting_for
from helpers.commands import TINY, Started, kvps_run, refused
from helpers.harness import check_chain
from helpers.pages import python_in
from helpers.servers import free_port, running_server
from kvps_cli.prove.fault_injection import judge
from kvps_workers import load_task
from kvps_workers.queue.queue import TaskQueue

import kvps
from kvps.job import Job
from kvps.store import Store

RQ = str(Path(sys.executable).with_name("rq"))
Start = Callable[..., Started]
# Each starts whole commands, and a busy machine starts a process in seconds.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def eventually(holds: Callable[[], bool]) -> bool:
    return waiting_for.eventually(holds, 300)


def accuracy(job: Job) -> float:
    return load_task("digits").evaluate(job.snapshot()[1], np)["accuracy"]


@pytest.mark.parametrize("victim", ["host", "task process"])
def test_three_hosts_train_the_digits_and_one_is_killed(
    home: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """On the private server; judged from the log: all that was acknowledged counts, once; its replay is the same."""
    assert kvps_run("server", "start").returncode == 0
    try:
        aggregator = start("aggregator", "start", "--job", "digits")
        options = ["--workers", "3", "--epochs", "8", "--slow", "w1=5x"]
        options += ["--data", "static"]  # so that the others cannot end before w1 is back
        done = kvps_run("submit", "digits", *options)
        assert done.returncode == 0, done.stderr
        assert "it begins with 3 hosts at the queue kvps, where 0 are now" in done.stderr
        hosts = [start("worker", "--queue", "--burst", "--acks", f"acks{i}") for i in range(3)]
        with kvps.connect() as store:
            job = store.job("digits")
            assert eventually(lambda: job.state().version > 5)
            member = job.state().members["w1"]
            parent = int(Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(parent if victim == "host" else member.pid, signal.SIGKILL)
            codes = sorted(host.wait() for host in hosts)
            assert codes == ([-signal.SIGKILL, 0, 0] if victim == "host" else [0, 0, 0])
            assert aggregator.wait() == 0, "the job is finished"
            assert accuracy(job) > 0.9
            lives = {m.worker: m.incarnation.partition("-")[0] for m in job.state().members.values()}
            assert lives == {"w0": "1", "w1": "2", "w2": "1"}
            verdict = judge(tmp_path.glob("acks*"), job)
            assert verdict.acknowledged > 100
            assert (verdict.lost, verdict.twice) == (0, 0)
            check_chain(job)
        proved = kvps_run("verify", "digits")
        assert proved.returncode == 0, proved.stderr
        shown = kvps_run("queue")
        counted = ["", "kvps: 1 host\n"] if victim == "host" else [""]  # a lost one counts for a while
        assert shown.stdout in counted
    finally:
        assert kvps_run("server", "stop", "--yes").returncode == 0


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
    victim = next(row for row in queue.look()[1] if row.id.endswith("older-w1"))
    os.kill(victim.process["pid"], signal.SIGKILL)
    assert eventually(lambda: older.state().members["w1"].incarnation.startswith("2-"))
    assert [m.active for m in later.state().members.values()] == [False]
    aggregator = start("aggregator", "start")
    assert eventually(lambda: older.state().finished(older.config) and later.state().finished(later.config))
    assert aggregator.end() == 128 + signal.SIGTERM
    codes = [host.end() if host.process.poll() is None else host.wait() for host in hosts]
    assert sorted(codes) == [-signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGTERM]


def test_a_host_to_spare_joins_a_job_that_wants_more_until_another_needs_it(
    digits: Callable[..., Job], start: Start, queue: TaskQueue
) -> None:
    aggregator = start("aggregator", "start")
    wide = digits("wide", workers=1, units=10**6)
    queue.submit(wide, {f"w{rank}": 20 for rank in range(3)}, most=3)
    hosts = [start("worker", "--queue") for _ in range(2)]

    def at_work() -> set[str]:
        return {member.worker for member in wide.state().members.values() if member.active}

    assert eventually(lambda: at_work() == {"w0", "w1"} and min(wide.state().clock.values()) > 1)
    other = digits("other", workers=1)
    queue.submit(other)
    assert eventually(lambda: other.state().finished(other.config))
    assert eventually(lambda: at_work() == {"w0", "w2"})
    assert [member.incarnation[:2] for member in wide.state().members.values()] == ["1-"] * 3, "w0 was left alone"
    with pytest.raises(kvps.InvalidSetting, match="hands out no units"):
        queue.submit(other, most=2)
    assert queue.cancel("wide") == (1, 2)
    assert [host.end() for host in hosts] == [128 + signal.SIGTERM] * 2
    assert aggregator.end() == 128 + signal.SIGTERM


def test_tasks_that_no_host_was_free_for_are_withdrawn_when_their_job_is_finished(
    digits: Callable[..., Job], start: Start, store: Store, raw: Any
) -> None:
    submitted = kvps_run("submit", "digits", "-w", "1:3", "--data", "units", *TINY)
    assert submitted.returncode == 0, submitted.stderr
    assert "up to 3 hosts train it while no other job needs them" in submitted.stderr
    shown = kvps_run("queue").stdout
    assert re.findall(r"(w\d) +kvps +waits *(.*?) *\n", shown) == [
        ("w0", ""),
        ("w1", "if a host is free"),
        ("w2", "if a host is free"),
    ]
    aggregator = start("aggregator", "start", "--job", "digits")
    done = kvps_run("worker", "--queue", "--burst")
    assert done.returncode == 0, done.stderr
    assert "digits w1" not in done.stderr
    assert aggregator.wait() == 0
    job = store.job("digits")
    assert job.state().finished(job.config)
    assert set(job.state().members) == {"w0"}
    assert raw.llen("rq:queue:kvps") == 0


def test_a_job_wider_than_the_hosts_waits_and_says_so_and_can_be_cancelled(
    digits: Callable[..., Job], start: Start, queue: TaskQueue, raw: Any
) -> None:
    job = digits("wide", workers=3)
    queue.submit(job)
    host = start("worker", "--queue")
    host.until("joined as w0")
    shown = kvps_run("queue").stdout
    assert re.findall(r"wide +(w\d) +kvps +(\w+)", shown) == [("w0", "runs"), ("w1", "waits"), ("w2", "waits")]
    assert "kvps: 1 host; more hosts are needed by wide (3): start them with kvps worker --queue" in shown
    listed = json.loads(kvps_run("queue", "--json").stdout)
    assert listed["hosts"] == {"kvps": 1, "kvps-gpu": 0}
    assert [(t["worker"], t["queue"], t["state"]) for t in listed["tasks"]] == [
        ("w0", "kvps", "runs"),
        ("w1", "kvps", "waits"),
        ("w2", "kvps", "waits"),
    ]
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
    refused("cancel", "wide", code=1)
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
    (tmp_path / "mine.py").write_text(python_in("docs/tasks.md")[0])
    submitted = kvps_run("submit", "mine:Line", "-w", "1", "--epochs", "1", "--job", "line")
    assert submitted.returncode == 0, submitted.stderr
    assert kvps_run("submit", "digits", "-w", "1", "--gpus", "--job", "fast").returncode == 0
    aggregator = start("aggregator", "start", "--job", "line")
    done = kvps_run("worker", "--queue", "--burst", "--allow", "mine:Line")
    assert done.returncode == 0, done.stderr
    assert "line w0: finished" in done.stderr
    assert raw.llen("rq:queue:kvps-gpu") == 1, "for others"
    assert aggregator.wait() == 0
    refused("worker", "--queue", "--allow", "mine:Nothing")


@pytest.mark.slow
def test_the_queue_may_be_on_another_server(digits: Callable[..., Job], start: Start, store: Store, raw: Any) -> None:
    with running_server() as other:
        aggregator = start("aggregator", "start", "--job", "far")
        where = ["--queue-redis", other]
        assert kvps_run("submit", "digits", "-w", "1", "--job", "far", *TINY, *where).returncode == 0
        assert "far" in kvps_run("queue", KVPS_QUEUE_URL=other).stdout
        assert kvps_run("worker", "--queue", "--burst", *where).returncode == 0
        assert aggregator.wait() == 0
    assert raw.keys("rq:*") == []
    away = ["--queue-redis", "redis://:hush@127.0.0.1:1"]
    assert "hush" not in refused("submit", "digits", "--job", "none", *away, code=1)
    assert "none" not in store.jobs()


def test_the_password_stands_in_no_command_line_and_no_environment(home: Path, start: Start) -> None:
    host = start("worker", "--queue", "--listen", f"127.0.0.1:{free_port()}")
    url = re.findall(r"KVPS_REDIS_URL=(\S+)", host.until("join from elsewhere"))[0]
    password = url.split("@")[0].rpartition(":")[2]
    assert len(password) > 20
    assert kvps_run("submit", "digits", "-w", "2", "--job", "job").returncode == 0
    host.until("joined as w0")
    mine = f"KVPS_RUNTIME_DIR={home}\0".encode()
    running = [p for p in Path("/proc").glob("[0-9]*") if b"kvps_workers.queue.task_process" in _bytes(p / "cmdline")]
    (task_process,) = [p for p in running if mine in _bytes(p / "environ")]
    for process in (task_process, Path(f"/proc/{host.process.pid}")):
        for file in ("cmdline", "environ"):
            assert password.encode() not in _bytes(process / file)
    assert host.end() == 128 + signal.SIGTERM


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
