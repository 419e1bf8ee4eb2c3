"""Stores what the next incarnation of a worker needs while the worker is away: the residual of a lossy format, and the
state of its inner optimizer.

A worker that leaves stores them as "<incarnation>:<seq>:<digest>:<digest>:<bytes>", the last two only with a state, and
"-" for no residual. leave.lua notes that name if nothing was accepted after that sequence number. join.lua hands it on.
push.lua forgets it: the contribution it went into has a new residual and a new state.
"""

from __future__ import annotations

import re

from kvps.arrays.digest import digest_of, fold, shard_digests, view
from kvps.arrays.layout import CHUNK_BYTES, Array, Layout
from kvps.connection.client import Client
from kvps.errors import CorruptData, ServerFull, UsageError
from kvps.parsing import matching, whole
from kvps.protocol.keys import JobKeys

_NAME = re.compile(r"[A-Za-z0-9-]{1,128}:[0-9]{1,16}:(-|[0-9a-f]{1,64})(:[0-9a-f]{1,64}:[0-9]{1,12})?", re.ASCII)
_STATES = 16  # the largest state, in sizes of the weights; its names may take 64 MiB more


class ResidualStore:
    """The stored residuals and inner states of one worker. A residual is (size,) float32, a state is bytes."""

    def __init__(self, client: Client, keys: JobKeys, layout: Layout, worker: str) -> None:
        self._client = client
        self._keys = keys
        self._layout = layout
        self._worker = worker

    def save(self, incarnation: str, seq: int, values: Array | None, state: bytes = b"") -> str:
        """Store the residual and the state after an incarnation's contribution `seq`. Return their name. Raises
        ServerFull, and UsageError for a state that is too large."""
        if len(state) > self._most_state:
            raise UsageError(f"a state of {len(state)} bytes is not stored: it may have {self._most_state}")
        name = f"{incarnation}:{seq}:{'-' if values is None else self._digest(values)}"
        if state:
            name = f"{name}:{digest_of([memoryview(state)])}:{len(state)}"
        items = [] if values is None else self._items(name, values)
        items += self._state_items(name, memoryview(state))
        try:
            self._client.put([(key, [part]) for key, part in items], wait_for_room=False)
        except ServerFull:
            self._client.unlink(self.keys(name))
            raise
        return name

    def load(self, name: str, values: Array) -> None:
        """Read the residual that is stored under a name. Raises ChunkGone, CorruptData."""
        self._client.get(self._items(name, values))
        if self._digest(values) != self._parts(name)[2]:
            raise self._damaged("residual", self.keys(name)[0])

    @property
    def _most_state(self) -> int:
        return _STATES * self._layout.nbytes + (64 << 20)

    def load_state(self, name: str) -> bytearray:
        """Return the state that is stored under a name, empty if it has none. Raises ChunkGone, CorruptData."""
        digest, nbytes = (self._parts(name)[3:] or ["", "0"])[:2]
        data = bytearray(whole(int(nbytes), f"the state of worker {self._worker!r}", 0, self._most_state))
        items = self._state_items(name, memoryview(data))
        self._client.get(items)
        if data and digest_of([memoryview(data)]) != digest:
            raise self._damaged("inner state", items[0][0])
        return data

    def keys(self, name: str) -> list[str]:
        """Return the keys of all its chunks. Raises CorruptData for a name that `save` does not give."""
        _, _, residual, *state = self._parts(name)
        chunks = [] if residual == "-" else [(c.shard, c.number) for c in self._layout.chunks_in("")]
        return [self._key(name, *chunk) for chunk in (*chunks, *self._state_chunks(int(state[1]) if state else 0))]

    def _parts(self, name: str) -> list[str]:
        matching(name, f"the residual of worker {self._worker!r}", _NAME, "the name of a stored residual")
        return name.split(":")

    def _key(self, name: str, shard: int, chunk: int) -> str:
        incarnation, seq, *_ = self._parts(name)
        return self._keys.residual(shard, self._worker, incarnation, int(seq), chunk)

    def _items(self, name: str, values: Array) -> list[tuple[str, memoryview]]:
        chunks = self._layout.chunks_in("")
        return [(self._key(name, c.shard, c.number), view(values[c.start : c.stop])) for c in chunks]

    def _state_chunks(self, nbytes: int) -> list[tuple[int, int]]:
        """Return the chunks of a state, as (shard, number): in the slot of shard 0, behind the chunks of its
        residual."""
        first = len(self._layout.chunks[0])
        return [(0, first + number) for number in range(-(-nbytes // CHUNK_BYTES))]

    def _state_items(self, name: str, state: memoryview) -> list[tuple[str, memoryview]]:
        chunks = enumerate(self._state_chunks(len(state)))
        return [(self._key(name, *chunk), state[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]) for i, chunk in chunks]

    def _damaged(self, what: str, key: str) -> CorruptData:
        return CorruptData(
            f"the {what} that worker {self._worker!r} of job {self._keys.job!r} stored when it left is damaged: "
            f"another program wrote under {key}"
        )

    def _digest(self, values: Array) -> str:
        return fold(shard_digests(self._layout, values))
