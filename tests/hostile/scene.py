"""Real jobs of several kinds on a real server, all that their keys and files hold, and a way to make that anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import redis
from helpers.harness import aggregating, await_version, gradient, model
from helpers.internals import abandon, abandon_learner, die_sending, fall_silent
from kvps_workers.queue.queue import CPU, TaskQueue

import kvps
from hostile.mutations import Content
from kvps.actors.watch import Watch
from kvps.arrays.layout import Array
from kvps.arrays.pieces import Buffer
from kvps.connection.client import Client
from kvps.history import commit_log
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.machine.paths import private_directory
from kvps.protocol.scripts import Said
from kvps.session.session import Session
from kvps.store import Store
from kvps.transport import shared_memory

JOB, NEIGHBOUR = "job", "neighbour"
NEIGHBOURS_KEYS = b"kvps:{neighbour"
_LONG = {"worker_timeout_ms": 86_400_000, "lease_ms": 86_400_000}  # nothing changes but what a reader does
_ASIDE = b"aside"
_NOISE = (b"kvps:preflight",)


class GaveUp(Exception):
    """A reader waited for something that does not come; it would wait on, and that is right."""


class HurriedClient(Client):
    """A client whose waits end at once, and which gives up after some of them if `waits` says how many."""

    def __init__(self, url: str, waits: int | None = None) -> None:
        super().__init__(url, patience_s=0.05)
        self._allowed = waits
        self.waits = 0

    def begin(self) -> None:
        """Begin to count anew."""
        self.waits = 0

    def _wait_command(self, streams: Any, timeout_ms: int) -> Any:
        self.waits += 1
        if self._allowed is not None and self.waits > self._allowed:
            raise GaveUp
        if self._allowed is None:
            return super()._wait_command(streams, 20)
        # Without BLOCK: a server looks only ten times a second at what has waited long enough.
        return ("XREAD", "STREAMS", *streams.keys(), *streams.values())


class Held(NamedTuple):
    """What a watcher has that read the version before the newest one, and what it is to have then."""

    names: tuple[str, ...]
    flat: Array
    newest: Array


class Scene:
    """A job of one kind beside a neighbour on the server at `url`.

    `content` is what every key held when the scene was made, `absent` are keys that a job may have and this one lacks,
    `files` are a checkpoint and a log by their names, `neighbour` is the digest of the neighbour's keys, `size` is the
    bytes of all values, `held` is what a watcher of a published job has. Keys whose names begin as one of `stays` are
    not touched.
    """

    stays: tuple[bytes, ...] = ()

    def __init__(self, url: str, folder: Path, make: Callable[[Store, Path], Job]) -> None:
        self.url = url
        self.folder = folder
        self.raw = redis.Redis.from_url(url, protocol=2)
        self.raw.flushall()
        self.store = Store(HurriedClient(url, waits=4))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with kvps.connect(url) as store:
            neighbour = store.create_job(NEIGHBOUR, {"x": np.ones(2, np.float32)}, **_LONG)
            _pushed(neighbour.join("w0"))
            job = make(store, folder)
        self.memory = job.config.metadata.memory
        self.held = _held(self.opened()) if job.config.metadata.publishes else None
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.content: Content = {}
        self._dumps: dict[bytes, tuple[bytes, int]] = {}
        self._segments: dict[Path, bytes] = {}
        self._note(job)

    def _note(self, job: Job) -> None:
        everything = sorted(key for key in self.raw.keys("*") if key not in _NOISE)
        content = {}
        for key in everything:
            self._dumps[key] = self.raw.dump(key), max(0, self.raw.pttl(key))
            if not key.startswith((NEIGHBOURS_KEYS, b"kvps:memory")):
                type_ = self.raw.type(key).decode()
                content[key] = type_, READ[type_](self.raw, key)
        self.content = content
        k = job.access.keys
        possible = [k.pin, k.mirror, k.plan, k.ready, k.inbox, k.removed, k.units, k.free_units, k.draining, k.clock]
        possible += [k.finished, k.lease(0), k.term(0), k.lease(1), k.leases, k.owner(0), k.trace("w0"), k.skip]
        possible += [k.activity, k.aggregators, k.shard_trace(0), k.free_units, k.lots]
        self.absent = [key.encode() for key in possible if key.encode() not in self._dumps]
        self.neighbour = self.digest(NEIGHBOURS_KEYS)
        self.size = sum(len(dump) for dump, _ in self._dumps.values())
        if self.memory:
            at = shared_memory.folder_of(self.url)
            self._segments = {path: path.read_bytes() for path in at.rglob("*") if path.is_file()}

    def opened(self) -> Job:
        """Return the job, opened now."""
        return self.store.job(JOB)

    def restore(self) -> None:
        """Make everything as it was when the scene was made."""
        pipe = self.raw.pipeline(transaction=False)
        if self.stays:
            pipe.delete(*(key for key in self.raw.keys("*") if not key.startswith(self.stays)))
        else:
            pipe.flushall()
        for key, (dump, ms) in self._dumps.items():
            pipe.restore(key, ms, dump)
        pipe.execute()
        for path, data in self._segments.items():
            for folder in (path.parent.parent, path.parent):
                private_directory(folder)
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
        for name, data in self.files.items():
            (self.folder / name).write_bytes(data)
        for path in self.folder.iterdir():
            if path.name not in self.files:
                path.unlink()

    def digest(self, only: bytes = b"") -> dict[bytes, bytes]:
        """Return the dump of every key whose name begins with `only`."""
        keys = sorted(key for key in self.raw.keys("*") if key.startswith(only) and key not in _NOISE)
        pipe = self.raw.pipeline(transaction=False)
        for key in keys:
            pipe.dump(key)
        return dict(zip(keys, pipe.execute(), strict=True))

    def changed(self, before: dict[bytes, bytes], after: dict[bytes, bytes]) -> set[bytes]:
        """Return the keys that do not hold the same in two digests. A dump shows a hash's fields in any order."""
        return {
            key
            for key in before.keys() | after.keys()
            if before.get(key) != after.get(key) and self._meaning(before.get(key)) != self._meaning(after.get(key))
        }

    def _meaning(self, dump: bytes | None) -> Any:
        if dump is None:
            return None
        self.raw.restore(_ASIDE, 0, dump, replace=True)
        try:
            type_ = self.raw.type(_ASIDE).decode()
            return type_, READ[type_](self.raw, _ASIDE)
        finally:
            self.raw.delete(_ASIDE)

    def close(self) -> None:
        self.store.close()
        self.raw.close()


