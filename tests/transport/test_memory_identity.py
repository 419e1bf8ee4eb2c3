"""Jobs over shared memory, and processes of the same host and user that see another /dev/shm, as in a container."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from helpers.arrays import assert_same_bits
from helpers.commands import TINY, Started, kvps_run
from helpers.harness import abandoned, aggregating, gradient, model, plain_loop, work_on
from helpers.internals import abandon, segments_of
from helpers.shared_memory import LARGE, recoveries, take, train
from helpers.waiting import eventually
from kvps_aggregator import Aggregator, AggregatorOptions, serve

import kvps
from kvps.job import Job
from kvps.machine import process
from kvps.protocol.keys import MEMORY
from kvps.store import Store
from kvps.transport import shared_memory
from kvps.transport.memory_identity import Memory
from kvps.transport.opening import find_transport
from kvps.transport.shared_memory import Segments

pytestmark = pytest.mark.usefixtures("seldom_mirrored")
SHM: dict[str, Any] = {"transport": "shm", "lease_ms": 300, "worker_timeout_ms": 60_000}
See = Callable[[str], Job]
_MOUNTED = "mount -t tmpfs kvps-test /dev/shm && echo mounted && exec cat"
_MOVED = "import pathlib; from kvps.transport import shared_memory; shared_memory.ROOT = pathlib.Path({root!r}); "
_KVPS = "import sys, kvps_cli; sys.exit(kvps_cli.main())"


class Elsewhere:
    """Runs kvps on this host, as this user, with another /dev/shm: the same one each time."""

    def __init__(self, inside: list[str], root: Path | None) -> None:
        self.started: list[Started] = []
        self._command = [*inside, sys.executable, "-c", (_MOVED.format(root=str(root)) if root else "") + _KVPS]

    def start(self, *arguments: str) -> Started:
        """Start this kvps command there."""
        self.started.append(Started([*self._command, *arguments]))
        return self.started[-1]


@contextmanager
def _mount_namespace() -> Iterator[Elsewhere]:
    """A /dev/shm of its own as a container has it. Raises PermissionError where a user may not mount one."""
    holder = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", _MOUNTED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert holder.stdout
    try:
        if holder.stdout.readline() != "mounted\n":
            raise PermissionError("this user may not mount a tmpfs")
        yield Elsewhere(["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", f"--wd={os.getcwd()}"], None)
    finally:
        holder.communicate()


def _may_mount() -> bool:
    try:
        with _mount_namespace():
            return True
    except OSError:
        return False


@pytest.fixture(params=["directory", *["mounted"] * _may_mount()])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Elsewhere]:
    """Another /dev/shm: a directory that stands for one, and where this user may mount one, a real one too."""
    with nullcontext(Elsewhere([], tmp_path)) if request.param == "directory" else _mount_namespace() as found:
        yield found
        for each in found.started:
            if each.process.poll() is None:
                each.end()


def _train(job: Job, rounds: int) -> None:
    """Commit some rounds of w0 and leave no aggregator: Redis has version 0, all else is in memory."""
    with abandoned(job) as aggregator, job.join("w0") as session:
        take(aggregator)
        train(session, aggregator, rounds)
        session.leave(finished=False)
    assert job.state().version == rounds
    assert eventually(lambda: job.access.reader.holders() == [""])


# -- who does not see the memory of a job --------------------------------------------------------------------------


def test_auto_takes_no_other_memory_than_the_first_job(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def created(name: str, transport: str = "auto", there: bool = False) -> tuple[str, str]:
        """Create a job here, or as a process with another /dev/shm. Return its transport, and what was logged."""
        caplog.clear()
        with monkeypatch.context() as patch:
            if there:
                patch.setattr(shared_memory, "ROOT", tmp_path)
            return store.create_job(name, LARGE, transport=transport).config.transport, caplog.text

    assert created("here") == ("shm", "")
    transport, warning = created("there", there=True)
    assert (transport, "this process does not see the shared memory" in warning) == ("redis", True)
    transport, warning = created("named", "shm", there=True)
    assert (transport, "only processes that see the one here" in warning) == ("shm", True)
    assert created("again") == ("shm", "")
    for name in store.jobs():
        with monkeypatch.context() as patch:
            patch.setattr(shared_memory, "ROOT", tmp_path if name == "named" else shared_memory.ROOT)
            store.remove_job(name)
    assert not store.client.call("EXISTS", MEMORY)
    assert created("first", there=True) == ("shm", "")
    assert created("second")[0] == "redis"
    transport, warning = created("third", "shm")
    assert (transport, "only processes that see the one here" in warning) == ("shm", True)


def test_a_memory_noted_before_the_server_was_started_anew_is_not_waited_for(store: Store) -> None:
    """As after a restart of the host on which the server keeps its data."""
    gone = Memory("vm", os.getuid(), "0" * 16, "0" * 32, "0", "0.0")
    store.client.call("HSET", MEMORY, "an-earlier-run-id", str(gone))
    assert store.create_job("job", LARGE).config.transport == "shm"
    store.client.call("HSET", MEMORY, store.client.run_id(), str(gone))
    assert store.create_job("other", LARGE).config.transport == "redis"


# -- what is lost, and what only may be ----------------------------------------------------------------------------


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory that stands for /dev/shm."""
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr(shared_memory, "ROOT", path)
    return path


