"""Who looks at which job: each job that is looked at has one thread that reads it for all its viewers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from itertools import chain

from kvps.errors import JobNotFound, KvpsError, NoServer, ServerLost
from kvps.history.evaluations import Evaluation
from kvps.history.log_stream import entries_after
from kvps.job import readable
from kvps.parsing import entry_ms
from kvps.store import Store
from kvps_monitor.dashboard.frames import Look, Trouble, frame
from kvps_monitor.dashboard.history import MOST, History
from kvps_monitor.live import JobWatch
from kvps_monitor.spans import LearnerLosses, Traces, WholeVersions, losses_of, versions_of

log = logging.getLogger("kvps.dashboard")

LINGER_S = 5.0
"""For how long a job is still looked at when its last viewer has left: a page that is loaded again goes on."""
MOST_WATCHES = 32
"""The most jobs that are looked at, each by a thread of its own. Viewers of one job share its thread."""
_LOOK_EVERY_S = 0.4
_EVENTS = 12
_FEW = 100  # workers; the whole traces of more than these are too much to begin with


class TooManyWatches(KvpsError):
    """Viewers look at as many jobs as one dashboard watches."""


class Watches:
    """The watches of one server, each under the name of its job. Used by the event loop's thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._watches: dict[str, _Watch] = {}

    def newest(self, job: str) -> Look | None:
        """Return the newest look at a job; None if nobody looks at it, or it cannot be read."""
        watch = self._watches.get(job)
        return watch.newest if watch and isinstance(watch.newest, Look) else None

    def count(self) -> dict[str, int]:
        """Return how many viewers each job that is looked at has."""
        return {name: watch.viewers for name, watch in self._watches.items()}

    async def frames(self, job: str, worker: str | None = None) -> AsyncIterator[bytes]:
        """Return the frames of a job, one for each look at it from now on, until `close`. Looks that come while the
        viewer has not yet taken the frame before are passed over: the next frame has what changed in all of them.

        A job that nobody looks at yet is looked up first, so that a name alone starts no thread. Raises JobNotFound,
        NoServer, ServerLost, TooManyWatches.
        """
        if job not in self._watches:
            await asyncio.to_thread(self._look_up, job)
        if job not in self._watches:  # nobody else was quicker
            self._make_room()
            self._watches[job] = _Watch(self._store, job)
            self._end_later(job)  # the viewer may have gone before its first frame
        return self._frames(job, self._watches[job], worker)

    def _look_up(self, job: str) -> None:
        try:
            with readable(job):
                self._store.job(job)
        except (JobNotFound, NoServer, ServerLost):
            raise
        except KvpsError:
            return  # there is a job: why it cannot be read is what its viewers see

    def _make_room(self) -> None:
        """End the oldest watch that lingers, if there are as many as there may be. Raises TooManyWatches."""
        if len(self._watches) < MOST_WATCHES:
            return
        lingering = next((job for job, watch in self._watches.items() if not watch.viewers), None)
        if lingering is None:
            raise TooManyWatches(f"{MOST_WATCHES} jobs are looked at, and a dashboard looks at no more: close a page")
        self._watches.pop(lingering).end()

    async def _frames(self, job: str, watch: _Watch, worker: str | None) -> AsyncIterator[bytes]:
        news = asyncio.Event()
        watch.enter(news)
        sent: Look | Trouble | None = None
        try:
            while not watch.ended:
                if watch.newest is not None and watch.newest is not sent:
                    before, sent = sent, watch.newest
                    yield watch.frame(before if isinstance(before, Look) else None, sent, worker)
                    continue
                await news.wait()
                news.clear()
        finally:
            watch.leave(news)
            if not watch.viewers:
                self._end_later(job)

    def close(self) -> None:
        """End all watches and the frames of all viewers."""
        for watch in self._watches.values():
            watch.end()
        self._watches.clear()

    def _end_later(self, job: str) -> None:
        if watch := self._watches.get(job):
            asyncio.get_running_loop().call_later(LINGER_S, self._end_unless_seen, job, watch)

    def _end_unless_seen(self, job: str, watch: _Watch) -> None:
        if not watch.viewers and self._watches.get(job) is watch:
            watch.end()
            del self._watches[job]


