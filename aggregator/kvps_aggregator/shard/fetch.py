"""Fetches the contributions of one plan for a shard chunk by chunk, checks their digests, and records them.

A chunk of every contribution comes before the next chunk of any. So one chunk is summed while the next are on their
way, and only a few chunks are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import numpy as np

from kvps.arrays.digest import digest_of, finite, fold
from kvps.arrays.formats import Bytes, Format
from kvps.arrays.layout import DTYPE, Array
from kvps.arrays.pieces import Chunk
from kvps.connection.client import Client
from kvps.connection.sockets import ChunkGone
from kvps.errors import NotFinite, UsageError
from kvps.protocol.bounds import LEAST_EARLY_BYTES, MOST_EARLY_BYTES
from kvps.protocol.plan import Contribution
from kvps.transport.read_ahead import read_ahead
from kvps_aggregator.verify.recording import Recorder

_SLOTS = 6  # buffers for chunks that have arrived or are in use
_HELD = 2  # buffers in use: a sum begins with two contributions at once, and then takes one at a time
_Name = tuple[str, str, int]

Sizes = Callable[[Chunk, Iterable[Array]], list[float]]
"""Returns the largest magnitude that each contribution of a chunk has where it is reduced."""


class BadContribution(Exception):
    """A planned contribution that cannot be applied: its bytes are gone or `damaged`, or they are not finite or too
    large."""

    def __init__(self, contribution: Contribution, reason: str, damaged: bool = False) -> None:
        super().__init__(reason)
        self.contribution = contribution
        self.reason = reason
        self.damaged = damaged


class Source(NamedTuple):
    """Where a shard's part of a contribution is: the keys of its chunks, and the chunks if they need not be fetched."""

    contribution: Contribution
    keys: Sequence[str]
    chunks: list[Bytes] | None


class ContributionFetch:
    """The fetch of the contributions of one plan for shard `shard`. Use it in a `with`."""

    def __init__(
        self,
        client: Client,
        shard: int,
        chunks: Sequence[Chunk],
        sources: Sequence[Source],
        format: Format,
        recorder: Recorder | None,
    ) -> None:
        self._client = client
        self._shard = shard
        self._sources = sources
        self._recorder = recorder
        longest = max(chunk.stop - chunk.start for chunk in chunks)
        absent = [source for source in sources if not source.chunks]
        parts = [(each.keys, chunk) for chunk in chunks for each in absent if chunk.in_part(each.contribution.part)]
        self._format = format
        self._buffers: list[Bytes] = [np.empty(format.nbytes(longest), np.uint8) for _ in parts[:_SLOTS]]
        self._decoded: list[Array] = [np.empty(longest, DTYPE) for _ in range(_HELD if format.lossy else 0)]
        self._taken = 0
        arriving = client.getting(
            [(keys[c.number], self._buffer(number, c).data) for number, (keys, c) in enumerate(parts)]
        )
        self._arriving = read_ahead(arriving, _SLOTS, _HELD) if len(parts) > _SLOTS else arriving
        self._digests: list[dict[int, str]] = [{} for _ in sources]
        self._suspects: list[Chunk] = []
        self._error: UsageError | None = None

    def _buffer(self, number: int, chunk: Chunk) -> Bytes:
        return self._buffers[number % _SLOTS][: self._format.nbytes(chunk.stop - chunk.start)]

    def parts(self, chunk: Chunk) -> Iterator[Array]:
        """Yield what each contribution has of `chunk`, (items,) float32, in order. Chunks must come in order
        and on one thread, unless nothing is fetched, decoded or recorded. Raises BadContribution."""
        used: list[tuple[dict[int, str], Bytes]] = []
        for (contribution, _, whole), digests in zip(self._sources, self._digests, strict=True):
            if not chunk.in_part(contribution.part):
                continue
            if len(used) == _HELD:
                _note(used, chunk)
            try:
                data = whole[chunk.number] if whole else self._next(chunk)
                if self._recorder:
                    self._recorder.extend(contribution, data)
                values = self._values(data, chunk)
            except ChunkGone as gone:
                raise BadContribution(contribution, str(gone), damaged=True) from None
            except ValueError:
                raise BadContribution(contribution, "its bytes differ from its digest", damaged=True) from None
            used.append((digests, data))
            yield values
        _note(used, chunk)

    def _next(self, chunk: Chunk) -> Bytes:
        next(self._arriving)
        self._taken += 1
        return self._buffer(self._taken - 1, chunk)

    def _values(self, data: Bytes, chunk: Chunk) -> Array:
        if not self._format.lossy:
            return data.view(DTYPE)
        self._decoded.reverse()  # the part decoded last is still in use
        values = self._decoded[0][: chunk.stop - chunk.start]
        self._format.decode(data, values)
        return values

    def suspect(self, chunk: Chunk) -> None:
        """Let `check` find the contribution that made the reduced gradient of this chunk NaN or Inf."""
        self._suspects.append(chunk)

    @contextmanager
    def blaming(self, chunk: Chunk) -> Iterator[None]:
        """Leave an error that the user's code raises inside the block, or a step that is not finite, to `check`: a
        damaged contribution may be the cause."""
        try:
            yield
        except UsageError as error:
            self.suspect(chunk)
            self._error = self._error or error

    def check(self, sizes: Sizes, rejects: bool = False) -> None:
        """Raise BadContribution unless each contribution is finite, has its accepted digest, and makes no chunk NaN or
        Inf together with the others; then keep records.

        If no contribution has damaged bytes, NaN or Inf, raise the error that `blaming` has met; but with `rejects`
        blame the largest contribution for a step that is not finite.
        """
        for _ in self._arriving:  # gives its connection back
            pass
        for (contribution, _, _), digests in zip(self._sources, self._digests, strict=True):
            if fold(digest for _, digest in sorted(digests.items())) != contribution.digests[self._shard]:
                raise BadContribution(contribution, "its bytes differ from its digest", damaged=True)
        for chunk in self._suspects:
            for contribution, values in self._again(chunk):
                if not finite(values):
                    raise BadContribution(contribution, "it holds NaN or Inf")
        if self._error and not (rejects and isinstance(self._error, NotFinite)):
            raise self._error
        if self._suspects:
            self.blame(self._suspects[0], sizes, self._error)
        if self._recorder:
            self._recorder.keep()

    def blame(self, chunk: Chunk, sizes: Sizes, error: Exception | None) -> NoReturn:
        """Raise BadContribution for the contribution with the largest magnitude in a chunk, of which a step made NaN or
        Inf, as an error says, or the sum did. Raises the error if no contribution has the chunk and counts."""
        counting = [each.contribution for each in self._sources if chunk.in_part(each.contribution.part)]
        if error and not counting:
            raise error
        magnitudes = sizes(chunk, (values for _, values in self._again(chunk)))
        reason = f"of which {error}" if error else "whose reduced gradient overflows"
        raise BadContribution(counting[magnitudes.index(max(magnitudes))], f"it is the largest of those {reason}")

    def _again(self, chunk: Chunk) -> Iterator[tuple[Contribution, Array]]:
        """Yield each contribution that has `chunk`, and its part of it. Raises BadContribution."""
        for contribution, keys, whole in self._sources:
            if not chunk.in_part(contribution.part):
                continue
            data = whole[chunk.number] if whole else np.empty(self._format.nbytes(chunk.stop - chunk.start), np.uint8)
            try:
                self._client.get([] if whole else [(keys[chunk.number], data.data)])
            except ChunkGone as gone:
                raise BadContribution(contribution, str(gone), damaged=True) from None
            yield contribution, self._values(data, chunk)

    def __enter__(self) -> ContributionFetch:
        return self

    def __exit__(self, *_: object) -> None:
        self._arriving.close()
        if self._recorder:
            self._recorder.forget()


