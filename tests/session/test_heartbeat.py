"""Who is alive: a worker that computes and holds the interpreter's lock, not one that is stopped or dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.harness import aggregating, log_entries, model
from helpers.waiting import command_lines_with, eventually
from helpers.zygote import Popen

import kvps
from kvps.connection.stand_in_process import StandIn
from kvps.job import Job
from kvps.store import Store

HOLDER = """
import ctypes, sys
import kvps

url, seconds = sys.argv[1:]
with kvps.connect(url) as store, store.job("job").join("w0") as session:
    params = session.pull()
    print("holds the lock", flush=True)
    ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))  # unlike a CDLL, it keeps the interpreter's lock
    print(session.push(params), flush=True)
"""


@contextmanager
def _holding(job: Job, seconds: float) -> Iterator[Popen]:
    """Serve the job inside the block, with a worker that holds its interpreter's lock for so long before it pushes."""
    command = [sys.executable, "-c", HOLDER, job.access.client.url, str(seconds)]
    with aggregating(job), Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout
            assert worker.stdout.readline() == "holds the lock\n"
            yield worker
        finally:
            worker.kill()


@pytest.mark.slow
def test_a_worker_that_holds_the_interpreters_lock_for_longer_than_the_timeout_lives(store: Store) -> None:
    """No thread of its process can give a sign of life meanwhile."""
    job = store.create_job("job", model(), worker_timeout_ms=4000)
    with _holding(job, 5) as worker:
        output, _ = worker.communicate(timeout=60)
        assert (worker.returncode, output) == (0, "1\n")
    assert "evict" not in {fields["kind"] for _, fields in log_entries(job)}


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_one_that_is_stopped_or_dead_meanwhile_does_not(store: Store, number: signal.Signals) -> None:
    job = store.create_job("job", model(), worker_timeout_ms=500)
    with _holding(job, 60) as worker:
        stand_in = f"stand_in_process.py {worker.pid} "
        assert eventually(lambda: command_lines_with(stand_in))  # between fork and exec it has another name
        os.kill(worker.pid, number)
        assert eventually(lambda: job.state().members["w0"].evicted)
    assert eventually(lambda: not command_lines_with(stand_in))


def test_one_whose_store_is_closed_falls_silent(store: Store) -> None:
    """It can do nothing more: the others must not wait for it."""
    job = store.create_job("job", model(), worker_timeout_ms=500)
    with aggregating(job), kvps.connect(store.url) as other:
        other.job("job").join("w0")
        other.close()
        assert eventually(lambda: not job.state().members["w0"].active)
    assert eventually(lambda: all(thread.name != "kvps-heart-w0" for thread in threading.enumerate()))


def test_a_stand_in_goes_on_while_a_file_of_its_server_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVPS_REDIS_PASSWORD_FILE", str(tmp_path / "away"))
    stand_in = StandIn()
    stand_in.hear(b'1 0 ["redis://127.0.0.1:1", false, []]')
    stand_in.send(lives=True)
    assert stand_in.is_needed
