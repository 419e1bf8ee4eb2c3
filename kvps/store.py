"""Connects to a server, and creates, lists and removes jobs."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

import numpy as np

from kvps.actors.published import Asked, holder_of, published_job
from kvps.actors.publisher import Publisher
from kvps.actors.watch import Watch, await_job
from kvps.arrays.digest import Buffers, chunked, chunked_flat, digest_of, finite, fold
from kvps.arrays.formats import encoded, format_of
from kvps.arrays.inputs import of_pytorch
from kvps.arrays.layout import CHUNK_BYTES, DTYPE, Array, Layout
from kvps.arrays.number_ranges import counts_as_text
from kvps.arrays.parts import with_parts
from kvps.arrays.pieces import Buffer, Parameter
from kvps.arrays.weight_view import VIEW, has_view
from kvps.config import JobConfig, JobSettings, Metadata, takes_settings
from kvps.config.combinations import check_layout
from kvps.config.rollouts import Rollouts
from kvps.config.settings import AUTO
from kvps.config.specs import REPLICATED
from kvps.connection.client import Client
from kvps.connection.cluster import open_client
from kvps.connection.replica_reader import ReplicaReader
from kvps.connection.urls import redacted
from kvps.errors import (
    CorruptData,
    InvalidSetting,
    JobExists,
    JobNotFound,
    KvpsError,
    NoServer,
    NotFinite,
    ServerFull,
    ServerLost,
    ServerUnfit,
    counted,
)
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import newest
from kvps.job import Job, readable
from kvps.machine import launcher
from kvps.machine.files import writable_directory
from kvps.optim.trial import try_out
from kvps.parsing import bytes_text, whole_setting
from kvps.protocol.answers import being_removed, job_exists, job_not_found
from kvps.protocol.job_state import State
from kvps.protocol.keys import JOBS, MEMORY, JobKeys, check_id, check_new_name, staged_name
from kvps.protocol.scripts import JobScripts
from kvps.server import private_server
from kvps.transport import shared_memory
from kvps.transport.access import JobAccess
from kvps.transport.choice import is_near, with_transport
from kvps.transport.kept_state import kept_items
from kvps.transport.opening import open_transport

log = logging.getLogger("kvps.store")

T = TypeVar("T")
U = TypeVar("U")

_URL_VARIABLE = "KVPS_REDIS_URL"
_SETTLE_S = 1.0
_ID_TRIES = 500


def connect(
    url: str | None = None,
    listen: str | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    read_replicas: bool = False,
    stays_s: float = 0.0,
) -> Store:
    """Return a store on the server at `url`; for None on that of KVPS_REDIS_URL, or else on the user's own private
    server.

    The URL begins with redis, rediss or unix; or with redis+sentinel or rediss+sentinel, and then names Sentinels.
    The private server is started if it does not run. It ends when this process has ended or closed its stores, and no
    other process uses it. `listen` is HOST:PORT of a TCP port to open too, behind a password. The server keeps no data,
    or with `data_dir` all but the last second in files there. `stays_s` is for how many seconds a private server that
    this starts stays after its last use, if `Store.keep_server` asks for that. With `read_replicas`, `Job.snapshot`
    reads arrays from replicas of the server or the cluster where they have them. Raises NoServer, ServerUnfit,
    InvalidSetting.
    """
    if url is None and not (listen or data_dir):
        url = os.environ.get(_URL_VARIABLE) or None
    if url is None:
        if read_replicas:
            raise InvalidSetting("read_replicas is for a server with replicas: give its URL, or leave it out")
        with private_server.ensured(listen, Path(data_dir) if data_dir else None, stays_s) as server:
            return Store(open_client(server.url, private_server.why_lost), server)
    if listen or data_dir:
        raise InvalidSetting(
            f"{'listen' if listen else 'data_dir'} is for the private server: leave it out, or the URL"
        )
    client = open_client(url, private_server.why_lost)
    try:
        return Store(client, replicas=ReplicaReader(client) if read_replicas else None)
    except InvalidSetting:
        client.close()
        raise


class Store:
    """The jobs of one server. May be used from several threads.

    A pickle of it holds the server's URL, with its password if that stands in the URL. Where it is unpickled it
    connects anew, and does not end the server.
    """

    def __init__(
        self, client: Client, server: private_server.Server | None = None, replicas: ReplicaReader | None = None
    ) -> None:
        self.client = client
        self._server = server
        self._stays = False
        self._replicas = replicas

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.url, self._replicas is not None)

    @property
    def url(self) -> str:
        """The URL of the server, with its password if it has one."""
        return self.client.url

    @property
    def server_name(self) -> str:
        """The server's name and version, as in "Valkey 9.1.2". Raises ServerLost."""
        return self.client.server_name()

    @property
    def started_server(self) -> bool:
        """Whether this process started the server."""
        return self._server is not None and self._server.started_here

    @property
    def ends_unused(self) -> bool:
        """Whether this is the private server, and it ends when no process uses it."""
        return self._server is not None and not self._server.lasting

    @property
    def stays_s(self) -> float:
        """For how many seconds the private server stays after its last use; 0 if it ends at once, or not by itself."""
        return self._server.stays_s if self._server else 0.0

    @property
    def keeps_data(self) -> bool:
        """Whether this is a private server that keeps its data in files."""
        return self._server is not None and self._server.keeps

    def keep_server(self) -> None:
        """Have `close` leave a private server that this process started running for `stays_s` after its last use."""
        self._stays = self.stays_s > 0

    @property
    def ends_server(self) -> bool:
        """Whether `close` ends the server: this process started it, only this store uses it, and nothing keeps it."""
        return self._is_last_here and not self._stays and not self._used_by_others

    @property
    def hands_over_server(self) -> bool:
        """Whether `close` leaves the server that this process started to other processes that use it."""
        return self._is_last_here and self._used_by_others

    @property
    def _is_last_here(self) -> bool:
        return self._server is not None and self._server.started_here and self._server.users == 1

    @property
    def _used_by_others(self) -> bool:
        return self._server is not None and self._server.used_by_others()

    @takes_settings
    def create_job(
        self,
        name: str,
        params: Mapping[str, Any],
        *,
        config: JobConfig | None = None,
        id: str | None = None,
        parts: Mapping[str, str | Iterable[str]] | None = None,
        task: str = "",
        procs: int = 1,
        rounds: int = 0,
        **settings: Unpack[JobSettings],
    ) -> Job:
        """Create a job that begins with `params` (name -> float32 array) as version 0.

        `settings` are those of `JobConfig`: staleness, workers, shards, optimizer, reduction, nonfinite, ...; or give a
        whole `config`. `id` tells the job from all other jobs of its name; the default is a `fresh_id`. `parts` names
        parts of the model, which workers may pull and push alone: ``{"body": "layers.*", "head": ["head.*"]}``, with
        names of parameters or patterns of them, each parameter in one part. `task` names the task that workers train
        with it, each in `procs` processes, and `rounds` says how many each is going to do, so that screens can show how
        much is done. Raises JobExists, InvalidName, InvalidSetting, LayoutMismatch, NotFinite; nothing was changed
        then.
        """
        check_new_name("job", name)
        config = JobConfig.of("create_job", config, settings, Metadata(procs, task, rounds))
        id = self._spread_id(name, config.shards) if id is None else check_id(id)
        layout = with_parts(Layout.of(params, config.shards), parts, config.fragments)
        check_layout(config, layout)
        config.optimizer.check_groups([p.name for p in layout.parameters if not p.buffer])
        try_out(config.optimizer, config.reduction)
        values = {name: given.value if isinstance(given, Buffer) else given for name, given in params.items()}
        arrays = layout.hosted(values, "parameter")
        for parameter, array in zip(layout.parameters, arrays, strict=True):
            if not finite(array):
                raise NotFinite(_not_finite(parameter))
        config = _decided(config, values)
        chunks = chunked(layout, arrays)
        job = self._make(name, config, layout, [("w", chunks)], None, id)
        if format_of(config.gradient_format).lossy and is_near(self.client):
            log.warning(
                "gradient_format %s is for slow links: with all workers on this host it costs computing and saves no "
                "time, and fp32 is faster",
                config.gradient_format,
            )
        return job

    def create_published(self, name: str, layout: Layout, flat: Array, config: JobConfig) -> Job:
        """Create a job whose versions a learner publishes: `flat`, (layout.size,) words, is version 0. Raises
        JobExists, InvalidName, InvalidSetting; nothing was changed then."""
        check_new_name("job", name)
        chunks = chunked_flat(layout, flat)
        return self._make(name, config, layout, [("w", chunks)], None, self._spread_id(name, config.shards))

    def publisher(
        self,
        name: str | None,
        model: Any,
        *,
        dtype: str | None = None,
        shards: int = 1,
        durability: str = "memory",
        checkpoints: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        resume: bool | None = None,
        rollouts: Rollouts | None = None,
        wait: float | None = None,
        takeover: bool = False,
    ) -> Publisher:
        """Return the publisher of a job whose versions this process makes, with an optimizer of its own.

        with store.publisher("policy", model) as policy:
            while policy.version < 1000:
                ...
                policy.publish(model, loss=loss)

        `model` is a module, a state dict, or name -> array, of any dtypes. If there is no such job, it is made, and the
        weights are its version 0; else `model` only says which names, shapes and dtypes are meant: `Publisher.load`
        brings it to the newest version. With `dtype`, such as "bf16", arrays of wider floats are published in that one.
        `shards` and `durability` are those of `create_job`. A checkpoint is written `checkpoint_every` so many versions
        (100) into the directory `checkpoints`; with `resume` a job that is not there (any more) begins with the newest
        of them, with the experience that waited then. `rollouts` say how experience comes from actors, and how many
        prompts they answer: see `kvps.Rollouts`.

        Under ``kvps run --learner``, a `name` of None is that of the run, and it gives checkpoints and resume where
        they are left out.

        A job has one publisher. The next one waits for its end, up to `wait` seconds or as long as it takes; or with
        `takeover` it takes its place, and what the other one publishes from then on is refused. Raises LayoutMismatch,
        NotFinite, InvalidSetting, UsageError if the job is trained by workers or still published by another process.
        """
        asked = Asked(dtype, shards, durability, rollouts)
        name = _named(name)
        said = os.environ.get(launcher.CHECKPOINT_EVERY, "")
        asked_every = int(said) if checkpoint_every is None and said.isdecimal() else checkpoint_every
        every = whole_setting("checkpoint_every", 100 if asked_every is None else asked_every, 1)
        where = checkpoints or os.environ.get(launcher.CHECKPOINTS)
        directory = writable_directory("checkpoints", Path(where)) if where else None
        resume = bool(os.environ.get(launcher.RESUME)) if resume is None else resume
        if resume and name not in self.jobs() and directory and (found := newest(directory, name)):
            with suppress(JobExists):  # another process has just restored it
                self.restore_job(found.checkpoint)
        job, dtypes, given = published_job(self, name, model, asked)
        return Publisher(job, dtypes, given, holder_of(job, given, directory, every)).take(wait, takeover)

    def watch(self, name: str | None = None, wait: float = 60.0, *, actor: str = "") -> Watch:
        """Return a watch of a job, which brings its newest weights here again and again, and sends experience to its
        learner, as `actor` if a name is given; see `kvps.Watch`. Under ``kvps run --learner`` the run says both names.
        If there is no such job yet, the call waits for it, up to `wait` seconds. Raises JobNotFound, CorruptData,
        InvalidName."""
        actor = actor or os.environ.get(launcher.ACTOR, "")
        return Watch(await_job(partial(self.job, _named(name)), wait), actor)

    def restore_job(
        self,
        checkpoint: Checkpoint,
        name: str | None = None,
        shards: int | None = None,
        launched_by: str = "",
        before: JobConfig | None = None,
        id: str | None = None,
    ) -> Job:
        """Create a job that continues from a checkpoint, with its name and number of shards unless others are given.

        Workers join under their old ids and continue where they were. The job waits for all workers that had work left,
        but for those that were evicted. `launched_by` is what `kvps.machine.launcher` says of the command whose
        processes they are. If one had launched the earlier job too, all are started again: then it waits for these too.
        `before` are the settings of the checkpoint's job, if `checkpoint.config` has others: the log says which.
        `id` is as for `create_job`.
        Raises JobExists, InvalidName, InvalidSetting; nothing was changed then.
        """
        config = checkpoint.config.noting(launched_by=launched_by)
        if config.replicas:  # these may be other servers
            config = replace(config, durability=REPLICATED)
        if config.transport == "shm":  # this may be another host
            config = replace(config.noting(memory=""), transport="auto")
        name = check_new_name("job", checkpoint.job if name is None else name)
        config = config if shards is None else replace(config, shards=shards)
        layout = checkpoint.layout.of_shards(config.shards)
        arrays = {"w": checkpoint.weights, **checkpoint.slots}
        chunks = [(what, chunked_flat(layout, flat)) for what, flat in arrays.items()]
        changed = checkpoint.config.changes(before) if before else {}
        id = self._spread_id(name, config.shards) if id is None else check_id(id)
        return self._make(name, config, layout, chunks, checkpoint, id, changed)

    def _spread_id(self, name: str, shards: int) -> str:
        """Return a fresh id under which the slots of all shards fall evenly on the nodes of a cluster."""

        def unevenness(id: str) -> int:
            keys = JobKeys(name, id)
            return self.client.unevenness([keys.slot(shard) for shard in range(shards)])

        best, least = "", sys.maxsize
        for _ in range(_ID_TRIES):
            id = fresh_id()
            if (uneven := unevenness(id)) < least:
                best, least = id, uneven
            if least <= 1:
                break
        return best

    def _make(
        self,
        name: str,
        config: JobConfig,
        layout: Layout,
        arrays: Sequence[tuple[str, Sequence[Sequence[Buffers]]]],
        checkpoint: Checkpoint | None,
        id: str,
        changed: Mapping[str, tuple[str, str]] | None = None,
    ) -> Job:
        """Stage a job's first version and make it visible. `arrays` are "w" and the optimizer slots, in chunks.
        `changed` are the settings that a checkpoint's job had otherwise."""
        keys = JobKeys(name, id)
        if self.client.call("EXISTS", keys.version, keys.config, keys.layout):
            raise job_exists(name)
        if self.client.call("EXISTS", keys.removed):
            raise being_removed(name)
        config = self._with_replicas(with_transport(self.client, config, layout, name))
        self.check_room(name, config, layout)
        # A name of its own: the bytes that another creator of the same job stages are never touched.
        version = checkpoint.version if checkpoint else 0
        staged = staged_name(version, f"{id}-0-{secrets.token_hex(4)}")
        items: list[tuple[str, Buffers]] = []
        pull = format_of(config.weight_format)
        rounds, first = pull.lossy and not has_view(pull), dict(arrays)
        if has_view(pull):  # it begins with the weights; that of a checkpoint goes on
            first.setdefault(VIEW, first["w"])
        for shard in range(layout.shards):
            digests = {}
            for what, chunks in first.items():
                for number, chunk in enumerate(chunks[shard]):
                    items.append((keys.array(shard, what, staged, number), chunk))
                digests[what] = fold(digest_of(chunk) for chunk in chunks[shard])
                if what == "w" and rounds:
                    for number, chunk in enumerate(chunks[shard]):
                        values = np.frombuffer(b"".join(chunk), DTYPE)
                        items.append((keys.pulled(shard, staged, number), [encoded(pull, values).data]))
            if version:  # version 0 has no manifest: no aggregator has committed it
                low, high = layout.shard_range(shard)
                manifest = {"plan": 0, "version": version, "bytes": (high - low) * DTYPE.itemsize, "digests": digests}
                if checkpoint and checkpoint.skipped:
                    manifest["skipped"] = counts_as_text(checkpoint.skipped)
                if checkpoint and checkpoint.kept and not shard:
                    kept, about = kept_items(keys, staged, checkpoint.kept)
                    items += kept
                    manifest |= about
                items.append((keys.manifest(shard, staged), [memoryview(json.dumps(manifest).encode())]))
        if checkpoint:
            items += checkpoint.experience.items(keys, layout.shards)
        all_come = bool(config.metadata.launched_by)
        begins = json.dumps(_as_text(checkpoint, changed or {}, all_come)) if checkpoint else ""
        access = JobAccess.of(self.client, keys, config, layout)
        transport = open_transport(access)
        transport.prepare()
        try:
            access.storing.put(items)
            self.client.call("SADD", JOBS, name)  # first: a job that is not listed would stay for ever
            access.scripts.create(config, layout, staged, access.server.run_id(), begins)
            self.client.call("SADD", JOBS, name)  # a removal of an earlier job of that name may have unlisted it
        except ServerLost:
            raise  # the job may exist all the same, and then these bytes are its own
        except KvpsError:
            self.client.unlink([key for key, _ in items])
            transport.discard()
            raise
        return Job(self.client, name, self._replicas)

    def _with_replicas(self, config: JobConfig) -> JobConfig:
        """Return the settings with the number of replicas that must confirm what is acknowledged: all that each server
        has now. Raises ServerUnfit where a failover could go to another one."""
        if not config.replicas:
            return config
        attached, where = self.client.attached(), redacted(self.url)
        why, remedy = attached.why_not_all()
        if why:
            raise ServerUnfit(
                f"durability replicated waits for all replicas of each server. At {where} {why}: {remedy}"
            )
        asked = replace(config, durability=f"{REPLICATED}:{attached.fewest}")
        if config.durability not in (REPLICATED, asked.durability):
            has = counted(attached.fewest, "replica")
            raise ServerUnfit(f"durability {config.durability}: each server at {where} has {has}")
        return asked

    def check_room(self, name: str, config: JobConfig, layout: Layout) -> int:
        """Return how many bytes of the server a job needs at its peak. Raises ServerFull if that exceeds its
        maxmemory."""
        used, limit = self.client.memory()
        # Two versions, the one being staged and a reserve for it; of each worker what may wait and one gradient more.
        pull, pushed = format_of(config.weight_format), format_of(config.gradient_format).nbytes(layout.size)
        pulled = pull.nbytes(layout.size) if pull.lossy else 0
        versions = 4 * (layout.nbytes * (1 + len(config.slots)) + pulled) + 2 * CHUNK_BYTES * layout.shards
        gradients = 0 if config.transport == "shm" else config.most_contributions * pushed
        if limit and used + versions + gradients > limit:
            raise ServerFull(
                f"job {name!r} needs {bytes_text(versions + gradients)} and {redacted(self.url)} has "
                f"{bytes_text(limit - used)} left of its maxmemory ({bytes_text(limit)}): raise that, remove jobs "
                "(kvps rm), or have fewer workers"
            )
        return versions + gradients

    def job(self, name: str) -> Job:
        """Return the job of that name. Raises JobNotFound, InvalidName, CorruptData."""
        try:
            return Job(self.client, name, self._replicas)
        except CorruptData as error:
            raise CorruptData(f"job {name!r}: {error}") from error

    def jobs(self) -> list[str]:
        """Return the names of all jobs, sorted."""
        return sorted(self.client.call("SMEMBERS", JOBS))

    def read_jobs(self, read: Callable[[Job, State], T], unreadable: Callable[[str, KvpsError], U]) -> Iterator[T | U]:
        """Yield what `read` makes of each job and its state, by name; for a job that cannot be read, what `unreadable`
        makes of its name and the reason. A job that is removed meanwhile is left out. Raises NoServer, ServerLost."""
        for name in self.jobs():
            try:
                with readable(name):
                    job = self.job(name)
                    result: T | U = read(job, job.state())
            except JobNotFound:
                continue
            except (NoServer, ServerLost):
                raise
            except KvpsError as error:
                result = unreadable(name, error)
            yield result

    def free_name(self, wished: str) -> str:
        """Return the name `wished`, with a number appended if it is taken, also by a run of several jobs."""
        taken, base = {name for job in self.jobs() for name in (job, job.rpartition(".")[0])}, wished[:60]
        return next(n for n in (base if i == 1 else f"{base}-{i}" for i in range(1, len(taken) + 2)) if n not in taken)

    def remove_job(self, name: str, id: str | None = None) -> None:
        """Delete a job, even a damaged one, and all its bytes; with `id` only the job of that id. Its processes get
        JobNotFound. A job that is created under its name meanwhile or afterwards is left alone.

        Completes an earlier call that was cut short. Raises JobNotFound.
        """
        self._unlink_foreign(JobKeys(name))
        while True:
            keys = JobKeys(name)
            fields, workers, removed, there = self.client.together(
                [
                    ("HGETALL", keys.version),
                    ("HKEYS", keys.workers),
                    ("GET", keys.removed),
                    ("EXISTS", keys.version, keys.config, keys.layout),
                ]
            )
            if not there and removed is None:
                self._unlist(keys)
                raise job_not_found(name)
            keys = JobKeys(name, fields.get("id", "") if there else removed)
            if id is not None and keys.id != id:
                raise job_not_found(name)
            segments = self._segments(keys) if there else None
            shards = sum(field.startswith("shard:") for field in fields)
            if not there or JobScripts(self.client.call, keys, shards).remove(workers):
                break  # else workers have joined since the read
        self._remove_bytes(keys, segments, settles=bool(workers))
        self._unlist(keys)
        JobScripts(self.client.call, keys, 0).forget()
        if not self.jobs():
            self.client.call("DEL", MEMORY)

    def _unlink_foreign(self, keys: JobKeys) -> None:
        """Unlink what cannot be a job's, in the keys that decide whether it may be removed: no script touches those."""
        wanted = {keys.version: "hash", keys.workers: "hash", keys.removed: "string"}
        types = self.client.each([("TYPE", key) for key in wanted])
        types_of = dict(zip(wanted, types, strict=True))
        if foreign := [key for key, type_ in types_of.items() if type_ not in (wanted[key], "none")]:
            self.client.unlink(foreign)

    def _remove_bytes(self, keys: JobKeys, segments: shared_memory.Segments | None, settles: bool) -> None:
        """Unlink all bytes of a removed job; if it had workers, repeat until no more bytes arrive."""
        if segments:
            segments.remove()
        self._unlink_all(keys)
        while settles:
            # A worker, even a killed one, may have a gradient on the way, and nothing signals when the last bytes of a
            # closed connection arrive.
            time.sleep(_SETTLE_S)
            if not self._unlink_all(keys):
                break
        if segments:
            segments.remove()  # a worker may have made a segment meanwhile

    def _unlist(self, keys: JobKeys) -> None:
        """Take a name out of the list of jobs, unless a job of that name has been created meanwhile."""
        self.client.call("SREM", JOBS, keys.job)
        if self.client.call("EXISTS", keys.version):
            self.client.call("SADD", JOBS, keys.job)

    def _segments(self, keys: JobKeys) -> shared_memory.Segments | None:
        """Return the segments of a job that may be damaged; None if it has none or they cannot be found."""
        with suppress(KvpsError):
            if memory := self.client.call("HGET", keys.config, "memory"):
                return shared_memory.Segments(memory, keys.id)
        return None

    def _unlink_all(self, keys: JobKeys) -> int:
        stored = list(self.client.scan(keys.all_bytes))
        self.client.unlink(stored)
        return len(stored)

    def close(self) -> None:
        """Close the connections. With the last store, end a server that this process started, unless others use it.

        Does nothing in a fork.
        """
        if not self.client.owner.is_here:
            return
        self.client.close()
        if self._replicas:
            self._replicas.close()
        server, self._server = self._server, None
        if server:
            server.leave(self._stays)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _decided(config: JobConfig, values: Mapping[str, Any]) -> JobConfig:
    """Return the settings with a decision in place of what is to become of parameters without a gradient."""
    if config.missing != AUTO:
        return config
    return replace(config, missing="skip" if any(map(of_pytorch, values.values())) else "zeros")


