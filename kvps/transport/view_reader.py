"""Reads the view of one session: the differences to what it has, or all of it if it has missed too many versions."""

from __future__ import annotations

import numpy as np

from kvps.arrays.formats import Bytes, format_of
from kvps.arrays.layout import CHUNK_ITEMS, DTYPE, Array
from kvps.arrays.pieces import Chunk
from kvps.arrays.weight_view import follow
from kvps.connection.sockets import ChunkGone
from kvps.protocol.job_state import RoundState
from kvps.protocol.keys import following
from kvps.transport.access import JobAccess
from kvps.transport.stored_view import damaged, most_differences
from kvps.transport.version_reader import VersionReader
from kvps.transport.weight_reader import Arrived, PullRequest, Weights


class ViewReader:
    """The view of one session. One thread at a time uses it. What it has read last must not be written to."""

    receives = True

    def __init__(self, access: JobAccess, reader: VersionReader) -> None:
        self._keys = access.keys
        self._format = format_of(access.config.weight_format)
        self._most = most_differences(self._format)
        self._reader = reader
        self._held: Array = np.empty(0, DTYPE)
        self._names: tuple[str, ...] = ()  # of the version in `_held`: no other version ever has them

    def read(self, request: PullRequest) -> Weights:
        """Read the view of the version that is asked for, whole, whatever part of the model is needed."""
        state, flat, arrived = request.state, request.into, request.arrived
        missing = versions_between(self._names, state, self._most)
        held, self._names = self._held, ()  # until all of it is there
        self._held = flat
        if missing is not None:
            try:
                self._follow(missing, held, flat, arrived)
                self._names = state.names
                return Weights(state.version, state.names, flat)
            except ChunkGone:
                pass
        weights = self._reader.view(state, flat, arrived)
        self._names = weights.names
        return weights

    def close(self) -> None:
        """Nothing goes on between two reads."""

    def _follow(self, missing: list[tuple[str, ...]], held: Array, flat: Array, arrived: Arrived | None) -> None:
        """Add the differences of these versions to what is held. Raises ChunkGone, CorruptData."""
        scratch: Array = np.empty(min(flat.size, CHUNK_ITEMS), DTYPE)
        for number, names in enumerate(missing, 1):
            last = number == len(missing)

            def add(c: Chunk, sent: Bytes, base: Array = held, last: bool = last) -> None:
                items = slice(c.start, c.stop)
                follow(self._format, sent, base[items], flat[items], scratch[: c.stop - c.start])
                if arrived and last:
                    arrived(c.start, flat[items])

            try:
                self._reader.staged(names, add)
            except ValueError as error:
                raise damaged(self._keys, error) from None
            held = flat
            self._reader.differences += 1
        if held is not flat:
            np.copyto(flat, held)
        if arrived and not missing:
            arrived(0, flat)


def versions_between(held: tuple[str, ...], state: RoundState, most: int) -> list[tuple[str, ...]] | None:
    """Return the staged names of the versions after `held`, up to that of `state`; None if they are not known, or more
    than `most`.

    A term makes all versions between two of its own. From one term to the next, Redis has the name before.
    """
    if not held:
        return None
    if held == state.before != state.names:
        return [state.names]
    names, out = held, list[tuple[str, ...]]()
    while names != state.names and len(out) < most:
        names = tuple(following(name) for name in names)
        out.append(names)
    return out if names == state.names else None
