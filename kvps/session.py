"""A worker's side of a job: join, pull, push, leave.

    with job.join("w0") as session:
        for batch in batches:
            params = session.pull()        # blocks as the bound asks
            session.push(gradient(params, batch))

The promise of `push`: once it has returned a clock, that contribution is in exactly one commit, or waits in
the inbox for it, or stands in the log as rejected with its reason. Whether the reply of the server came the
first time or the third makes no difference.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvps.client import Client
from kvps.config import JobConfig
from kvps.errors import JobNotFound, KvpsError, NotFinite, WorkerEvicted, WrongOrder
from kvps.keys import JobKeys
from kvps.layout import DTYPE, Array, Layout
from kvps.reader import Reader
from kvps.scripts import Accepted, InboxFull, JobScripts, Joined, NewLife, evicted
from kvps.state import State
from kvps.wire import Buffers, chunked, digest, finite, fold

_BEATS_PER_TIMEOUT = 5


class Session:
    """One incarnation of a worker in a job. Belongs to the thread that made it; `Job.join` makes one.

    rank      the worker's number in the job, kept across incarnations
    round     the last round it has done (or need not do)
    sequence  how many contributions of this incarnation have been acknowledged
    clock     its contributions acknowledged so far, all incarnations together
    version   the version of the weights that the last pull returned
    """

    def __init__(
        self,
        client: Client,
        keys: JobKeys,
        config: JobConfig,
        layout: Layout,
        scripts: JobScripts,
        worker: str,
        joined: Joined,
    ) -> None:
        self.worker = worker
        self.rank = joined.rank
        self.incarnation = joined.incarnation
        self.round = joined.round
        self.clock = joined.clock + joined.pending
        self.version = 0
        self._client = client
        self._keys = keys
        self._config = config
        self._layout = layout
        self._scripts = scripts
        self._reader = Reader(client, keys, layout, scripts)
        self._history = ""
        self.sequence = 0
        self._unit: int | None = None
        self._tried = 0  # the last sequence number of which bytes may have been sent
        self._pulled = False
        self._closed = False
        self._flat: Array = np.empty(layout.size, DTYPE)
        self._views = layout.views(self._flat)
        self._spans: dict[str, float] = {}
        self._since = time.perf_counter()
        self._trace: list[object] = []  # of the last iteration; goes with the next call that writes anyway
        self._thread = threading.get_ident()
        self._heart = _Heart(scripts, worker, joined.incarnation, config.worker_timeout_ms / 1000)
        self._heart.start()
        weakref.finalize(self, self._heart.stop)  # who drops a session without leaving falls silent

    # -- pull -------------------------------------------------------------------------------------------------

    def pull(self) -> dict[str, Array]:
        """The newest weights, as soon as the staleness bound lets this worker begin its next round.

        Returns name -> read-only array, valid until the next pull. Raises WorkerEvicted, JobNotFound, ServerLost.
        """
        self._check_usable()
        began = time.perf_counter()
        state = self._await_turn()
        turn = time.perf_counter()
        self.version = self._reader.weights(state, self._flat)
        self._history = state.history
        self._pulled = True
        self._spans = {"wait": turn - began, "fetch": time.perf_counter() - turn}
        self._since = time.perf_counter()
        return dict(self._views)

    def _await_turn(self) -> State:
        """The first state that holds enough of everybody's rounds for this worker's next one."""
        state = self._look()
        while not state.admits(self.round, self._config.staleness, self._config.workers):
            self._client.wait({self._keys.commits: state.bell})
            state = self._look()
        return state

    def _look(self) -> State:
        state = self._reader.state()
        me = state.members.get(self.worker)
        if me is None or me.incarnation != self.incarnation:
            raise evicted(self.worker, self._keys.job, "replaced")
        if me.state != "active":
            raise evicted(self.worker, self._keys.job, "evicted after a silence, or its server began a new life")
        if me.accepted < self.sequence:
            raise self._forgotten()
        return state

    def _forgotten(self) -> WorkerEvicted:
        """The server remembers less than this session was told: it has begun a new life, which all must know."""
        self._scripts.recover(self._client.run_id(), secrets.token_hex(4), self.version)
        return evicted(
            self.worker, self._keys.job, "its server has begun a new life, and may have lost its last writes"
        )

    # -- units ------------------------------------------------------------------------------------------------

    def take(self) -> int | None:
        """The unit of data that the next push will have used; the same until then.

        None says that none is free: all have been handed out. Leave then, and see `Job.await_unit` for those that
        may come back from workers who died. Raises WorkerEvicted, WrongOrder for a job that hands out none.
        """
        self._check_usable()
        if not self._config.units:
            raise WrongOrder(f"job {self._keys.job!r} hands out no units: create it with units=N")
        self._unit = self._scripts.take(self.worker, self.incarnation).unit
        return self._unit

    # -- push -------------------------------------------------------------------------------------------------

    def push(self, grads: Mapping[str, Any], loss: float | None = None) -> int:
        """Hand over the gradient of the weights last pulled; returns the clock it was acknowledged as.

        `grads` maps every parameter's name to a float32 array of its shape, in host or CUDA memory; `loss` is
        shown while the job runs. Raises LayoutMismatch, NotFinite (unless the job counts those as zeros),
        WrongOrder; after these nothing has changed and the push may be made again. Raises WorkerEvicted.
        """
        self._check_usable()
        if not self._pulled:
            raise WrongOrder("push() needs a pull() before it: a gradient belongs to the weights it was computed on")
        began = time.perf_counter()
        if self._config.units and self._unit is None:
            raise WrongOrder("push() needs a take() before it: this job counts each unit of data once")
        arrays = self._layout.hosted(grads, "gradient")
        counts = self._counts(arrays)
        items, digests = self._encoded(arrays) if counts else ([], "-")
        accepted = self._deliver(items, int(counts), digests)
        self.sequence += 1
        self._pulled, self._unit = False, None
        self.clock, self.round = accepted
        self._trace = self._measured(began - self._since, time.perf_counter() - began, loss)
        return self.clock

    def _counts(self, arrays: list[Array]) -> bool:
        """Whether the gradient counts; one with NaN or Inf is refused, or counts as zeros."""
        for parameter, array in zip(self._layout.parameters, arrays, strict=True):
            if not finite(array):
                if self._config.nonfinite == "skip":
                    return False
                raise NotFinite(
                    f"gradient {parameter.name!r} holds NaN or Inf and was not sent: mend it, or create the job "
                    f"with nonfinite='skip' to count such gradients as zeros"
                )
        return True

    def _encoded(self, arrays: list[Array]) -> tuple[list[tuple[str, Buffers]], str]:
        """The chunks under their keys, as pieces of the arrays' own memory; and the digest of each shard's part."""
        items: list[tuple[str, Buffers]] = []
        digests = []
        for shard, chunks in enumerate(chunked(self._layout, arrays)):
            for index, chunk in enumerate(chunks):
                items.append(
                    (self._keys.gradient(shard, self.worker, self.incarnation, self.sequence + 1, index), chunk)
                )
            digests.append(fold(digest(chunk) for chunk in chunks))
        return items, ",".join(digests)

    def _deliver(self, items: list[tuple[str, Buffers]], weight: int, digests: str) -> Accepted:
        """Store the chunks, wait for every OK, then have them accepted.

        Never both in one pipeline: a refused SET before an accepted push would be an acknowledgement without
        bytes. After a cut it asks before it sends again, for a resend would recreate what a commit had freed.
        """
        seq = self.sequence + 1
        while True:
            if self._tried == seq and (accepted := self._scripts.ask(self.worker, self.incarnation, seq)):
                return accepted
            self._tried = seq
            with contextlib.suppress(RedisConnectionError, RedisTimeoutError):
                self._client.put_once(items)
                break
        while True:
            try:
                return self._scripts.push(
                    self.worker,
                    self.incarnation,
                    seq,
                    self.version,
                    weight,
                    digests,
                    self._history,
                    self._unit,
                    self._trace,
                )
            except NewLife:
                raise self._forgotten() from None
            except WrongOrder:  # the numbers are this session's own, and it does not miscount
                raise self._forgotten() from None
            except JobNotFound:
                self._client.unlink([key for key, _ in items])  # who removed it may have looked for bytes before
                raise
            except InboxFull:
                state = self._look()
                if state.members[self.worker].pending >= self._config.max_pending:
                    self._client.wait({self._keys.commits: state.bell})

    def _measured(self, compute_s: float, push_s: float, loss: float | None) -> list[object]:
        fields: list[object] = ["round", self.round, "version", self.version]
        for name, seconds in (self._spans | {"compute": compute_s, "push": push_s}).items():
            fields += [f"{name}_ms", f"{seconds * 1000:.3f}"]
        if loss is not None:
            fields += ["loss", f"{loss:.6g}"]
        return fields

    # -- life -------------------------------------------------------------------------------------------------

    def leave(self, finished: bool = True) -> None:
        """Leave the vector clock: nobody waits for this worker any more, and what it pushed still commits.

        `finished` says that it has done all its rounds; a job is finished when all its workers are. Raises
        WorkerEvicted if it was evicted before and not replaced, for then the job does not know that.
        """
        if self._closed:
            return
        self._closed = True
        self._heart.stop()
        try:
            self._scripts.leave(self.worker, self.incarnation, finished, self._trace)
        except NewLife:
            raise self._forgotten() from None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.leave(finished=True)
            return
        # The first error is what the user must see; a server that is gone will notice the silence.
        with contextlib.suppress(KvpsError):
            self.leave(finished=False)

    def _check_usable(self) -> None:
        if self._closed:
            raise WrongOrder(f"the session of worker {self.worker!r} is closed: join again")
        if threading.get_ident() != self._thread:
            raise WrongOrder("a session belongs to the thread that joined: let each thread join under its own id")
        if self._heart.evicted:
            raise self._heart.evicted


class _Heart(threading.Thread):
    """Gives a sign of life while the worker computes, for a round may take longer than the timeout."""

    def __init__(self, scripts: JobScripts, worker: str, incarnation: str, timeout_s: float) -> None:
        super().__init__(name=f"kvps-heart-{worker}", daemon=True)
        self._scripts = scripts
        self._worker = worker
        self._incarnation = incarnation
        self._interval_s = timeout_s / _BEATS_PER_TIMEOUT
        self._stopped = threading.Event()
        self.evicted: WorkerEvicted | None = None

    def run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._scripts.heartbeat(self._worker, self._incarnation)
            except WorkerEvicted as error:
                self.evicted = error
                return
            except KvpsError:
                continue  # the worker's own next call will say it, with the context that a user needs

    def stop(self) -> None:
        self._stopped.set()
