"""The newest weights of a job for a process that does not train it: an actor, an evaluator, an inference engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvps.actors.sending import ActorRollouts
from kvps.arrays.digest import view
from kvps.arrays.layout import DTYPE, Array
from kvps.arrays.state_dict import place, unpacked
from kvps.errors import InvalidSetting, JobNotFound, WrongOrder, not_to_be_pickled
from kvps.job import Job
from kvps.parsing import MOST_BASES, whole_setting
from kvps.protocol.job_state import RoundState
from kvps.transport.difference_reader import DifferenceReader
from kvps.transport.host_pull import HostPull
from kvps.transport.weight_reader import PullRequest, WeightReader

_WAIT_MS = 1_000  # for news, between two looks


class Traffic(NamedTuple):
    """What a watch has read: so many differences, versions read whole, and of these because a difference did not fit;
    and the bytes of arrays and differences that came from Redis to this process."""

    differences: int
    wholes: int
    repairs: int
    nbytes: int


class Watch:
    """The newest weights of a job, in memory of this process; `Store.watch` returns one. One thread at a time uses it.

    `update` reads the differences to the version that is there where a learner publishes the job, and whole versions
    else. Of large models that come over a network, one process reads for all watchers of its host. Whatever was read is
    compared with the digests in the commit log.

    job       the job
    version   the version that is there; -1 before the first `update`, and after one that failed
    rollouts  sends experience to the learner
    """

    def __init__(self, job: Job, actor: str = "") -> None:
        """`actor` is the name under which it sends experience, "" for one of its own."""
        self.job = job
        self.version = -1
        access = job.access
        self._own = DifferenceReader(access, access.reader)
        self._reader: WeightReader = self._own
        if HostPull.pays(access):
            self._reader = HostPull(access, self._own, "watchers")
        self._flat: Array = np.zeros(0, DTYPE)
        self._names: tuple[str, ...] = ()  # of the version in `_flat`
        self._target: Any = None  # what got arrays last: held, so that no other gets its id
        self._taken: dict[str, int] = {}  # name -> digest of the array that it got
        self._known: dict[str, int] = {}  # name -> digest of the array of the version of the names `_digests_of`
        self._digests_of: tuple[str, ...] = ()
        self._read_names: dict[int, str] = {}  # of the last versions that were read here, those of shard 0
        self._closed = False
        self.rollouts = ActorRollouts(job, actor, self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise not_to_be_pickled(
            f"the watch of job {self.job.name!r} belongs to its process", "hand over the store, and watch there"
        )

    def __repr__(self) -> str:
        return f"Watch({self.job.name!r}, version {self.version})"

    @property
    def running(self) -> bool:
        """Whether more versions may come: the job is there, and not finished. One that its learner has left unfinished
        is gone on with."""
        with suppress(JobNotFound):
            return not self.job.state().finished(self.job.config)
        return False

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Name -> array of the version that is there: read-only views, which the next `update` changes."""
        self._check_read()
        return unpacked(self.job.layout, self._flat)

    @property
    def traffic(self) -> Traffic:
        """What was read."""
        own = self._own
        return Traffic(own.differences, own.wholes, own.repairs, own.nbytes)

    def load(self, target: Any) -> int:
        """As `update`, but bring all arrays of `target` to that version, whatever was in them."""
        self._target = None
        return self.update(target)

    def update(self, target: Any = None, wait: float | None = None) -> int:
        """Go to the newest version, and return it. `target` (a module, a state dict, or name -> array) is brought to it
        in place: only those of its arrays that are other than after the last call with the same target.

        With `wait`, a number of seconds, the call waits up to so long for a version newer than the one that is there,
        or for the end of the job.
        Raises LayoutMismatch if the target has other names or shapes, before any of it is changed; JobNotFound,
        ServerLost, CorruptData for bytes that are not the committed ones.
        """
        state = self._newest(wait)
        if not self._flat.size:
            self._flat = np.zeros(self.job.layout.size, DTYPE)
        if state.names != self._names:
            held, self._names, self.version = self._names, (), -1  # until it is whole
            request = PullRequest(state, 0, self.job.access.reader.round_state, self._flat, held=held)
            weights = self._reader.read(request)
            self.version, self._names = weights.version, weights.names
            self._read_names[self.version] = self._names[0]
            self._read_names.pop(next(iter(self._read_names)) if len(self._read_names) > MOST_BASES else -1, None)
        if target is not None:
            self._place(target)
        return self.version

    def changed(self, wait: float | None = None) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Go to the newest version as `update` does, and yield name and array of those that are other than after the
        last such call: for engines that load a tensor at a time."""
        self.update(wait=wait)
        taken = self._taken_by(self)
        for name, digest in self._digests.items():
            if taken.get(name) != digest:
                yield name, self.arrays[name]
                taken[name] = digest  # and not if the caller has stopped at it

    def at(self, version: int) -> dict[str, np.ndarray[Any, Any]]:
        """Return name -> read-only array of an earlier version, as long as the job keeps its bytes: the last two
        versions, and up to 64 of a small model. Raises InvalidSetting if it does not."""
        wanted = whole_setting("version", version, 0)
        self._check_open()
        if wanted == self.version:
            flat = self._flat.copy()
        else:
            flat = np.zeros(self.job.layout.size, DTYPE)
            state = self.job.access.reader.round_state()
            if not self._own.read_at(wanted, state, flat):
                raise InvalidSetting(
                    f"version {wanted} of job {self.job.name!r} is not kept, and the newest is {state.version}: keep "
                    f"the arrays of a version that will be needed, or write checkpoints"
                )
        return unpacked(self.job.layout, flat)

    def next_unit(self, wait: float | None = None) -> int | None:
        """Return the prompt that this actor is to answer; see `rollouts`."""
        return self.rollouts.next_unit(wait)

    def name_of(self, version: int) -> str | None:
        """Return the staged name of a version that was read here, None for another one."""
        return self._read_names.get(version)

    def close(self) -> None:
        """Stop reading for others of this host, and give back what this actor has."""
        self.rollouts.close()
        self._closed = True
        self._reader.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _newest(self, wait: float | None) -> RoundState:
        """Return the newest state; with `wait` one with a version that is not here, or that of the end of the wait."""
        self._check_open()
        reader = self.job.access.reader
        deadline, state = time.monotonic() + (wait or 0.0), reader.round_state()
        while (
            state.names == self._names and state.run.state != "stopped" and (left_s := deadline - time.monotonic()) > 0
        ):
            state, _ = reader.next_round_state("", state, None, max(1, min(_WAIT_MS, round(1000 * left_s))))
        return state

    def _check_open(self) -> None:
        self.job.access.client.owner.check()
        if self._closed:
            raise WrongOrder(f"the watch of job {self.job.name!r} is closed: open another one with Store.watch")

    def _check_read(self) -> None:
        if not self._names:
            raise WrongOrder(f"the watch of job {self.job.name!r} has no version yet: call update or load first")

    def _place(self, target: Any) -> None:
        """Bring a target to the version that is there."""
        taken, now = self._taken_by(target), self._digests
        if names := [name for name, digest in now.items() if taken.get(name) != digest]:
            self._target = None  # a failure may leave it half done
            place(self.job.layout, self._flat, target, names=names)
            self._target = target
            taken.update(now)

    def _taken_by(self, target: Any) -> dict[str, int]:
        """Return the digests of the arrays that a target has, by name; {} for another one than the last."""
        if self._target is not target:
            self._target, self._taken = target, {}
        return self._taken

    @property
    def _digests(self) -> dict[str, int]:
        """Name -> digest of each array of the version that is there, taken once a version."""
        self._check_read()
        if self._digests_of != self._names:
            layout, flat = self.job.layout, self._flat
            own = {p.name: xxhash.xxh3_64_intdigest(view(flat[p.start : p.stop])) for p in layout.parameters}
            self._known = own | {name: own[other] for name, other in layout.tied.items()}
            self._digests_of = self._names
        return self._known


def await_job(open_job: partial[Job], wait_s: float) -> Job:
    """Return what `open_job` returns, as soon as that job is there, within `wait_s`. Raises JobNotFound."""
    deadline, pause_s = time.monotonic() + wait_s, 0.05
    while True:
        try:
            return open_job()
        except JobNotFound:
            if time.monotonic() >= deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