@pytest.mark.parametrize(
    ("deleted", "lost"),
    [
        ("the job's directory", True),
        ("all of this user's", True),
        ("all, and another job was made since", True),
        ("the identity", False),
    ],
)
def test_memory_that_was_deleted_is_lost(store: Store, root: Path, deleted: str, lost: bool) -> None:
    """The kernel and the directory are the same: that it has no such job, or another identity, proves it. That only
    its identity is gone proves nothing."""
    job = store.create_job("job", model(), optimizer=kvps.SGD(lr=0.05), **SHM)
    _train(job, 3)
    assert segments_of(job)
    users = root / f"kvps-{os.getuid()}"
    if lost:
        shutil.rmtree(segments_of(job).folder if deleted == "the job's directory" else users)
    else:
        (users / "identity").unlink()
    if "another" in deleted:
        store.create_job("other", model(), **SHM)
    with aggregating(job):
        if lost:
            assert eventually(lambda: job.state().version == 0)
            assert eventually(lambda: bool(find_transport(job) and segments_of(job) and segments_of(job).here))
        work_on(job, "w0", 5)
        assert eventually(lambda: job.state().version == 5)
    assert recoveries(job) == [("0", "3")] * lost
    assert segments_of(store.job("job")).here  # type: ignore[union-attr]
    assert_same_bits(job.snapshot()[1], plain_loop(model(), 1, 5, 0.05))


def _standing_by(job: Job, **options: Any) -> bool:
    """Whether an aggregator that tries to take the job at once holds nothing, and has changed nothing."""
    before = job.state()
    aggregator = Aggregator(job, threading.Event(), options=AggregatorOptions(**options))
    aggregator.hold(at_once=True)
    holds = bool(aggregator.held.shards)
    aggregator.release()
    return not holds and job.state() == before and job.access.reader.holders() == [""]


@pytest.mark.parametrize("unlike", ["boot", "place", "unknown boot"])
def test_memory_of_which_no_more_is_known_is_not_called_lost(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch, unlike: str
) -> None:
    """Its directory is missing here, and so is its nonce: it may be in another /dev/shm, or gone with a restart."""
    if unlike == "unknown boot":
        monkeypatch.setattr(process, "boot", lambda: "")
    job = store.create_job("job", model(), **SHM)
    assert segments_of(job)
    segments_of(job).remove()
    (root / f"kvps-{os.getuid()}" / "identity").unlink()
    assert segments_of(job).seen == (unlike != "unknown boot")
    if unlike == "boot":
        monkeypatch.setattr(process, "boot", lambda: "0-0")
    elif unlike == "place":
        root.rename(root.with_name("away"))
        root.mkdir()
    assert _standing_by(job)


