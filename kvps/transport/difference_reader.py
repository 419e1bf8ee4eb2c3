"""Reads versions for a process that watches a job: the lossless differences to the version that it has, or a whole one.

A version that a learner publishes has beside it the difference to the version before. Whatever was read, each shard's
digest is compared with the one in the commit log. Bits that are not those are never handed on: they are read again,
whole.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import numpy as np

from kvps.arrays.digest import shard_digests
from kvps.arrays.formats import Bytes
from kvps.arrays.layout import Array
from kvps.arrays.lossless import follow, stretches
from kvps.connection.sockets import ChunkGone
from kvps.errors import CorruptData
from kvps.protocol.bounds import MOST_DIFFERENCES
from kvps.protocol.job_state import Commit, RoundState
from kvps.protocol.keys import staged_name, term_of, version_of
from kvps.protocol.manifest import differences_in
from kvps.transport.access import JobAccess
from kvps.transport.version_reader import VersionReader
from kvps.transport.view_reader import versions_between
from kvps.transport.weight_reader import PullRequest, Weights

log = logging.getLogger("kvps.watch")

_PAGES = (8, 200, *[2_000] * 10)  # entries of the log, newest first, among which a version's is looked for
_TRIES = 3  # whole reads whose bits are not the committed ones


class DifferenceReader:
    """The reader of one watcher. One thread at a time uses it.

    differences  how many differences were followed
    wholes       how many versions were read whole
    repairs      how many of these because what was followed did not fit
    nbytes       bytes of arrays and differences that were read from Redis
    """

    receives = True

    def __init__(self, access: JobAccess, reader: VersionReader) -> None:
        self.differences = self.wholes = self.repairs = self.nbytes = 0
        self._client, self._keys, self._layout = access.client, access.keys, access.layout
        self._published = bool(access.config.metadata.publishes)
        self._reader = reader
        self._stretches = [stretches(access.layout, shard) for shard in range(access.layout.shards)]

    def read(self, request: PullRequest) -> Weights:
        """Bring `request.into` to the version of `request.state`, or to a newer one. Raises CorruptData if the bytes in
        Redis are not those that were committed."""
        state, flat = request.state, request.into
        between = versions_between(request.held, state, MOST_DIFFERENCES) if self._published else None
        if between is not None and (sent := self._sent(between)) is not None:
            if self._followed(sent, flat, state.version):
                self.differences += len(between)
                if request.arrived:
                    request.arrived(0, flat)
                return Weights(state.version, state.names, flat)
            self.repairs += 1
            log.warning("job %s: a difference to version %d does not fit: read whole", self._keys.job, state.version)
        for _ in range(_TRIES):
            weights = self._reader.fetch(state, flat, arrived=request.arrived)  # on its way: others wait for it
            self.wholes += 1
            self.nbytes += self._layout.nbytes
            if self._is_committed(weights.version, flat):
                return weights
            state = request.newest()
        raise CorruptData(
            f"version {state.version} of job {self._keys.job!r} is damaged in Redis: its bytes are not those that were "
            f"committed, so another program wrote under {self._keys.slot(0)}w:…"
        )

    def read_at(self, version: int, state: RoundState, flat: Array) -> bool:
        """Read a version before that of `state` into `flat`; return whether its bytes are all there. Its names are
        known while the same terms have made all versions since, and for the one before."""
        if version > state.version:
            return False
        for names in (state.names, state.before, tuple(staged_name(version, term_of(name)) for name in state.names)):
            if version_of(names[0]) == version:
                with suppress(ChunkGone):
                    self._reader.read_exactly(names, flat)
                    return self._is_committed(version, flat)
        return False

    def close(self) -> None:
        """Nothing goes on between two reads."""

    def _sent(self, between: list[tuple[str, ...]]) -> list[list[Bytes]] | None:
        """Return of each shard the differences to these versions, oldest first; None if one is gone, or they are not
        smaller than a version."""
        if not between:
            return None
        keys = self._keys
        texts = self._client.gather([("GET", keys.manifest(shard, name)) for shard, name in enumerate(between[-1])])
        sizes = [differences_in(text)[-len(between) :] if text else [] for text in texts]
        nbytes = sum(map(sum, sizes))
        if any(len(each) < len(between) for each in sizes) or nbytes >= self._layout.nbytes:
            return None
        sent = [[np.empty(size, np.uint8) for size in each] for each in sizes]
        items = [
            item
            for shard, each in enumerate(sent)
            for names, memory in zip(between, each, strict=True)
            for item in keys.difference(shard, names[shard], memory.data)
        ]
        try:
            self._client.get(items)
        except ChunkGone:  # a newer version has outgrown the chain
            return None
        self.nbytes += nbytes
        return sent

    def _followed(self, sent: list[list[Bytes]], flat: Array, version: int) -> bool:
        """Follow differences in place; return whether `flat` has the committed bits of this version."""
        for shard, each in enumerate(sent):
            low, high = self._layout.shard_range(shard)
            try:
                for difference in each:
                    follow(self._stretches[shard], difference.data, flat[low:high])
            except ValueError:
                return False
        return self._is_committed(version, flat)

    def _is_committed(self, version: int, flat: Array) -> bool:
        """Return whether the log has these bits as this version. The first version of a job is in no commit, and what
        the log has no entry of any more is not known: a newer version is there."""
        end = "+"
        for count in _PAGES:
            entries = self._client.call("XREVRANGE", self._keys.commits, end, "-", "COUNT", count)
            for id, fields in entries:
                if fields.get("version") == str(version) and fields.get("kind") in ("commit", "create", "restore"):
                    if fields["kind"] != "commit":
                        return True
                    logged = [shard.rpartition(" ")[2] for shard in Commit.of(fields).shards]
                    return logged == shard_digests(self._layout, flat)
                end = f"({id}"
        return False
