"""Training tasks in RQ's queues: the one module that knows RQ.

They stand in RQ's own keys, where RQ's own tools look: a hash a task, a list that is the queue, sorted sets of what
runs and of what is over. But what decides is four scripts of kvps (`lua/`), each one step, so that a task is always
either in the queue or noted as somebody's, whoever is killed in between; and who is lost, kvps finds out (`host`), for
RQ notices it after minutes and calls it failed.

Nothing that stands there is run, imported or unpickled: see `training` for how a payload is read. RQ's `Job` is written
and never read back, and RQ's commands over pub/sub are not listened to.

A task's id is <when it was submitted, us>-<job>-<worker>. The queue is kept in the order of these times.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import resources
from typing import Any, NamedTuple, TypeVar

import redis
from redis.connection import ConnectionPool
from redis.exceptions import AuthenticationError, AuthorizationError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq.job import Job as RqJob
from rq.queue import Queue as RqQueue
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.suspension import is_suspended
from rq.utils import now, utcformat
from rq.worker import BaseWorker
from rq.worker_registration import WORKERS_BY_QUEUE_KEY, register, unregister

from kvps.connection.sockets import KINDS, ClientRefused, client_name, connection_settings, redacted, too_many_clients
from kvps.errors import CorruptData, InvalidTask, NoServer, ServerError, ServerLost
from kvps.job import Job
from kvps.machine import process
from kvps.protocol.keys import check_name
from kvps.server.private_server import why_lost
from kvps_workers.training import FUNCTION, PAYLOAD_BYTES, Started, WorkerTask

CPU, GPU = "kvps", "kvps-gpu"
QUEUES = (CPU, GPU)

_TOO_MANY_LOSSES = 5
_KEPT_S = 24 * 3600  # what is over
_HOST_S = 15  # a host that says nothing for so long is none
_EXECUTION_S = 24 * 3600
_PATIENCE_S = 10.0
_FAILURES_SHOWN = 10
_IDS = re.compile("[A-Za-z0-9_-]+")

_T = TypeVar("_T")


class QueueRow(NamedTuple):
    """A task as a look at the queue shows it: `state` is RQ's word, `what` the task or None, `more` where or why."""

    queue: str
    id: str
    state: str
    what: WorkerTask | None
    more: str


class BeatReply(NamedTuple):
    """What a host is told when it gives a sign of life: whether it still has the task, whether that was cancelled, and
    the task that has waited longest for a host, or ""."""

    mine: bool
    cancelled: bool
    first: str