def test_the_nonce_alone_tells_the_memory_too(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may be told another boot than their host, and share its memory."""
    job = store.create_job("job", model(), **SHM)
    _train(job, 2)
    monkeypatch.setattr(process, "boot", lambda: "0-0")
    with aggregating(job):
        work_on(job, "w0", 3)
        assert eventually(lambda: job.state().version == 3)
        segments_of(job).remove()  # type: ignore[union-attr]
        assert eventually(lambda: job.state().version == 0)
    assert recoveries(job) == [("0", "3")]


@pytest.mark.parametrize("whose", ["the memory's", "the directory's"])
def test_another_users_memory_is_not_judged(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """Also not by root, who may look into it; nor where user ids are mapped, and the same number is another user."""
    job = store.create_job("job", model(), **SHM)
    assert segments_of(job)
    real = os.getuid
    if whose == "the memory's":
        monkeypatch.setattr(os, "getuid", lambda: real() + 1)
        segments_of(job).remove()
    else:
        monkeypatch.setattr(Segments, "_is_ours", lambda self: False)
    assert not segments_of(job).here
    assert _standing_by(job)
    with pytest.raises((kvps.UsageError, kvps.ServerUnfit), match=r"does not see|must be yours"):
        job.join("w0")


# -- the operator says that it is lost -----------------------------------------------------------------------------


@pytest.mark.slow
def test_an_aggregator_elsewhere_stands_by_until_it_is_told_that_the_memory_is_lost(
    store: Store, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and beside one that serves the job; it says so once. Another one, and a worker there, end the job."""
    monkeypatch.setenv("KVPS_REDIS_URL", store.url)
    settings = ["--transport", "shm", "--workers", "1", "--lease", "0.3"]
    made = kvps_run("create", "digits", "--job", "job", "--data", "static", *settings, *TINY)
    assert made.returncode == 0, made.stderr
    job = store.job("job")
    other = elsewhere.start("aggregator", "start", "--job", "job")
    other.until("stands by: its arrays are in a shared memory of")
    assert job.access.reader.holders() == [""]
    with aggregating(job):
        assert eventually(lambda: any(job.access.reader.holders()))
    _train(job, 3)
    other.process.terminate()
    assert "stands by" not in other.process.communicate(timeout=60)[0]
    assert recoveries(job) == []
    aggregator = elsewhere.start("aggregator", "start", "--job", "job", "--memory-lost")
    aggregator.until("shared memory was lost: goes on from version 0, which Redis has; lost the last 3 versions")
    elsewhere.start("worker", "--job", "job").output()
    aggregator.output()
    assert job.state().finished(job.config)
    assert recoveries(job) == [("0", "3")]
    verified = kvps_run("verify", "job")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_it_goes_on_in_the_memory_of_the_one_who_was_told(store: Store, root: Path, see_elsewhere: See) -> None:
    """Those who still see the old memory, and were alive all the time, have no part in it any more."""
    old = store.create_job("job", model(), optimizer=kvps.SGD(lr=0.05), **SHM)
    _train(old, 3)
    alive = old.join("w0")
    alive.pull()
    new = see_elsewhere("job")
    with aggregating(new, memory_lost=True):
        assert eventually(lambda: new.state().version == 0)
        assert eventually(lambda: segments_of(new).here)
        with pytest.raises(kvps.WorkerEvicted):
            alive.push(gradient(model(), 0, 0))
        abandon(alive)
        with pytest.raises(kvps.UsageError, match="does not see"):
            old.join("w0")
        work_on(new, "w0", 5)
        assert eventually(lambda: new.state().version == 5)
    assert _standing_by(old)
    assert _standing_by(store.job("job"))
    assert recoveries(new) == [("0", "3")]
    assert old.snapshot()[0] == 5, "what its aggregator gave to Redis when it ended"
    for job in (new, old):
        assert_same_bits(job.snapshot()[1], plain_loop(model(), 1, 5, 0.05))


def test_only_the_memory_that_the_job_was_in_is_given_up(
    store: Store, root: Path, see_elsewhere: See, tmp_path: Path
) -> None:
    """Two are told; the one that comes second does not take the job from the memory of the first."""
    store.create_job("job", model(), **SHM)
    told, late = see_elsewhere("job"), store.job("job")
    segments_of(late)._root = tmp_path  # type: ignore[union-attr]
    waiting = Aggregator(late, threading.Event(), options=AggregatorOptions(memory_lost=True))
    with aggregating(told, memory_lost=True):
        assert eventually(lambda: segments_of(told).here)
        work_on(told, "w0", 3)
        assert eventually(lambda: told.state().version == 3)
    assert told.access.reader.holders() == [""]
    waiting.hold(at_once=True)
    assert not waiting.held.shards
    assert told.access.reader.holders() == [""]
    waiting.release()
    assert told.state().version == 3


def test_memory_that_is_seen_is_not_given_up(store: Store, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job = store.create_job("job", model(), **SHM)
    _train(job, 3)
    stop = threading.Event()
    serving = threading.Thread(target=serve, args=(job,), kwargs={"stop": stop, "memory_lost": True})
    serving.start()
    work_on(job, "w0", 5)
    stop.set()
    serving.join()
    assert "finds out by itself" in caplog.text
    assert recoveries(job) == []


def test_a_worker_that_joins_while_the_job_moves_does_not_work_in_the_old_memory(
    store: Store, root: Path, see_elsewhere: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = store.create_job("job", model(), **SHM)
    new = see_elsewhere("job")
    join = old.access.scripts.join

    def late(*arguments: Any) -> Any:
        aggregator = Aggregator(new, threading.Event(), options=AggregatorOptions(memory_lost=True))
        take(aggregator)
        aggregator.release()
        return join(*arguments)

    monkeypatch.setattr(old.access.scripts, "join", late)
    with pytest.raises(kvps.WorkerEvicted, match="lost meanwhile"):
        old.join("w0")
    assert not any(member.active for member in old.state().members.values())


@pytest.mark.slow
def test_it_is_said_for_one_job_over_shared_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_REDIS_URL", store.url)
    store.create_job("job", model(), transport="redis")
    for arguments, words in (([], "give its name with --job"), (["--job", "job"], "are in Redis")):
        refused = kvps_run("aggregator", "start", "--memory-lost", *arguments)
        assert refused.returncode == 2
        assert words in refused.stderr.splitlines()[-1]


# -- whose directory it is -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_at_the_path_of_another_one_has_a_directory_of_its_own(home: Path) -> None:
    """Two containers that share /dev/shm, each with its own file system: the server of one starts and ends beside the
    jobs of the other."""
    code = "import sys, numpy, kvps; s = kvps.connect(); {} print(flush=True); sys.stdin.read()"
    create = "j = s.create_job('job', {'x': numpy.zeros(400_000, 'f4')}); print(j.access.transport.segments.folder)"

    @contextmanager
    def user(does: str) -> Iterator[str]:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        running = subprocess.Popen([sys.executable, "-c", code.format(does)], **pipes)
        assert running.stdout
        yield running.stdout.readline().strip()
        running.communicate()

    with user(create + ";") as folder:
        home.rename(away := home.with_name(f"{home.name}-away"))
        home.mkdir(mode=0o700)
        with user(""):
            assert Path(folder).is_dir()
        assert eventually(lambda: not (home / "redis.sock").exists())
        assert Path(folder).is_dir()
        shutil.rmtree(home)
        away.rename(home)
    assert eventually(lambda: not Path(folder).exists())
