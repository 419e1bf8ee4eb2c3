"""Connects to a server, and creates, lists and removes jobs."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kvps import embedded, shared, wire
from kvps.checkpoint import Checkpoint
from kvps.client import Client
from kvps.config import JobConfig
from kvps.errors import InvalidSetting, KvpsError, NotFinite, ServerFull, ServerLost
from kvps.formats import encoded, format_of
from kvps.job import Job
from kvps.keys import JOBS, JobKeys, check_name, staged_name
from kvps.layout import CHUNK_BYTES, DTYPE, Layout
from kvps.scripts import JobScripts, job_exists, job_not_found
from kvps.transport import connection_settings, redacted
from kvps.wire import Buffers

_log = logging.getLogger("kvps.store")
_SETTLE_S = 1.0
_WORTH_SHARING = 1 << 20  # below that the calls to Redis, which stay, are all that a round costs
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MORE_ROOM = "make room there (in a container: docker run --shm-size), or choose transport 'redis'"


def connect(url: str | None = None, listen: str | None = None, data_dir: Path | None = None) -> Store:
    """A store on the server at `url` (redis, rediss, unix), or for None on the user's own private server.

    That one is started if it does not run, and then ends with this process, or with the last of its stores that is
    closed; `listen` is HOST:PORT of a TCP port it opens as well, behind a password. It keeps nothing, or with
    `data_dir` all but the last second in files there. Raises NoServer, ServerUnfit, InvalidSetting.
    """
    if url is None:
        with embedded.ensured(listen, data_dir) as server:
            return Store(_client(server.url), server)
    if listen or data_dir:
        raise InvalidSetting(
            f"{'listen' if listen else 'data_dir'} is for the private server: leave it out, or the URL"
        )
    return Store(_client(url))


def _client(url: str) -> Client:
    client = Client(url)
    try:
        client.preflight()
    except BaseException:
        client.close()
        raise
    return client


class Store:
    """The jobs of one server. May be used from several threads."""

    def __init__(self, client: Client, server: embedded.Server | None = None) -> None:
        self.client = client
        self._server = server

    @property
    def url(self) -> str:
        """Where the server is, with its password if it has one."""
        return self.client.url

    @property
    def started_server(self) -> bool:
        """Whether this process started the server, which then ends with its last store."""
        return self._server is not None and self._server.started_here

    @property
    def borrowed_server(self) -> bool:
        """Whether this is the private server that another process started, with which it ends."""
        return self._server is not None and not self._server.lasting and not self._server.started_here

    @property
    def ends_server(self) -> bool:
        """Whether `close` ends the server: this process started it, and has no other store on it."""
        return self._server is not None and self._server.started_here and self._server.users == 1

    def create_job(
        self,
        name: str,
        params: Mapping[str, Any],
        *,
        config: JobConfig | None = None,
        id: str | None = None,
        **settings: Any,
    ) -> Job:
        """Make a job that begins with `params` (name -> float32 array) as version 0.

        `settings` are those of `JobConfig`: staleness, workers, shards, optimizer, reduction, nonfinite, ...;
        or give a whole `config`. `id` tells it from all other jobs of its name, see `fresh_id`; without it it gets one
        here. Raises JobExists, InvalidName, InvalidSetting, LayoutMismatch, NotFinite; then
        nothing was changed.
        """
        check_name("job", name)
        config = JobConfig.of("create_job", config, settings)
        layout = Layout.of(params, config.shards)
        config = self._with_transport(config, layout, name)
        arrays = layout.hosted(params, "parameter")
        for parameter, array in zip(layout.parameters, arrays, strict=True):
            if not wire.finite(array):
                raise NotFinite(f"parameter {parameter.name!r} holds NaN or Inf")
        chunks = wire.chunked(layout, arrays)
        job = self._make(name, config, layout, [("w", chunks)], None, id or fresh_id())
        if format_of(config.wire).lossy and self._is_near():
            _log.warning(
                "wire %s is for slow links: with all workers on this host it costs computing and saves no time, and "
                "fp32 is faster",
                config.wire,
            )
        return job

    def restore_job(self, checkpoint: Checkpoint, name: str | None = None, shards: int | None = None) -> Job:
        """Make a job that goes on from a checkpoint: under its name or another, with its shards or other ones.

        Its workers join under their old ids and go on where those were; those that were at work are waited for.
        Raises JobExists, InvalidName, InvalidSetting; then nothing was changed.
        """
        config = checkpoint.config
        if config.transport == "shm":  # this may be another host
            config = replace(config, transport="auto", memory="")
        name = checkpoint.job if name is None else name
        config = config if shards is None else replace(config, shards=shards)
        layout = Layout.of(checkpoint.layout.views(checkpoint.weights), config.shards)
        config = self._with_transport(config, layout, name)
        arrays = {"w": checkpoint.weights, **checkpoint.slots}
        chunks = [
            (what, [[[wire.view(flat[c.start : c.stop])] for c in shard] for shard in layout.chunks])
            for what, flat in arrays.items()
        ]
        return self._make(name, config, layout, chunks, checkpoint, fresh_id())

    def _make(
        self,
        name: str,
        config: JobConfig,
        layout: Layout,
        arrays: Sequence[tuple[str, Sequence[Sequence[Buffers]]]],
        checkpoint: Checkpoint | None,
        history: str,
    ) -> Job:
        """Stage a job's first version, and make it visible. `arrays` are "w" and optimizer slots, in chunks."""
        keys = JobKeys(name)
        if self.client.call("EXISTS", keys.config):
            raise job_exists(name)
        self._check_room(name, config, layout)
        # Staged under a name of its own: what another creator of the same job stages is never touched.
        version = checkpoint.version if checkpoint else 0
        staged = staged_name(version, f"{history}-0-{secrets.token_hex(4)}")
        items: list[tuple[str, Buffers]] = []
        pull = format_of(config.pull_wire)
        for shard in range(layout.shards):
            digests = {}
            for what, chunks in arrays:
                for number, chunk in enumerate(chunks[shard]):
                    items.append((keys.array(shard, what, staged, number), chunk))
                digests[what] = wire.fold(wire.digest(chunk) for chunk in chunks[shard])
                if what == "w" and pull.lossy:
                    for number, chunk in enumerate(chunks[shard]):
                        values = np.frombuffer(b"".join(chunk), DTYPE)
                        items.append((keys.pulled(shard, staged, number), [encoded(pull, values).data]))
            if version:  # version 0 has none: nobody has committed it
                low, high = layout.shard_range(shard)
                manifest = {"plan": 0, "version": version, "bytes": (high - low) * DTYPE.itemsize, "digests": digests}
                items.append((keys.manifest(shard, staged), [memoryview(json.dumps(manifest).encode())]))
        scripts = JobScripts(self.client.call, keys, layout.shards)
        begins = json.dumps(_as_text(checkpoint)) if checkpoint else ""
        segments = shared.Segments(config.memory, history) if config.transport == "shm" else None
        if segments:
            segments.ensure()
        try:
            self.client.put(items)
            self.client.call("SADD", JOBS, name)  # first: a job that nobody lists would be there for ever
            scripts.create(config, layout, history, staged, self.client.run_id(), begins)
        except ServerLost:
            raise  # it may have been created all the same: whose bytes these are is not known
        except KvpsError:
            self.client.unlink([key for key, _ in items])
            if segments:
                segments.remove()
            raise
        return Job(self.client, name)

    def _with_transport(self, config: JobConfig, layout: Layout, job: str) -> JobConfig:
        """The settings with the transport that is meant by "auto", and the host whose memory is shared.

        Raises ServerFull if that has not the room, InvalidSetting if there is none.
        """
        if config.transport == "redis":
            return config
        # Versions: the present one, the one before, one that is staged, one that a slow reader holds.
        gradients = config.workers * (config.max_pending + 1) * format_of(config.wire).nbytes(layout.size)
        held = config.workers * layout.nbytes if config.staleness else 0  # a version each, by those who are slow
        needs = 4 * layout.nbytes * (1 + len(config.optimizer.slots)) + gradients + held
        if config.transport == "auto":
            if layout.nbytes < _WORTH_SHARING or not self._is_local():
                return replace(config, transport="redis")
            if why := _why_not_shared(config, needs):
                _log.warning("job %s: arrays go through Redis, and not through memory, which is faster: %s", job, why)
                return replace(config, transport="redis")
        elif not shared.available():
            raise InvalidSetting(f"transport shm needs {shared.ROOT}, which this machine has not: choose 'redis'")
        elif needs > shared.room():
            raise ServerFull(
                f"{shared.ROOT} has {_mb(shared.room())} left, the job needs {_mb(needs)}: make room, or choose 'redis'"
            )
        return replace(config, transport="shm", memory=shared.memory_of(self.url))

    def _is_local(self) -> bool:
        """Whether nobody can reach the server but from this host."""
        return self.url.startswith("unix:") and not self.client.port()

    def _is_near(self) -> bool:
        """Whether the server is on this host, and nothing shows that others are to reach it from elsewhere."""
        return self._is_local() or connection_settings(self.url).get("host") in _LOOPBACK

    def _check_room(self, name: str, config: JobConfig, layout: Layout) -> None:
        """Raise ServerFull for a job that a server with limited memory could not hold at its worst moment."""
        used, limit = self.client.memory()
        # Two versions, the one being staged and the reserve for it; and of each worker what may wait and one more.
        pull, pushed = format_of(config.pull_wire), format_of(config.wire).nbytes(layout.size)
        pulled = pull.nbytes(layout.size) if pull.lossy else 0
        versions = 4 * (layout.nbytes * (1 + len(config.optimizer.slots)) + pulled) + 2 * CHUNK_BYTES * layout.shards
        gradients = 0 if config.transport == "shm" else config.workers * (config.max_pending + 1) * pushed
        if limit and used + versions + gradients > limit:
            raise ServerFull(
                f"job {name!r} needs {_mb(versions + gradients)} and {redacted(self.url)} has {_mb(limit - used)} left "
                f"of its maxmemory ({_mb(limit)}): raise that, remove jobs (kvps rm), or have fewer workers"
            )

    def job(self, name: str) -> Job:
        """The job of that name. Raises JobNotFound, InvalidName."""
        return Job(self.client, name)

    def jobs(self) -> list[str]:
        """Names of all jobs, sorted."""
        return sorted(self.client.call("SMEMBERS", JOBS))

    def free_name(self, wished: str) -> str:
        """This name, or with a number behind it if jobs of that name are there."""
        taken, base = set(self.jobs()), wished[:60]
        return next(n for n in (base if i == 1 else f"{base}-{i}" for i in range(1, len(taken) + 2)) if n not in taken)

    def remove_job(self, name: str) -> None:
        """Delete a job and all its bytes, damaged ones too. Who works on it is told that it does not exist.

        Goes on where an earlier call was cut short. Raises JobNotFound.
        """
        keys = JobKeys(name)
        control = (keys.config, keys.layout, keys.version, keys.removed)
        fields, workers, there = self.client.together(
            [("HGETALL", keys.version), ("HKEYS", keys.workers), ("EXISTS", *control)]
        )
        if not there:
            self.client.call("SREM", JOBS, name)
            raise job_not_found(name)
        shards = sum(field.startswith("shard:") for field in fields)
        segments = self._segments(keys, fields.get("id", ""))
        JobScripts(self.client.call, keys, shards).remove(workers)
        if segments:
            segments.remove()
        self._unlink_all(keys)
        while workers:
            # A worker may have been sending a gradient, and one that was killed leaves it on the way: there is no
            # sign to wait for when a closed connection's last bytes arrive.
            time.sleep(_SETTLE_S)
            if not self._unlink_all(keys):
                break
        if segments:
            segments.remove()  # a worker may have made one meanwhile
        self.client.call("SREM", JOBS, name)
        self.client.call("DEL", keys.removed)

    def _segments(self, keys: JobKeys, id: str) -> shared.Segments | None:
        """Those of a job that may be damaged."""
        with suppress(KvpsError):
            if memory := self.client.call("HGET", keys.config, "memory"):
                return shared.Segments(memory, id)
        return None

    def _unlink_all(self, keys: JobKeys) -> int:
        found = list(self.client.scan(keys.all_bytes))
        self.client.unlink(found)
        return len(found)

    def close(self) -> None:
        """Close the connections; and end the server if this process started it and has no other store on it."""
        self.client.close()
        server, self._server = self._server, None
        if server:
            server.stop()

    def close_unless_used(self) -> bool:
        """Close, but not if that ended a server which other processes use; whether it is closed."""
        if not self.started_server:
            self.close()
            return True
        with embedded.alone():  # who was about to connect has by now; who comes later starts a server anew
            if self._server and self._server.used_by_others():
                return False
            self.close()
            return True

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fresh_id() -> str:
    """The id of a job that is not made yet: who makes it under this id, and asks again, finds his own."""
    return secrets.token_hex(4)


