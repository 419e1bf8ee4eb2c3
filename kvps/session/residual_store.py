"""Stores the residual of a lossy format while its worker is away.

A worker that leaves stores it as "<incarnation>:<seq>:<digest>". leave.lua notes that name if nothing was accepted
after that sequence number. join.lua hands it on. push.lua forgets it: the contribution it went into has a new residual.
"""

from __future__ import annotations

import re

from kvps.arrays.digest import fold, shard_digests, view
from kvps.arrays.layout import Array, Layout
from kvps.connection.client import Client
from kvps.errors import CorruptData, ServerFull
from kvps.parsing import matching
from kvps.protocol.keys import JobKeys

_NAME = re.compile(r"[A-Za-z0-9-]{1,128}:[0-9]{1,16}:[0-9a-f]{1,64}", re.ASCII)


class ResidualStore:
    """The stored residuals of one worker. `values` are (size,) float32."""

    def __init__(self, client: Client, keys: JobKeys, layout: Layout, worker: str) -> None:
        self._client = client
        self._keys = keys
        self._layout = layout
        self._worker = worker

    def save(self, incarnation: str, seq: int, values: Array) -> str:
        """Store the residual up to an incarnation's contribution `seq`. Return its name. Raises ServerFull."""
        name = f"{incarnation}:{seq}:{self._digest(values)}"
        try:
            self._client.put([(key, [part]) for key, part in self._items(name, values)], wait_for_room=False)
        except ServerFull:
            self._client.unlink(self.keys(name))
            raise
        return name

    def load(self, name: str, values: Array) -> None:
        """Read the residual that is stored under a name. Raises ChunkGone, CorruptData."""
        self._client.get(self._items(name, values))
        if self._digest(values) != name.rpartition(":")[2]:
            raise CorruptData(
                f"the residual that worker {self._worker!r} of job {self._keys.job!r} stored when it left is damaged: "
                f"another program wrote under {self.keys(name)[0]}"
            )

    def keys(self, name: str) -> list[str]:
        """Return the keys of its chunks. Raises CorruptData for a name that `save` does not give."""
        matching(name, f"the residual of worker {self._worker!r}", _NAME, "the name of a stored residual")
        incarnation, seq, _ = name.split(":")
        chunks = [c for shard in self._layout.chunks for c in shard]
        return [self._keys.residual(c.shard, self._worker, incarnation, int(seq), c.number) for c in chunks]

    def _items(self, name: str, values: Array) -> list[tuple[str, memoryview]]:
        chunks = [c for shard in self._layout.chunks for c in shard]
        return [(key, view(values[c.start : c.stop])) for key, c in zip(self.keys(name), chunks, strict=True)]

    def _digest(self, values: Array) -> str:
        return fold(shard_digests(self._layout, values))