class TaskQueue:
    """One of RQ's queues on one server. Connections of its own. All methods raise NoServer, ServerLost, ServerError.

    Every request may be repeated, and is, after a cut.
    """

    def __init__(self, url: str, name: str) -> None:
        settings = connection_settings(url)
        self.name = name
        self._url, self._where = url, redacted(url)
        self._redis: Any = redis.Redis(
            connection_pool=ConnectionPool(connection_class=KINDS[url.split(":", 1)[0]], **settings)
        )
        known: dict[str, Any] = {"connection": self._redis, "serializer": JSONSerializer}
        self._queue = RqQueue(name, **known)
        self._started, *self._over = [
            registry(name, **known).key
            for registry in (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)
        ]
        self._entry: _Entry | None = None
        try:
            self._redis.ping()
        except ClientRefused:
            self.close()
            raise too_many_clients(url) from None
        except (RedisConnectionError, RedisTimeoutError) as error:  # first contact: nobody waits for what never was
            self.close()
            raise NoServer(f"no Redis server answers at {self._where} ({error}): start it, or check the URL") from None
        except ResponseError as error:
            self.close()
            raise ServerError(f"{self._where} answers: {error}") from None

    # -- who submits and who looks ----------------------------------------------------------------------------

    def submit(self, job: Job, slow: Mapping[str, float] | None = None, prefetch: bool = False) -> None:
        """Put all workers of a job into the queue, in one step: nothing comes between them.

        `slow` stretches the steps of those it names; with `prefetch` the next weights come while they compute.
        """
        seconds, us = self._ask(self._redis.time)
        own, arguments = job.state().id, list[Any]()
        for worker in (f"w{rank}" for rank in range(job.config.workers)):
            task = WorkerTask(job.name, own, worker, float((slow or {}).get(worker, 1)), prefetch)
            id = f"{seconds * 1_000_000 + us}-{job.name}-{worker}"
            flat = _flat(self._call(id, asdict(task), str(task)))
            arguments += [id, len(flat), *flat]
        self._run("submit", [self._queue.key, RqQueue.redis_queues_keys], _KEY, *arguments)

    def cancel(self, job: str) -> tuple[int, int]:
        """Take the waiting tasks of a job out, and have those that run end: how many waited, how many run."""
        check_name("job", job)
        _, waited, running = self._run("cancel", [self._queue.key, self._started, self._over[2]], _KEY, job, _KEPT_S)
        return waited, running

    def seen(self) -> list[QueueRow]:
        """What runs, what waits, in this order, and what failed last."""
        found = [self._look(s.id, "runs", s.host or "?") for s in self.started()]
        found += [self._look(id, "waits", "") for id in self._ids("LRANGE", self._queue.key, 0, -1)]
        failed = self._ids("ZREVRANGE", self._over[1], 0, _FAILURES_SHOWN - 1)
        return found + [self._look(id, "failed", self._why(id)) for id in failed]

    def task(self, id: str) -> WorkerTask | None:
        """The task of that id, or None if that is none."""
        try:
            return WorkerTask.of(self._payload(id))
        except InvalidTask:
            return None

    def hosts(self) -> int:
        """How many hosts serve this queue."""
        names = self._ids("SMEMBERS", WORKERS_BY_QUEUE_KEY % self.name)
        return sum(bool(self._ask(partial(self._redis.exists, name))) for name in names)

    def started(self) -> list[Started]:
        """All executions that are noted, but for what no host can have noted."""
        out = []
        for entry in self._ids("ZRANGE", self._started, 0, -1):
            id, _, name = entry.rpartition(":")
            if not _IDS.fullmatch(id) or not _IDS.fullmatch(name):
                continue
            host, beat, text = self._fields(f"{_EXECUTION}{entry}", "kvps_host", "last_heartbeat", "kvps_process")
            out.append(Started(id, name, host, beat, _identity(text)))
        return out

    def _call(self, id: str, arguments: dict[str, Any], description: str) -> dict[str, Any]:
        """The hash of a task, as RQ writes one."""
        job = RqJob.create(
            FUNCTION,
            kwargs=arguments,
            connection=self._redis,
            id=id,
            description=description,
            timeout=-1,
            origin=self.name,
            serializer=JSONSerializer,
        )
        fields = job.to_dict()
        return fields | {"status": "queued", "enqueued_at": fields["created_at"]}

    def _look(self, id: str, state: str, more: str) -> QueueRow:
        try:
            what = WorkerTask.of(self._payload(id))
        except InvalidTask as error:
            what, more = None, str(error)
        return QueueRow(self.name, id, state, what, more)

    def _why(self, id: str) -> str:
        return self._fields(_KEY + id, "kvps_why")[0]

    def _payload(self, id: str) -> bytes:
        with _other_type_passed_over():
            short = self._ask(lambda: self._redis.hstrlen(_KEY + id, "data")) <= PAYLOAD_BYTES
            return (self._ask(lambda: self._redis.hget(_KEY + id, "data")) or b"") if short else b""
        return b""

    def _fields(self, key: str, *names: str) -> list[str]:
        with _other_type_passed_over():
            found = self._ask(lambda: self._redis.hmget(key, *names))
            return [(value or b"")[:2000].decode(errors="replace") for value in found]
        return [""] * len(names)

    def _ids(self, *command: Any) -> list[str]:
        return [id.decode(errors="replace") for id in self._ask(lambda: self._redis.execute_command(*command))]

    # -- who works --------------------------------------------------------------------------------------------

    def take(self, execution: str) -> tuple[str, bytes | None] | None:
        """The first task and its payload, noted as this host's under the name of an execution; None: none waits.

        Without a payload it was only taken out of the queue: nothing has that id, or it runs already, or is over.
        """
        if self._ask(lambda: is_suspended(self._redis)):  # rq suspend
            return None
        assert self._entry
        stamp = now().timestamp()
        task = {"status": "started", "worker_name": self._entry.name, "started_at": utcformat(now())}
        note = {
            "id": execution,
            "worker_name": self._entry.name,
            "created_at": stamp,
            "last_heartbeat": stamp,
            "kvps_host": f"{process.host()}:{os.getpid()}",
            "kvps_process": json.dumps(process.identity()),
        }
        code, *reply = self._run(
            "take",
            [self._queue.key, self._started],
            *(_KEY, _EXECUTION, execution, PAYLOAD_BYTES, 2 * len(task), *_flat(task), *_flat(note)),
        )
        if code == b"EMPTY":
            return None
        return reply[0].decode(errors="replace"), reply[1] if code == b"TAKEN" else None

    def await_task(self, timeout_s: float) -> None:
        """Wait until a task waits for a host, not longer than `timeout_s`."""
        if self._ask(lambda: is_suspended(self._redis)):
            time.sleep(timeout_s)  # rq resume rings no bell
            return
        # From the front to the front: it moves nothing, and blocks until there is something that could be moved.
        self._ask(lambda: self._redis.blmove(self._queue.key, self._queue.key, timeout_s, "LEFT", "LEFT"))

    def release(self, id: str, execution: str, status: str, why: str = "", version: str = "", note: str = "") -> str:
        """End an execution: its task is "queued" again, "finished", "failed" or "canceled"; what it became, or "".

        "" is: that execution was ended before. `version` is that of the task's job where a loss counts: a task that
        is lost again and again at the same version is failed. `note` describes it to RQ's tools, if it is none.
        """
        code, *became = self._run(
            "release",
            [self._queue.key, self._started, *self._over],
            *(_KEY, _EXECUTION, id, execution, status, version, _TOO_MANY_LOSSES, why, _KEPT_S),
        )
        if code != b"DONE":
            return ""
        status = became[0].decode()
        if self._entry:
            self._entry.tally(status)
        if status != "queued":
            self._tidy(id, status, note)
        return status

    def _tidy(self, id: str, status: str, note: str) -> None:
        """Leave of a task that is over only what is known of it: it may have been planted, to be unpickled or called by
        RQ's tools when they look at it."""
        task, why = self.task(id), self._why(id)
        fields = self._call(id, asdict(task) if task else {}, note or str(task))

        def replace() -> None:
            pipe = self._redis.pipeline()
            pipe.delete(_KEY + id)
            pipe.hset(_KEY + id, mapping=fields | {"status": status, "kvps_why": why, "ended_at": utcformat(now())})
            pipe.expire(_KEY + id, _KEPT_S)
            pipe.execute()

        self._ask(replace)
        if status == "failed":
            job = RqJob(id, self._redis, JSONSerializer)
            self._ask(lambda: Result.create_failure(job, _KEPT_S, why))  # where RQ's tools look for it

    def arrive(self) -> None:
        """Let RQ's tools, and `hosts`, see this process as one that serves the queue."""
        self._entry = _Entry(self._queue)
        self.beat(None)

    def beat(self, started: tuple[str, str] | None) -> BeatReply:
        """A sign of life, of this host and of the execution (task, name) that it has."""
        entry = self._entry
        assert entry

        def run() -> list[Any]:
            pipe = self._redis.pipeline()
            if started:
                id, name = started
                pipe.zscore(self._started, f"{id}:{name}")
                pipe.hget(_KEY + id, "status")
                pipe.lindex(self._queue.key, 0)
                pipe.hset(f"{_EXECUTION}{id}:{name}", "last_heartbeat", now().timestamp())
                pipe.expire(f"{_EXECUTION}{id}:{name}", _EXECUTION_S)
            entry.say(pipe, started and started[0])
            return list(pipe.execute())

        replies = self._ask(run)
        score, status, first = replies[:3] if started else (1, b"", b"")
        return BeatReply(score is not None, status == b"canceled", (first or b"").decode(errors="replace"))

    def depart(self) -> None:
        """What `arrive` said is not so any more."""
        if entry := self._entry:
            self._entry = None
            self._ask(lambda: entry.end(self._redis.pipeline()))

    def close(self) -> None:
        """Close the connections."""
        self._redis.connection_pool.disconnect()

    def __enter__(self) -> TaskQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests ---------------------------------------------------------------------------------------------

    def _run(self, script: str, keys: list[str], *arguments: Any) -> list[Any]:
        reply = list(self._ask(lambda: self._redis.register_script(SCRIPTS[script])(keys, arguments)))
        if reply[0] == b"WRONGTYPE":
            _, key, found, want = (part.decode(errors="replace") for part in reply)
            raise CorruptData(f"key {key} is a {found}, not a {want}: another program wrote there; delete or rename it")
        return reply

    def _ask(self, run: Callable[[], _T]) -> _T:
        """Run until it is answered: after cuts again, for a while."""
        deadline, delay = time.monotonic() + _PATIENCE_S, 0.01
        while True:
            try:
                return run()
            except (AuthenticationError, AuthorizationError) as error:
                raise NoServer(f"{self._where} refuses the login: {error}") from None
            except (RedisConnectionError, RedisTimeoutError) as error:
                if why := why_lost(self._url):
                    raise ServerLost(why) from None
                if time.monotonic() + delay > deadline:
                    if isinstance(error, ClientRefused):
                        raise too_many_clients(self._url) from None
                    raise ServerLost(f"no answer from {self._where} for {_PATIENCE_S:g} s ({error})") from None
            except ResponseError as error:
                raise ServerError(f"{self._where} answers: {error}") from error
            time.sleep(delay)  # a server that is away rings no bell
            delay = min(delay * 2, 0.5)


