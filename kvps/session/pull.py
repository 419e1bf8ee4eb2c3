"""The weights that a session pulls: how they come, and where the user then has them.

over Redis          received into one flat array in host memory, or fetched ahead into another
shared memory       where the aggregator wrote them
on a device         from either of these, part by part as it comes
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvps.arrays.formats import format_of
from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.config import JobConfig
from kvps.connection.client import Client
from kvps.device.base import CPU, Device, DeviceBuffer, empty
from kvps.protocol.job_state import Turn
from kvps.protocol.keys import JobKeys
from kvps.session.prefetch import FetchedWeights, Prefetch
from kvps.transport.shared_memory import Segments, SharedMemoryLost
from kvps.transport.version_reader import Reader


class WeightPull:
    """Of one session, which alone calls it. What it hands out is valid until it hands out the next."""

    def __init__(
        self,
        client: Client,
        keys: JobKeys,
        config: JobConfig,
        layout: Layout,
        reader: Reader,
        segments: Segments | None,
        device: Device | str,
        prefetch: bool,
    ) -> None:
        named, where = (device, CPU) if isinstance(device, str) else (device.name, device)
        memory = partial(empty, layout.size, named)
        self._client = client
        self._keys = keys
        self._layout = layout
        self._reader = reader
        self._wire = format_of(config.weight_format)
        self._shared = segments is not None
        self._where = where
        self._landing: DeviceBuffer | None = (
            None  # from the first pull on, for a device without room must not fail a join
        )
        self._flat: Array = np.empty(0, DTYPE) if self._shared else memory()
        self._views = {} if self._shared else layout.views(self._flat)
        self._prefetch: Prefetch | None = None
        if prefetch and not self._shared:  # over shared memory there is nothing to fetch
            self._prefetch = Prefetch(client, keys, config, reader, memory())
            weakref.finalize(self, self._prefetch.close)  # who drops a session without leaving forgets what comes

    @property
    def inline_buffer(self) -> Array | None:
        """Where the weights of a small model may come together with a turn; None if they come otherwise."""
        return None if self._prefetch or self._shared or self._wire.lossy else self._flat

    def weights(
        self, turn: Turn, received_inline: bool, rounds_done: int, look: Callable[[], Turn]
    ) -> tuple[int, dict[str, Any]]:
        """The weights of this turn, or newer ones: their version, and name -> array.

        `came` is whether they are in `room`, `look` how the session finds the newest turn. Raises SharedMemoryLost,
        DeviceFailed, and what `Reader.weights` and `look` raise.
        """
        self._landing = self._landing or self._where.landing(self._layout.size)
        if self._landing:
            self._landing.begin()
        version, flat = self._mapped(turn, look) if self._shared else self._fetched(turn, received_inline, rounds_done)
        if flat is not self._flat:
            self._flat, self._views = flat, self._layout.views(flat)
        return version, self._layout.cut(self._landing.whole(flat)) if self._landing else dict(self._views)

    def _fetched(self, turn: Turn, received_inline: bool, rounds_done: int) -> tuple[int, Array]:
        if received_inline:
            return turn.version, self._flat
        fetched = self._prefetch.take(self._flat) if self._prefetch else None
        if not fetched:
            arrived = self._landing.arrived if self._landing else None
            fetched = FetchedWeights(self._reader.weights(turn, self._flat, self._wire, arrived), self._flat)
        if self._prefetch:
            self._prefetch.begin(rounds_done + 1, fetched.version)
        return fetched

    def _mapped(self, turn: Turn, look: Callable[[], Turn]) -> tuple[int, Array]:
        """Where they are in shared memory, or out of Redis if only that has them yet."""
        while True:
            if mapped := self._reader.mapped(turn):
                flat: Array = np.frombuffer(mapped.data.data, DTYPE)
                weakref.finalize(flat, mapped.close)  # with the last array that the user has of it
                return turn.version, flat
            now = look()
            if now.version == turn.version:
                if (given := self._reader.given(turn)) is not None:
                    return turn.version, given
                self._client.wait({self._keys.turns: now.last_entry})  # until its aggregator has seen that too
                raise SharedMemoryLost(f"version {turn.version} of job {self._keys.job!r} is in no memory")
            turn = now

    def close(self) -> None:
        """Forget what is coming."""
        if self._prefetch:
            self._prefetch.close()
