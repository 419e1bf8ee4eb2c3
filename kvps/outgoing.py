"""A contribution on its way out: each chunk leaves as soon as all the arrays that it is made of are there.

So a push goes on while later layers' gradients are still being computed, and a digest is taken of bytes that are then
sent out of the same cache.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from kvps.client import Client
from kvps.coding import Remainder
from kvps.layout import Array, Layout
from kvps.wire import Buffers, digest, fold, view


class _Dropped(Exception):
    """Ends a connection in the middle of sending."""


class Outgoing:
    """One contribution. `key` names a chunk by shard and number; `live` is whether chunks are sent at once,
    or may be sent
    without asking: a `whole` one leaves with what has it accepted.

    Arrays are flat, contiguous float32 and must stay as they are until `end`.
    """

    def __init__(
        self,
        client: Client,
        layout: Layout,
        key: Callable[[int, int], str],
        remainder: Remainder | None,
        live: bool,
        whole: bool = False,
    ) -> None:
        self.live = live
        self.whole = whole
        self.items: list[tuple[str, Buffers]] = []
        self._layout = layout
        self._key = key
        self._remainder = remainder
        self._arrays: list[Array | None] = [None] * len(layout.parameters)
        self._missing = [[len(pieces) for pieces in chunks] for chunks in layout.pieces]
        self._digests = [[""] * len(chunks) for chunks in layout.pieces]
        self._sending = ExitStack()
        self._put = self._sending.enter_context(client.putting(cuts=False)) if live and not whole else None

    def has(self, number: int) -> bool:
        """Whether the `number`-th array was put."""
        return self._arrays[number] is not None

    def put(self, number: int, array: Array) -> None:
        """Add the `number`-th array of the layout, and send the chunks that are whole now."""
        self._arrays[number] = array
        for shard, chunk in self._layout.chunks_of[number]:
            self._missing[shard][chunk] -= 1
            if not self._missing[shard][chunk]:
                self._send(shard, chunk)

    def _send(self, shard: int, number: int) -> None:
        pieces = []
        for p in self._layout.pieces[shard][number]:
            array = self._arrays[p.number]
            assert array is not None
            pieces.append(array[p.start : p.stop])
        if self._remainder:
            chunk = self._layout.chunks[shard][number]
            data = self._remainder.encode(chunk.start, pieces)
            value: Buffers = [data.data]
        else:
            value = [view(piece) for piece in pieces]
        self._digests[shard][number] = digest(value)
        self.items.append((self._key(shard, number), value))
        if self._put:
            self._put(*self.items[-1])

    @property
    def digests(self) -> str:
        """The digest of each shard's part, as push.lua takes them; of all that was put."""
        return ",".join(fold(chunks) for chunks in self._digests)

    def end(self) -> None:
        """Wait until all that was sent is there. Raises redis-py's ConnectionError or TimeoutError after a cut."""
        self._sending.close()

    def drop(self) -> None:
        """Not to be pushed after all: what was sent is dead, and the connection with half a chunk on it is closed."""
        self._sending.__exit__(_Dropped, _Dropped(), None)
