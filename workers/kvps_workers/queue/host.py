"""A host: takes one task after the other from a queue, and runs each in a process of its own.

A task is lost when its host is lost: when the host's process is surely dead (hosts on the same machine can tell), or
has given no sign of life for a while. Every host looks each second, at work or idle, and puts a lost task back, once.
A task process ends with its host. If it lives on all the same, cut off or stopped, no gradient counts twice: no process
can join under its worker id while it lives, so the next task process waits until the id is free.

No two jobs keep each other from starting. A job commits nothing before all its workers have joined, so two jobs with
some of the hosts each could wait for ever. Therefore the queue is kept in the order of submission, and a task that is
put back goes to its place in that order. So the running tasks are the oldest ones, and at most one job has only some of
its workers. The jobs before it end, and their hosts take its other tasks. Only a lost host leaves a gap in that order.
Then a host whose job was submitted later and cannot continue makes way (`_makes_way`). So the oldest unfinished job
always gets its hosts, if there are as many as it has workers. If there are fewer, it waits and says so.

A job may have optional tasks, for hosts to spare. They are in the queue behind all others, and a host that runs one
makes way for any task that a job needs. What is left of them when their job is finished is withdrawn.
"""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvps.errors import InvalidTask, KvpsError, NoServer, ServerLost
from kvps.job import Job
from kvps.machine import process
from kvps.store import Store
from kvps_workers.queue.liveness import LivenessTracker
from kvps_workers.queue.queue import QueueRow, TaskQueue
from kvps_workers.queue.task_process import AWAY, REMOVED
from kvps_workers.queue.task_runner import HostResources, TaskProcess
from kvps_workers.queue.worker_task import WorkerTask, is_optional, place_of

log = logging.getLogger("kvps.host")

_TICK_S = 1.0
_MAKES_WAY_S = 2.0
_NONE = ("", "")


