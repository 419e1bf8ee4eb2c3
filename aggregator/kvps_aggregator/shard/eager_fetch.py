"""Contributions that are fetched before their plan is made, while others still compute.

In BSP the last worker's gradient is then all that a round still waits for. Each is whole in memory, and all of them
together take no more than a bound; what does not fit is fetched with its plan. Of a small model the next contribution
of each worker is asked for along with the plan, whether it is there or not: one wait for the server less.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from itertools import islice

import numpy as np

from kvps.arrays.formats import Bytes
from kvps.connection.client import Client
from kvps.connection.sockets import ChunkGone
from kvps.protocol.plan import Contribution

_MOST_BYTES = 512 << 20  # of all shards of a job
_LEAST_BYTES = 256 << 10  # what is smaller is not worth asking for what waits
_FEW = 8  # contributions that are asked for again and again until they are there

_Name = tuple[str, str, int]


class EagerFetch:
    """Those of one shard. A contribution's part lies end to end in its chunks, which have `sizes` bytes."""

    def __init__(
        self, client: Client, shards: int, sizes: Sequence[int], keys: Callable[[Contribution], Sequence[str]]
    ) -> None:
        self._client = client
        self._ends = np.cumsum(sizes).tolist()
        self._most = _MOST_BYTES // shards
        self._keys = keys
        self._here: dict[_Name, tuple[Bytes, list[Bytes]]] = {}
        self._coming: dict[_Name, tuple[Sequence[str], Bytes, list[Bytes]]] = {}
        self._unused: list[Bytes] = []

    @property
    def worth(self) -> bool:
        """Whether contributions are so large that fetching them takes longer than asking for them."""
        return bool(self._ends[-1] >= _LEAST_BYTES)

    def get(self, c: Contribution) -> list[Bytes] | None:
        """The chunks of a contribution, if they are here."""
        _, chunks = self._here.get(_name(c), (None, None))
        return chunks or None

    def expect(self, made: Sequence[Contribution]) -> None:
        """These are committed: the next of the same workers are asked for before they are known, if small and few."""
        last = {c.worker: c for c in made}
        if self._ends[-1] >= min(self._client.small_bytes, _LEAST_BYTES) or len(last) > _FEW:
            return
        following = {_name(c): c for c in (c._replace(seq=c.seq + 1) for c in last.values())}
        self._unused += [whole for _, whole, _ in self._coming.values()]
        self._forget(following)
        self._coming = {n: (self._keys(c), *self._room()) for n, c in following.items() if n not in self._here}

    def gets(self) -> list[tuple[str, memoryview]]:
        """What is still expected, chunk by chunk."""
        each = (zip(keys, chunks, strict=True) for keys, _, chunks in self._coming.values())
        return [(key, chunk.data) for chunks in each for key, chunk in chunks]

    def got(self, came: Iterator[bool]) -> None:
        """Of each of `gets`, whether it was there."""
        for name, (keys, whole, chunks) in list(self._coming.items()):
            if sum(islice(came, len(keys))) == len(keys):
                del self._coming[name]
                self._here[name] = whole, chunks

    def _room(self) -> tuple[Bytes, list[Bytes]]:
        whole = self._unused.pop() if self._unused else np.empty(self._ends[-1], np.uint8)
        return whole, [whole[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def _forget(self, but: Container[_Name]) -> None:
        for name in [name for name in self._here if name not in but]:
            self._unused.append(self._here.pop(name)[0])

    def fetch(self, waiting: Sequence[Contribution]) -> bool:
        """Fetch one of those that wait, and forget those that do not any more; False if there is none to fetch."""
        names = {_name(c): c for c in waiting if c.weight}
        self._forget(names)
        if (len(self._here) + 1) * self._ends[-1] > self._most:
            return False
        for name, c in names.items():
            if name not in self._here:
                whole, chunks = self._room()
                try:
                    self._client.get([(key, chunk.data) for key, chunk in zip(self._keys(c), chunks, strict=True)])
                except ChunkGone:  # a damaged one: that is found, and said, when it is applied
                    chunks = []
                self._here[name] = whole, chunks
                return True
        return False


def _name(c: Contribution) -> _Name:
    return c.worker, c.incarnation, c.seq
