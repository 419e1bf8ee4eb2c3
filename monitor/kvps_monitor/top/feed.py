"""Looks at a job on a thread of its own, so that no answer of a server, or its absence, keeps the screen from a key."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from kvps.errors import JobNotFound, KvpsError, NoServer, ServerLost
from kvps.job import Job, readable
from kvps.protocol.job_state import Member, State
from kvps.store import Store
from kvps_monitor.live import JobWatch
from kvps_monitor.views import JobView

EVERY_S = 0.5
_PATIENCE_S = 1.0  # of a request: the next look asks again anyway
_END_S = 2.0  # a request to a server that hangs outlives the screen


class JobLine(NamedTuple):
    """A job in the list of jobs. `mode` is "" and `about` the reason, if it cannot be read."""

    name: str
    mode: str
    version: int
    about: str

    @classmethod
    def of(cls, job: Job, state: State) -> JobLine:
        """Return the line of a job."""
        return cls(job.name, job.config.mode, state.version, job.config.metadata.task or "made in Python")

    @classmethod
    def unreadable(cls, name: str, error: KvpsError) -> JobLine:
        """Return the line of a job that cannot be read."""
        return cls(name, "", 0, str(error))


class Looked(NamedTuple):
    """A look at the chosen job."""

    view: JobView


class NotSeen(NamedTuple):
    """A look that failed, and why; the next one comes all the same."""

    why: str


class Listed(NamedTuple):
    """The jobs of the server, by name."""

    jobs: list[JobLine]


class Asked(NamedTuple):
    """The incarnation of a worker that the user may want to evict."""

    job: Job
    member: Member


class Said(NamedTuple):
    """What has become of a request of the user."""

    words: str


Told = Looked | NotSeen | Listed | Asked | Said


class Feed:
    """A thread that looks at the chosen job twice a second and does what the user asks for, and tells of both."""

    def __init__(self, store: Store, job: str | None, tell: Callable[[Told], None]) -> None:
        """`tell` is called on the thread."""
        self._store = Store(store.client.twin(_PATIENCE_S))
        self._name = job
        self._tell = tell
        self._watch: JobWatch | None = None
        self._wanted = queue.SimpleQueue[Callable[[], None] | None]()
        # A daemon: the user need not wait for a server that hangs.
        self._thread = threading.Thread(target=self._run, name="kvps-top", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a request that hangs is left to itself."""
        self._wanted.put(None)
        self._thread.join(_END_S)

    def choose(self, name: str) -> None:
        """Look at another job from now on."""
        self._wanted.put(lambda: self._choose(name))

    def list_jobs(self) -> None:
        """Tell which jobs the server has."""
        self._wanted.put(self._list)

    def ask(self, worker: str) -> None:
        """Tell which incarnation of a worker there is now, so that the user can say yes to just this one."""
        self._wanted.put(lambda: self._ask(worker))

    def evict(self, job: Job, member: Member) -> None:
        """Evict an incarnation of a worker; one that has come since stays."""
        self._wanted.put(lambda: self._evict(job, member))

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wanted: Callable[[], None] | None = self._look
        while wanted:
            try:
                wanted()
            except KvpsError as error:
                self._failed(error)
            try:
                wanted = self._wanted.get(timeout=EVERY_S)
            except queue.Empty:
                wanted = self._look
        self._store.close()

    def _failed(self, error: KvpsError) -> None:
        if isinstance(error, JobNotFound):
            self._watch = None  # another job may get the name
        why = "the server does not answer" if isinstance(error, NoServer | ServerLost) else str(error)
        self._tell(NotSeen(why))

    def _look(self) -> None:
        if self._name is None:
            return
        with readable(self._name):
            watch = self._watch = self._watch or JobWatch(self._store.job(self._name))
            view = watch.look()
        self._tell(Looked(view))

    def _choose(self, name: str) -> None:
        self._name, self._watch = name, None
        self._look()

    def _list(self) -> None:
        self._tell(Listed(list(self._store.read_jobs(JobLine.of, JobLine.unreadable))))

    def _ask(self, worker: str) -> None:
        if self._watch is None:
            return
        job = self._watch.job
        member = job.state().members.get(worker)
        if member and member.active:
            self._tell(Asked(job, member))
        else:
            self._tell(Said(f"{worker} is not in the job now"))

    def _evict(self, job: Job, member: Member) -> None:
        job.evict(member, "asked for in kvps top")
        now = job.state().members.get(member.worker)
        came_back = now is not None and now.active
        self._tell(Said(f"{member.worker} is {'in the job again: it has joined anew' if came_back else 'evicted'}"))