class Host:
    """A host that serves one queue of tasks, whose jobs are in `store`."""

    def __init__(self, queue: TaskQueue, store: Store, resources: HostResources) -> None:
        self._queue = queue
        self._store = store
        self._resources = resources
        self._liveness = LivenessTracker()
        self._held = _NONE  # the id of this host's task, and the name of its execution
        self._first = ("", 0.0)  # the task at the front of the queue, and since when it is there
        self._warned = ""

    def serve(self, burst: bool = False) -> None:
        """Take tasks and run them; with `burst` until none waits. Raises NoServer, ServerLost."""
        reachable = True
        try:
            while True:
                with self._retried():
                    self._look()
                    if not self._run_next():
                        if burst:
                            return
                        self._queue.await_task(_TICK_S)
        except (NoServer, ServerLost):
            reachable = False
            raise
        finally:
            if reachable:
                with suppress(KvpsError):
                    self._leave()

    def _leave(self) -> None:
        """Put this host's task back into the queue, and stop serving the queue."""
        if self._held != _NONE and self._queue.release(*self._held, "queued"):
            log.info("%s: waits again (this host ends)", self._held[0])
        self._queue.depart()

    def _run_next(self) -> bool:
        """Run the next task. Return whether there was one."""
        execution = secrets.token_hex(8)
        taken = self._queue.take(execution)
        if not taken:
            return False
        id, payload = taken
        if payload is None:
            log.warning("passed over %r: no task has that id, or it was cancelled", id)
            return True
        self._held = (id, execution)
        try:
            task = WorkerTask.of(payload)
        except InvalidTask as error:
            log.warning("refused %r: %s", id, error)
            self._queue.release(*self._held, "refused", f"refused: {error}")
        else:
            if self._is_finished(task):
                self._queue.release(*self._held, "canceled", "its job is finished")
            else:
                log.info("%s: taken", task)
                self._run(task)
        self._held = _NONE
        return True

    # -- one task ---------------------------------------------------------------------------------------------

    def _run(self, task: WorkerTask) -> None:
        running = TaskProcess(task, self._store.url, self._resources)
        status, why = "", ""
        try:
            while not running.ended(_TICK_S):
                with self._retried():
                    rows = self._look()
                    if not why:
                        status, why = self._verdict(task, rows)
                    if why:
                        running.end()
        finally:
            running.end()
            code = running.wait()
        if why:
            self._close(task, status, why)
        else:
            self._judge(task, code, running.last)

    def _verdict(self, task: WorkerTask, rows: list[QueueRow]) -> tuple[str, str]:
        """Return the next status of the running task, and why, if this host must end it; else ("", "")."""
        mine = next((row for row in rows if row.held == self._held), None)
        if mine is None:
            return "", "the queue no longer lists it as running on this host"
        if mine.cancelled:
            return "canceled", "it was cancelled"
        if self._makes_way(task, next((row.id for row in rows if row.state == "waits"), "")):
            return "queued", "it makes way for a job that needs this host more"
        return "", ""

    def _makes_way(self, task: WorkerTask, first: str) -> bool:
        """Return whether the task at the front of the queue should have this host: its job is older, no other host has
        taken it for `_MAKES_WAY_S`, and this host's job commits nothing until more workers come; or its job needs it,
        and this host's job can do without."""
        if first != self._first[0]:
            self._first = (first, time.monotonic())
        ours, theirs = place_of(self._held[0]), place_of(first)
        if ours is None or theirs is None or theirs >= ours or time.monotonic() - self._first[1] < _MAKES_WAY_S:
            return False
        if is_optional(self._held[0]):
            return not is_optional(first)
        with suppress(Exception):  # a job that cannot be read makes way too
            job = self._job(task)
            members = job.state().members.values()
            there = sum(m.active or m.finished for m in members)
            return len(members) < job.config.workers or there < job.config.min_workers
        return True

    def _judge(self, task: WorkerTask, code: int, last: str) -> None:
        """Release a task whose process has ended by itself, with a status that follows from its exit code."""
        if code == 0:
            self._close(task, "finished", "it has done its rounds")
        elif code in (1, 2):
            missed = not is_optional(self._held[0]) and self._is_missed(task)
            self._close(task, "failed", last or f"its process ended with code {code}")
            if missed and any(self._queue.cancel(task.job)):
                log.warning("job %s is cancelled, for it cannot begin without %s", task.job, task.worker)
        elif code == REMOVED:
            self._close(task, "canceled", "its job is not there any more")
        elif code == AWAY:
            self._close(task, "queued", last)
            time.sleep(_TICK_S)  # the server of its job is away, and no event says when it is back
        else:
            how = signal.Signals(-code).name if code < 0 else f"code {code}"
            self._close(task, "queued", f"its process ended by {how}", self._version(task))

    def _close(self, task: WorkerTask, status: str, why: str, version: str = "") -> None:
        became = self._queue.release(*self._held, status, why, version) if status else ""
        word = {"queued": "waits again", "": "left to others"}.get(became, became)
        log.log(logging.WARNING if became == "failed" else logging.INFO, "%s: %s (%s)", task, word, why)

    # -- other hosts ------------------------------------------------------------------------------------------

    def _look(self) -> list[QueueRow]:
        """Give a sign of life, and put back lost hosts' tasks. Return the running tasks and the first waiting one."""
        self._queue.beat(busy=self._held != _NONE)
        _, rows = self._queue.look(waiting=1, failed=0)
        for lost in self._liveness.lost([row for row in rows if row.state == "runs" and row.held != self._held]):
            self._put_back(lost)
        return rows

    def _put_back(self, lost: QueueRow) -> None:
        version = self._version(lost.task) if lost.task else ""
        why = f"its host {lost.host} is lost"
        if became := self._queue.release(*lost.held, "queued", why, version):
            word = "waits again" if became == "queued" else became
            log.warning("%s: %s (%s)", lost.task or lost.id, word, why)

    def _version(self, task: WorkerTask) -> str:
        """Return the version of a task's job, or "". A worker that is surely dead is evicted at once."""
        with suppress(Exception):  # another program may have written anything to these keys
            job = self._job(task)
            state = job.state()
            member = state.members.get(task.worker)
            if member and member.active and process.is_dead(member.process):
                job.evict(member)
            return str(state.version)
        return ""

    def _is_finished(self, task: WorkerTask) -> bool:
        """Return whether a task's job is finished, so that there is nothing to do for another worker."""
        with suppress(Exception):
            job = self._job(task)
            return job.state().finished(job.config)
        return False

    def _is_missed(self, task: WorkerTask) -> bool:
        """Return whether a task's job has not begun, and cannot begin without this worker."""
        with suppress(Exception):
            job = self._job(task)
            members = job.state().members
            return task.worker not in members and len(members) < job.config.workers
        return False

    def _job(self, task: WorkerTask) -> Job:
        job = self._store.job(task.job)
        if job.id != task.id:
            raise InvalidTask(f"job {task.job!r} is another one now")
        return job

    @contextmanager
    def _retried(self) -> Iterator[None]:
        """Log an error of the server inside the block, such as a key of another type, once. The caller tries again."""
        try:
            yield
        except (NoServer, ServerLost):
            raise
        except KvpsError as error:
            if str(error) != self._warned:
                self._warned = str(error)
                log.warning("kvps: error: %s", error)
            time.sleep(_TICK_S)
