"""The queue of tasks: the one module that knows RQ's keys.

Tasks are where RQ's own tools look: a hash for each task, a list that is the queue, sorted sets of running and of ended
tasks. A few scripts (`lua/`) decide, each in one step: a task is always either in the queue or noted as taken by a
host, whichever process is killed. docs/experiments.md shows what RQ's own worker does instead.

Nothing that is read here is unpickled or imported (see `worker_task`), and a host listens to none of RQ's commands.

A task's id is <place>-<job>-<worker>, with _ for what RQ does not take in an id. The place is when the job was
submitted, us, and much more for a task without which the job can do. The queue is kept in the order of these places.
The description is <job> <worker>, and says which job a task is of.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from rq.defaults import RQ_KEY_PREFIX
from rq.job import Job as RqJob
from rq.queue import Queue as RqQueue
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import now, utcformat
from rq.version import VERSION
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY

from kvps.connection.client import Client
from kvps.connection.sockets import client_name
from kvps.connection.urls import redacted
from kvps.errors import CorruptData, InvalidSetting, InvalidTask, NoServer, ServerError, ServerLost, ServerUnfit
from kvps.job import Job
from kvps.machine import process
from kvps.parsing import Fields
from kvps.protocol.keys import check_name
from kvps.protocol.lua_scripts import evaluate, load_scripts
from kvps.server import private_server
from kvps_workers.queue.worker_task import WorkerTask, place

CPU, GPU = "kvps", "kvps-gpu"
QUEUES = (CPU, GPU)

_TASK = RqJob.redis_job_namespace_prefix
_HOST = f"{RQ_KEY_PREFIX}:worker:"
_TOO_MANY_LOSSES = 5
_KEPT_S = 24 * 3600  # how long ended tasks are kept
_HOST_S = 15  # a host that is silent for so long is no longer counted
_FAILURES_SHOWN = 10
_MOST_PID = 2**31 - 1
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9_-]")  # of tasks: RQ's own commands refuse such an id


class QueueRow(NamedTuple):
    """A task of a queue. `state` is runs, waits or failed; `why` says why it failed, or why it is no valid task.

    A running task has the name of its execution, its host's process, and `beat`, which changes while the host lives.
    """

    id: str
    state: str
    task: WorkerTask | None
    execution: str
    cancelled: bool
    process: Mapping[str, Any]
    beat: str
    why: str

    @property
    def held(self) -> tuple[str, str]:
        """The id of the task and the name of its execution."""
        return self.id, self.execution

    @property
    def host(self) -> str:
        """The host that runs the task, as "host:pid"; "?" if that is not known."""
        return f"{self.process['host']}:{self.process['pid']}" if self.process else "?"


class QueueKeys(NamedTuple):
    """RQ's keys of one queue, by the names that the scripts give them."""

    queue: str
    started: str
    finished: str
    failed: str
    canceled: str
    hosts: str
    queues: str = RqQueue.redis_queues_keys
    suspended: str = WORKERS_SUSPENDED

    @classmethod
    def of(cls, name: str) -> QueueKeys:
        """Return the keys of the queue of this name."""
        kinds = (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)
        started, finished, failed, canceled = (kind.key_template.format(name) for kind in kinds)
        queue, hosts = RqQueue.redis_queue_namespace_prefix + name, WORKERS_BY_QUEUE_KEY % name
        return cls(queue, started, finished, failed, canceled, hosts)


