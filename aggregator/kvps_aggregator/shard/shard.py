"""A shard and its holder's work on it: the arrays, the next version, and the storage of the bytes.

The next version is computed beside the present one, never over it: if the plan is replaced, or another holder commits,
the present version is still as it was committed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from kvps.arrays.digest import Buffers, digest_of, fold
from kvps.arrays.formats import format_of
from kvps.arrays.layout import DTYPE, Array
from kvps.arrays.number_ranges import counts_as_text, numbers_in
from kvps.arrays.pieces import Chunk
from kvps.connection.sockets import ChunkGone
from kvps.errors import CorruptData, NotFinite, ServerFull
from kvps.job import Job
from kvps.protocol.answers import CommitResult
from kvps.protocol.job_state import State
from kvps.protocol.keys import staged_name
from kvps.protocol.manifest import digests_in, skipped_in
from kvps.protocol.plan import Plan
from kvps_aggregator.shard.fetch import BadContribution, ContributionFetch, Source
from kvps_aggregator.shard.spans import VersionSpans
from kvps_aggregator.shard.storage import Storage
from kvps_aggregator.step.clipping import square_sum
from kvps_aggregator.step.shard_arrays import ShardArrays
from kvps_aggregator.verify.recording import Recorder


class Measured(NamedTuple):
    """A shard's part of a plan's reduced gradient, (size,) float32; and the sums of squares of that, and, in a job that
    rejects outliers, of the shard's part of each counting contribution."""

    plan: Plan
    gradient: Array
    square_sums: tuple[float, ...]