READ: dict[str, Callable[[Any, bytes], Any]] = {
    "string": lambda raw, key: raw.get(key),
    "hash": lambda raw, key: raw.hgetall(key),
    "stream": lambda raw, key: raw.xrange(key),
    "zset": lambda raw, key: raw.zrange(key, 0, -1, withscores=True),
    "set": lambda raw, key: sorted(raw.smembers(key)),
    "list": lambda raw, key: raw.lrange(key, 0, -1),
}


def _pushed(*sessions: Session) -> None:
    """Have sessions push once more. The second leaves; the first ends as if its process had been killed."""
    for session in sessions:
        params = session.pull()
        if session._access.config.units:
            session.next_unit()
        session.push(gradient(params, session.rank, session.round), loss=0.5)
    for session in sessions[1:]:
        session.leave(finished=False)
    fall_silent(sessions[0])
    abandon(sessions[0])


def _trained(
    store: Store, folder: Path, workers: int = 2, rounds: int = 3, buffers: tuple[str, ...] = (), **settings: Any
) -> Job:
    params = model() | {name: Buffer(model()[name], "average") for name in buffers}
    job = store.create_job(JOB, params, workers=workers, **(_LONG | settings))
    sessions = [job.join(f"w{i}") for i in range(workers)]
    with aggregating(job):
        for _ in range(rounds):
            for session in sessions:
                if job.config.units:
                    session.next_unit()
                session.push(gradient(session.pull(), session.rank, session.round), loss=0.25)
            await_version(job, session.round)
            job.report(session.round, {"loss": 0.25, "n": float("nan")}, by="me")
    state = job.state()
    made = job.checkpoint()
    made.write(folder / made.filename)
    commit_log.keep(LogStream(job.access), folder, state, made.version)
    store.client.call("DEL", job.access.keys.pin)
    _pushed(*sessions)
    job.access.scripts.plan()
    return job


def _restored(store: Store, folder: Path) -> Job:
    _trained(store, folder, optimizer=kvps.Adam(lr=0.1))
    found = kvps.Checkpoint.load(next(folder.glob("*.safetensors")))
    store.remove_job(JOB)
    job = store.restore_job(found, JOB)
    sessions = [job.join(f"w{i}") for i in range(2)]
    _pushed(*sessions)
    job.access.scripts.plan()
    return job


def _queued(store: Store, folder: Path) -> Job:
    job = _trained(store, folder, task="digits", batch_size=48)
    with TaskQueue(store.url, CPU) as queue:
        queue.submit(job)
        queue.beat(busy=True)
        queue.take("execution")
        queue.submit(job)
        queue.take("another")
        queue.release(*_running(queue), "failed", "it ended")
    return job