def _reopened(url: str, read_replicas: bool) -> Store:
    return connect(url, read_replicas=read_replicas)


def _not_finite(p: Parameter) -> str:
    """Return the message about a parameter or a buffer with NaN or Inf."""
    if not p.buffer:
        return f"parameter {p.name!r} holds NaN or Inf"
    return (
        f"buffer {p.name!r} holds NaN or Inf: mend it, register it with persistent=False, and it stays each worker's, "
        f"or leave all buffers to each worker, with kvps.torch.parameters(model, buffers='own')"
    )


def _named(name: str | None) -> str:
    """Return the name of a published job, which a run may say. Raises InvalidSetting."""
    if name is None and not (name := os.environ.get(launcher.JOB)):
        raise InvalidSetting("name must say which job: only under kvps run --learner it may be None")
    return name


def fresh_id() -> str:
    """Return an id for a job to be created. By it, the creator can later tell its own job from others of the name."""
    return secrets.token_hex(4)


def _as_text(
    checkpoint: Checkpoint, changed: Mapping[str, tuple[str, str]], launched: bool
) -> dict[str, str | dict[str, str]]:
    """Return what create.lua takes from a checkpoint, with numbers as text because Lua would round them. A job that a
    command has `launched`, as the earlier one, has all its workers started again."""
    return {
        "version": str(checkpoint.version),
        "head": checkpoint.head,
        "contributions": str(checkpoint.begin.contributions),
        "job": checkpoint.job,
        "id": checkpoint.id,
        "lr": "" if checkpoint.lr is None else repr(checkpoint.lr),
        "run": checkpoint.run.fields,
        "clock": {worker: str(count) for worker, count in checkpoint.clock.items()},
        "skip": {worker: str(count) for worker, count in checkpoint.skip.items()},
        "all_come": "1" if launched and checkpoint.config.metadata.launched_by else "",
        "suspended": "1" if checkpoint.suspended else "",
        "workers": dict(checkpoint.workers),
        "units": dict(checkpoint.units),
        "states": dict(checkpoint.states),
        "settings": json.dumps(changed) if changed else "",
        **checkpoint.experience.as_text(),
    }
