"""A shard in the hands of its holder: weights and optimizer state in memory, the next version, the bytes to free.

The next version is computed beside the present one, never over it: if the plan is replaced, or another holder
commits, the present one is still what is committed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvps import wire
from kvps.errors import CorruptData, ServerFull
from kvps.job import Job
from kvps.keys import staged_name
from kvps.layout import CHUNK_BYTES, DTYPE, Array
from kvps.plan import Contribution, Plan
from kvps.state import State
from kvps.transport import ChunkGone
from kvps.wire import Buffers
from kvps_aggregator.part import Part
from kvps_aggregator.record import Recorder

_LINGER_BYTES = 32 << 20  # what the versions of a small job may take together; of a large one two are kept
_LINGER_VERSIONS = 64
_RESERVE_PART = 64 << 20  # Redis fills this much in some ten milliseconds


class BadContribution(Exception):
    """A planned contribution that cannot be applied: its bytes are gone, damaged or not finite."""

    def __init__(self, contribution: Contribution, reason: str) -> None:
        super().__init__(reason)
        self.contribution = contribution
        self.reason = reason


class Shard:
    """One shard, held under `term`. Used by the aggregator's loop alone. `record` is where contributions are kept."""

    def __init__(self, job: Job, number: int, term: str, record: Path | None = None) -> None:
        self.number = number
        self.term = term
        self.version, self._life = 0, ""
        self.staged: Plan | None = None
        self._job = job
        self._part = Part(job.config, job.layout, number)
        self._record = record
        self._recorder: Recorder | None = None
        # A small model is two versions further within a millisecond, and a reader that lost its processor for a
        # moment would chase it: its old versions stay a little longer.
        nbytes = job.layout.nbytes * (1 + len(self._part.slots))
        # A version, and two chunks on their way through the server's own buffers, which count too.
        self._reserve = self._part.size * DTYPE.itemsize * (1 + len(self._part.slots)) + 2 * CHUNK_BYTES
        self._kept_versions = max(2, min(_LINGER_VERSIONS, _LINGER_BYTES // nbytes))
        self._names: dict[int, str] = {}  # versions whose bytes are still there
        self._dead: list[str] = []
        self._gave_up_reserve = False

    # -- what the last holder left -----------------------------------------------------------------------------

    def load(self, state: State, before: str, pinned: tuple[int, str] | None) -> None:
        """Read the committed weights and optimizer state. Raises CorruptData if they are not what was committed.

        `before` is the shard's staged name one version ago, `pinned` version and name that a slow reader holds.
        """
        self.version, self._life, name = state.version, state.server, state.names[self.number]
        try:
            self._read(self._part.weights, self._weight_keys(name))
            for slot in self._part.slots:
                if self.version:
                    self._read(self._part.state[slot], self._slot_keys(slot, name))
                else:
                    self._part.state[slot].fill(0)
        except ChunkGone as gone:
            raise CorruptData(
                f"version {self.version} of job {self._job.name!r}, shard {self.number}: {gone}"
            ) from None
        if self._record:
            self._recorder = Recorder(self._record, self._job.name, state.id, self.number)
        if self.version:
            self._check_manifest(name)
        elif self._recorder:
            self._recorder.initial(self._part.weights, self._part.digest(self._part.weights))
        self._names = {self.version: name} if before == name else {self.version - 1: before, self.version: name}
        if pinned:
            self._names.setdefault(pinned[0], pinned[1])
        self.staged = None

    def live_names(self) -> set[str]:
        """The staged names that may still be read, or become a version."""
        return set(self._names.values()) | ({self.staged_as} if self.staged else set())

    def bury(self, keys: Sequence[str]) -> None:
        """Have keys of this slot deleted with the next `free`."""
        self._dead += keys

    def _check_manifest(self, name: str) -> None:
        text = self._job.client.call("GET", self._job.keys.manifest(self.number, name))
        digests = self._digests(self._part.weights, self._part.state)
        if not text or json.loads(text)["digests"] != digests:
            raise CorruptData(
                f"version {self.version} of job {self._job.name!r}, shard {self.number}: the bytes differ from what "
                f"was committed; something else wrote under {self._job.keys.weights(self.number, name, 0)}"
            )

    # -- the next version --------------------------------------------------------------------------------------

    def compute(self, plan: Plan) -> None:
        """Reduce the plan's contributions and step the optimizer. Raises BadContribution."""
        self._part.begin()
        for contribution in plan.contributions:
            if contribution.weight:
                self._fetch(contribution)
                if self._recorder:
                    self._recorder.contribution(contribution, self._part.incoming)
                self._part.add()
        self._part.step(plan)

    def _fetch(self, contribution: Contribution) -> None:
        target = self._part.incoming
        try:
            self._read(target, self._gradient_keys(contribution))
        except ChunkGone as gone:
            raise BadContribution(contribution, str(gone)) from None
        if self._part.digest(target) != contribution.digests[self.number]:
            raise BadContribution(contribution, "its bytes differ from its digest")
        if not wire.finite(target):
            raise BadContribution(contribution, "it holds NaN or Inf")

    def stage(self, plan: Plan) -> str:
        """Store the next version under this term's name, manifest last; the digest of its weights."""
        name = staged_name(plan.version, self.term)
        items = self._encoded(self._part.next_weights, self._weight_keys(name))
        for slot in self._part.slots:
            items += self._encoded(self._part.next_state[slot], self._slot_keys(slot, name))
        digests = self._digests(self._part.next_weights, self._part.next_state)
        manifest = {
            "plan": plan.id,
            "version": plan.version,
            "head": plan.head,
            "bytes": self._part.size * DTYPE.itemsize,
        }
        text = json.dumps(manifest | {"digests": digests}).encode()
        items.append((self._job.keys.manifest(self.number, name), [memoryview(text)]))
        try:
            self._job.client.put(items, wait_for_room=False)
        except ServerFull:
            self._make_room()
            self._job.client.put(items)
        self.staged = plan
        return digests["w"]

    def _make_room(self) -> None:
        """Give up what a commit can do without: only commits free the memory that gradients take."""
        for version in [v for v in self._names if v < self.version]:
            self._bury_version(version)  # its readers find it gone, and read the present one
        self.bury(self._reserve_keys())
        self.free()
        self._gave_up_reserve = True

    def keep_reserve(self) -> None:
        """On a server whose memory is limited, hold room for one version more. Raises nothing if there is none."""
        with suppress(ServerFull):
            self._gave_up_reserve = False
            used, limit = self._job.client.memory()
            for part, key in enumerate(self._reserve_keys() if limit else []):
                size = min(_RESERVE_PART, self._reserve - part * _RESERVE_PART)
                if used + 2 * size < limit and not self._job.client.call("EXISTS", key):
                    self._job.client.call("SETRANGE", key, size - 1, "\0")

    def _reserve_keys(self) -> list[str]:
        return [self._job.keys.reserve(self.number, part) for part in range(-(-self._reserve // _RESERVE_PART))]

    @property
    def staged_as(self) -> str:
        """The name under which the next version is staged."""
        assert self.staged is not None
        return staged_name(self.staged.version, self.term)

    def promote(self, pinned_version: int | None) -> None:
        """The staged version is committed: go on from it, and free what no reader can want any more."""
        plan = self.staged
        assert plan is not None
        self._part.promote()
        self.version, self.staged = plan.version, None
        self._names[plan.version] = staged_name(plan.version, self.term)
        for contribution in plan.contributions + plan.rejected:
            if contribution.weight:
                self._dead += self._gradient_keys(contribution)
        for version in [v for v in self._names if v <= self.version - self._kept_versions and v != pinned_version]:
            self._bury_version(version)

    def _bury_version(self, version: int) -> None:
        name = self._names.pop(version)
        self._dead += [*self._weight_keys(name), self._job.keys.manifest(self.number, name)]
        for slot in self._part.slots:
            self._dead += self._slot_keys(slot, name)

    def free(self) -> None:
        """Delete the bytes that died. Raises LeaseLost if another may do that now, NewLife if they may live again."""
        dead, self._dead = self._dead, []
        self._job.scripts.free(self.number, self.term, self._life, dead)
        if self._gave_up_reserve and not self.staged:  # before the next gradients take the room
            self.keep_reserve()

    # -- bytes -------------------------------------------------------------------------------------------------

    def _weight_keys(self, name: str) -> list[str]:
        return [self._job.keys.weights(self.number, name, c.number) for c in self._part.chunks]

    def _slot_keys(self, slot: str, name: str) -> list[str]:
        return [self._job.keys.state(self.number, slot, name, c.number) for c in self._part.chunks]

    def _gradient_keys(self, c: Contribution) -> list[str]:
        keys = self._job.keys
        return [keys.gradient(self.number, c.worker, c.incarnation, c.seq, chunk.number) for chunk in self._part.chunks]

    def _read(self, target: Array, keys: list[str]) -> None:
        self._job.client.get(list(zip(keys, self._part.stretches(target), strict=True)))

    def _encoded(self, array: Array, keys: list[str]) -> list[tuple[str, Buffers]]:
        return [(key, [stretch]) for key, stretch in zip(keys, self._part.stretches(array), strict=True)]

    def _digests(self, weights: Array, state: Mapping[str, Array]) -> dict[str, str]:
        """What the manifest says of a version."""
        return {name: self._part.digest(array) for name, array in {"w": weights, **state}.items()}
