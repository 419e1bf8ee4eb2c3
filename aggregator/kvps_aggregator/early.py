"""Contributions that are fetched before their plan is made, while others still compute.

In BSP the last worker's gradient is then all that a round still waits for. Each is whole in memory, and all of them
together take no more than a bound; what does not fit is fetched with its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvps.client import Client
from kvps.formats import Bytes
from kvps.plan import Contribution
from kvps.transport import ChunkGone

_MOST_BYTES = 512 << 20  # of all shards of a job
_LEAST_BYTES = 256 << 10  # what is smaller comes with its plan as quickly


class Early:
    """Those of one shard. A contribution's part lies end to end in its chunks, which have `sizes` bytes."""

    def __init__(
        self, client: Client, shards: int, sizes: Sequence[int], keys: Callable[[Contribution], Sequence[str]]
    ) -> None:
        self._client = client
        self._ends = np.cumsum(sizes).tolist()
        self._most = _MOST_BYTES // shards
        self._keys = keys
        self._here: dict[tuple[str, str, int], tuple[Bytes, list[Bytes]]] = {}
        self._unused: list[Bytes] = []

    @property
    def worth(self) -> bool:
        """Whether contributions are so large that fetching them takes longer than asking for them."""
        return bool(self._ends[-1] >= _LEAST_BYTES)

    def get(self, c: Contribution) -> list[Bytes] | None:
        """The chunks of a contribution, if they are here."""
        _, chunks = self._here.get((c.worker, c.incarnation, c.seq), (None, None))
        return chunks or None

    def fetch(self, waiting: Sequence[Contribution]) -> bool:
        """Fetch one of those that wait, and forget those that do not any more; False if there is none to fetch."""
        names = {(c.worker, c.incarnation, c.seq): c for c in waiting if c.weight}
        for name in [name for name in self._here if name not in names]:
            self._unused.append(self._here.pop(name)[0])
        size = self._ends[-1]
        if (len(self._here) + 1) * size > self._most:
            return False
        for name, c in names.items():
            if name not in self._here:
                whole = self._unused.pop() if self._unused else np.empty(size, np.uint8)
                chunks = [whole[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]
                try:
                    self._client.get([(key, chunk.data) for key, chunk in zip(self._keys(c), chunks, strict=True)])
                except ChunkGone:  # a damaged one: that is found, and said, when it is applied
                    chunks = []
                self._here[name] = whole, chunks
                return True
        return False
