"""The storage of one shard's bytes: what Redis and shared memory have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvps.arrays.digest import Buffers
from kvps.arrays.formats import Bytes
from kvps.arrays.pieces import Chunk
from kvps.job import Job
from kvps.protocol.job_state import State
from kvps.protocol.keys import staged_name
from kvps.protocol.plan import Contribution, Plan
from kvps_aggregator.shard.lifecycle import DeadKeys, Versions
from kvps_aggregator.step.shard_arrays import ShardArrays

Step = Callable[[Chunk], dict[str, str]]
"""A function that makes one chunk of the next version, and returns the digest of each of its arrays."""


class Storage(ABC):
    """The bytes of one shard, as its holder reads and stores them.

    stores_with_ready  whether what Redis is given of a version is so small that it is stored in one MULTI with `ready`
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
        """Load the committed weights and optimizer state into the shard's arrays.

        `before` is the shard's staged name one version ago; `pinned` is the version, with its name, that a pin keeps.
        Raises ChunkGone, CorruptData; LeaseLost if the job has to continue in other memory.
        """

    @abstractmethod
    def promote(self, plan: Plan, name: str, pinned: int | None) -> None:
        """Go on from the version of `plan`, committed as `name`, and discard bytes that no reader wants any more."""

    @abstractmethod
    def make_room(self) -> None:
        """On a full server, delete all bytes that a commit can do without. Raises LeaseLost, ServerRestarted."""

    @abstractmethod
    def retire(self) -> None:
        """Discard what was kept for later versions: nothing more will be stored."""

    def loaded(self) -> None:
        """Note that the loaded bytes have proved to be the committed ones."""

    def gradient_keys(self, c: Contribution) -> list[str]:
        """Return the keys of this shard's part of a contribution, one for each chunk; also for the chunks that are not
        in its part of the model."""
        keys, chunks = self._job.access.keys, self._arrays.chunks
        return [keys.gradient(self._number, c.worker, c.incarnation, c.seq, chunk.number) for chunk in chunks]

    def contribution(self, c: Contribution) -> list[Bytes] | None:
        """Return the chunks of a contribution, or None if they must be fetched. Raises LeaseLost."""
        return None

    def fetch_one_early(self, waiting: Callable[[], Sequence[Contribution]]) -> bool:
        """Fetch one contribution that is not planned yet. Return False if there is none, or it is not worth it."""
        return False

    def staging(self, name: str) -> AbstractContextManager[None]:
        """Return the context in which the version of this name is made. Raises ServerFull, LeaseLost."""
        return nullcontext()

    def each_chunk(self, step: Step) -> Generator[dict[str, str], None, None]:
        """Run `step` on each chunk, and yield its results in the order of the chunks."""
        yield from map(step, self._arrays.chunks)

    def items(self, name: str, chunk: Chunk) -> Iterator[tuple[str, Buffers]]:
        """Yield the keys and values that Redis is given of a chunk of the next version."""
        return iter(())

    def behind(self, name: str) -> Iterator[tuple[str, Buffers]]:
        """Yield the keys and values that Redis is given behind all chunks of the next version."""
        return iter(())

    def present(self) -> Iterator[tuple[str, Buffers]]:
        """Yield the keys and values that Redis has of the present version, without its manifest, and without the
        differences that a view has: a reader that misses them reads the view."""
        return iter(())

    def about(self) -> dict[str, Any]:
        """Return what the manifest of the next version says of its storage."""
        return {}

    def live_names(self) -> set[str]:
        """Return the staged names that may still be read or committed."""
        return {*self._versions.names.values(), self._next_name}

    @property
    def _next_name(self) -> str:
        """The name under which this term stages the next version."""
        return staged_name(self._version + 1, self._term)

    def _keys(self, what: str, name: str) -> list[str]:
        """Return the keys of one array of a version, one for each chunk."""
        return [self._job.access.keys.array(self._number, what, name, chunk.number) for chunk in self._arrays.chunks]

    def _read_from_redis(self, version: int, name: str) -> None:
        """Read the bytes of a version from Redis into the arrays. Raises ChunkGone."""
        for what in self._whats:
            target = self._arrays.weights if what == "w" else self._arrays.state[what]
            if what != "w" and not version:
                target.fill(0)
            else:
                chunks = self._arrays.stretches(target)
                self._job.access.client.get(list(zip(self._keys(what, name), chunks, strict=True)))

    # -- dead bytes ----------------------------------------------------------------------------------------------

    def discard(self, keys: Iterable[str]) -> None:
        """Delete these keys of the slot with the next `free`."""
        self._dead.discard(keys)

    def discard_segments(self, names: Iterable[str]) -> None:
        """Delete these segments with the next `free`."""

    def free(self, wait: bool = False) -> None:
        """Delete the discarded bytes; with `wait`, only once they are worth a request.

        Raises LeaseLost after a change of holder, ServerRestarted if they may be live.
        """
        self._dead.free()

    def restore_reserve(self) -> None:
        """Reserve again the room that `make_room` gave up."""

    def keep_reserve(self) -> None:
        """On a server with a memory limit, reserve room for one more version. Raises nothing if there is no room."""

    # -- the end -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Make sure that Redis has everything that is committed. Raises KvpsError, ServerRestarted."""

    def finish(self) -> None:
        """Leave the finished job's bytes in Redis alone. Raises KvpsError."""

    def close(self) -> None:
        """Release all that this process uses of the shard."""
