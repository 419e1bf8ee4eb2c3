"""What Redis has of one shard's view, and which of its bytes outlive the version that they were stored with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from kvps.arrays.digest import Buffers
from kvps.arrays.formats import format_of
from kvps.arrays.pieces import Chunk
from kvps.arrays.weight_view import VIEW
from kvps.connection.sockets import ChunkGone
from kvps.job import Job
from kvps.protocol.keys import chain, staged_name
from kvps.transport.stored_view import StoredView, most_differences
from kvps_aggregator.step.shard_arrays import ShardArrays


class ViewStorage:
    """The stored view of one shard, held under `term`; see `kvps.transport.stored_view` for how it is stored."""

    def __init__(self, job: Job, number: int, term: str, arrays: ShardArrays) -> None:
        format_ = format_of(job.config.weight_format)
        self._keys = job.access.keys
        self._number = number
        self._term = term
        self._arrays = arrays
        # A failover in a cluster may lose differences, and nobody has them any more: there each view is stored whole.
        self._most = 1 if job.access.client.is_cluster else most_differences(format_)
        self._stored = StoredView(job.access.client, job.access.keys, job.layout, format_)
        self._next = 0
        self._first = 0  # the version of this term whose view was stored whole last; 0 if there is none
        self._begins: dict[str, int] = {}  # staged name -> the version whose view is stored whole
        self._kept: dict[str, bool] = {}  # staged names with bytes of the view -> whether it is whole there

    def load(self, version: int, name: str, names: Collection[str]) -> None:
        """Read the view of `version`, and note what is there of the versions of these names. Raises ChunkGone."""
        self._stored.read({self._number: name}, self._arrays.state[VIEW], self._arrays.low)
        self._next = version + 1
        for each in names:
            try:
                self._note(each, self._stored.begins([(self._number, each)])[0])
            except ChunkGone:  # the version before; its readers find that too, and read the newest
                self._note(each, int(each.partition(".")[0]))

    def _note(self, name: str, first: int) -> None:
        self._begins[name] = first
        links = chain(name, first)
        self._kept |= {link: number == 0 for number, link in enumerate(links)}

    @property
    def begins(self) -> int:
        """The version whose whole view is under the next one's."""
        return self._first if self._first and self._next - self._first < self._most else self._next

    def items(self, name: str, chunk: Chunk, view: memoryview) -> Iterator[tuple[str, Buffers]]:
        """Yield the keys and values of a chunk of the next version, whose view is `view`."""
        if self.begins == self._next:
            yield self._keys.state(self._number, VIEW, name, chunk.number), [view]
        yield self._keys.pulled(self._number, name, chunk.number), [self._arrays.pulled(chunk).data]

    def promote(self, name: str) -> None:
        """Go on from the next version, committed as `name`."""
        self._first = self.begins
        self._note(name, self._first)
        self._next += 1

    def unneeded(self, names: Collection[str]) -> list[str]:
        """Forget the bytes that no version of these names needs, and return their keys."""
        self._begins = {name: first for name, first in self._begins.items() if name in names}
        needed = {link for name, first in self._begins.items() for link in chain(name, first)}
        gone = {name: whole for name, whole in self._kept.items() if name not in needed}
        self._kept = {name: whole for name, whole in self._kept.items() if name in needed}
        return self._keys_of(gone)

    def next_keys(self) -> list[str]:
        """Return the keys under which the next version is staged."""
        return self._keys_of({staged_name(self._next, self._term): True})

    def _keys_of(self, names: Mapping[str, bool]) -> list[str]:
        chunks, number = self._arrays.chunks, self._number
        out = [self._keys.pulled(number, name, c.number) for name in names for c in chunks]
        return out + [self._keys.state(number, VIEW, name, c.number) for name, w in names.items() if w for c in chunks]

    @property
    def names(self) -> set[str]:
        """The staged names whose bytes the live versions need."""
        return set(self._kept)
