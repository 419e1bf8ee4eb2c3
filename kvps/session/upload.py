"""A contribution on its way out: each chunk leaves as soon as all the arrays that it is made of are there.

So a push goes on while later layers' gradients are still being computed, and a digest is taken of bytes that are then
sent out of the same cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Protocol

import numpy as np

from kvps.arrays.digest import Buffers, digest_of, finite, fold, view
from kvps.arrays.error_feedback import Residual
from kvps.arrays.formats import Bytes
from kvps.arrays.layout import Array, Layout
from kvps.connection.client import Client
from kvps.device.base import Flat
from kvps.errors import WrongOrder
from kvps.protocol.scripts import Call
from kvps.transport.shared_memory import WritableSegment


class GradientTransport(Protocol):
    """How chunks get to where an aggregator finds them: one by one by `send`, or once more by `resend`."""

    keys: list[str]
    early: bool  # whether chunks may leave before all of them can: else what is put may change until then

    @property
    def missing(self) -> int:
        """How many chunks are not known to have arrived. Any thread may ask."""

    @property
    def with_command(self) -> Call | None:
        """Runs a command in one step with the storing of all chunks; None if they are stored before it."""

    def send(self, number: int, value: Buffers) -> str:
        """Let the `number`-th chunk leave, unless it must not yet; its digest. It stays as it is until `end`."""

    def end(self) -> bool:
        """Wait until all that was sent is there; False if nothing was. Raises redis-py's ConnectionError or
        TimeoutError after a cut."""

    def resend(self) -> None:
        """Store the chunks that are not known to have arrived, sent or not. Raises as `end` does."""

    def drop(self) -> None:
        """What was sent is dead."""


class _Dropped(Exception):
    """Ends a connection in the middle of sending."""


class RedisTransport:
    """The chunks become the values of `keys`.

    `live` is whether they may be sent without asking; a `whole` contribution leaves with what has it accepted.
    """

    def __init__(self, client: Client, keys: list[str], live: bool, whole: bool) -> None:
        self.keys = keys
        self._live, self._whole = live, whole
        self.early = live and not whole
        self._client = client
        self._items: list[tuple[str, Buffers]] = []
        self._stored: set[str] = set()
        self._said: list[str] = []
        self._sending = ExitStack()
        putting = client.putting(cuts=False, stored=self._stored.add)
        self._put = self._sending.enter_context(putting) if live and not whole else None

    @property
    def missing(self) -> int:
        return len(self.keys) - len(self._stored)

    @property
    def with_command(self) -> Call | None:
        return partial(self._client.put_and_call, self._items, cuts=False) if self._whole else None

    def send(self, number: int, value: Buffers) -> str:
        self._said.append(digest_of(value))
        self._items.append((self.keys[number], value))
        if self._put:
            self._put(*self._items[-1])
        return self._said[-1]

    def end(self) -> bool:
        self._sending.close()
        return self._live

    def resend(self) -> None:
        todo = [(item, said) for item, said in zip(self._items, self._said, strict=True) if item[0] not in self._stored]
        if any(digest_of(value) != said for (_, value), said in todo):
            raise WrongOrder(
                "a gradient was changed after it was put, and it must be sent again: push the same one, or leave, and "
                "join again"
            )
        self._client.put_once([item for item, _ in todo], self._stored.add)

    def drop(self) -> None:
        self._sending.__exit__(_Dropped, _Dropped(), None)  # its connection may hold half a chunk: it is closed


class ShmTransport:
    """The chunks, of `sizes` bytes, go into a segment that `make` gives: at once, if this is `live`.

    `lent` says that some of them may lie there already, where the user can write to them until they are pushed.
    """

    def __init__(self, sizes: Iterable[int], make: Callable[[], WritableSegment], live: bool, lent: bool) -> None:
        self.keys: list[str] = []
        self.early = live and not lent
        self._ends = list(accumulate(sizes))
        self._make = make
        self._data: Bytes | None = make().data if live else None
        self._items: list[tuple[int, Buffers]] = []

    @property
    def missing(self) -> int:
        return 0  # no link is in between

    @property
    def with_command(self) -> Call | None:
        return None

    def send(self, number: int, value: Buffers) -> str:
        if self._data is None:
            self._items.append((number, value))
            return digest_of(value)
        return digest_of([self._copied(self._data, number, value)])

    def _copied(self, data: Bytes, number: int, value: Buffers) -> memoryview:
        end = self._ends[number]
        at = start = end - sum(piece.nbytes for piece in value)
        for piece in value:
            source, target = np.frombuffer(piece, np.uint8), data[at : at + piece.nbytes]
            if source.ctypes.data != target.ctypes.data:  # else it was computed where it belongs
                np.copyto(target, source)
            at += piece.nbytes
        return data[start:end].data

    def end(self) -> bool:
        return self._data is not None

    def resend(self) -> None:
        data = self._make().data
        for number, value in self._items:
            self._copied(data, number, value)

    def drop(self) -> None:
        pass  # its name is never given to anybody


class GradientUpload:
    """One contribution. Arrays are flat, contiguous float32 and must stay as they are until it is accepted; of one that
    still arrives a chunk is waited for when it is its turn.

    finite   False once an array held NaN or Inf, if this `looks` at them on their way: nobody is told then of what left
    counts   False once an array with NaN or Inf was put where such a contribution counts as zeros
    begun    whether anything of it may have left
    """

    def __init__(self, layout: Layout, residual: Residual | None, way: GradientTransport, looks: bool = False) -> None:
        self.way = way
        self.finite = True
        self.counts = True
        self.begun = False
        self._looks = looks
        self._layout = layout
        self._residual = residual
        self._arrays: list[Flat | None] = [None] * len(layout.parameters)
        self._missing = [[len(pieces) for pieces in chunks] for chunks in layout.pieces]
        self._digests = [[""] * len(chunks) for chunks in layout.pieces]
        self._whole: list[tuple[int, int]] = []  # chunks that wait
        self._first = [0, *accumulate(len(chunks) for chunks in layout.pieces)]  # of a shard, among all chunks

    def has(self, number: int) -> bool:
        """Whether the `number`-th array was put."""
        return self._arrays[number] is not None

    def put(self, arrays: Mapping[int, Flat], last: bool = True) -> None:
        """Add arrays, by their numbers in the layout, and send the chunks that are whole now; those that may not leave
        early, with the `last` arrays."""
        self._whole += self._completed(arrays)
        if not (last or self.way.early):
            return
        whole, self._whole = self._whole, []
        for (shard, number), value in zip(whole, self._values(whole), strict=True):
            self.begun = True
            self._digests[shard][number] = self.way.send(self._first[shard] + number, value)

    def _completed(self, arrays: Mapping[int, Flat]) -> Iterator[tuple[int, int]]:
        """The chunks of which these are the last arrays that were missing, as (shard, number)."""
        for number, array in arrays.items():
            self._arrays[number] = array
            for shard, chunk in self._layout.chunks_of[number]:
                self._missing[shard][chunk] -= 1
                if not self._missing[shard][chunk]:
                    yield shard, chunk

    def _values(self, chunks: Sequence[tuple[int, int]]) -> Iterator[Buffers]:
        """What is sent of each: in host memory it is computed when it is its turn, to be sent out of the cache."""
        parts = map(self._pieces, chunks)
        if self._residual:
            starts = (self._layout.chunks[shard][number].start for shard, number in chunks)
            return ([data.data] for data in self._residual.encode(zip(starts, parts, strict=True)))
        return ([view(piece) for piece in pieces] for pieces in parts)

    def _pieces(self, chunk: tuple[int, int]) -> list[Array]:
        """The memory it is made of."""
        shard, number = chunk
        pieces = []
        for p in self._layout.pieces[shard][number]:
            array = self._arrays[p.number]
            assert array is not None
            pieces.append(array[p.start : p.stop])
        if self._looks:  # who sends them then takes them out of the cache
            self.finite = self.finite and all(map(finite, pieces))
        return pieces

    @property
    def digests(self) -> str:
        """The digest of each shard's part, as push.lua takes them; of all that was put."""
        return ",".join(fold(chunks) for chunks in self._digests)


class SegmentRing:
    """The segments of one worker's contributions: written anew when what was in them is committed.

    `name` gives the segment of a sequence number.
    """

    def __init__(
        self,
        make: Callable[[str, int, Sequence[WritableSegment]], WritableSegment],
        name: Callable[[int], str],
        nbytes: int,
    ) -> None:
        self._make = make
        self._name = name
        self._nbytes = nbytes
        self._made: dict[int, WritableSegment] = {}

    def segment(self, seq: int, settled: int) -> WritableSegment:
        """The segment for a contribution. Those up to the `settled`-th wait no more.

        Raises ServerFull, SharedMemoryLost.
        """
        if seq not in self._made:
            spare = [made for number, made in self._made.items() if number <= settled]
            fresh = self._make(self._name(seq), self._nbytes, spare)
            self._made = {number: made for number, made in self._made.items() if made is not fresh} | {seq: fresh}
        return self._made[seq]

    def unlink(self, settled: int) -> None:
        """Give up those that wait no more."""
        for number in [number for number in self._made if number <= settled]:
            self._made.pop(number).unlink()