class TaskQueue:
    """One queue on one server, on a connection of its own. All methods raise NoServer, ServerLost, ServerError,
    CorruptData; every request is repeated after a cut."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self._keys = QueueKeys.of(name)
        # The name of kvps's connections, by which a private server knows whether others use it.
        self._host = _HOST + client_name()
        self._born, self._ended = utcformat(now()), {"finished": 0, "failed": 0}
        self._client = Client(url, why_lost=private_server.why_lost)
        try:
            if self._client.preflight():
                raise ServerUnfit(
                    f"{redacted(url)} is a node of a cluster, and RQ's queues need a single server: start each worker "
                    f"with kvps worker --job NAME, or use a single server"
                )
        except BaseException:
            self._client.close()
            raise

    # -- submitting and looking -------------------------------------------------------------------------------

    def submit(self, job: Job, slow: Mapping[str, float] | None = None, prefetch: bool = False, most: int = 0) -> None:
        """Put a task for each worker of a job into the queue, in one step: no other task comes between them.

        `slow` stretches the steps of the workers it names. With `prefetch`, the next weights arrive while they compute.
        Tasks of more workers than the job waits for, up to `most` in all, come behind all that jobs need, for hosts
        that are free while the job trains. Raises InvalidSetting for these if the job hands out no units.
        """
        if most > job.config.workers and not job.config.units:
            raise InvalidSetting(f"job {job.name!r} hands out no units, so that more workers would have no data")
        seconds, us = map(int, self._client.call("TIME"))
        tasks, readable = [], _NOT_IN_IDS.sub("_", job.name)
        for rank in range(max(job.config.workers, most)):
            task = WorkerTask(job.name, job.id, f"w{rank}", float((slow or {}).get(f"w{rank}", 1)), prefetch)
            first = place(seconds * 1_000_000 + us, optional=rank >= job.config.workers)
            tasks += [f"{first}-{readable}-{task.worker}", task.payload(), str(task)]
        self._run("submit", name=self.name, tasks=tasks)

    def cancel(self, job: str) -> tuple[int, int]:
        """Take a job's waiting tasks out of the queue, and make its running ones end. Return how many of each."""
        check_name("job", job)
        _, waited, running = self._run("cancel", job=job)
        return waited, running

    def look(self, waiting: int = 0, failed: int = _FAILURES_SHOWN) -> tuple[int, list[QueueRow]]:
        """Return how many hosts serve this queue, and its running, waiting and last failed tasks, in this order.

        `waiting` and `failed` are how many of these to return at most; 0 waiting is all.
        """
        _, hosts, *rows = self._run("look", host_prefix=_HOST, most_waiting=waiting, most_failed=failed)
        return hosts, [_row(*row) for row in rows]

    def hosts(self) -> int:
        """Return how many hosts serve this queue."""
        return self.look(waiting=1, failed=0)[0]

    # -- a host's side ----------------------------------------------------------------------------------------

    def take(self, execution: str) -> tuple[str, str | None] | None:
        """Take the first task for this host, as the execution of this name. Return (id, payload); None if none waits.

        If the payload is None, the id was only taken out of the queue: no task has it, or the task was cancelled.
        """
        note = {
            "origin": self.name,
            "timeout": -1,
            "worker_name": client_name(),
            "started_at": utcformat(now()),
            "kvps_process": json.dumps(process.identity()),
        }
        match self._run("take", execution=execution, note=_flat(note)):
            case ["TAKEN", id, payload]:
                return id, payload
            case ["DROPPED", id]:
                return id, None
            case ["EMPTY"]:
                return None
        raise CorruptData(
            f"key {self._keys.queue} is damaged: another program, or another version of kvps, wrote there"
        )

    def await_task(self, timeout_s: float) -> None:
        """Wait until the queue holds a task, not longer than `timeout_s`."""
        if self._client.call("EXISTS", WORKERS_SUSPENDED):
            time.sleep(timeout_s)  # no event says that `rq resume` was run
            return
        try:
            # Moving the first element to the front changes nothing, and blocks until the queue has an element.
            self._client.call("BLMOVE", self._keys.queue, self._keys.queue, "LEFT", "LEFT", timeout_s)
        except (NoServer, ServerLost):
            raise
        except ServerError:
            pass  # the element is no text, or the key no list: `take` handles that

    def release(self, id: str, execution: str, status: str, why: str = "", version: str = "") -> str:
        """End an execution: its task gets the `status` "queued", "finished", "failed", "canceled" or "refused".

        Return the status it got, or "" if the execution had ended before. `version` is that of the task's job if a loss
        counts: a task that is lost again and again at the same version fails. A refused task's payload is deleted.
        """
        reason = why.encode("ascii", "backslashreplace").decode()
        values = {"status": status, "version": version, "most_losses": _TOO_MANY_LOSSES, "reason": reason}
        reply = self._run("release", task=id, execution=execution, **values)
        if reply[0] == "GONE":
            return ""
        _, became = reply
        if became in self._ended:
            self._ended[became] += 1
        return str(became)

    def beat(self, busy: bool) -> None:
        """Say that this host lives. Every field is written each time, because the server may have lost them."""
        fields = {
            "birth": self._born,
            "last_heartbeat": utcformat(now()),
            "queues": self.name,
            "pid": os.getpid(),
            "hostname": process.host(),
            "ip_address": "unknown",
            "version": VERSION,
            "state": "busy" if busy else "idle",
            "successful_job_count": self._ended["finished"],
            "failed_job_count": self._ended["failed"],
        }
        self._client.together(
            [
                ("HSET", self._host, *_flat(fields)),
                ("EXPIRE", self._host, _HOST_S),
                ("SADD", REDIS_WORKER_KEYS, self._host),
                ("SADD", self._keys.hosts, self._host),
            ]
        )

    def depart(self) -> None:
        """Take this host out of the hosts that serve the queue."""
        for workers in (REDIS_WORKER_KEYS, self._keys.hosts):
            self._client.call("SREM", workers, self._host)
        self._client.unlink([self._host])

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> TaskQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, script: str, /, **values: object) -> list[Any]:
        """Run a script with these arguments. Each may take the prefix of tasks' keys, and how long ended ones stay."""
        command = SCRIPTS[script].command(self._keys, {"prefix": _TASK, "kept_s": _KEPT_S, **values})
        reply = evaluate(self._client.call, SCRIPTS, command)
        if reply[0] == "WRONGTYPE":
            _, key, present, want = reply
            raise CorruptData(
                f"key {key} is a {present}, not a {want}: another program wrote there; delete or rename it"
            )
        return reply


SCRIPTS = load_scripts("kvps_workers.queue")


def _row(id: str, state: str, payload: str, execution: str, cancelled: int, who: str, beat: str, why: str) -> QueueRow:
    task = None
    try:
        task = WorkerTask.of(payload)
    except InvalidTask as error:
        why = why or str(error)
    return QueueRow(id, state, task, execution, bool(cancelled), _process(who), beat, why)


def _process(text: str) -> dict[str, Any]:
    """Return the identity of a process as `take` noted it; {} if another program wrote there."""
    try:
        f = Fields.of_json(text, "a process")
        known = {name: f.text(name) for name in ("host", "space", "start")}
        return known | {"pid": f.whole("pid", 1, _MOST_PID)}
    except CorruptData:
        return {}


def _flat(fields: Mapping[str, Any]) -> list[Any]:
    return [part for pair in fields.items() for part in pair]