class Shard:
    """One shard, held under `term`. Used by the aggregator's loop alone.

    begun    the plan for which bytes of the next version may have been stored; None if there is none
    staged   that plan, once all of these bytes are stored
    measured  the reduced gradient of a plan, if it is to be clipped
    spans    the times of its versions
    """

    def __init__(
        self, job: Job, term: str, arrays: ShardArrays, storage: Storage, spans: VersionSpans, record: Path | None
    ) -> None:
        self.number = arrays.number
        self.term = term
        self.storage = storage
        self.version = 0
        self.begun: Plan | None = None
        self.staged: Plan | None = None
        self.measured: Measured | None = None
        self.spans = spans
        self._job = job
        self._arrays = arrays
        self._format = format_of(job.config.gradient_format)
        self._record = record
        self._recorder: Recorder | None = None
        self._unsent: list[tuple[str, Buffers]] = []
        self._manifests: dict[int, tuple[str, Buffers]] = {}  # version -> key and text: of the present, and the next

    def load(self, state: State, before: str, pinned: tuple[int, str] | None) -> None:
        """Read the committed weights and optimizer state. Raises CorruptData if they are not what was committed.

        `before` is the shard's staged name one version ago; `pinned` is the version, with its name, that a pin keeps.
        """
        name = state.names[self.number]
        self.version = state.version
        try:
            self.storage.load(state, before, pinned)
            if self._record:
                self._recorder = Recorder(self._record, self._job.name, state.id, self.number)
            if self.version:
                self._check_manifest(name)
            elif self._recorder:
                self._recorder.initial(self._arrays.weights, self._arrays.digest(self._arrays.weights))
            self._arrays.loaded()
            self.storage.loaded()
        except ChunkGone as gone:
            self.storage.close()
            damage = CorruptData(f"version {self.version} of job {self._job.name!r}, shard {self.number}: {gone}")
            raise self._job.access.client.lacking(damage) from None
        except BaseException:
            self.storage.close()
            raise
        self.begun = self.staged = self.measured = None

    def _check_manifest(self, name: str) -> None:
        key = self._job.access.keys.manifest(self.number, name)
        text = self._job.access.client.call("GET", key)
        if not text or digests_in(text) != self._digests():
            raise CorruptData(
                f"version {self.version} of job {self._job.name!r}, shard {self.number}: the bytes differ from what "
                f"was committed; something else wrote under {self._job.access.keys.weights(self.number, name, 0)}"
            )
        self._arrays.skipped = skipped_in(text, self.version, len(self._job.layout.parameters))
        self._manifests = {self.version: (key, [memoryview(text.encode())])}

    def _digests(self) -> dict[str, str]:
        """Return the digests of the present version, as its manifest must have them."""
        arrays: dict[str, Array] = {"w": self._arrays.weights, **self._arrays.state}
        return {what: self._arrays.digest(array) for what, array in arrays.items()}

    # -- the next version --------------------------------------------------------------------------------------

    def measure(self, plan: Plan) -> None:
        """Reduce this part of the plan's gradient, and keep it as `measured` for `make`.

        Raises BadContribution, LeaseLost, and UsageError for a reduction of the user's own that fails.
        """
        arrays, total = self._arrays, 0.0
        each = [0.0] * len(plan.counting) if self._job.config.reject_norm else []

        def noted(parts: Iterator[Array], items: int) -> Iterator[Array]:
            for number, part in enumerate(parts):
                each[number] += square_sum(part[:items])
                yield part

        gradient = self.measured.gradient if self.measured else np.empty(arrays.size, DTYPE)
        self.measured = None
        self.spans.begin()
        with self._fetch(plan) as fetch:
            for chunk in arrays.chunks:
                reduced, items = arrays.stretch(gradient, chunk), self._job.layout.buffer_start_in(chunk)
                timer = self.spans.chunk()
                parts = timer.fetching(fetch.parts(chunk))
                parts = noted(parts, items) if each else parts
                with fetch.blaming(chunk):
                    if math.isnan(arrays.reduce(plan, chunk, parts, reduced)):
                        fetch.suspect(chunk)
                exact = square_sum(reduced[:items])
                timer.reduced(exact)
                timer.end()
                total += exact
            fetch.check(partial(arrays.sizes, plan), self._skips)
        self.measured = Measured(plan, gradient, (total, *each))
        self.spans.measured()

    def has_measured(self, plan: Plan) -> bool:
        """Return whether `measured` is the gradient of this plan."""
        return self.measured is not None and self.measured.plan == plan

    def make(self, plan: Plan, scale: np.float32 | None = None) -> str:
        """Compute the next version and store it under this term's name, manifest last. Return its weights' digest.

        With a `scale`, it is made from the `measured` gradient. A small version is stored by `commit` instead.
        While one chunk is reduced and stepped, the next contributions are being received and the last results sent.
        Raises BadContribution, LeaseLost, ServerFull, NotFinite for a version that would not be, and UsageError for
        code of the user's own that fails.
        """
        self.begun = plan
        self.spans.begin() if scale is None else self.spans.resume()
        client, storage, name = self._job.access.storing, self.storage, staged_name(plan.version, self.term)
        digests: dict[str, list[str]] = {}
        items: list[tuple[str, Buffers]] = []
        try:
            with (
                storage.staging(name),
                self._fetch(plan) if scale is None else nullcontext() as fetch,
                nullcontext(_later) if storage.stores_with_ready else client.putting(wait_for_room=False) as put,
            ):
                with closing(storage.each_chunk(lambda chunk: self._step(plan, chunk, fetch, scale))) as steps:
                    for chunk, made in zip(self._arrays.chunks, steps, strict=True):
                        for what, digest in made.items():
                            digests.setdefault(what, []).append(digest)
                        for item in storage.items(name, chunk):
                            items.append(item)
                            put(*item)
                for item in storage.behind(name):
                    items.append(item)
                    put(*item)
                if fetch:
                    fetch.check(partial(self._arrays.sizes, plan), self._skips)
                folded = {what: fold(each) for what, each in digests.items()}
                items.append((self._job.access.keys.manifest(self.number, name), [self._manifest(plan, folded)]))
                self._manifests[plan.version] = items[-1]
                put(*items[-1])
        except ServerFull:
            if not items:
                raise
            storage.make_room()
            client.put(items)
        self._unsent, self.staged = (items, None) if storage.stores_with_ready else ([], plan)
        self.spans.made(sum(piece.nbytes for _, value in items for piece in value))
        return folded["w"]

    def _fetch(self, plan: Plan) -> ContributionFetch:
        counting = plan.counting
        for c in counting:
            if c.part and c.part not in self._job.layout.parts:
                raise BadContribution(c, f"the job has no part {c.part}")
        for c in plan.contributions:
            if c.lacks and not self._may_lack(c.lacks):
                raise BadContribution(c, "it lacks parameters that must be there, or that the job does not have")
        storage, chunks = self.storage, self._arrays.chunks
        sources = [Source(c, storage.gradient_keys(c), storage.contribution(c)) for c in counting]
        return ContributionFetch(self._job.access.client, self.number, chunks, sources, self._format, self._recorder)

    def _may_lack(self, lacks: str) -> bool:
        """Return whether a contribution of this job may lack these parameters: some of them, and no buffers."""
        trained = [number for number, p in enumerate(self._job.layout.parameters) if not p.buffer]
        with suppress(CorruptData):
            return self._job.config.skips_missing and numbers_in(lacks) < set(trained)
        return False

    def _step(
        self, plan: Plan, chunk: Chunk, fetch: ContributionFetch | None, scale: np.float32 | None
    ) -> dict[str, str]:
        """Make a chunk of the next version. Return the digest of each of its arrays."""
        timer = self.spans.chunk()
        if scale is not None and self.measured:
            gradient = self._arrays.stretch(self.measured.gradient, chunk)
            timer.reduced(0.0)  # `measure` has noted the sum
            try:
                self._arrays.apply_scaled(plan, chunk, gradient, scale)
            except NotFinite as error:
                self._blame(plan, chunk, error)
        elif fetch:
            with fetch.blaming(chunk):
                if not self._arrays.step(plan, chunk, timer.fetching(fetch.parts(chunk)), timer.reduced):
                    fetch.suspect(chunk)
        timer.end()
        return {what: digest_of([made]) for what, made in self._arrays.made(chunk).items()}

    @property
    def _skips(self) -> bool:
        """Whether contributions are rejected of which a step makes NaN or Inf."""
        return self._job.config.nonfinite == "skip"

    def _blame(self, plan: Plan, chunk: Chunk, error: NotFinite) -> NoReturn:
        """Raise BadContribution for the contribution of which the step of a measured gradient makes NaN or Inf, if such
        are rejected; else the error."""
        if self._skips:
            with self._fetch(plan) as fetch:
                fetch.blame(chunk, partial(self._arrays.sizes, plan), error)
        raise error

    def _manifest(self, plan: Plan, digests: Mapping[str, str]) -> memoryview:
        about = {"plan": plan.id, "version": plan.version, "head": plan.head}
        about |= {"bytes": self._arrays.size * DTYPE.itemsize, "digests": digests}
        about |= self.storage.about()
        if self._arrays.next_skipped:
            about["skipped"] = counts_as_text(self._arrays.next_skipped)
        return memoryview(json.dumps(about).encode())

    def commit(self, plan: Plan, digest: str) -> CommitResult:
        """Call ready for this part, whose weights have `digest`. A small part is stored in the same MULTI.

        Raises LeaseLost, PlanGone, ServerRestarted, ServerFull.
        """
        result = self._ready(plan, digest)
        self.spans.committed(plan)
        return result

    def _ready(self, plan: Plan, digest: str) -> CommitResult:
        client, scripts = self._job.access.client, self._job.access.scripts
        ready = (self.number, self.term, plan, digest)
        if self._unsent:
            try:
                stored = partial(client.put_and_call, self._unsent, wait_for_room=False)
                result = scripts.through(stored).ready(*ready)
                self.staged = plan
                return result
            except ServerFull:
                self.storage.make_room()
                client.put(self._unsent)
            self.staged = plan
        return scripts.ready(*ready)

    @property
    def staged_as(self) -> str:
        """The name under which the next version is staged."""
        assert self.staged is not None
        return staged_name(self.staged.version, self.term)

    def promote(self, pinned: int | None) -> None:
        """Go on from the staged version, which is committed. `pinned` is the version that a pin keeps."""
        plan, name = self.staged, self.staged_as
        assert plan is not None
        self._arrays.promote()
        self.version, self.begun, self.staged = plan.version, None, None
        self._manifests = {plan.version: self._manifests[plan.version]}
        self.storage.promote(plan, name, pinned)

    def mend(self) -> int:
        """Store again what Redis lacks of the present version, under its own names. Return how many keys that was.

        The server of the slot may have failed over to a replica that never got them. Raises ServerLost, ServerFull.
        """
        items = [*self.storage.present(), *self._manifests.values()]
        lengths = self._job.access.client.gather([("STRLEN", key) for key, _ in items])
        lost = [
            (key, value)
            for (key, value), length in zip(items, lengths, strict=True)
            if length != sum(piece.nbytes for piece in value)
        ]
        self._job.access.storing.put(lost, wait_for_room=False)
        return len(lost)

    def free(self, wait: bool = False) -> None:
        """Delete the discarded bytes as `Storage.free` does, and raise what it raises."""
        self.storage.free(wait)
        if not self.begun:  # before new gradients take the room
            self.storage.restore_reserve()


def _later(key: str, value: Buffers) -> None:
    """Store nothing yet: `commit` does."""