class _Watch:
    """One job, looked at about twice a second by a thread of its own, until `end`.

    newest  what the last look found; None before the first
    """

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._viewers: set[asyncio.Event] = set()
        self._ended = threading.Event()
        self._frames: dict[tuple[int, str | None], bytes] = {}
        self.newest: Look | Trouble | None = None
        threading.Thread(target=self._run, name=f"kvps-look-{job}", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether no more looks come."""
        return self._ended.is_set()

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    def enter(self, news: asyncio.Event) -> None:
        """Set `news` after each look from now on."""
        self._viewers.add(news)

    def leave(self, news: asyncio.Event) -> None:
        self._viewers.discard(news)

    def frame(self, before: Look | None, now: Look | Trouble, worker: str | None) -> bytes:
        """Return a frame, made once for all viewers that need the same."""
        key = (before.number if before else 0, worker)
        if key not in self._frames:
            self._frames[key] = frame(before, now, worker)
        return self._frames[key]

    def end(self) -> None:
        """End the thread after its present look, and let all viewers see that it has."""
        self._ended.set()
        for news in self._viewers:
            news.set()

    def _publish(self, look: Look | Trouble) -> None:
        self.newest = look
        self._frames.clear()
        for news in self._viewers:
            news.set()

    def _run(self) -> None:
        """Look until the end. An error is what there is to see, and the next look begins anew."""
        job: _LookedAt | None = None
        number = 0
        while not self.ended:
            number, began = number + 1, time.monotonic()
            look: Look | Trouble
            try:
                with readable(self._job):
                    job = job or _LookedAt(self._store, self._job, number)
                    look = job.look(number)
            except KvpsError as error:
                job, look = None, Trouble(number, _kind(error), str(error))
            except Exception as error:
                log.exception("the look at job %s failed", self._job)
                job, look = None, Trouble(number, "unreadable", f"the look failed: {type(error).__name__}")
            if self.ended:
                return
            with suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._publish, look)
            # A look at a thousand workers takes long. It leaves half of the time to those who are looked at.
            took_s = time.monotonic() - began
            self._ended.wait(max(_LOOK_EVERY_S - took_s, took_s))


class _LookedAt:
    """A job that was found, its watch and its history. Used by one thread."""

    def __init__(self, store: Store, name: str, number: int) -> None:
        """`number` is that of the first look. Raises JobNotFound, CorruptData, ServerLost."""
        job = store.job(name)
        self._first = number
        self._watch = JobWatch(job, _EVENTS)
        self._history = History()
        self._seen_evaluation = "0-0"
        members = list(job.state().members)
        # What many workers have recorded is much to read; the first look has the end of it.
        iterations, versions = Traces(job, MOST).read(members if len(members) <= _FEW else [])
        recent = list(chain.from_iterable(map(WholeVersions(job.layout.shards).add, versions.values())))
        said = LearnerLosses(job, MOST).read()
        earlier = [v for v in versions_of(job) if not recent or v.version < recent[0].version]
        self._history.add(
            number, [*earlier, *recent], list(iterations.values()), self._evaluated(), [*losses_of(job), *_said(said)]
        )

    def look(self, number: int) -> Look:
        """Look once. Raises JobNotFound, CorruptData, ServerLost."""
        view = self._watch.look()
        iterations, versions = self._watch.kept()
        losses = _said(view.losses)
        self._history.add(number, self._watch.made(), list(iterations.values()), self._evaluated(), losses)
        look = Look(number, self._first, view, self._history.snapshot(), iterations, versions)
        # Made here, so that the event loop has less to do.
        _ = look.rows, look.shards, look.events, look.facts
        return look

    def _evaluated(self) -> list[Evaluation]:
        """Return the evaluations that were reported since the last call. Raises CorruptData, ServerLost."""
        access, found = self._watch.job.access, list[Evaluation]()
        for id, fields in entries_after(access.client, access.keys.evaluations, self._seen_evaluation):
            self._seen_evaluation = id
            found.append(Evaluation.of(fields, entry_ms(id, fields), f"evaluation {id}"))
        return found


def _said(losses: Iterable[tuple[int, float]]) -> list[tuple[int, float, float, float]]:
    """Return what a learner said of versions as (version, mean, lowest, highest loss)."""
    return [(version, loss, loss, loss) for version, loss in losses]


def _kind(error: KvpsError) -> str:
    if isinstance(error, JobNotFound):
        return "gone"
    if isinstance(error, ServerLost | NoServer):
        return "lost"
    return "unreadable"
