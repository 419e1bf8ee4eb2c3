"""What crosses a fork stays the parent's: a child cannot use it, and does nothing to it when it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.forker import ROUNDS
from helpers.harness import aggregating, await_version, gradient, large_model, log_entries, work
from helpers.paths import TESTS
from helpers.waiting import eventually
from kvps_aggregator import Aggregator

import kvps
from kvps.server import private_server
from kvps.store import Store

FORKER = str(TESTS / "helpers" / "forker.py")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
PATIENT = {"worker_timeout_ms": 3_600_000, "optimizer": kvps.SGD(lr=0.1)}


def _forked(store: Store, children: list[str], *options: str, **settings: Any) -> list[list[str]]:
    """What a worker says of its children, which then goes on; its weights are those of a run without a fork."""
    params = large_model()
    job = store.create_job("job", params, **PATIENT | settings)
    command = [sys.executable, FORKER, store.url, "job", ",".join(children), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stdout
        said = [line.split() for line in islice(worker.stdout, len(children))]
        with aggregating(job):
            rest, errors = worker.communicate(timeout=120)
            assert worker.returncode == 0, errors
            job.await_finished()
    assert not rest
    assert sum(job.state().clock.values()) == ROUNDS
    _, weights = job.snapshot()
    expected = params
    for round_ in range(ROUNDS):
        grads = gradient(params if options else expected, 0, round_)
        expected = {name: value - np.float32(0.1) * grads[name] for name, value in expected.items()}
    same = np.allclose if options else np.array_equal  # without a bound a version may be made of two pushes
    assert all(same(weights[name], expected[name]) for name in params)
    return said


@pytest.mark.slow
def test_a_child_does_nothing_to_what_its_parent_made(store: Store, transport: str) -> None:
    children = ["uses", "closes", "exits", "raises", "collects", "uses-at-once", "closes-at-once", "process", "pool"]
    for name, status, commands, same in _forked(store, children, transport=transport):
        assert (name, status, commands, same) == (name, "1" if name == "raises" else "0", "0", "True")


@pytest.mark.slow
def test_a_child_of_a_worker_that_fetches_ahead(store: Store) -> None:
    """Its other thread goes on asking for the next version meanwhile, so commands are not counted."""
    children = ["uses", "exits", "collects"]
    said = _forked(store, children, "--prefetch", transport="redis", staleness=-1, reduction="sum")
    assert [[name, status, same] for name, status, _, same in said] == [[name, "0", "True"] for name in children]


@pytest.mark.slow
def test_a_child_connects_and_joins_anew(store: Store, transport: str) -> None:
    (name, status, _, _), *rest = _forked(store, ["connects"], transport=transport)
    assert (name, status, rest) == ("connects", "0", [])


def _in_fork(run: Callable[[], object]) -> int:
    """Start a fork of this process that does just this; its pid."""
    if pid := os.fork():
        return pid
    try:
        run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _status(pid: int) -> int:
    """How a child has ended; one that hangs is killed."""
    kill = threading.Timer(30, os.kill, (pid, signal.SIGKILL))
    kill.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        kill.cancel()


def test_a_child_cannot_write_into_a_gradient_that_its_parent_pushes(store: Store) -> None:
    """Not before the push, and not between its acknowledgement and the commit."""
    params = {"a": np.zeros(300_000, np.float32)}
    job = store.create_job("job", params, transport="shm", optimizer=kvps.SGD(lr=1.0), worker_timeout_ms=3_600_000)
    ours, theirs = os.pipe()
    with job.join("w0") as session:
        session.pull()
        grads = session.buffers()
        grads["a"][:] = 1

        def write() -> None:
            grads["a"][:] = 5
            assert (grads["a"] == 5).all()

        assert _status(_in_fork(write)) == 0
        assert (grads["a"] == 1).all()
        late = _in_fork(lambda: os.read(ours, 1) and write())
        session.push(grads)
        os.write(theirs, b".")
        assert _status(late) == 0
        with aggregating(job):
            session.pull()
    assert [fields for _, fields in log_entries(job) if fields["kind"] == "reject"] == []
    assert np.unique(job.snapshot()[1]["a"]).tolist() == [-1.0]


def test_an_aggregator_that_forks_keeps_its_shards(store: Store) -> None:
    """The child ends in the middle of its parent's loop, as by sys.exit in a signal's handler; the thread that renews
    leases was about to do that, and is not there in the child."""
    job = store.create_job("job", large_model(), **PATIENT)
    children: list[int] = []

    class Stop(threading.Event):
        def is_set(self) -> bool:
            if job.access.reader.holders() == [""] or children:
                return super().is_set()
            aggregator.held.leases._lock.acquire()
            if not (pid := os.fork()):
                sys.exit(0)
            aggregator.held.leases._lock.release()
            children.append(pid)
            return False

    stop = Stop()
    aggregator = Aggregator(job, stop)

    def run() -> None:
        me = os.getpid()
        try:
            aggregator.run(until_finished=False)
        finally:
            if os.getpid() != me:
                os._exit(0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert eventually(lambda: bool(children))
        assert _status(children[0]) == 0
        holder, term = job.access.reader.holders(), job.access.reader.terms()
        work(job, 2, lambda session, params, round_: gradient(params, session.rank, round_), workers=1)
        await_version(job, 2)
        assert (job.access.reader.holders(), job.access.reader.terms()) == (holder, term) != ([""], [""])
    finally:
        stop.set()
        thread.join()


ALONE = """if True:
    import gc, os, sys
    import numpy as np, kvps
    def gradient(params, rank, round): return {"a": np.full(3, rank + 1, np.float32)}
    MAKE
        job.train(gradient, 2)
        for ends in (lambda: sys.exit(0), gc.collect, lambda: job.train(gradient, 1), lambda: CREATE):
            if not (pid := os.fork()):
                try:
                    ends()
                except kvps.WrongOrder as error:
                    print("refused:", error, flush=True)
                sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        print(job.train(gradient, 2)["a"].tolist(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "create"),
    [
        ("with kvps.local({'a': np.zeros(3, np.float32)}, workers=2) as job:", "job.state()"),
        (
            "worker = kvps.from_env(); job = worker.create_job({'a': np.zeros(3, np.float32)})\n    with worker:",
            "worker.create_job({})",
        ),
    ],
)
def test_a_job_that_its_process_serves_outlives_the_children(home: Path, make: str, create: str) -> None:
    """So does the private server."""
    code = ALONE.replace("MAKE", make).replace("CREATE", create)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    refused, again, weights = done.stdout.splitlines()
    assert refused.startswith("refused: the connection to unix://"), done.stderr
    assert again.startswith("refused: the worker of kvps.from_env()" if "worker" in create else "refused: the conn")
    mean = 1.0 if "worker" in create else 1.5
    np.testing.assert_allclose(json.loads(weights), [-0.1 * 4 * mean] * 3, rtol=1e-5)


