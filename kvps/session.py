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
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvps.client import Client
from kvps.coding import Remainder
from kvps.config import JobConfig
from kvps.errors import (
    CorruptData,
    JobNotFound,
    KvpsError,
    LayoutMismatch,
    NotFinite,
    ServerFull,
    WorkerEvicted,
    WrongOrder,
)
from kvps.formats import format_of
from kvps.heart import Heart
from kvps.keys import JobKeys
from kvps.layout import DTYPE, Array, Layout
from kvps.outgoing import Outgoing
from kvps.prefetch import Prefetch
from kvps.reader import Reader
from kvps.remainders import Remainders
from kvps.scripts import Accepted, InboxFull, JobScripts, Joined, NewLife, evicted
from kvps.state import State
from kvps.transport import ChunkGone
from kvps.wire import finite


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
        prefetch: bool = False,
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
        self._prefetch = Prefetch(client, keys, layout, config, self._reader) if prefetch else None
        self._history = ""
        self.sequence = 0
        self._unit: int | None = None
        self._tried = 0  # the last sequence number of which bytes may have been sent
        self._out: Outgoing | None = None
        self._counts = True  # whether all that was put is finite
        self._doubt = ""  # the digests of a push of which the end is not known; "?" if there are none
        self._wire = format_of(config.wire)
        self._pull_wire = format_of(config.pull_wire)
        self._stored = Remainders(client, keys, layout, worker)
        self._inherited = joined.remainder
        self._remainder: Remainder | None = None  # of a lossy format, from the first contribution on
        self._pulled = False
        self._closed = False
        self._flat: Array = np.empty(layout.size, DTYPE)
        self._views = layout.views(self._flat)
        self._spans: dict[str, float] = {}
        self._since = time.perf_counter()
        self._trace: list[object] = []  # of the last iteration; goes with the next call that writes anyway
        self._thread = threading.get_ident()
        self._heart = Heart(scripts, worker, joined.incarnation, config.worker_timeout_ms / 1000)
        self._heart.start()
        weakref.finalize(self, self._heart.stop)  # who drops a session without leaving falls silent
        if self._prefetch:
            weakref.finalize(self, self._prefetch.close)

    # -- pull -------------------------------------------------------------------------------------------------

    def pull(self) -> dict[str, Array]:
        """The newest weights, as soon as the staleness bound lets this worker begin its next round.

        Returns name -> read-only array, valid until the next pull. Raises WorkerEvicted, JobNotFound, ServerLost.
        """
        self._check_usable()
        self._forget_put()
        began = time.perf_counter()
        state = self._await_turn()  # first: nothing may fail between taking what was fetched and ordering the next
        turn = time.perf_counter()
        fetched = self._prefetch.take(self._flat) if self._prefetch else None
        if fetched:
            self.version, self._flat = fetched
            self._views = self._layout.views(self._flat)
        else:
            self.version = self._reader.weights(state, self._flat, self._pull_wire)
        self._history = state.history
        if self._prefetch:
            self._prefetch.begin(self.round + 1, self.version)
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
        self._unit = self._scripts.take(self.worker, self.incarnation)
        return self._unit

    # -- push -------------------------------------------------------------------------------------------------

    def put(self, name: str, grad: Any) -> None:
        """Hand over one parameter's gradient ahead of `push`, as soon as it is computed: its bytes leave meanwhile.

        `grad` is what `push` takes, and must stay as it is until push has returned. Raises LayoutMismatch, also for one
        that was put already, NotFinite, WrongOrder; after these nothing has changed. Raises WorkerEvicted.
        """
        self._check_may_push()
        number = self._layout.numbers.get(name)
        if number is None:
            raise LayoutMismatch(f"gradients do not fit the job: unknown {name}")
        if self._out and self._out.has(number):
            raise LayoutMismatch(f"gradient {name!r} was put already: push() first")
        array = self._layout.host(number, grad, "gradient")
        self._counts &= self._finite(number, array)
        out = self._outgoing()
        try:
            out.put(number, array)
        except BaseException:  # half of it may be sent, and the other half may land later
            self._out, self._counts, self._doubt = None, True, "?"
            out.drop()
            raise

    def push(self, grads: Mapping[str, Any] | None = None, loss: float | None = None) -> int:
        """Hand over the gradient of the weights last pulled; returns the clock it was acknowledged as.

        `grads` maps every parameter's name, but for those that were `put` before, to a float32 array of its shape, in
        host or CUDA memory; `loss` is shown while the job runs. Raises LayoutMismatch, NotFinite (unless the job
        counts those as zeros), WrongOrder; after these nothing has changed and the push may be made again. Raises
        WorkerEvicted. After any other error it may have counted: the same gradients, put again too, may be pushed
        again, and count once.
        """
        self._check_may_push()
        began = time.perf_counter()
        put = self._out.has if self._out else lambda _: False
        arrays = self._layout.rest({} if grads is None else grads, "gradient", put)
        counts = self._counts
        for number, array in arrays.items():
            counts &= self._finite(number, array)
        out = self._outgoing(live=counts)
        self._out, self._counts = None, True
        try:
            for number, array in arrays.items() if counts else ():
                out.put(number, array)
            self._check_same(out.digests if counts else "-")
            accepted = self._deliver(out, counts)
        except BaseException:
            if not self._doubt and self._tried > self.sequence:
                self._doubt = out.digests
            out.drop()
            raise
        self._doubt = ""
        if self._remainder and counts:
            self._remainder.keep()
        self.sequence += 1
        self._pulled, self._unit = False, None
        self.clock, self.round = accepted
        self._trace = self._measured(began - self._since, time.perf_counter() - began, loss)
        return self.clock

    def _check_same(self, digests: str) -> None:
        """After a push of which the end is not known, only the same one may follow: it may count, or its bytes may
        still be on their way to the names of the next."""
        if self._doubt not in ("", digests):
            raise WrongOrder(
                "how the push before this one ended is not known, and this is another gradient: leave, and join again"
            )

    def _forget_put(self) -> None:
        """What was put for a push that never came is not pushed. All of it has arrived then: none lands later."""
        out, self._out, self._counts = self._out, None, True
        if out:
            try:
                out.end()
            except (RedisConnectionError, RedisTimeoutError):
                self._doubt = "?"

    def _check_may_push(self) -> None:
        self._check_usable()
        if not self._pulled:
            raise WrongOrder("push() needs a pull() before it: a gradient belongs to the weights it was computed on")
        if self._config.units and self._unit is None:
            raise WrongOrder("push() needs a take() before it: this job counts each unit of data once")

    def _finite(self, number: int, array: Array) -> bool:
        """Whether a gradient counts; one with NaN or Inf is refused, or counts as zeros."""
        if finite(array):
            return True
        if self._config.nonfinite == "skip":
            return False
        raise NotFinite(
            f"gradient {self._layout.parameters[number].name!r} holds NaN or Inf and was not sent: mend it, or create "
            f"the job with nonfinite='skip' to count such gradients as zeros"
        )

    def _outgoing(self, live: bool = True) -> Outgoing:
        """The contribution that is being put together; a new one is not `live` if its number was tried before."""
        if not self._out:
            seq = self.sequence + 1

            def key(shard: int, chunk: int) -> str:
                return self._keys.gradient(shard, self.worker, self.incarnation, seq, chunk)

            self._remainder = self._remainder or self._inherit()
            live, self._tried = live and self._tried < seq, seq if live else self._tried
            self._out = Outgoing(self._client, self._layout, key, self._remainder, live)
        return self._out

    def _inherit(self) -> Remainder | None:
        """What the last incarnation left out, if it stored that; else nothing."""
        if not self._wire.lossy:
            return None
        remainder = Remainder(self._layout, self._wire)
        if self._inherited:
            try:
                self._stored.load(self._inherited, remainder.values)
            except ChunkGone as gone:
                self._look()  # it is freed when another goes on with it
                raise CorruptData(f"what worker {self.worker!r} stored when it left is not there: {gone}") from None
        return remainder

    def _deliver(self, out: Outgoing, counts: bool) -> Accepted:
        """Store the chunks, wait for every OK, then have them accepted.

        Never both in one pipeline: a refused SET before an accepted push would be an acknowledgement without
        bytes. After a cut it asks before it sends again, for a resend would recreate what a commit had freed.
        """
        seq, keys = self.sequence + 1, [key for key, _ in out.items]
        if not counts:
            out.drop()  # what was sent of it is dead, and will be swept
        elif not self._sent(out):
            while True:
                if accepted := self._scripts.ask(self.worker, self.incarnation, seq):
                    return accepted
                with contextlib.suppress(RedisConnectionError, RedisTimeoutError):
                    self._client.put_once(out.items)
                    break
        return self._accept(seq, int(counts), out.digests if counts else "-", keys)

    def _sent(self, out: Outgoing) -> bool:
        """Whether all is there; False if it may be, or if it was tried before."""
        with contextlib.suppress(RedisConnectionError, RedisTimeoutError):
            out.end()
            return out.live
        return False

    def _accept(self, seq: int, weight: int, digests: str, keys: Sequence[str]) -> Accepted:
        """Have what was stored accepted, as soon as the inbox takes it."""
        said = (self.worker, self.incarnation, seq, self.version, weight, digests, self._history)
        while True:
            try:
                return self._scripts.push(*said, self._unit, self._trace)
            except NewLife:
                raise self._forgotten() from None
            except WrongOrder:  # the numbers are this session's own, and it does not miscount
                raise self._forgotten() from None
            except JobNotFound:
                self._client.unlink(keys)  # who removed it may have looked for bytes before
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
        keys = [key for key, _ in self._out.items] if self._out else []
        with contextlib.suppress(KvpsError):  # the next call meets the same
            self._forget_put()
        if self._prefetch:
            self._prefetch.close()
        try:
            remainder = self._save(finished)
        finally:
            self._heart.stop()
        keys += self._stored.keys(remainder) if remainder else []
        try:
            self._scripts.leave(self.worker, self.incarnation, finished, self._trace, remainder)
        except NewLife:
            raise self._forgotten() from None
        except JobNotFound:
            self._client.unlink(keys)  # who removed it may have looked for bytes before
            raise

    def _save(self, finished: bool) -> str:
        """Have what was left out of all contributions stored for the next incarnation: its name, or ""."""
        if finished and not self._config.units:  # nobody comes back; but for units of the dead one does
            return ""
        if not self.sequence:
            return self._inherited
        if self._remainder:
            with contextlib.suppress(WorkerEvicted, ServerFull, JobNotFound):
                if self._look().members[self.worker].accepted == self.sequence:
                    return self._stored.save(self.incarnation, self.sequence, self._remainder.values)
        return ""

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
