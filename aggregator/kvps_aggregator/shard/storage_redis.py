"""A shard whose bytes are in Redis, a key for each chunk of each array."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvps.arrays.digest import Buffers
from kvps.arrays.formats import Bytes, encoded, format_of
from kvps.arrays.layout import CHUNK_BYTES, DTYPE, Chunk
from kvps.job import Job
from kvps.protocol.job_state import State
from kvps.protocol.plan import Contribution, Plan
from kvps_aggregator.shard.eager_fetch import EagerFetch
from kvps_aggregator.shard.lifecycle import Reserve, Versions
from kvps_aggregator.shard.storage import Storage
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
        gradient_format = format_of(job.config.gradient_format)
        sizes = [gradient_format.nbytes(chunk.stop - chunk.start) for chunk in arrays.chunks]
        self._early = EagerFetch(job.client, job.layout.shards, sizes, self.gradient_keys)
        self.stores_with_ready = nbytes <= job.client.small_bytes
        # Room for a version, and for two chunks in the server's own buffers, which count as used memory.
        self._reserve = Reserve(job, number, -(-nbytes * arrays.size // job.layout.size) + 2 * CHUNK_BYTES)

    # -- versions ------------------------------------------------------------------------------------------------

    def load(self, state: State, before: str, pinned: tuple[int, str] | None) -> None:
        name = state.names[self._number]
        self._version, self._dead.run_id = state.version, state.run_id
        self._read_from_redis(state.version, name)
        self._versions.begin(state.version, name, before, pinned)

    def items(self, name: str, chunk: Chunk) -> Iterator[tuple[str, Buffers]]:
        for what, made in self._arrays.made(chunk).items():
            yield self._job.keys.array(self._number, what, name, chunk.number), [made]
        if self._weight_format.lossy:
            shorter = encoded(self._weight_format, self._arrays.stretch(self._arrays.next_weights, chunk))
            yield self._job.keys.pulled(self._number, name, chunk.number), [shorter.data]

    def promote(self, plan: Plan, name: str, pinned: int | None) -> None:
        self._version = plan.version
        self._versions.names[plan.version] = name
        for contribution in plan.contributions + plan.rejected:
            if contribution.weight:
                self._bury_contribution(contribution)
        for _, old in self._versions.expired(plan.version, pinned):
            self._bury_version(old, self._reuses)

    # -- contributions -------------------------------------------------------------------------------------------

    def contribution(self, c: Contribution) -> list[Bytes] | None:
        return self._early.get(c)

    def fetch_one_early(self, waiting: Callable[[], Sequence[Contribution]]) -> bool:
        return self._early.is_worth_it and self._early.fetch_one(waiting())

    # -- dead bytes ----------------------------------------------------------------------------------------------

    @property
    def _reuses(self) -> bool:
        """Whether dead keys are renamed to the next keys. A server that is short of memory is better off without."""
        return self._arrays.size * DTYPE.itemsize >= _REUSED_BYTES and not self._reserve.limited

    def _bury_contribution(self, c: Contribution) -> None:
        keys = self.gradient_keys(c)
        if self._reuses:  # at most `max_pending` wait, so the name behind them cannot have been sent yet
            self._dead.reuse(keys, self.gradient_keys(c._replace(seq=c.seq + self._job.config.max_pending)))
        else:
            self._dead.bury(keys)

    def _bury_version(self, name: str, reuses: bool = False) -> None:
        self._dead.bury([self._job.keys.manifest(self._number, name)])
        keys = self._version_keys(name)
        if reuses:
            self._dead.reuse(keys, self._version_keys(self._next_name))
        else:
            self._dead.bury(keys)

    def free_some(self) -> None:
        if len(self._dead) >= _FEW_KEYS or self._reserve.limited or not self.stores_with_ready:
            self.free()

    def make_room(self) -> None:
        for _, name in self._versions.before(self._version):
            self._bury_version(name)
        self._dead.bury(self._reserve.keys)
        self._dead.free()
        self._reserve.is_given_up = True

    def retire(self) -> None:
        self._dead.bury(self._version_keys(self._next_name))

    def keep_reserve(self) -> None:
        self._reserve.keep()

    def restore_reserve(self) -> None:
        if self._reserve.is_given_up:
            self._reserve.keep()

    # -- keys ----------------------------------------------------------------------------------------------------

    def _version_keys(self, name: str) -> list[str]:
        """Return the keys of all chunks of a version, without its manifest."""
        keys = [key for what in self._whats for key in self._keys(what, name)]
        if self._weight_format.lossy:
            keys += [self._job.keys.pulled(self._number, name, chunk.number) for chunk in self._arrays.chunks]
        return keys
