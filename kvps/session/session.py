"""A worker's side of a job: join, pull, push, leave.

    with job.join("w0") as session:
        for batch in batches[session.clock:]:  # a worker that comes back does its own next batch
            params = session.pull()            # blocks as the bound asks
            session.push(gradient(params, batch))

The promise of `push`: once it has returned a clock, that contribution is in exactly one commit, or waits in the inbox
for it, or is in the log as rejected, with the reason. Lost replies and repeated calls make no difference.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvps.arrays.inputs import check_flat, one_number
from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.config import JobConfig
from kvps.device.base import CPU, Device
from kvps.errors import (
    ContributionLate,
    JobNotFound,
    JobStopped,
    KvpsError,
    LayoutMismatch,
    WrongOrder,
    not_to_be_pickled,
)
from kvps.optim.reductions import check_weight
from kvps.protocol.answers import Joined, UnitDone
from kvps.protocol.job_state import RoundState
from kvps.protocol.phases import COMPUTE, FETCH, OTHER, PUSH, WAIT
from kvps.session.buffers import GradientBuffers
from kvps.session.delivery import Delivery, Header
from kvps.session.encoder import Encoder
from kvps.session.inner_state import to_bytes
from kvps.session.iteration import iteration_timer
from kvps.session.membership import Membership
from kvps.session.missing import with_zeros
from kvps.session.pull import Pulled, WeightPull
from kvps.session.push import Push, PushState
from kvps.session.round import Round
from kvps.session.units import Units
from kvps.session.upload import Gradients
from kvps.session.worker_state import WorkerState
from kvps.transport.opening import OpenedJob

log = logging.getLogger("kvps.session")


class Session:
    """One incarnation of a worker in a job, made by `Job.join`. It belongs to the thread that made it.

    A fork of its process cannot use it: every call raises WrongOrder there, and the end of its with block does nothing.

    worker       the worker's id
    incarnation  the name of this incarnation of the worker
    rank         the worker's number in the job, kept across incarnations
    round        the last round it has done, or need not do because others made it while this worker was away. In BSP
                 with a quorum a round belongs to the job: a worker that was late skips the rounds that were made
                 without it, at its next pull or after a late push
    clock        its contributions acknowledged so far, all incarnations together: the number, from 0, of its next batch
    """

    def __init__(
        self, access: OpenedJob, worker: str, joined: Joined, device: Device | str = CPU, prefetch: bool = False
    ) -> None:
        self.worker = worker
        self.incarnation = joined.incarnation
        self.rank = joined.rank
        self.round = joined.round
        self.clock = joined.clock + joined.pending
        self._access = access
        self._timer = iteration_timer(access)
        self._membership = Membership(access, worker, joined, self._timer)
        self._encoder = Encoder(access, self._membership, joined.residual)
        self._delivery = Delivery(access, self._membership, self._encoder.sizes)
        self._weights = WeightPull(access, access.transport, device, prefetch)
        self._reader = access.reader
        self._round = Round(self._new_push())
        self._units = Units(access, self._membership)
        self._state = WorkerState(joined.state, worker)
        self._spare: Array | None = None  # the memory of `buffers` where no segment is lent

    @property
    def config(self) -> JobConfig:
        """The settings of the job."""
        return self._access.config

    @property
    def layout(self) -> Layout:
        """The layout of the job."""
        return self._access.layout

    @property
    def closed(self) -> bool:
        """Whether this worker has left."""
        return self._membership.closed

    @property
    def sequence(self) -> int:
        """How many contributions of this incarnation have been acknowledged."""
        return self._membership.sequence

    @property
    def accepted(self) -> int:
        """How many contributions of this incarnation have been accepted; those that came late and were dropped are
        none."""
        return self.sequence - self._membership.dropped

    @property
    def duplicates(self) -> int:
        """How many units this incarnation has pushed that another worker had pushed before."""
        return self._membership.duplicates

    @property
    def version(self) -> int:
        """The version of the weights that the last pull returned."""
        return self._membership.version

    @property
    def state(self) -> dict[str, Any]:
        """What this worker's user keeps beside the weights, as an epoch or a sampler's position: a dict of at most
        64 KiB as JSON. It travels with each push, and becomes part of the job in the commit of that contribution. A
        worker that comes back finds it as it was then, exactly as old as its `clock`; a checkpoint has it too."""
        return self._state.value

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        self._state.value = value

    @property
    def lacking(self) -> int:
        """By how many local steps this worker's contributions, those in `clock`, were shorter than whole rounds: one
        with which it left may have fewer steps than the others. It travels with `state`."""
        return self._state.lacking

    @lacking.setter
    def lacking(self, value: int) -> None:
        self._state.lacking = value

    @property
    def undelivered(self) -> int:
        """How many chunks of the gradient that is being pushed are not known to have arrived. Any thread may ask."""
        return self._round.push.missing

    # -- pull -------------------------------------------------------------------------------------------------

    def pull(self, part: str = "") -> dict[str, Any]:
        """Return the newest weights, as soon as the staleness bound lets this worker begin its next round.

        Returns name -> array, to be read only, on the device it joined with: valid until the next pull, on a device
        also for what that pull's current stream still computes. With a `part` of the model, see `Store.create_job`,
        only those of its parameters, and only they are read. Raises WorkerEvicted, JobNotFound, ServerLost,
        InvalidSetting if the job has no such part; and JobStopped or JobSuspended, which end the loop, if the job was
        stopped or suspended and this worker has done the last round.
        """
        self.layout.check_part(part)
        return self._pull(part).named(part)

    def pull_flat(self) -> Any:
        """Pull as `pull` does, and return all weights as one array, (size,) float32 in the order of the layout."""
        return self._pull("").flat

    def _pull(self, part: str) -> Pulled:
        self._membership.check_usable()
        self._round.push.forget()
        self._timer.enter(WAIT)
        if (same := self._units.weights(self._round.unit)) and not part:
            self._round.pulled, weights = same
            self._timer.enter(COMPUTE)
            return weights
        # First, because nothing may fail between taking a prefetched version and ordering the next.
        state, inline = self._await_round()
        self._timer.enter(FETCH)
        oldest = self._units.oldest_base(self._round.unit)
        with self._membership.memory_checked():
            version, weights = self._weights.pull(state, inline, self.round, self._membership.round_state, part)
            while version < oldest:  # it was prefetched before this unit's round was open
                version, weights = self._weights.pull(state, False, self.round, self._membership.round_state, part)
        self._membership.version, self._round.pulled = version, state
        self._units.pulled(state, None if part else weights)
        if self._access.config.partial_rounds:
            self.round = max(self.round, version)
        self._timer.enter(COMPUTE)
        return weights

    def _await_round(self) -> tuple[RoundState, bool]:
        """Wait for the state that admits this worker's next round. Return it, and whether its weights came with it."""
        config = self._access.config
        if config.unit_rounds:  # no unit is handed out before its round is open
            came, self._round.state = self._round.state, None
            return came or (self._membership.round_state(), False)
        state, inline = self._round.after or self._membership.round_state(), False
        while True:
            if not self._round.after:
                self._check_goes_on(state)
                if state.admits(self.round, config):
                    return state, inline
            state, inline = self._reader.next_round_state(self.worker, state, self._weights.inline_buffer)
            self._round.after = None
            self._membership.check(state)

    def _check_goes_on(self, state: RoundState) -> None:
        """Raise JobStopped or JobSuspended if this worker has done its last round. With a quorum, rounds are of the
        job."""
        done = max(self.round, state.version) if self._access.config.partial_rounds else self.round
        if state.run.is_last(done):
            raise self._membership.ended(state.run)

    @property
    def stopping(self) -> bool:
        """Whether the job was stopped or suspended, as far as this worker knows: its loop ends soon, at `pull` or
        `next_unit`."""
        return self._membership.run.ends

    def ended_by(self, error: BaseException | None) -> bool:
        """Return whether this session has raised an error because its job was stopped or suspended."""
        return error is not None and error is self._membership.ending

    # -- units ------------------------------------------------------------------------------------------------

    def next_unit(self) -> int | None:
        """Return the unit of data that the next push will have used; the same one until that push.

        Where versions are made of rounds of units, it waits: for the next version, or for a unit that comes back from a
        worker that died, or that is late. None says that all units are committed, or that the job was stopped; leave
        then. In other jobs None says that no unit is free, because all are handed out, or that the job was stopped:
        leave then, and see `kvps.job.await_unit` for units that come back. Raises WorkerEvicted,
        JobSuspended, and WrongOrder if the job hands out no units.
        """
        self._membership.check_usable()
        self._timer.enter(WAIT)
        self._round.unit = self._units.next(self._round, self._weights.inline_buffer)
        return self._round.unit

    @property
    def unit_seed(self) -> int:
        """The seed of all that is random in the present unit, from 0 to 2**63 - 1: it follows from the job's seed and
        the unit alone, whoever computes it. Raises WrongOrder without a unit."""
        return self._units.seed(self._round.unit)

    # -- push -------------------------------------------------------------------------------------------------

    def buffers(self) -> dict[str, Array]:
        """Return name -> array to compute the next gradient into, and then to `push` (or `put`); valid until that push.

        Over shared memory they lie where the aggregator reads them, and nothing is copied; over Redis they are plain
        arrays. Their first content is undefined. A write through a view of them after the push changes nothing that was
        acknowledged, and a fork has a copy of them. Raises WorkerEvicted, WrongOrder, ServerFull.
        """
        self._check_may_push()
        place = self._round.push.buffer() or self._spare_memory()
        self._round.buffers = GradientBuffers(self.layout, place)
        return dict(self._round.buffers.arrays)

    def _spare_memory(self) -> Array:
        if self._spare is None:
            self._spare = np.empty(self.layout.size, DTYPE)
        return self._spare

    def put(self, name: str, grad: Any) -> None:
        """Hand over one parameter's gradient before `push`, as soon as it is computed, so that its bytes leave early.

        `grad` is an array as `push` takes it, and must not change until push has returned. Raises LayoutMismatch, also
        if it was put already, NotFinite, WrongOrder; after these nothing has changed. Raises WorkerEvicted.
        """
        self._check_may_push()
        layout, push, buffers = self.layout, self._round.push, self._round.buffers
        number = layout.numbers.get(name)
        if number is None:
            raise LayoutMismatch(f"gradients do not fit the job: unknown {name}")
        if push.has(number):
            raise LayoutMismatch(f"gradient {name!r} was put already: push() first")
        layout.check(number, grad, "gradient")
        push.add(self._encoder.flat({number: grad}, buffers), buffers)

    def push(
        self, grads: Mapping[str, Any] | None = None, loss: Any = None, weight: int | None = None, part: str = ""
    ) -> int:
        """Hand over the gradient of the weights last pulled. Return the clock as which it was acknowledged. If another
        worker has pushed the same unit before, which was late and handed out a second time, that one counts: the clock
        stays as it was, and `duplicates` counts one more.

        `grads` maps every parameter's name, except those that were `put` before, to a float32 array of its shape, in
        host or CUDA memory; a job of `missing` "skip" lets names be left out. `loss`, a number or an array or tensor
        with one item, is shown while the job runs. `weight` is for a job whose reduction is weighted, as the number of
        samples: a whole number from 1 to 2**31; left out, it is 1. With a `part` of the model, see `Store.create_job`,
        `grads` maps its parameters alone, and the others stay as they are unless another contribution of the version
        has them. Raises LayoutMismatch, NotFinite (unless the job counts those as zeros), WrongOrder, InvalidSetting
        for a weight that the job does not take or a part that it does not have, and UsageError for a loss that is not
        one number; after these nothing has changed and the push may be repeated. Raises JobStopped or JobSuspended if
        the job ends with an earlier round: this gradient does not count. Raises WorkerEvicted, and ContributionLate if
        the job drops late ones and this is one: then pull, and go on with the round that is open. After any other error
        the push may have counted: push the same gradients again (put them again too), and they count once. If the error
        came while a device was computing them, that second push raises WrongOrder.
        """
        self._check_may_push()
        round_ = self._round
        withdraws = round_.buffers is not None and round_.buffers.may_be_written(grads)
        shown = None if loss is None else one_number(loss, "the loss")
        weight = self.check_weight(weight)
        self.layout.check_part(part)
        self._timer.enter(PUSH)
        has = round_.push.has if round_.push.begun else None
        grads, lacks = ({} if grads is None else grads), ""
        if self.config.skips_missing:
            grads, lacks = with_zeros(self.layout, grads, has, part)
        rest = self._encoder.flat(self.layout.rest(grads, "gradient", has, part), round_.buffers)
        return self._push(rest, shown, weight, part, lacks, withdraws)

    def push_flat(self, flat: Array, loss: Any = None, weight: int | None = None) -> int:
        """Push as `push` does, all gradients in one array, (size,) float32 in the order of the layout, in host memory.
        Raises LayoutMismatch for any other array, WrongOrder after `put` or `buffers`, and what `push` raises."""
        self._check_may_push()
        if self._round.push.begun or self._round.buffers:
            raise WrongOrder("push_flat() takes all gradients at once: push() those that were not put, or in buffers()")
        shown = None if loss is None else one_number(loss, "the loss")
        weight = self.check_weight(weight)
        check_flat(flat, self.layout.size)
        self._timer.enter(PUSH)
        return self._push(self._encoder.whole(flat), shown, weight)

    def _push(
        self,
        gradients: list[Gradients],
        loss: float | None,
        weight: int,
        part: str = "",
        lacks: str = "",
        withdraws: bool = False,
    ) -> int:
        """Have the contribution accepted that these gradients complete."""
        round_, pulled = self._round, self._round.pulled
        assert pulled
        traces = self._timer.due()
        state = self._state.to_send()
        header = Header(self.version, pulled.history, round_.unit, traces, weight, part, lacks, state)
        more_units = True
        try:
            accepted = round_.push.send(gradients, header, round_.buffers, withdraws)
            self.clock, self.round, more_units = accepted
            self._state.accepted()
            self._units.pushed(round_.unit)
        except UnitDone as done:
            self._membership.duplicates += 1
            self._timer.enter(OTHER)
            log.debug("%s, after it was late and handed out a second time: that one counts", done)
            return self.clock
        except ContributionLate:
            self.round = self.version + 1  # that round is over
            raise
        finally:
            if round_.push.state is not PushState.UNKNOWN:
                self._state.refused()
            if round_.push.done:
                self._round = round_.following(self._new_push(), self._access.config, more_units)
        self._timer.sent(traces)
        self._timer.pushed(self.round, self.clock, self.version, round_.unit, part, loss)
        return self.clock

    def check_weight(self, weight: object) -> int:
        """Return a contribution's weight, 1 for None. Raises InvalidSetting unless `push` takes it."""
        return check_weight(weight, self._access.config.reduction)

    def _new_push(self) -> Push:
        return Push(self._access, self._membership, self._encoder, self._delivery)

    def _check_may_push(self) -> None:
        """Raise WrongOrder if a push has used the last pull, or a unit is missing."""
        self._membership.check_usable()
        if self._round.pulled is None:
            raise WrongOrder("push() needs a pull() before it: a gradient belongs to the weights it was computed on")
        if self._access.config.units and self._round.unit is None:
            raise WrongOrder("push() needs a next_unit() before it: this job counts each unit of data once")
        if self.version < self._units.oldest_base(self._round.unit):
            raise WrongOrder("push() needs a pull() after next_unit(): these weights are older than the unit's round")

    # -- leave ------------------------------------------------------------------------------------------------

    def inherited_state(self) -> dict[str, NDArray[Any]]:
        """Return the `state` that the last incarnation gave to `leave`; {} if it gave none, or was killed or evicted.
        Raises CorruptData, WorkerEvicted."""
        self._membership.check_usable()
        return self._encoder.inherited_state()

    def leave(self, finished: bool = True, state: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Leave the vector clock: no worker waits for this one any more, and what it pushed still commits.

        `finished` says that it has done all its rounds; a job is finished when all its workers are. `state`, name ->
        float32, float64 or int64 array, is what the worker keeps beside the weights, as it was when its last push
        returned. A worker that is not finished finds it again when it joins: see `inherited_state`. Raises
        WorkerEvicted if it was evicted before and not replaced, because then the job does not know that it finished.
        """
        # No worker comes back after its last round, except to compute the units of dead workers.
        comes_back = not finished or bool(self._access.config.units)
        kept = to_bytes(state) if state and comes_back else b""
        me = self._membership
        me.owner.check()
        if me.closed:
            return
        me.closed = True
        keys = self._round.push.keys
        with contextlib.suppress(KvpsError):  # the next call raises it too
            self._round.push.forget()
        self._weights.close()
        self._delivery.release()
        try:
            residual = self._encoder.save(kept) if comes_back else ""
        finally:
            me.stop_heartbeat()
        try:
            me.leave(finished, self._timer.traces, residual)
        except JobNotFound:  # the removal may have scanned before these bytes arrived
            self._access.client.unlink(keys + self._encoder.stored_keys(residual))
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        raise not_to_be_pickled(
            f"the session of worker {self.worker!r} belongs to its thread", "hand over the job, and join there"
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self._membership.owner.is_here:
            return False
        stopped = isinstance(error, JobStopped) and self.ended_by(error)
        if error is None or stopped:
            self.leave(finished=True)
            return stopped
        if isinstance(error, ValueError) and "read-only" in str(error):
            error.add_note("arrays that pull() returns are the job's: change a copy, as params[name].copy()")
        # The user must see the first error; a server that cannot be reached now will notice the worker's silence.
        with contextlib.suppress(KvpsError):
            self.leave(finished=False)
        return False
