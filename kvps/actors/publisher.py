"""A job whose versions a learner makes with an optimizer of its own: the learner's handle on it."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, Self

import numpy as np

from kvps.actors.taking import Item, LearnerRollouts
from kvps.arrays.dtypes import dtype_of
from kvps.arrays.given import Given
from kvps.arrays.inputs import one_number, state_of
from kvps.arrays.items import KEPT, encode
from kvps.arrays.layout import DTYPE
from kvps.arrays.state_dict import pack, place
from kvps.errors import InvalidSetting, JobStopped, KvpsError, LayoutMismatch, WrongOrder, not_to_be_pickled, some_of
from kvps.job import Job
from kvps.protocol.scripts import Said
from kvps.transport.difference_reader import DifferenceReader
from kvps.transport.kept_state import kept_state
from kvps.transport.weight_reader import PullRequest

log = logging.getLogger("kvps.publish")


class Holder(Protocol):
    """What holds a job for its learner, as `kvps_aggregator.Publishing` does. One thread at a time uses it. `claims` is
    told of each new term of shard 0."""

    claims: LearnerRollouts | None

    def take(self, wait_s: float | None, takeover: bool) -> int:
        """Take the job and return its newest version. If another learner holds it, wait up to `wait_s`, for None as
        long as it takes; with `takeover` take its place. Raises UsageError."""

    def hold(self) -> None:
        """Make sure that this learner holds the job. Raises LeaseLost if another one has taken over."""

    def commit(self, said: Said) -> int:
        """Commit what the learner has given as the next version, once, and return that version. Raises LeaseLost if
        another learner has taken over, JobStopped, JobSuspended, ItemsRefused."""

    def finish(self) -> None:
        """Finish the job. Raises LeaseLost if another learner has taken over."""

    def release(self) -> None:
        """Give the job up to other learners."""


class Publisher:
    """The one learner that publishes a job; `Store.publisher` returns one. One thread at a time uses it.

    The end of its `with` block finishes the job. An error, a signal or JobSuspended leaves the job to be gone on with:
    the same call of `Store.publisher` finds it.

    job       the job, whose state, log and checkpoints are read as of any other
    version   the newest version that is committed
    rollouts  the experience that actors have put
    """

    def __init__(self, job: Job, dtypes: Mapping[str, str], given: Given, holder: Holder) -> None:
        """`dtypes` are those of the learner's arrays, which may be published in shorter ones. `given` is where `holder`
        finds what the next version has."""
        self.job = job
        self.version = 0
        self._dtypes = dtypes
        self._given = given
        self._holder = holder
        self._thread = ThreadPoolExecutor(1, f"kvps-publish-{job.name}")
        self._under_way: Future[int] | None = None
        self._lots: list[str] = []  # what that is trained on
        self._closed = False
        self.rollouts = LearnerRollouts(job, self._hold, self._settled)
        holder.claims = self.rollouts

    def __reduce__(self) -> tuple[Any, ...]:
        raise not_to_be_pickled(
            f"the publisher of job {self.job.name!r} belongs to its process", "hand over the store, and publish there"
        )

    def __repr__(self) -> str:
        return f"Publisher({self.job.name!r}, version {self.version})"

    def take(self, wait_s: float | None, takeover: bool) -> Self:
        """Take the job, as `Holder.take` does, and return self; or close, and raise what that raises."""
        try:
            self.version = self._holder.take(wait_s, takeover)
        except BaseException:
            self.close()
            raise
        return self

    def publish(
        self,
        model: Any,
        *,
        trained: Iterable[Item | str] = (),
        loss: Any = None,
        state: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> int:
        """Commit the weights of `model` (a module, a state dict, or name -> array) as the next version, and return that
        version. Each watcher sees all of it, or none of it.

        `trained` are the items of experience that it was trained on, whole groups, or their ids: in the same step they
        get their fate. If the version is not made, they are given back; what is refused before it is begun, such as
        another model, leaves them taken. `state`, name -> array, number, text or bytes, is kept with the version: the
        learner's float32 weights, moments, random state. `load` brings it back.

        With ``wait=False`` the call returns once the weights are copied in memory, with the number that the version
        will have. The next call, or the end, waits for this one, and raises what it raises. `loss` is one finite
        number, for the log and the screens. Raises LayoutMismatch for another name, shape or dtype, NotFinite,
        LeaseLost if another learner has taken over, ItemsRefused if an item is too stale for this version, JobStopped
        and JobSuspended if somebody has asked for that: nothing is committed then. After ServerLost it is not known:
        `load` says which version is there.
        """
        number = None if loss is None else one_number(loss, "loss")
        if number is not None and not math.isfinite(number):
            raise InvalidSetting(f"loss must be a finite number, not {number}: leave it out where there is none")
        self.wait()
        arrays = state_of(model)
        for name, array in arrays.items():
            if (now := dtype_of(array, name).name) != self._dtypes.get(name, now):
                raise LayoutMismatch(f"array {name!r} is {now} now, and was {self._dtypes[name]}: convert it")
        lots = self.rollouts.lots_of(trained)
        kept = b"" if state is None else _encoded(state)
        pack(self.job.layout, arrays, self._given.flat)
        self._given.state = kept
        self.rollouts.plan(lots)
        self._lots = lots
        self._under_way = self._thread.submit(self._holder.commit, Said(number, secrets.token_hex(8), lots))
        return self.wait() if wait else self.version + 1

    def wait(self) -> int:
        """Wait until the last `publish` is committed, and return the newest version. Raises what that call raises."""
        self.job.access.client.owner.check()
        if self._closed:
            raise WrongOrder(f"the publisher of job {self.job.name!r} is closed: open another with Store.publisher")
        if under_way := self._under_way:
            try:
                self.version = under_way.result()
                self.rollouts.trained(self._lots)
            finally:
                if under_way.done():  # and not if Ctrl-C came meanwhile
                    self._under_way = None
                    if under_way.exception():
                        self._give_back(self._lots)
        return self.version

    def _give_back(self, lots: list[str]) -> None:
        """Give back what a failed publish was trained on, or `rollouts` holds at the end. What cannot be given back
        now waits again as soon as a learner takes the job."""
        with suppress(KvpsError, SystemExit):
            self.rollouts.refused(lots)

    def _hold(self) -> None:
        """Make sure that this learner holds the job, on the thread that publishes. Raises LeaseLost."""
        self.job.access.client.owner.check()
        self._thread.submit(self._holder.hold).result()

    def _settled(self) -> bool:
        """Wait for the publish that is under way, and return whether there was one. Raises what `publish` raises."""
        there = self._under_way is not None
        self.wait()
        return there

    def load(self, model: Any, state: dict[str, Any] | None = None) -> int:
        """Bring `model` (a module, a state dict, or name -> array) to the newest version, in place, and return that
        version. A dict `state` gets what was kept with it, instead of what it has: name -> array (read-only), number,
        text or bytes; nothing if none was. Raises LayoutMismatch, CorruptData; then nothing is changed."""
        self.wait()
        flat, reader = np.zeros(self.job.layout.size, DTYPE), self.job.access.reader
        request = PullRequest(reader.round_state(), 0, reader.round_state, flat)
        weights = DifferenceReader(self.job.access, reader).read(request)
        kept = {} if state is None else kept_state(self.job.access, weights.names[0])
        place(self.job.layout, flat, model)
        if state is not None:
            state.clear()
            state |= kept
        shorter = [p.name for p in self.job.layout.parameters if self._dtypes[p.name] != p.stored_as.name]
        if shorter and not kept and weights.version:
            log.warning(
                "job %s: version %d has %s in fewer bits than this model, and what was rounded off is lost: "
                "publish(state=...) keeps it, and load(state=...) brings it back",
                self.job.name,
                weights.version,
                some_of(shorter),
            )
        return weights.version

    def close(self, finish: bool = False) -> None:
        """Give the job up, so that another learner may go on with it; with `finish` it is finished, and actors see
        that. Raises what the last `publish` raises, and LeaseLost if the job is another learner's to finish. Does
        nothing in a fork."""
        if self._closed or not self.job.access.client.owner.is_here:
            return
        try:
            self.wait()
            if finish:
                self._holder.finish()
        finally:
            self._give_back(self.rollouts.taken)
            self.rollouts.close()
            self._closed = True
            self._thread.shutdown()
            self._holder.release()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None or isinstance(error, JobStopped):
            self.close(finish=True)
            return isinstance(error, JobStopped)
        try:
            self.close()
        except (KvpsError, SystemExit) as failed:  # the error of the block is the one to see
            log.warning("job %s: %s", self.job.name, failed)
        return False


def _encoded(state: Mapping[str, Any]) -> bytes:
    """Return the state that is kept with a version as bytes. Raises InvalidSetting."""
    try:
        return b"".join(encode(state, [], KEPT).parts)
    except InvalidSetting as error:
        raise InvalidSetting(f"state: {error}") from None
