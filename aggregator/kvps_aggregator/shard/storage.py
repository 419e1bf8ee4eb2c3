"""Where one shard's bytes lie: what the two ways to store them have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from kvps.arrays.digest import Buffers
from kvps.arrays.formats import Bytes
from kvps.arrays.layout import Chunk
from kvps.job import Job
from kvps.protocol.job_state import State
from kvps.protocol.keys import staged_name
from kvps.protocol.plan import Contribution, Plan
from kvps_aggregator.shard.lifecycle import DeadKeys, Versions
from kvps_aggregator.step.shard_arrays import ShardArrays

Step = Callable[[Chunk], dict[str, str]]
"""Makes one chunk of the next version; the digest of each of its arrays."""


class Storage(ABC):
    """The bytes of one shard, in the hands of its holder.

    stores_with_ready  whether all that Redis is given of a version is small enough to go with `ready`, in one step
    """

    stores_with_ready = True

    def __init__(self, job: Job, number: int, term: str, arrays: ShardArrays, versions: Versions) -> None:
        self._job = job
        self._number = number
        self._term = term
        self._arrays = arrays
        self._whats = ("w", *arrays.slots)
        self._versions = versions
        self._dead = DeadKeys(job, number, term)
        self._version = 0

    @abstractmethod
    def load(self, state: State, before: str, pinned: tuple[int, str] | None) -> None:
        """Have the committed weights and optimizer state in the shard's arrays, and go on from there.

        `before` is the shard's staged name one version ago, `pinned` version and name that a slow reader holds. Raises
        ChunkGone, CorruptData; LeaseLost if the job has to go on in other memory.
        """

    @abstractmethod
    def promote(self, plan: Plan, name: str, pinned: int | None) -> None:
        """The version of `plan`, staged under `name`, is committed: what no reader can want any more is dead."""

    @abstractmethod
    def make_room(self) -> None:
        """Give up what a commit can do without, on a server that is full. Raises LeaseLost, ServerRestarted."""

    @abstractmethod
    def retire(self) -> None:
        """Nothing more will be stored: bury what was kept for that."""

    def loaded(self) -> None:
        """What was loaded is what was committed."""

    def gradient_keys(self, c: Contribution) -> list[str]:
        """The keys of this shard's part of a contribution, one a chunk."""
        keys, chunks = self._job.keys, self._arrays.chunks
        return [keys.gradient(self._number, c.worker, c.incarnation, c.seq, chunk.number) for chunk in chunks]

    def contribution(self, c: Contribution) -> list[Bytes] | None:
        """The chunks of a contribution, if they need not be fetched. Raises LeaseLost."""
        return None

    def fetch_one_early(self, waiting: Callable[[], Sequence[Contribution]]) -> bool:
        """Fetch a contribution that waits for those of others; False if there is none, or it is not worth it."""
        return False

    def staging(self, name: str) -> AbstractContextManager[None]:
        """Around the making of the version of this name. Raises ServerFull, LeaseLost."""
        return nullcontext()

    def each_chunk(self, step: Step) -> Generator[dict[str, str], None, None]:
        """What `step` returns for each chunk, in order."""
        yield from map(step, self._arrays.chunks)

    def items(self, name: str, chunk: Chunk) -> Iterator[tuple[str, Buffers]]:
        """What Redis is given of a chunk of the next version: keys and values."""
        return iter(())

    def live_names(self) -> set[str]:
        """The staged names that may still be read, or become a version."""
        return {*self._versions.names.values(), self._next_name}

    @property
    def _next_name(self) -> str:
        """The name under which this term stages the version behind the present one."""
        return staged_name(self._version + 1, self._term)

    def _keys(self, what: str, name: str) -> list[str]:
        """The keys of one array of a version, a chunk each."""
        return [self._job.keys.array(self._number, what, name, chunk.number) for chunk in self._arrays.chunks]

    def _read_from_redis(self, version: int, name: str) -> None:
        """Have the bytes of a version in the arrays. Raises ChunkGone."""
        for what, target in {"w": self._arrays.weights, **self._arrays.state}.items():
            if what != "w" and not version:
                target.fill(0)
            else:
                chunks = self._arrays.stretches(target)
                self._job.client.get(list(zip(self._keys(what, name), chunks, strict=True)))

    # -- what died -----------------------------------------------------------------------------------------------

    def bury(self, keys: Iterable[str]) -> None:
        """Have keys of this slot deleted with the next `free`."""
        self._dead.bury(keys)

    def bury_segments(self, names: Iterable[str]) -> None:
        """Have segments deleted with the next `free`."""

    def free(self) -> None:
        """Delete the bytes that died.

        Raises LeaseLost if another may do that now, ServerRestarted if they may live again.
        """
        self._dead.free()

    def restore_reserve(self) -> None:
        """Hold the room again that `make_room` gave up."""

    def keep_reserve(self) -> None:
        """On a server whose memory is limited, hold room for one version more. Raises nothing if there is none."""

    # -- the end -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Leave in Redis all that is committed. Raises KvpsError, ServerRestarted."""

    def finish(self) -> None:
        """The job is finished: leave nothing elsewhere than in Redis. Raises KvpsError."""

    def close(self) -> None:
        """Nothing of this shard is used here any more."""