class _Entry(BaseWorker):
    """What RQ's tools see of this process. It works by other rules: only what it says of itself is RQ's."""

    def __init__(self, queue: RqQueue) -> None:
        # The name that kvps's connections have, for by those a private server knows whether others use it.
        super().__init__([queue], client_name(), connection=queue.connection, prepare_for_work=False)
        self.hostname, self.pid = socket.gethostname(), os.getpid()
        self.birth_date = now()

    def _set_connection(self, connection: Any) -> Any:
        return connection  # RQ would raise the timeout of its sockets

    def say(self, pipe: Any, task: str | None) -> None:
        """It lives, and works on a task or on none. All of it each time, for it may have been forgotten meanwhile."""
        self.last_heartbeat = now()
        counts = {"successful_job_count": self.successful_job_count, "failed_job_count": self.failed_job_count}
        pipe.hset(self.key, mapping=self.serialize() | counts | {"state": "busy" if task else "idle"})
        if task:
            pipe.hset(self.key, "current_job", task)
        else:
            pipe.hdel(self.key, "current_job")
        pipe.expire(self.key, _HOST_S)
        register(self, pipe)

    def tally(self, status: str) -> None:
        """A task has become this."""
        self.successful_job_count += status == "finished"
        self.failed_job_count += status == "failed"

    def end(self, pipe: Any) -> None:
        unregister(self, pipe)
        pipe.delete(self.key)
        pipe.execute()


def _load(name: str) -> str:
    folder = resources.files("kvps_workers.queue") / "lua"
    return (folder / "_prelude.lua").read_text("utf-8") + (folder / f"{name}.lua").read_text("utf-8")


SCRIPTS = {name: _load(name) for name in ("submit", "take", "release", "cancel")}
_KEY = RqJob.redis_job_namespace_prefix
_EXECUTION = "rq:execution:"  # and "<task>:<execution>", see RQ's Execution.key


def _identity(text: str) -> dict[str, Any]:
    """A process's identity as `take` noted it; {} if another program wrote there."""
    try:
        found = json.loads(text)
        return {"space": str(found["space"]), "start": str(found["start"]), "pid": int(found["pid"])}
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [part for pair in fields.items() for part in pair]


@contextmanager
def _other_type_passed_over() -> Iterator[None]:
    """A key of another type than is read here holds nothing."""
    try:
        yield
    except ServerError as error:
        if "WRONGTYPE" not in str(error):
            raise
