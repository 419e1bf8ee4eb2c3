"""Reads whole versions of a job over shared memory: there, or the version that Redis was last given."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from kvps.arrays.formats import FP32, Format
from kvps.arrays.layout import DTYPE, Array
from kvps.connection.sockets import ChunkGone
from kvps.errors import KvpsError
from kvps.protocol.job_state import AnyState, RoundState
from kvps.protocol.noted_versions import Mirrored
from kvps.transport.access import JobAccess
from kvps.transport.shared_memory import ReadableSegment, Segments, SharedMemoryLost, free_bytes
from kvps.transport.version_reader import VersionReader
from kvps.transport.weight_reader import Arrived, PullRequest, Weights

_TRIES = 10
_MOST_IN_USE = 2  # segments: one that a user still has while the next one comes; more would fill the shared memory
_SPARE_VERSIONS = 8  # versions for which shared memory must have room, or a reader copies what it reads


class ShmVersionReader(VersionReader):
    """A reader of a job over shared memory: it reads there, or the version that Redis was last given."""

    receives = False

    def __init__(self, access: JobAccess, segments: Segments) -> None:
        super().__init__(replace(access, replicas=None))  # the bytes are in memory, or in what the master was given
        self._segments = segments
        self._in_use: set[ReadableSegment] = set()  # held by the user's arrays: their memory is not used again

    def read(self, request: PullRequest) -> Weights:
        """Return the weights in the memory where the aggregator wrote them."""
        state = request.state
        while True:
            if mapped := self.mapped(state):
                flat: Array = np.frombuffer(mapped.data.data, DTYPE)
                weakref.finalize(flat, mapped.close)  # once the user's last array of it is gone
                return Weights(state.version, state.names, flat)
            newest = request.newest()
            if newest.version == state.version:
                if (given := self.given(state)) is not None:
                    return Weights(state.version, state.names, given)
                self._client.wait({self._keys.turns: newest.last_entry})  # until the aggregator has noticed the loss
                raise SharedMemoryLost(f"version {state.version} of job {self._keys.job!r} is in no memory")
            state = newest

    def fetch(
        self, state: AnyState, flat: Array, format: Format = FP32, arrived: Arrived | None = None, part: str = ""
    ) -> Weights:
        """Read as `VersionReader` does; if this process does not see the memory, the newest weights in Redis."""
        if self._segments.here:
            return super().fetch(state, flat, format, arrived, part)
        self.reads += 1
        return self._fetch_given(state, flat)

    def _newest(self, state: RoundState, since: int) -> tuple[int, Array]:
        if not self._segments.here:
            return super()._newest(state, since)
        room = len(self._in_use) < _MOST_IN_USE and free_bytes() > _SPARE_VERSIONS * self._layout.nbytes
        mapped = self.mapped(state) if room else None
        if not mapped:
            return self._alone(state)
        self.reads += 1
        self._in_use.add(mapped)
        flat: Array = np.frombuffer(mapped.data.data, DTYPE)
        weakref.finalize(flat, self._release, mapped)  # once the user's last array of it is gone
        return state.version, flat

    def _release(self, mapped: ReadableSegment) -> None:
        self._in_use.discard(mapped)
        mapped.close()

    def mapped(self, state: AnyState) -> ReadableSegment | None:
        """Return the weights of exactly this version, in memory that its writer shares with this process; None if this
        process does not see that memory, or another version has replaced them."""
        with suppress(ChunkGone):
            return self._segments.open(self._keys.segment("w", state.names[0]), self._layout.nbytes)
        return None

    def given(self, state: AnyState) -> Array | None:
        """Return the weights of exactly this version if Redis has them, else None."""
        flat: Array = np.empty(self._layout.size, DTYPE)
        with suppress(ChunkGone):
            self._client.get(self._gets(state.names, flat))
            return flat
        return None

    def mirrored(self) -> Mirrored | None:
        """Return the version that Redis was last given; None if it has only the one the job was created with."""
        text = self._client.call("GET", self._keys.mirror)
        return Mirrored.of(text) if text else None

    def _stored_names(self, state: RoundState) -> tuple[str, ...]:
        record = self.mirrored()
        return (record.name,) if record else state.names

    def _fetch_given(self, state: AnyState, flat: Array) -> Weights:
        """Read the newest weights that Redis was given, where memory is not shared."""
        for _ in range(_TRIES):
            record = self.mirrored() or Mirrored(state.version, state.names[0])
            with suppress(ChunkGone):
                self._client.get(self._gets((record.name,), flat))
                return Weights(record.version, (record.name,), flat)
            self.restarts += 1
        raise KvpsError(
            f"the weights of job {self._keys.job!r} were replaced {_TRIES} times while they were read: "
            f"read them on its host, or make the job with transport redis"
        )

    def _read(self, names: Sequence[str], flat: Array, what: str = "w", part: str = "") -> None:
        if not self._copied(names, flat, what):
            super()._read(names, flat, what, part)

    def _stream(self, names: Sequence[str], flat: Array, arrived: Arrived, part: str) -> None:
        if not self._copied(names, flat, "w"):
            super()._stream(names, flat, arrived, part)

    def _copied(self, names: Sequence[str], flat: Array, what: str) -> bool:
        """Copy an array of a version from memory and return True; False if it is not there."""
        with suppress(ChunkGone), self._segments.open(self._keys.segment(what, names[0]), flat.nbytes) as data:
            np.copyto(flat, data.view(DTYPE))
            return True
        return False
