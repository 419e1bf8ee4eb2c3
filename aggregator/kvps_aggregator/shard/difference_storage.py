"""What Redis has of the lossless differences between one shard's versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvps.arrays.digest import Buffers
from kvps.arrays.layout import CHUNK_BYTES, DTYPE
from kvps.arrays.lossless import encode, stretches
from kvps.job import Job
from kvps.protocol.bounds import MOST_DIFFERENCES
from kvps.protocol.keys import staged_name
from kvps_aggregator.step.shard_arrays import ShardArrays


class DifferenceStorage:
    """The differences of one shard, held under `term`. Each lies beside the version that it makes of the one before,
    and outlives it: a reader that was away follows several of them.

    They are kept while all of them together are smaller than a version. A new holder keeps none of an earlier one.
    """

    def __init__(self, job: Job, number: int, term: str, arrays: ShardArrays) -> None:
        self._keys = job.access.keys
        self._number = number
        self._term = term
        self._arrays = arrays
        self._stretches = stretches(job.layout, number)
        self._kept: dict[str, int] = {}  # staged name -> bytes of the difference to it: versions in a row, oldest first
        self._gone: dict[str, int] = {}  # those that are to be deleted
        self._next: bytes | None = None

    def items(self, name: str) -> Iterator[tuple[str, Buffers]]:
        """Yield the keys and values of the difference to the next version, staged as `name`."""
        self._next = encode(self._stretches, self._arrays.weights, self._arrays.next_weights)
        if self._next is not None:
            for key, piece in self._keys.difference(self._number, name, memoryview(self._next)):
                yield key, [piece]

    @property
    def about(self) -> list[int]:
        """How many bytes each difference has that leads to the next version, oldest first."""
        return [] if self._next is None else [*self._kept.values(), len(self._next)]

    def promote(self, name: str) -> None:
        """Go on from the next version, committed as `name`."""
        if self._next is None:  # nearly all items have changed
            self.drop()
            return
        self._kept[name], self._next = len(self._next), None
        whole = self._arrays.size * DTYPE.itemsize
        while sum(self._kept.values()) >= whole or len(self._kept) >= MOST_DIFFERENCES:
            oldest = next(iter(self._kept))
            self._gone[oldest] = self._kept.pop(oldest)

    def drop(self) -> None:
        """Keep none of them."""
        self._gone |= self._kept
        self._kept = {}

    def unneeded(self) -> list[str]:
        """Return the keys of those that no reader is to follow any more, and forget them."""
        gone, self._gone = self._gone, {}
        return self._keys_of(gone)

    def next_keys(self, version: int) -> list[str]:
        """Return the keys under which the difference to this version may have been staged."""
        return self._keys_of({staged_name(version, self._term): len(self._next or b"")})

    def _keys_of(self, names: Mapping[str, int]) -> list[str]:
        return [
            self._keys.pulled(self._number, name, piece)
            for name, size in names.items()
            for piece in range(-(-size // CHUNK_BYTES))
        ]

    @property
    def names(self) -> set[str]:
        """The staged names of the versions whose differences are kept."""
        return set(self._kept)