def _running(queue: TaskQueue) -> tuple[str, str]:
    return next(row.held for row in queue.look()[1] if row.execution == "another")


def published(version: int) -> dict[str, np.ndarray]:
    """Return a learner's model of several dtypes; two of its names are tied, and a few items are those of a version."""
    array = np.arange(4_000, dtype=np.float16).reshape(40, 100)
    array[:, version] = -1
    return {
        "W": array,
        "steps": np.array(version, np.int64),
        "b": np.ones(7, np.float32),
        "mask": array[0] > 3,
        "T": array,
    }


def _published(store: Store, folder: Path) -> Job:
    """A job whose learner has published, and was killed while it opened the plan of the next version."""
    policy = store.publisher(JOB, published(0), shards=2)
    for version in range(1, 5):
        policy.publish(published(version), loss=0.25)
    job = policy.job
    job.report(4, {"loss": 0.25}, by="me")
    made = job.checkpoint()
    made.write(folder / made.filename)
    state, term = job.state(), job.access.reader.terms()[0]
    commit_log.keep(LogStream(job.access), folder, state, made.version)
    store.client.call("DEL", job.access.keys.pin)
    policy.close()
    job.access.scripts.publish(term, state, "here:1:2:x", Said(0.5, "nonce"))
    return job


def _experience(store: Store, folder: Path) -> Job:
    """A job with experience: of one prompt the items are trained on, of one taken, of one rejected, of one they wait;
    an actor has put one of two items, and was killed while it sent the next one."""
    rollouts = kvps.Rollouts(max_staleness=2, capacity=32, prompts=8, group=2)
    policy = store.publisher(JOB, published(0), shards=2, rollouts=rollouts)
    watch = store.watch(JOB, actor="a0")
    _answered(watch, 9)
    policy.publish(published(1), trained=policy.rollouts.take(groups=1))
    policy.rollouts.reject(policy.rollouts.take(groups=1), "of no use")
    watch.update()
    policy.rollouts.take(groups=1)
    die_sending(watch.rollouts, 1_000)
    abandon_learner(policy)
    job = store.job(JOB)
    made = job.checkpoint()
    made.write(folder / made.filename)
    commit_log.keep(LogStream(job.access), folder, job.state(), made.version)
    store.client.call("DEL", job.access.keys.pin)
    return job


def _answered(watch: Watch, items: int) -> None:
    watch.load(published(0))
    for n in range(items):
        assert watch.next_unit() is not None
        watch.rollouts.put({"tokens": np.arange(9, dtype=np.int32), "n": n}, version=watch.version)


def _held(job: Job) -> Held:
    state, reader = job.access.reader.round_state(), job.access.reader
    before, newest = (np.zeros(job.layout.size, np.float32) for _ in range(2))
    reader.read_exactly(state.before, before)
    reader.read_exactly(state.names, newest)
    return Held(state.before, before, newest)


def _slow_reader(store: Store, folder: Path) -> Job:
    job = _trained(store, folder, staleness=2, gradient_format="topk:0.1", weight_format="bf16")
    job.access.scripts.pin(86_400_000)
    return job


def _grouped() -> kvps.SGD:
    rates = kvps.schedules.TableLR([0.1, 0.2, 0.3])
    warmed = kvps.schedules.SequentialLR([kvps.schedules.LinearLR(0, 1, 2), kvps.schedules.StepLR(1, 2)], [2])
    return kvps.SGD(lr=warmed, groups=(kvps.ParameterGroup("?", momentum=0.5, lr=rates),))


SCENES: dict[str, Callable[[Store, Path], Job]] = {
    "BSP, two workers, Adam": lambda store, folder: _trained(store, folder, optimizer=kvps.Adam(lr=0.1)),
    "groups and a table": lambda store, folder: _trained(store, folder, optimizer=_grouped()),
    "SSP, topk and bf16, a pin": _slow_reader,
    "units": lambda store, folder: _trained(store, folder, units=12),
    "two shards": lambda store, folder: _trained(store, folder, shards=2, optimizer=kvps.SGD(lr=0.1, momentum=0.9)),
    "buffers": lambda store, folder: _trained(store, folder, buffers=("b", "scale"), optimizer=kvps.Adam(lr=0.1)),
    "restored": _restored,
    "queue": _queued,
    "published": _published,
    "experience": _experience,
}
if shared_memory.available():
    SCENES["shared memory"] = lambda store, folder: _trained(store, folder, transport="shm")


@contextmanager
def scene(name: str, url: str, folder: Path) -> Iterator[Scene]:
    """Make a scene on an empty server; the server is empty again behind the block."""
    found = Scene(url, folder, SCENES[name])
    try:
        yield found
    finally:
        found.raw.flushall()
        found.close()
