"""A shard whose bytes are in Redis, a key for each chunk of each array."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from kvps.arrays.digest import Buffers
from kvps.arrays.formats import Bytes, encoded, format_of
from kvps.arrays.layout import CHUNK_BYTES, DTYPE
from kvps.arrays.pieces import Chunk
from kvps.arrays.weight_view import VIEW
from kvps.job import Job
from kvps.protocol.job_state import State
from kvps.protocol.plan import Contribution, Plan
from kvps_aggregator.shard.difference_storage import DifferenceStorage
from kvps_aggregator.shard.fetch import EagerFetch
from kvps_aggregator.shard.lifecycle import Reserve, Versions
from kvps_aggregator.shard.state_storage import StateStorage
from kvps_aggregator.shard.storage import Storage
from kvps_aggregator.shard.view_storage import ViewStorage
from kvps_aggregator.step.given_arrays import GivenArrays
from kvps_aggregator.step.shard_arrays import ShardArrays

_FEW_KEYS = 16  # of a small model; to delete them takes a tenth of the time of its round
_REUSED_BYTES = 1 << 20  # smaller shards' memory is never freed in large stretches


class RedisStorage(Storage):
    """The `Storage` of a shard whose bytes are in Redis."""

    def __init__(self, job: Job, number: int, term: str, arrays: ShardArrays) -> None:
        self._weight_format = format_of(job.config.weight_format)
        pulled = self._weight_format.nbytes(job.layout.size) if self._weight_format.lossy else 0
        nbytes = job.layout.nbytes * (1 + len(arrays.slots)) + pulled
        super().__init__(job, number, term, arrays, Versions(nbytes))
        self._view = ViewStorage(job, number, term, arrays) if VIEW in arrays.slots else None
        published = job.config.metadata.publishes
        self._differences = DifferenceStorage(job, number, term, arrays) if published else None
        self._kept = StateStorage(job, arrays.given) if isinstance(arrays, GivenArrays) and not number else None
        self._whats = ("w", *job.config.optimizer.slots)
        gradient_format = format_of(job.config.gradient_format)
        sizes = [gradient_format.nbytes(chunk.stop - chunk.start) for chunk in arrays.chunks]
        self._early = EagerFetch(job.access.client, job.layout.shards, arrays.chunks, sizes, self.gradient_keys)
        self._is_small = nbytes <= job.access.client.small_bytes
        # Room for a version, and for two chunks in the server's own buffers, which count as used memory.
        self._reserve = Reserve(job, number, -(-nbytes * arrays.size // job.layout.size) + 2 * CHUNK_BYTES)

    @property
    def stores_with_ready(self) -> bool:  # type: ignore[override]
        return self._is_small and not (self._kept and self._kept.is_large)

    # -- versions ------------------------------------------------------------------------------------------------

    def load(self, state: State, before: str, pinned: tuple[int, str] | None) -> None:
        name = state.names[self._number]
        self._version = state.version
        self._dead.begin(state)
        self._read_from_redis(state.version, name)
        self._versions.begin(state.version, name, before, pinned)
        if self._view:
            self._view.load(state.version, name, self._versions.names.values())

    def about(self) -> dict[str, Any]:
        if self._differences:
            return {"differences": self._differences.about, **(self._kept.about if self._kept else {})}
        return {VIEW: self._view.begins} if self._view else {}

    def live_names(self) -> set[str]:
        beside = self._view or self._differences
        return super().live_names() | (beside.names if beside else set())

    def items(self, name: str, chunk: Chunk) -> Iterator[tuple[str, Buffers]]:
        made = self._arrays.made(chunk)
        for what in self._whats:
            yield self._job.access.keys.array(self._number, what, name, chunk.number), [made[what]]
        if self._view:
            yield from self._view.items(name, chunk, made[VIEW])
        elif self._weight_format.lossy:
            shorter = encoded(self._weight_format, self._arrays.stretch(self._arrays.next_weights, chunk))
            yield self._job.access.keys.pulled(self._number, name, chunk.number), [shorter.data]

    def behind(self, name: str) -> Iterator[tuple[str, Buffers]]:
        beside = self._differences.items(name) if self._differences else iter(())
        return chain(beside, self._kept.items(name) if self._kept else ())

    def present(self) -> Iterator[tuple[str, Buffers]]:
        name, arrays = self._versions.names[self._version], self._arrays
        for what in (*self._whats, *([VIEW] if self._view else [])):
            array = arrays.weights if what == "w" else arrays.state[what]
            if what not in ("w", VIEW) and not self._version:
                continue  # zeros, which are not stored
            for key, stretch in zip(self._keys(what, name), arrays.stretches(array), strict=True):
                yield key, [stretch]
        if self._weight_format.lossy and not self._view:
            for chunk in arrays.chunks:
                shorter = encoded(self._weight_format, arrays.stretch(arrays.weights, chunk))
                yield self._job.access.keys.pulled(self._number, name, chunk.number), [shorter.data]

    def promote(self, plan: Plan, name: str, pinned: int | None) -> None:
        self._version = plan.version
        self._versions.names[plan.version] = name
        if self._view:
            self._view.promote(name)
        if self._differences:
            self._differences.promote(name)
        reuses = self._reuses
        for contribution in plan.contributions + plan.rejected:
            if contribution.weight:
                self._discard_contribution(contribution, reuses)
        for _, old in self._versions.expired(plan.version, pinned):
            self._discard_version(old, reuses)
        self._discard_beside()

    # -- contributions -------------------------------------------------------------------------------------------

    def contribution(self, c: Contribution) -> list[Bytes] | None:
        return self._early.get(c)

    def fetch_one_early(self, waiting: Callable[[], Sequence[Contribution]]) -> bool:
        return self._early.is_worth_it and self._early.fetch_one(waiting())

    # -- dead bytes ----------------------------------------------------------------------------------------------

    @property
    def _reuses(self) -> bool:
        """Whether dead keys are renamed to the next keys. A server that is short of memory is better off without.

        A commit waits until one replica has the version. If another could take over, it must not have dead bytes of the
        same length in their place: nobody would miss them.
        """
        if self._arrays.size * DTYPE.itemsize < _REUSED_BYTES or self._reserve.limited:
            return False
        return self._job.access.client.own_replicas(self._job.access.keys.owner(self._number)) < 2

    def _discard_contribution(self, c: Contribution, reuses: bool) -> None:
        keys = self.gradient_keys(c)
        # At most `max_pending` wait, so the name behind them cannot have been sent yet. A contribution of a part would
        # leave the renamed keys of other parts behind.
        if reuses and not self._job.layout.parts:
            self._dead.reuse(keys, self.gradient_keys(c._replace(seq=c.seq + self._job.config.max_pending)))
        else:
            self._dead.discard(keys)

    def _discard_version(self, name: str, reuses: bool = False) -> None:
        self._dead.discard([self._job.access.keys.manifest(self._number, name)])
        if self._kept:
            self._dead.discard(self._kept.drop(name))
        keys = self._version_keys(name)
        if reuses:
            self._dead.reuse(keys, self._version_keys(self._next_name))
        else:
            self._dead.discard(keys)

    def _discard_beside(self) -> None:
        if self._view:
            self._dead.discard(self._view.unneeded(self._versions.names.values()))
        if self._differences:
            self._dead.discard(self._differences.unneeded())

    def free(self, wait: bool = False) -> None:
        few_and_small = len(self._dead) < _FEW_KEYS and self.stores_with_ready
        if not (wait and few_and_small and not self._reserve.limited):
            super().free()

    def make_room(self) -> None:
        for _, name in self._versions.before(self._version):
            self._discard_version(name)
        if self._differences:
            self._differences.drop()
        self._discard_beside()
        self._dead.discard(self._reserve.keys)
        self._dead.free()
        self._reserve.is_given_up = True

    def retire(self) -> None:
        self._dead.discard(self._version_keys(self._next_name))
        if self._view:
            self._dead.discard(self._view.next_keys())
        if self._differences:
            self._dead.discard(self._differences.next_keys(self._version + 1))

    def keep_reserve(self) -> None:
        self._reserve.keep()

    def restore_reserve(self) -> None:
        if self._reserve.is_given_up:
            self._reserve.keep()

    # -- keys ----------------------------------------------------------------------------------------------------

    def _version_keys(self, name: str) -> list[str]:
        """Return the keys of all chunks of a version, without its manifest, and without a view."""
        keys = [key for what in self._whats for key in self._keys(what, name)]
        if self._weight_format.lossy and not self._view:
            keys += [self._job.access.keys.pulled(self._number, name, chunk.number) for chunk in self._arrays.chunks]
        return keys