def _why_not_shared(config: JobConfig, needs: int) -> str:
    """Why "auto" does not choose shared memory for a job that needs so many bytes of it; "" if it does."""
    if config.shards > 1 or config.pull_wire != "fp32":
        return "shared memory is for shards=1 and pull_wire='fp32'; choose these, or transport 'redis'"
    if not shared.available():
        return f"{shared.ROOT} is not there, or cannot be written to: {_MORE_ROOM}"
    if needs >= (room := shared.room()) // 2:
        return f"{shared.ROOT} has {_mb(room)} left, and the job needs {_mb(needs)} and as much again: {_MORE_ROOM}"
    return ""


def _mb(nbytes: int) -> str:
    return f"{max(0, nbytes) / 1e6:,.1f} MB"


def _as_text(checkpoint: Checkpoint) -> dict[str, str | dict[str, str]]:
    """What create.lua takes over of a checkpoint; numbers as text, for Lua would round them."""
    return {
        "version": str(checkpoint.version),
        "head": checkpoint.head,
        "contributions": str(checkpoint.begin.contributions),
        "job": checkpoint.job,
        "id": checkpoint.id,
        "clock": {worker: str(count) for worker, count in checkpoint.clock.items()},
        "workers": checkpoint.workers_anew(),
        "units": checkpoint.units_anew(),
    }
