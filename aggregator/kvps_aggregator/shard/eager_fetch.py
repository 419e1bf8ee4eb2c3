"""Fetches contributions before their plan is made, while other workers still compute.

So in BSP a round still waits for the last worker's gradient only. Early contributions are whole in memory, up to a
bound for all of them together; a contribution that does not fit is fetched with its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np

from kvps.arrays.formats import Bytes
from kvps.arrays.layout import Chunk
from kvps.connection.client import Client
from kvps.connection.sockets import ChunkGone
from kvps.protocol.bounds import LEAST_EARLY_BYTES, MOST_EARLY_BYTES
from kvps.protocol.plan import Contribution

_Name = tuple[str, str, int]


class EagerFetch:
    """The early contributions of one shard. Their `chunks` have `sizes` bytes, and lie end to end in memory."""

    def __init__(
        self,
        client: Client,
        shards: int,
        chunks: Sequence[Chunk],
        sizes: Sequence[int],
        keys: Callable[[Contribution], Sequence[str]],
    ) -> None:
        self._client = client
        self._chunks = chunks
        self._ends = np.cumsum(sizes).tolist()
        self._most = MOST_EARLY_BYTES // shards
        self._keys = keys
        self._here: dict[_Name, tuple[Bytes, list[Bytes]]] = {}
        self._unused: list[Bytes] = []

    @property
    def is_worth_it(self) -> bool:
        """Whether contributions are so large that fetching one takes longer than reading the inbox."""
        return bool(self._ends[-1] >= LEAST_EARLY_BYTES)

    def get(self, c: Contribution) -> list[Bytes] | None:
        """Return the chunks of a contribution; None if it was not fetched."""
        _, chunks = self._here.get(_name(c), (None, None))
        return chunks or None

    def fetch_one(self, waiting: Sequence[Contribution]) -> bool:
        """Fetch one contribution of `waiting`, and forget those not in it. Return False if there is none to fetch."""
        names = {_name(c): c for c in waiting if c.weight}
        self._forget(names)
        if (len(self._here) + 1) * self._ends[-1] > self._most:
            return False
        for name, c in names.items():
            if name not in self._here:
                whole, chunks = self._memory()
                try:
                    each = zip(self._chunks, self._keys(c), chunks, strict=True)
                    self._client.get([(key, memory.data) for chunk, key, memory in each if chunk.in_part(c.part)])
                except ChunkGone:  # damaged: that is found and reported when it is applied
                    chunks = []
                self._here[name] = whole, chunks
                return True
        return False

    def _memory(self) -> tuple[Bytes, list[Bytes]]:
        whole = self._unused.pop() if self._unused else np.empty(self._ends[-1], np.uint8)
        return whole, [whole[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def _forget(self, but: Container[_Name]) -> None:
        for name in [name for name in self._here if name not in but]:
            self._unused.append(self._here.pop(name)[0])


def _name(c: Contribution) -> _Name:
    return c.worker, c.incarnation, c.seq
