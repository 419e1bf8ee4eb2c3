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
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvps.arrays.digest import finite
from kvps.arrays.error_feedback import DeviceResidual, Residual
from kvps.arrays.formats import chunk_sizes, format_of
from kvps.arrays.inputs import one_number
from kvps.arrays.layout import CHUNK_ITEMS, DTYPE, Array, Layout
from kvps.config import JobConfig
from kvps.connection.client import Client
from kvps.connection.sockets import ChunkGone, redacted
from kvps.device.base import CPU, Cuda, Device, Flat, PinnedStaging, device_of, on_device
from kvps.errors import (
    CorruptData,
    DeviceFailed,
    JobNotFound,
    KvpsError,
    LayoutMismatch,
    NotFinite,
    ServerFull,
    ServerLost,
    WorkerEvicted,
    WrongOrder,
)
from kvps.machine.fork import ProcessOwner
from kvps.protocol.job_state import Member, Turn
from kvps.protocol.keys import JobKeys, segment_of
from kvps.protocol.recovery import await_history
from kvps.protocol.scripts import Accepted, InboxFull, JobScripts, Joined, ServerRestarted, evicted
from kvps.session.buffers import GradientBuffers
from kvps.session.heartbeat import Heartbeat
from kvps.session.pull import WeightPull
from kvps.session.residual_store import ResidualStore
from kvps.session.upload import GradientTransport, GradientUpload, RedisTransport, SegmentRing, ShmTransport
from kvps.transport.shared_memory import Segments, SharedMemoryLost, WritableSegment
from kvps.transport.version_reader import Reader

log = logging.getLogger("kvps.session")