def test_a_child_is_not_kept_from_a_server_of_its_own(home: Path) -> None:
    """Another thread of its parent was looking for the private server when it was forked."""
    inside, leave = threading.Event(), threading.Event()

    def look() -> None:
        with private_server.alone(), private_server._counting:
            inside.set()
            leave.wait(120)

    looking = threading.Thread(target=look)
    looking.start()
    assert inside.wait(120)

    def connect() -> None:
        with kvps.connect() as store:
            assert store.jobs() == []

    child = _in_fork(connect)
    leave.set()
    looking.join()
    assert _status(child) == 0


def test_a_child_trains_a_copy_of_the_model_that_its_parent_trains(store: Store) -> None:
    """The hooks by which gradients of its parent leave are there, and do nothing."""
    torch = pytest.importorskip("torch")
    import kvps.torch

    def round_of(worker: kvps.torch.TorchSession) -> int:
        worker.pull()
        model(torch.ones(1, 3)).sum().backward()
        return worker.step()

    def train_anew() -> None:
        with pytest.raises(kvps.WrongOrder, match=f"worker 'w0' belongs to process {os.getppid()}"):
            worker.step()
        with kvps.connect(store.url) as mine:
            job = mine.create_job("copy", kvps.torch.parameters(model), **PATIENT)
            with kvps.torch.join(job, model, "w0", overlap=True) as anew:
                assert round_of(anew) == 1
        worker.__exit__(None, None, None)

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    job = store.create_job("job", kvps.torch.parameters(model), **PATIENT)
    with aggregating(job), kvps.torch.join(job, model, "w0", overlap=True) as worker:
        assert round_of(worker) == 1
        assert _status(_in_fork(train_anew)) == 0
        assert round_of(worker) == 2
