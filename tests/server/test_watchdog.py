"""The private server goes on for others when the process that started it ends, however that ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import ENDLESS, LONG_UP, TINY, kvps_run, private_store, refused
from helpers.harness import aggregating, await_version, model
from helpers.servers import free_port
from helpers.waiting import awaited_job, eventually, processes_of

import kvps
from kvps.machine import process
from kvps.server import private_server

pytestmark = pytest.mark.slow  # each starts whole commands

GOES_ON = "the private server keeps running"
LOST = "the private server has ended, by kvps server stop or by a signal, and its jobs with it: start this again"


def _no_server_is_left(home: Path) -> bool:
    return eventually(lambda: private_server.running() is None and processes_of(home) == [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_others_go_on_when_the_up_that_started_it_is_ended(home: Path, start: Any, number: int) -> None:
    first = start("up", "digits", *LONG_UP)
    assert "(ends when nobody uses it)" in first.until("private server")
    with private_store() as store:
        awaited_job(store, "digits", 6)
    with kvps.connect() as store:
        assert store.ends_unused
        job = store.create_job("other", model())
        with aggregating(job), job.join("w0") as session:
            session.push(session.pull())
            first.process.send_signal(number)
            if number != signal.SIGKILL:
                line = f"{GOES_ON} for others (other); kvps server stop ends it"
                assert first.until(GOES_ON).splitlines()[-1] == line
            assert first.wait() == (-number if number == signal.SIGKILL else 128 + number)
            session.push(session.pull())
            await_version(job, 2)
    assert _no_server_is_left(home)


@pytest.mark.parametrize("last", ["store.close()", "os.kill(os.getpid(), 15)"])
def test_a_program_that_started_it_takes_it_from_nobody(home: Path, start: Any, last: str) -> None:
    code = f"import os, sys, kvps; store = kvps.connect(); print('here', flush=True); sys.stdin.read(); {last}"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as program:
        assert program.stdout
        assert program.stdout.readline() == "here\n"
        with kvps.connect() as store:
            assert not store.started_server
            program.communicate(timeout=120)
            store.create_job("job", model())
            assert store.jobs() == ["job"]
            with kvps.connect() as another:
                assert another.url == store.url
    assert _no_server_is_left(home)


def test_a_server_with_a_password_is_handed_over_too(home: Path, start: Any) -> None:
    port = free_port()
    first = start("aggregator", "start", "--listen", f"127.0.0.1:{port}")
    first.until("serving")
    with kvps.connect() as store:
        assert first.end(signal.SIGINT) == 130
        assert store.jobs() == []
        with kvps.connect(private_server.tcp_url(store.url, f"127.0.0.1:{port}")) as far:
            store.close()
            assert far.jobs() == [], "also who came over TCP is somebody"
    assert _no_server_is_left(home)


def test_who_is_connected_keeps_it_when_its_directory_is_deleted(home: Path, start: Any) -> None:
    """As /run/user is at logout. Whoever comes later is told why it finds nothing, and the server ends with its last
    user."""
    first = start("up", "digits", *LONG_UP)
    first.until("private server")
    with private_store() as store:
        awaited_job(store, "digits", 1)
        url = store.url
        (server,) = {int(store.client.call("INFO", "server")["process_id"])}
        shutil.rmtree(home)
        with pytest.raises(kvps.NoServer, match=rf"{home} is not there. If it was deleted, who is connected goes on"):
            kvps.connect(url)
        first.process.kill()
        first.wait()
        time.sleep(1)  # several looks of the guard
        assert store.jobs() == ["digits"]
    assert eventually(lambda: not process.runs(server))
    home.mkdir(0o700)  # which the fixture deletes


def test_copies_that_outlive_a_killed_run_do_not_keep_it(home: Path, start: Any, tmp_path: Path) -> None:
    """The kernel ends the shell when its parent dies. What the shell has started hears nothing of it, but the server
    is not its own: it ends."""
    (tmp_path / "train.py").write_text(ENDLESS)
    run = start("run", "-w", "1", "--job", "train", "--", "sh", "-c", f"{sys.executable} train.py; true")
    run.until("look inside")
    with private_store() as store:
        awaited_job(store, "train", 6)
    assert run.end(signal.SIGKILL) == -signal.SIGKILL
    assert _no_server_is_left(home)


def _ended_by_stop(store: kvps.Store) -> None:
    asked = refused("server", "stop")  # it has no terminal
    assert asked.startswith(
        "kvps server stop asks: End the private server, and with it the jobs at work on it (other)?"
    )
    said = kvps_run("server", "stop", "--yes").stderr
    assert said == "private server ended; these jobs were at work on it: other\n"


def _ended_by_a_signal(store: kvps.Store) -> None:
    os.kill(int(store.client.call("INFO", "server")["process_id"]), signal.SIGKILL)


@pytest.mark.parametrize("end", [_ended_by_stop, _ended_by_a_signal])
def test_who_loses_the_server_is_told_so_at_once(home: Path, start: Any, end: Any) -> None:
    with kvps.connect() as starter:
        up = start("up", "digits", "--job", "other", *LONG_UP)
        awaited_job(starter, "other", 6)
        end(starter)
        assert up.until("kvps: error").splitlines()[-1].endswith(f"kvps: error: {LOST}")
        assert up.wait() == 1
        with pytest.raises(kvps.ServerLost, match="the private server has ended"):
            starter.jobs()
    assert _no_server_is_left(home)


def test_the_next_command_meets_the_server_or_starts_one(home: Path, start: Any) -> None:
    """Between the end of one and the start of the other nothing is lost: eight in a row, without a pause."""
    for _ in range(8):
        with kvps.connect() as store:
            assert store.jobs() == []
            other = start("worker")
            other.until("waiting for a job")
        other.process.kill()
        other.wait()
    assert kvps_run("up", "digits", *TINY).returncode == 0
    assert _no_server_is_left(home)