class Session:
    """One incarnation of a worker in a job. Belongs to the thread that made it; `Job.join` makes one.

    A fork of its process cannot use it: every call raises WrongOrder there, and the end of its with block does nothing.

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
        segments: Segments | None = None,
        device: Device | str = CPU,
    ) -> None:
        self._owner = ProcessOwner(f"the session of worker {worker!r}")
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
        self._reader = Reader(client, keys, layout, scripts, segments)
        self._incoming = WeightPull(client, keys, config, layout, self._reader, segments, device, prefetch)
        self._history = ""
        self._seen: Turn | None = None
        self._pushed_on: Turn | None = None  # in BSP, since the last push: nobody goes on before something happens
        self.sequence = 0
        self._unit: int | None = None
        self._tried = 0  # the last sequence number under which bytes, or a push, may have been sent
        self._out: GradientUpload | None = None
        self._pushing: GradientUpload | None = None  # while push() is at work, for other threads
        self._doubt = ""  # the digests of a push of which the end is not known; "?" if there are none
        self._wire = format_of(config.gradient_format)
        self._stored = ResidualStore(client, keys, layout, worker)
        self._inherited = joined.residual
        self._residual: Residual | None = None  # of a lossy format, from the first contribution on
        self._sizes = chunk_sizes(layout, self._wire)
        self._ring = SegmentRing(segments.make, self._segment, sum(self._sizes)) if segments else None
        self._settled = 0  # what this incarnation has pushed up to here waits no more
        self._spare: Array | None = None
        self._staging = PinnedStaging(layout.size, CHUNK_ITEMS)
        self._lent: GradientBuffers | None = None
        self._pulled = False
        self._closed = False
        self._spans: dict[str, float] = {}
        self._since = time.perf_counter()
        self._trace: list[object] = []  # of the last iteration; goes with the next call that writes anyway
        self._thread = threading.get_ident()
        self._heart = Heartbeat(scripts, worker, joined.incarnation, config.worker_timeout_ms / 1000)
        self._heart.start()
        weakref.finalize(self, self._owner.run, self._heart.stop)  # who drops a session without leaving falls silent

    # -- pull -------------------------------------------------------------------------------------------------

    def pull(self) -> dict[str, Any]:
        """The newest weights, as soon as the staleness bound lets this worker begin its next round.

        Returns name -> array, to be read only, on the device it joined with: valid until the next pull, on a device
        also for what the stream that is current then still computes. Raises WorkerEvicted, JobNotFound, ServerLost.
        """
        self._check_usable()
        self._forget_put()
        began = time.perf_counter()
        # First: nothing may fail between taking what was fetched and ordering the next.
        turn, received_inline = self._await_turn()
        waited = time.perf_counter()
        try:
            self.version, weights = self._incoming.weights(turn, received_inline, self.round, self._look)
        except SharedMemoryLost:
            raise self._memory_lost() from None
        self._seen, self._history = turn, turn.history
        self._pulled = True
        self._spans = {"wait": waited - began, "fetch": time.perf_counter() - waited}
        self._since = time.perf_counter()
        return weights

    def _await_turn(self) -> tuple[Turn, bool]:
        """The first turn that holds enough of everybody's rounds for this worker's next one; whether its weights came
        with it."""
        turn, received_inline = self._pushed_on or self._look(), False
        while self._pushed_on or not turn.admits(self.round, self._config.staleness, self._config.workers):
            turn, received_inline = self._reader.next_turn(self.worker, turn, self._incoming.inline_buffer)
            self._pushed_on = None
            self._check_member(turn)
        return turn, received_inline

    def _look(self) -> Turn:
        turn = self._reader.turn(self.worker)
        self._check_member(turn)
        return turn

    def _check_member(self, turn: Turn) -> Member:
        me = turn.me
        if me is None or me.incarnation != self.incarnation:
            raise evicted(self.worker, self._keys.job, "replaced")
        if me.state != "active":
            raise evicted(self.worker, self._keys.job, "evicted after a silence, or its server was restarted")
        if me.accepted < self.sequence:
            raise self._forgotten()
        self._settled = me.accepted - me.pending
        return me

    def _forgotten(self) -> WorkerEvicted:
        """The server remembers less than this session was told: it was restarted, which all must know."""
        await_history(self._client, self._scripts, self._keys.job, self.version)
        return evicted(self.worker, self._keys.job, "its server was restarted, and may have lost its last writes")

    # -- units ------------------------------------------------------------------------------------------------

    def next_unit(self) -> int | None:
        """The unit of data that the next push will have used; the same until then.

        None says that none is free: all have been handed out. Leave then, and see `Job.await_unit` for those that
        may come back from workers who died. Raises WorkerEvicted, WrongOrder for a job that hands out none.
        """
        self._check_usable()
        if not self._config.units:
            raise WrongOrder(f"job {self._keys.job!r} hands out no units: create it with units=N")
        try:
            self._unit = self._scripts.next_unit(self.worker, self.incarnation)
        except ServerRestarted:
            raise self._forgotten() from None
        return self._unit

    # -- push -------------------------------------------------------------------------------------------------

    def buffers(self) -> dict[str, Array]:
        """Name -> array to compute the next gradient into, and then to `push` (or `put`), until that has returned.

        Over shared memory they lie where the aggregator reads them, and nothing is copied; over Redis they are plain
        arrays. What is in them at first is undefined. What is written through a view of them after the push changes
        nothing that was acknowledged, and a fork has a copy of them. Raises WorkerEvicted, WrongOrder, ServerFull.
        """
        self._check_may_push()
        seq = self.sequence + 1
        if self._ring and not self._wire.lossy and self._tried < seq:
            self._lent = GradientBuffers(self._layout, seq, self._made(self._ring, seq))
        else:
            if self._spare is None:
                self._spare = np.empty(self._layout.size, DTYPE)
            self._lent = GradientBuffers(self._layout, seq, self._spare)
        return dict(self._lent.arrays)

    def _taken(self, grads: Mapping[int, Any]) -> dict[int, Flat]:
        """Gradients flat in host memory, or on their way there; on a device, if that is where they are encoded.

        What the format left out is where the first of them is that is on a device. Raises LayoutMismatch, DeviceFailed.
        """
        if self._wire.lossy and not self._residual:
            self._residual = self._inherit(device_of(grads.values()))
        return {number: self._flattened(number, grad) for number, grad in grads.items()}

    def _flattened(self, number: int, grad: Any) -> Flat:
        if self._home is CPU and on_device(grad):
            return self._staging.bring(grad, self._layout.parameters[number].start)
        array = self._home.flat(grad)
        if self._lent:
            self._lent.check_place(self._layout.parameters[number].name, array)
        return array

    @property
    def _home(self) -> Device:
        """Where gradients are encoded; if that is no matter, host memory."""
        return self._residual.home if self._residual else CPU

    def _lent_now(self) -> GradientBuffers | None:
        """What was lent for the next contribution."""
        return self._lent if self._lent and self._lent.sequence > self.sequence else None

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
        self._layout.check(number, grad, "gradient")
        arrays = self._taken({number: grad})
        with self._home.current():
            counts = self._finite(number, arrays[number])
        out = self._outgoing()
        try:
            out.counts &= counts
            out.put(arrays, last=False)
        except BaseException:  # half of it may be sent, and the other half may land later
            self._out = None
            self._doubt = "?" if out.begun else self._doubt
            out.way.drop()
            raise

    def push(self, grads: Mapping[str, Any] | None = None, loss: Any = None) -> int:
        """Hand over the gradient of the weights last pulled; returns the clock it was acknowledged as.

        `grads` maps every parameter's name, but for those that were `put` before, to a float32 array of its shape, in
        host or CUDA memory. `loss`, a number or an array or tensor with one item, is shown while the job runs. Raises
        LayoutMismatch, NotFinite (unless the job counts those as zeros), WrongOrder, and UsageError for a loss that is
        not one number; after these nothing has changed and the push may be made again. Raises WorkerEvicted. After any
        other error it may have counted: the same gradients, put again too, may be pushed again, and count once; unless
        it came in the middle of computing them on a device, when WrongOrder says so.
        """
        self._check_may_push()
        lent = self._lent_now()
        withdraws = lent is not None and lent.may_be_written(grads)
        shown = None if loss is None else one_number(loss, "the loss")
        began = time.perf_counter()
        put = self._out.has if self._out else lambda _: False
        rest = self._layout.rest({} if grads is None else grads, "gradient", put)
        arrays = self._taken(rest)
        counts = self._out is None or self._out.counts
        looks = self._out is None and self._looks_late
        with self._home.current():
            for number, array in arrays.items():
                counts &= looks or self._finite(number, array)
        out = self._outgoing(live=counts, looks=looks)
        self._out, self._pushing = None, out
        try:
            if counts:
                out.put(arrays)
            if not out.finite:
                counts = all(self._finite(number, array) for number, array in arrays.items())
            self._check_same(out.digests if counts else "-")
            if lent and withdraws:
                lent.withdraw()
            accepted = self._deliver(out, counts)
            if lent:
                lent.close()
            if self._residual and counts:
                self._residual.keep()
            self.sequence += 1  # last: if this is interrupted, how it ended is not known
        except NotFinite:
            self._out = out
            self._forget_put()
            raise
        except BaseException:
            if not self._doubt and self._tried > self.sequence and (out.begun or not counts):
                self._doubt = out.digests if counts else "-"
            out.way.drop()
            raise
        finally:
            self._pushing = None
        self._doubt = ""
        self._pulled, self._unit = False, None
        self._pushed_on = None if self._config.staleness else self._seen
        self.clock, self.round = accepted
        self._trace = self._measured(began - self._since, time.perf_counter() - began, shown)
        return self.clock

    @property
    def undelivered(self) -> int:
        """How many chunks of the gradient that is being pushed are not known to have arrived. Any thread may ask."""
        out = self._pushing
        return out.way.missing if out else 0

    def _check_same(self, digests: str) -> None:
        """After a push of which the end is not known, only the same one may follow: it may count, or its bytes may
        still be on their way to the names of the next."""
        if self._doubt not in ("", digests):
            raise WrongOrder(
                "how the push before this one ended is not known, and this is another gradient: leave, and join again"
            )

    def _forget_put(self) -> None:
        """What was put for a push that never came is not pushed. All of it has arrived then: none lands later."""
        out, self._out = self._out, None
        if out:
            try:
                out.way.end()
            except BaseException as error:
                self._doubt = "?"
                if not isinstance(error, (RedisConnectionError, RedisTimeoutError)):
                    raise

    def _check_may_push(self) -> None:
        self._check_usable()
        if not self._pulled:
            raise WrongOrder("push() needs a pull() before it: a gradient belongs to the weights it was computed on")
        if self._config.units and self._unit is None:
            raise WrongOrder("push() needs a next_unit() before it: this job counts each unit of data once")

    @property
    def _looks_late(self) -> bool:
        """Whether NaN may be found when most has left: if that is written over by what follows, and not left behind on
        the server until a sweep, as of a contribution that is skipped."""
        return not self._wire.lossy and (self._ring is not None or self._config.nonfinite == "reject")

    def _finite(self, number: int, array: Flat) -> bool:
        """Whether a gradient counts; one with NaN or Inf is refused, or counts as zeros."""
        if finite(array):
            return True
        if self._config.nonfinite == "skip":
            return False
        raise NotFinite(
            f"gradient {self._layout.parameters[number].name!r} holds NaN or Inf and was not sent: mend it, or create "
            f"the job with nonfinite='skip' to count such gradients as zeros"
        )

    def _outgoing(self, live: bool = True, looks: bool = False) -> GradientUpload:
        """The contribution that is being put together; a new one is not `live` if its number was tried before."""
        if not self._out:
            seq = self.sequence + 1
            live, self._tried = live and self._tried < seq, seq
            self._out = GradientUpload(self._layout, self._residual, self._way(seq, live), looks)
        return self._out

    def _way(self, seq: int, live: bool) -> GradientTransport:
        if ring := self._ring:
            lent = self._lent_now()
            return ShmTransport(self._sizes, lambda: self._made(ring, seq), live, lent is not None and lent.in_place)
        me = (self.worker, self.incarnation, seq)
        keys = [self._keys.gradient(c.shard, *me, c.number) for shard in self._layout.chunks for c in shard]
        return RedisTransport(self._client, keys, live, whole=self._layout.nbytes <= self._client.small_bytes)

    def _made(self, ring: SegmentRing, seq: int) -> WritableSegment:
        """The segment of a contribution."""
        try:
            return ring.segment(seq, self._settled)
        except SharedMemoryLost:
            self._look()
            raise self._memory_lost() from None

    def _memory_lost(self) -> WorkerEvicted:
        """It is gone under a job that is there: what came since Redis was given the weights will be done again."""
        return evicted(self.worker, self._keys.job, "the shared memory of the job is lost")

    def _segment(self, seq: int) -> str:
        return segment_of(self._keys.gradient(0, self.worker, self.incarnation, seq, 0))

    def _inherit(self, home: Device) -> Residual:
        """What the last incarnation left out, if it stored that; else nothing."""
        values: Array = np.zeros(self._layout.size, DTYPE)
        if self._inherited:
            try:
                self._stored.load(self._inherited, values)
            except ChunkGone as gone:
                self._look()  # it is freed when another goes on with it
                raise CorruptData(f"what worker {self.worker!r} stored when it left is not there: {gone}") from None
        if isinstance(home, Cuda):
            return DeviceResidual(self._wire, values, self._layout, home)
        return Residual(self._wire, values)

    def _deliver(self, out: GradientUpload, counts: bool) -> Accepted:
        """Store the chunks, wait for every OK, then have them accepted. A small one in one step.

        Never both in one pipeline: a refused SET before an accepted push would be an acknowledgement without
        bytes. In a MULTI a refused SET refuses the push too. After a cut it asks before it sends again, for a
        resend would recreate what a commit had freed.
        """
        accept = partial(self._accept, self.sequence + 1, out, counts)
        if not counts:
            out.way.drop()  # what was sent of it is dead, and will be swept
            return accept(self._scripts)
        cut: Exception | None = None
        try:
            if out.way.end():
                call = out.way.with_command
                return accept(self._scripts.through(call) if call else self._scripts)
        except (RedisConnectionError, RedisTimeoutError) as error:
            cut = error
        return self._resent(out, cut) or accept(self._scripts)

    def _resent(self, out: GradientUpload, cut: Exception | None) -> Accepted | None:
        """Store the chunks of which it is not known whether they are there, unless they were accepted before.

        Goes on as long as chunks arrive. `cut` is how the first try ended, if there was one. Raises ServerLost.
        """
        retries, told = self._client.retries(), False
        while True:
            try:
                if accepted := self._scripts.ask(self.worker, self.incarnation, self.sequence + 1):
                    return accepted
            except ServerRestarted:  # nothing is sent to a server before the new history begins
                raise self._forgotten() from None
            missing = out.way.missing
            if cut and not told:
                log.warning("%s; what has not arrived is sent again", self._stuck(missing, out, cut))
                told = True
            try:
                out.way.resend()
                return None
            except (RedisConnectionError, RedisTimeoutError) as error:
                cut = error
            if out.way.missing < missing:
                retries.progress()
            if not retries.pause():
                raise ServerLost(
                    f"{self._stuck(out.way.missing, out, cut)}; for {retries.patience_s:g} s small requests passed and "
                    f"no chunk did: look at what is between here and there, then push the same gradient again"
                )

    def _stuck(self, missing: int, out: GradientUpload, cut: Exception) -> str:
        return (
            f"job {self._keys.job}: push {self.sequence + 1} of worker {self.worker!r} does not get through to "
            f"{redacted(self._client.url)}: {missing} of {len(out.way.keys)} chunks have not arrived ({cut})"
        )

    def _accept(self, seq: int, out: GradientUpload, counts: bool, scripts: JobScripts) -> Accepted:
        """Have what was stored, or is by these `scripts`, accepted, as soon as the inbox takes it."""
        said = (self.worker, self.incarnation, seq, self.version, int(counts), out.digests if counts else "-")
        while True:
            try:
                return scripts.push(*said, self._history, self._unit, self._trace)
            except ServerRestarted:
                raise self._forgotten() from None
            except WrongOrder:  # the numbers are this session's own, and it does not miscount
                raise self._forgotten() from None
            except JobNotFound:
                self._client.unlink(out.way.keys)  # who removed it may have looked for bytes before
                raise
            except InboxFull:
                scripts = self._scripts  # what those store is there now
                turn = self._reader.turn(self.worker)
                if self._check_member(turn).pending >= self._config.max_pending:
                    self._client.wait({self._keys.turns: turn.last_entry})

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
        self._owner.check()
        if self._closed:
            return
        self._closed = True
        keys = self._out.way.keys if self._out else []
        with contextlib.suppress(KvpsError):  # the next call meets the same
            self._forget_put()
        self._incoming.close()
        if self._ring:
            self._ring.unlink(self._settled)
        try:
            residual = self._save(finished)
        finally:
            self._heart.stop()
        keys += self._stored.keys(residual) if residual else []
        try:
            self._scripts.leave(self.worker, self.incarnation, finished, self._trace, residual)
        except ServerRestarted:
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
        if self._residual:
            with contextlib.suppress(WorkerEvicted, ServerFull, JobNotFound, DeviceFailed):
                if self._check_member(self._reader.turn(self.worker)).accepted == self.sequence:
                    return self._stored.save(self.incarnation, self.sequence, self._residual.values)
        return ""

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._owner.is_here:
            return
        if error is None:
            self.leave(finished=True)
            return
        # The first error is what the user must see; a server that is gone will notice the silence.
        with contextlib.suppress(KvpsError):
            self.leave(finished=False)

    def _check_usable(self) -> None:
        self._owner.check()
        if self._closed:
            raise WrongOrder(f"the session of worker {self.worker!r} is closed: join again")
        if threading.get_ident() != self._thread:
            raise WrongOrder("a session belongs to the thread that joined: let each thread join under its own id")
        if self._heart.evicted:
            raise self._heart.evicted
