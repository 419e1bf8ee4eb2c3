"""A host: takes one training task after the other from a queue, and runs each in a process of its own, the horse.

A task is lost when its host is. That is so if the host's process is surely dead (of this machine one knows), or has not
given a sign of life for a while; whoever serves the queue looks, at work or idle, and puts the task back, once. Its
horse ends with the host. If it lives all the same, cut off or stopped, nobody counts twice: joining under its worker id
is refused while it lives, and the next horse waits for that.

No two jobs keep each other from starting. A job needs all its workers before anything is committed, so two that have
some hosts each could wait for ever. The queue is in the order in which jobs were submitted, also what is put back. So
what was taken is a beginning of that order: at most one job has only a part of its workers, those before it end, and
their hosts take the rest of it. Only a host that is lost leaves a hole in that beginning. Then who waits in a job that
was submitted later and cannot go on makes way (`_makes_way`). So the oldest of the jobs that are not finished always
gets its hosts, if there are as many as it has workers. If there are fewer it waits for more, and says so.
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
from kvps_workers.queue.queue import TaskQueue
from kvps_workers.queue.resources import Horse, HostResources
from kvps_workers.queue.task_process import AWAY, REMOVED
from kvps_workers.training import Started, WorkerTask, submitted

log = logging.getLogger("kvps.host")

_TICK_S = 1.0
_MAKES_WAY_S = 2.0


class Host:
    """Serves one queue of training tasks, whose jobs are in `store`."""

    def __init__(self, queue: TaskQueue, store: Store, means: HostResources) -> None:
        self._queue = queue
        self._store = store
        self._means = means
        self._lookout = LivenessTracker()
        self._execution = ""  # the name of the present one, or of that which may be noted in a moment
        self._held: tuple[str, str] | None = None  # task and execution
        self._said = ""

    def serve(self, burst: bool = False) -> None:
        """Take tasks and run them; with `burst` until none waits. Raises NoServer, ServerLost."""
        reachable = True
        try:
            self._queue.arrive()
            while True:
                with self._going_on():
                    self._look_around()
                    if not self._next():
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
        """Give back what this host has, and be no host any more."""
        for started in self._queue.started():
            if started.name == self._execution:
                self._queue.release(started.id, started.name, "queued")
                log.info("%s: waits again (this host ends)", self._queue.task(started.id) or started.id)
        self._queue.depart()

    def _next(self) -> bool:
        """Run the next task; whether there was any."""
        self._execution = secrets.token_hex(8)
        found = self._queue.take(self._execution)
        if not found:
            return False
        id, payload = found
        if payload is None:
            log.warning("passed over %s: no task has that id, or it runs already, or is over", ascii(id)[:200])
            return True
        try:
            task = WorkerTask.of(payload)
        except InvalidTask as error:
            log.warning("refused %s: %s", ascii(id)[:200], error)
            self._queue.release(id, self._execution, "failed", str(error), note=f"refused: {error}")
            return True
        self._held = (id, self._execution)
        try:
            self._run(task)
        finally:
            self._held = None
        return True

    # -- one task ---------------------------------------------------------------------------------------------

    def _run(self, task: WorkerTask) -> None:
        assert self._held
        log.info("%s: taken", task)
        horse = Horse(task, self._store.url, self._means)
        status, why = "queued", ""
        try:
            while not horse.ended(_TICK_S):
                if not why and (told := self._told(task)):
                    status, why = told
                    horse.end()
        finally:
            horse.end()
            horse.wait()
        if why:
            self._close(task, status, why)
        else:
            self._judge(task, horse.code, horse.last)

    def _told(self, task: WorkerTask) -> tuple[str, str] | None:
        """What becomes of the task that runs, and why, if it shall not go on here."""
        assert self._held
        with self._going_on():
            word = self._queue.beat(self._held)
            self._look_around()
            if not word.mine:
                return "", "this host had not been heard of, and others look after it"
            if word.cancelled:
                return "canceled", "it was cancelled"
            if self._makes_way(task, word.first):
                return "queued", "it makes way for a job that was submitted before"
        return None

    def _makes_way(self, task: WorkerTask, first: str) -> bool:
        """Whether the task at the front of the queue should have this host: it is of an older job, no other host has
        taken it for a while, and nothing of this job is committed until more workers come."""
        assert self._held
        ours, theirs = submitted(self._held[0]), submitted(first)
        if not self._lookout.stands(first, _MAKES_WAY_S) or ours is None or theirs is None or theirs >= ours:
            return False
        with suppress(Exception):  # a job that cannot be read does not go on
            job = self._job(task)
            members = job.state().members.values()
            there = sum(m.active or m.finished for m in members)
            return len(members) < job.config.workers or there < job.config.min_workers
        return True

    def _judge(self, task: WorkerTask, code: int, last: str) -> None:
        """What becomes of a task whose horse has ended by itself."""
        if code == 0:
            self._close(task, "finished", "it has done its rounds")
        elif code in (1, 2):
            missed = self._is_missed(task)
            self._close(task, "failed", last or f"its process ended with code {code}")
            if missed:
                waited, running = self._queue.cancel(task.job)
                if waited or running:
                    log.warning("job %s is cancelled, for it cannot begin without %s", task.job, task.worker)
        elif code == REMOVED:
            self._close(task, "canceled", "its job is not there any more")
        elif code == AWAY:
            self._close(task, "queued", last)
            time.sleep(_TICK_S)  # the server of its job is away: what comes back rings no bell
        else:
            version = self._version(task)
            how = signal.Signals(-code).name if code < 0 else f"code {code}"
            self._close(task, "queued", f"its process ended by {how}", version)

    def _close(self, task: WorkerTask, status: str, why: str, version: str = "") -> None:
        became = self._release(status, why, version) if status else ""
        word = {"queued": "waits again", "": "left to others"}.get(became, became)
        log.log(logging.WARNING if became == "failed" else logging.INFO, "%s: %s (%s)", task, word, why)

    def _release(self, status: str, why: str = "", version: str = "") -> str:
        assert self._held
        return self._queue.release(*self._held, status, why, version)

    # -- the others -------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Give a sign of life, and put back what lost hosts had."""
        if not self._held:
            self._queue.beat(None)
        others = [s for s in self._queue.started() if not self._held or s.name != self._held[1]]
        for lost in self._lookout.lost(others):
            self._put_back(lost)

    def _put_back(self, lost: Started) -> None:
        task = self._queue.task(lost.id)
        version = self._version(task) if task else ""
        why = f"its host {lost.host or '?'} is lost"
        if became := self._queue.release(lost.id, lost.name, "queued", why, version):
            word = "waits again" if became == "queued" else became
            log.warning("%s: %s (%s)", task or ascii(lost.id)[:200], word, why)

    def _version(self, task: WorkerTask) -> str:
        """The version of a task's job, or "". If its worker is surely dead the job goes on without it at once."""
        with suppress(Exception):  # what stands in Redis may be anything
            job = self._job(task)
            state = job.state()
            member = state.members.get(task.worker)
            if member and member.active and process.is_dead(member.process):
                job.evict(member)
            return str(state.version)
        return ""

    def _is_missed(self, task: WorkerTask) -> bool:
        """Whether a task's job has not begun, and cannot without this worker."""
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
    def _going_on(self) -> Iterator[None]:
        """What the server refuses, as keys of another type, is said once, and tried again."""
        try:
            yield
        except (NoServer, ServerLost):
            raise
        except KvpsError as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("kvps: error: %s", error)
            time.sleep(_TICK_S)
