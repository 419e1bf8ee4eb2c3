"""Reads whole versions of a job: never half of one, and never waiting for anybody.

Bytes are immutable and live until two versions later, unless memory is full. A reader slower than that finds a chunk
gone; it then pins a version and reads that, so that no storm of commits can starve it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvps.client import Client
from kvps.errors import CorruptData
from kvps.keys import JobKeys
from kvps.layout import Array, Layout
from kvps.scripts import JobScripts, job_not_found
from kvps.state import State
from kvps.transport import ChunkGone
from kvps.wire import view

_PIN_MS = 5_000
_SLOW_BYTES_PER_MS = 50_000  # a pin outlives a read at 50 MB/s


class Reader:
    """Reads the state and the weights of one job. Keeps nothing but counts, so threads may share it."""

    def __init__(self, client: Client, keys: JobKeys, layout: Layout, scripts: JobScripts) -> None:
        self._client = client
        self._keys = keys
        self._layout = layout
        self._scripts = scripts
        self.reads = 0
        self.restarts = 0

    def state(self) -> State:
        """The job at one instant. Raises JobNotFound."""
        k = self._keys
        hashes = [("HGETALL", key) for key in (k.version, k.clock, k.workers, k.units)]
        replies = self._client.together([*hashes, ("XREVRANGE", k.commits, "+", "-", "COUNT", 1)])
        if not replies[0]:
            raise job_not_found(k.job)
        return State.of(*replies)

    def weights(self, state: State, flat: Array) -> int:
        """Read the weights of `state`, or of a newer version, into `flat` (shape (size,), float32).

        Returns the version that was read. Raises CorruptData if bytes that must be there are not.
        """
        self.reads += 1
        version, names, patience_ms = state.version, state.names, _PIN_MS + self._layout.nbytes // _SLOW_BYTES_PER_MS
        while True:
            try:
                self._read(names, flat)
                return version
            except ChunkGone as gone:
                self.restarts += 1
                now = self.state()
                if now.version == version:  # nobody frees this one
                    raise CorruptData(f"version {version} of job {self._keys.job!r}: {gone}") from None
            pin = json.loads(self._scripts.pin(patience_ms))
            patience_ms *= 2  # the link may be slower than that
            if pin["version"] >= state.version:
                version, names = pin["version"], tuple(pin["names"][str(i)] for i in range(self._layout.shards))
            else:  # another reader's, too old for this one
                version, names = now.version, now.names

    def _read(self, names: Sequence[str], flat: Array) -> None:
        self._client.get(
            [
                (self._keys.weights(c.shard, names[c.shard], c.number), view(flat[c.start : c.stop]))
                for chunks in self._layout.chunks
                for c in chunks
            ]
        )
