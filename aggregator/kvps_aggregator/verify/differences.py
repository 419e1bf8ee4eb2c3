"""Proves what Redis still has of the versions that a learner published: their weights, and the differences between
them, are compared with the log."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np

from kvps.arrays.digest import digest_of, fold, view
from kvps.arrays.formats import Bytes
from kvps.arrays.layout import DTYPE, Array
from kvps.arrays.lossless import follow, stretches
from kvps.arrays.pieces import Chunk
from kvps.connection.sockets import ChunkGone
from kvps.errors import CorruptData, counted
from kvps.history.commit_log import Log
from kvps.protocol.bounds import MOST_DIFFERENCES
from kvps.protocol.job_state import State
from kvps.protocol.keys import staged_name, version_of
from kvps.protocol.manifest import differences_in
from kvps.transport.opening import OpenedJob
from kvps_aggregator.verify.chain import Unproved
from kvps_aggregator.verify.chain import digest_of as logged_digest_of


def differences_followed(access: OpenedJob, log: Log, state: State) -> int:
    """Follow the differences that Redis still has of the versions up to `state`, from each version whose bytes are
    still there. Return how many versions they make as the log has them.

    Raises Unproved if one makes other weights, or a version is not as it was committed; CorruptData for a damaged
    manifest.
    """
    recent = deque((c for c in log.commits() if c.version <= state.version), maxlen=MOST_DIFFERENCES + 1)
    logged = {commit.version: commit.shards for commit in recent if commit.version > state.begin.version}
    for version, shards in logged.items():
        if len(shards) != access.layout.shards:
            raise Unproved(f"commit {version}: it names {counted(len(shards), 'shard')}, the job has others")
    made = Counter[int]()
    for shard in range(access.layout.shards):
        entries = {version: shards[shard] for version, shards in logged.items()}
        made.update(_ShardDifferences(access, shard, entries).follow(state))
    return sum(count == access.layout.shards for count in made.values())


class _ShardDifferences:
    """What Redis has of one shard's versions. `logged` is what the log has of each: "<term> <digest>"."""

    def __init__(self, access: OpenedJob, shard: int, logged: Mapping[int, str]) -> None:
        self._client, self._keys, self._shard, self._logged = access.client, access.keys, shard, logged
        self._chunks = access.layout.chunks[shard]
        self._low, high = access.layout.shard_range(shard)
        self._size = high - self._low
        self._stretches = stretches(access.layout, shard)
        now = access.reader.round_state()
        self._names = {version_of(names[shard]): names[shard] for names in (now.before, now.names)}

    def follow(self, state: State) -> Iterator[int]:
        """Yield the versions that a difference makes of the version before. Raises Unproved, CorruptData."""
        sizes = self._sizes(state.names[self._shard])
        first = state.version - len(sizes)
        words = self._weights(first) if sizes else None
        for version, size in enumerate(sizes, first + 1):
            difference = self._difference(version, size) if words is not None else None
            if words is not None and difference is not None:
                try:
                    follow(self._stretches, difference.data, words)
                except ValueError as error:
                    raise Unproved(f"the difference to version {version} of shard {self._shard}: {error}") from None
                if self._differs(version, words):
                    raise Unproved(
                        f"the difference to version {version} of shard {self._shard} makes other weights than those "
                        f"that were committed"
                    )
                yield version
            else:
                words = None
            stored = self._weights(version)
            words = words if stored is None else stored

    def _sizes(self, name: str) -> list[int]:
        """Return how many bytes each difference has that leads to the version of this name, oldest first."""
        text = self._client.call("GET", self._keys.manifest(self._shard, name))
        sizes = differences_in(text) if text else []
        if sum(sizes) >= 2 * self._size * DTYPE.itemsize:  # a holder keeps them while they are smaller than a version
            raise CorruptData(f"the manifest of shard {self._shard} has differences that are larger than the shard")
        return sizes

    def _name(self, version: int) -> str | None:
        entry = self._logged.get(version)
        return self._names.get(version) if entry is None else staged_name(version, entry.rpartition(" ")[0])

    def _weights(self, version: int) -> Array | None:
        """Return the shard's weights of a version, (n,) words; None if they are gone. Raises Unproved."""
        if not (name := self._name(version)):
            return None
        words: Array = np.empty(self._size, DTYPE)
        keys = [self._keys.weights(self._shard, name, chunk.number) for chunk in self._chunks]
        try:
            self._client.get([(key, view(self._part(words, c))) for key, c in zip(keys, self._chunks, strict=True)])
        except ChunkGone:
            return None
        if self._differs(version, words):
            raise Unproved(
                f"version {version}: the weights of shard {self._shard} in Redis are not those that were committed"
            )
        return words

    def _difference(self, version: int, size: int) -> Bytes | None:
        """Return the bytes of the difference to a version; None if they are gone."""
        memory: Bytes = np.empty(size, np.uint8)
        name = self._name(version)
        with suppress(ChunkGone):
            if name:
                self._client.get(self._keys.difference(self._shard, name, memory.data))
                return memory
        return None

    def _differs(self, version: int, words: Array) -> bool:
        """Return whether the log has other weights as this version. It has none of the job's first version."""
        entry = self._logged.get(version)
        digest = fold(digest_of([view(self._part(words, chunk))]) for chunk in self._chunks)
        return entry is not None and logged_digest_of(entry) != digest

    def _part(self, words: Array, chunk: Chunk) -> Array:
        return words[chunk.start - self._low : chunk.stop - self._low]
