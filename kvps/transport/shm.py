"""Arrays in memory that the processes of one host share: each version and each contribution is a segment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from kvps.arrays.digest import Buffers, digest_of
from kvps.arrays.formats import Bytes
from kvps.arrays.layout import Array
from kvps.errors import UsageError
from kvps.protocol.keys import JobKeys, segment_of
from kvps.transport.access import JobAccess
from kvps.transport.base import ChunkUpload, Transport, Uploads
from kvps.transport.shared_memory import Segments, WritableSegment
from kvps.transport.shm_version_reader import ShmVersionReader
from kvps.transport.weight_reader import WeightReader


class ShmTransport(Transport):
    """The transport of a job whose arrays are in shared memory, in `segments`."""

    def __init__(self, access: JobAccess, segments: Segments | None = None) -> None:
        self._access = access
        self.segments = segments or Segments(access.config.metadata.memory, access.keys.id)
        self.reader: ShmVersionReader = ShmVersionReader(access, self.segments)

    @property
    def here(self) -> bool:  # type: ignore[override]  # it may change at any time
        return self.segments.here

    @property
    def seen(self) -> bool:  # type: ignore[override]
        return self.segments.seen

    def moved(self, access: JobAccess) -> ShmTransport:
        return ShmTransport(access, self.segments.moved_to(access.config.metadata.memory))

    def check_here(self, why: str) -> None:
        if not self.segments.here:
            self.segments.check_ours()
            keys, config = self._access.keys, self._access.config
            raise UsageError(f"the arrays of job {keys.job!r} are in the shared memory of {config.metadata.host}{why}")

    def weight_reader(self, memory: Callable[[], Array], prefetch: bool) -> WeightReader:
        return self.reader  # there is nothing to fetch ahead

    def uploads(self, worker: str, incarnation: str, sizes: Iterable[int]) -> ShmUploads:
        return ShmUploads(self._access.keys, self.segments, worker, incarnation, list(sizes))

    def safe_version(self, version: int) -> int:
        record = self.reader.mirrored()
        return min(version, record.version if record else self.reader.state().begin.version)

    def prepare(self) -> None:
        self.segments.ensure()

    def discard(self) -> None:
        self.segments.remove()

    def names(self) -> list[str]:
        return self.segments.names()


class ShmUploads(Uploads):
    """The segments of one incarnation's contributions, each written anew when its contribution waits no more."""

    overwrites = True

    def __init__(self, keys: JobKeys, segments: Segments, worker: str, incarnation: str, sizes: Sequence[int]) -> None:
        self._keys = keys
        self._segments = segments
        self._owner = (worker, incarnation)
        self._sizes = sizes
        self._made: dict[int, WritableSegment] = {}

    def buffer(self, seq: int, settled: int) -> WritableSegment:
        if seq not in self._made:
            spare = [made for number, made in self._made.items() if number <= settled]
            name = segment_of(self._keys.gradient(0, *self._owner, seq, 0))
            fresh = self._segments.make(name, sum(self._sizes), spare)
            self._made = {number: made for number, made in self._made.items() if made is not fresh} | {seq: fresh}
        return self._made[seq]

    def open(self, seq: int, live: bool, settled: int, in_place: bool, part: str) -> ShmUpload:
        return ShmUpload(self._sizes, partial(self.buffer, seq, settled), live, in_place)

    def release(self, settled: int) -> None:
        for number in [number for number in self._made if number <= settled]:
            self._made.pop(number).unlink()


class ShmUpload(ChunkUpload):
    """The upload of one contribution: chunks of `sizes` bytes go into a segment that `make` returns; at once if `live`.

    `in_place` says that some chunks may be there already, where the user can write to them until they are pushed.
    """

    def __init__(self, sizes: Iterable[int], make: Callable[[], WritableSegment], live: bool, in_place: bool) -> None:
        self.keys = []
        self.immediate = live and not in_place
        self._ends = list(accumulate(sizes))
        self._make = make
        self._data: Bytes | None = make().data if live else None
        self._items: list[tuple[int, Buffers]] = []

    def send(self, number: int, value: Buffers) -> str:
        if self._data is None:
            self._items.append((number, value))
            return digest_of(value)
        return digest_of([self._copied(self._data, number, value)])

    def _copied(self, data: Bytes, number: int, value: Buffers) -> memoryview:
        end = self._ends[number]
        begin = start = end - sum(piece.nbytes for piece in value)
        for piece in value:
            source, target = np.frombuffer(piece, np.uint8), data[begin : begin + piece.nbytes]
            if source.ctypes.data != target.ctypes.data:  # else it was computed in place
                np.copyto(target, source)
            begin += piece.nbytes
        return data[start:end].data

    def end(self) -> bool:
        return self._data is not None

    def resend(self) -> None:
        data = self._make().data
        for number, value in self._items:
            self._copied(data, number, value)