def _note(used: list[tuple[dict[int, str], Bytes]], chunk: Chunk) -> None:
    """Note the digests of data that was summed. The sum goes first: it brings the bytes into the cache without the
    interpreter's lock, and xxhash keeps that lock even while it waits for memory."""
    for digests, data in used:
        digests[chunk.number] = digest_of([data.data])
    used.clear()


class EagerFetch:
    """The fetch of contributions before their plan is made, while other workers still compute. So in BSP a round still
    waits for the last worker's gradient only.

    They are whole in memory, end to end, up to a bound for all of them together; a contribution that does not fit is
    fetched with its plan. The `chunks` of a contribution have `sizes` bytes.
    """

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
        self._most_bytes = MOST_EARLY_BYTES // shards
        self._keys = keys
        self._fetched: dict[_Name, tuple[Bytes, list[Bytes]]] = {}
        self._unused: list[Bytes] = []

    @property
    def is_worth_it(self) -> bool:
        """Whether contributions are so large that fetching one takes longer than reading the inbox."""
        return bool(self._ends[-1] >= LEAST_EARLY_BYTES)

    def get(self, c: Contribution) -> list[Bytes] | None:
        """Return the chunks of a contribution; None if it was not fetched."""
        _, chunks = self._fetched.get(_name(c), (None, None))
        return chunks or None

    def fetch_one(self, waiting: Sequence[Contribution]) -> bool:
        """Fetch one contribution of `waiting`, and forget those not in it. Return False if there is none to fetch."""
        names = {_name(c): c for c in waiting if c.weight}
        self._forget(names)
        if (len(self._fetched) + 1) * self._ends[-1] > self._most_bytes:
            return False
        for name, c in names.items():
            if name not in self._fetched:
                whole, chunks = self._memory()
                try:
                    each = zip(self._chunks, self._keys(c), chunks, strict=True)
                    self._client.get([(key, memory.data) for chunk, key, memory in each if chunk.in_part(c.part)])
                except ChunkGone:  # damaged: that is found and reported when it is applied
                    chunks = []
                self._fetched[name] = whole, chunks
                return True
        return False

    def _memory(self) -> tuple[Bytes, list[Bytes]]:
        whole = self._unused.pop() if self._unused else np.empty(self._ends[-1], np.uint8)
        return whole, [whole[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def _forget(self, waiting: Container[_Name]) -> None:
        for name in [name for name in self._fetched if name not in waiting]:
            self._unused.append(self._fetched.pop(name)[0])


def _name(c: Contribution) -> _Name:
    return c.worker, c.incarnation, c.seq
