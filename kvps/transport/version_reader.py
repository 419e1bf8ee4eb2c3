"""Reads whole versions of a job: never half of one, and without waiting for any other process.

Bytes are immutable and live until two versions later, unless memory is full. A reader that is slower finds a chunk
gone. It then pins a version and reads that one, so that no storm of commits can starve it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from kvps.arrays.digest import shard_digests, view
from kvps.arrays.formats import FP32, Bytes, Format
from kvps.arrays.layout import DTYPE, Array, Chunk
from kvps.connection.resp import Command
from kvps.connection.sockets import ChunkGone
from kvps.errors import CorruptData, KvpsError
from kvps.protocol.job_state import Mirrored, Pin, State, Turn, digests_in
from kvps.protocol.keys import following
from kvps.protocol.scripts import job_not_found, made_anew
from kvps.transport.access import JobAccess
from kvps.transport.read_ahead import read_ahead
from kvps.transport.shared_memory import ReadableSegment, Segments

Arrived = Callable[[int, Array], None]

_PIN_MS = 5_000
_MOST_PIN_MS = 600_000
_TRIES = 10
_MOST_MISSED, _QUICK, _PAUSE_S = 40, 8, 0.05  # reads that found their version gone: after 8, there is a growing pause
_FEW = 4  # chunks, for which a second thread is not worth it
_SLOW_BYTES_PER_MS = 50_000  # a pin outlives a read at 50 MB/s


class VersionReader:
    """A reader of the state and the weights of one job. It keeps nothing but counts, so threads may share it.

    reads     how many times weights were read
    restarts  how many times a read began anew because its version was gone
    """

    def __init__(self, access: JobAccess) -> None:
        self._client = access.client
        self._keys = access.keys
        self._layout = access.layout
        self._scripts = access.scripts
        self.reads = 0
        self.restarts = 0

    def state(self) -> State:
        """Return the job's state at one instant, with every member. Raises JobNotFound."""
        return self._state()

    def held(self, arrays: int) -> State:
        """Return the job's state at one instant, and pin its version at that instant, for long enough to read `arrays`
        arrays of its size; unless another reader's pin holds another version. Raises JobNotFound."""
        return self._state(self._scripts.pinning(self._patience_ms(arrays)))

    def turn(self, worker: str = "") -> Turn:
        """Return what a worker, or a reader, must know of the job, at one instant. Raises JobNotFound."""
        newest = ("XREVRANGE", self._keys.turns, "+", "-", "COUNT", 1)
        return self._turn(worker, self._client.together([*self._asked(worker), newest]))

    def next_turn(self, worker: str, turn: Turn, flat: Array | None) -> tuple[Turn, bool]:
        """Return the next turn after `turn`, at the instant when it begins, or in a second at the latest.

        If the model is small, the weights of the version after `turn` are read into `flat` in the same request. Returns
        also whether that worked and that version is the present one. Raises JobNotFound.
        """
        names = tuple(following(name) for name in turn.names)
        small = flat is not None and self._layout.nbytes <= self._client.small_bytes
        gets = self._gets(names, flat) if flat is not None and small else []
        turns = self._keys.turns
        arrived, asked, came = self._client.wait_and_read({turns: turn.last_entry}, self._asked(worker), gets)
        now = self._turn(worker, [*asked, [(arrived.get(turns, turn.last_entry), {})]])
        return now, small and came and now.names == names

    def _asked(self, worker: str) -> list[Command]:
        k = self._keys
        return [
            ("HGETALL", k.version),
            ("ZRANGE", k.rounds, 0, 0, "WITHSCORES"),
            ("HLEN", k.workers),
            ("HGET", k.workers, worker),
            ("HGET", k.clock, worker),
            ("ZSCORE", k.rounds, worker),
        ]

    def _turn(self, worker: str, replies: Sequence[Any]) -> Turn:
        self._check_found(replies[0])
        return Turn.of(worker, *replies)

    def _state(self, *before: Command) -> State:
        k = self._keys
        hashes = [("HGETALL", key) for key in (k.version, k.clock, k.skip, k.workers, k.units)]
        newest = ("XREVRANGE", k.commits, "+", "-", "COUNT", 1)
        replies = self._client.together([*before, *hashes, newest])[len(before) :]
        self._check_found(replies[0])
        return State.of(*replies)

    def _check_found(self, version: Mapping[str, str]) -> None:
        """Raise JobNotFound unless the job exists and has the id that is meant."""
        if not version:
            raise job_not_found(self._keys.job)
        if version.get("id") != self._keys.id:
            raise made_anew(self._keys.job)

    def _patience_ms(self, arrays: int = 1) -> int:
        return _PIN_MS + arrays * self._layout.nbytes // _SLOW_BYTES_PER_MS

    def weights(self, state: State | Turn, flat: Array, format: Format = FP32, arrived: Arrived | None = None) -> int:
        """Read the weights of `state`, or of a newer version, into `flat`, (size,) float32. Return that version.

        `format` is the format in which they arrive: fp32, or the job's `weight_format`. If they are read from Redis,
        `arrived` is called with the first item and the array of each part of `flat` once it is filled, and again if the
        part is read again in another version. Raises CorruptData if bytes are missing that must exist.
        """
        self.reads += 1
        version, names, patience_ms = state.version, state.names, self._patience_ms()
        missed = 0
        while True:
            try:
                if format.lossy:
                    self._pull(names, flat, format, arrived)
                elif arrived:
                    self._stream(names, flat, arrived)
                else:
                    self._read(names, flat)
                return version
            except ChunkGone as gone:
                self.restarts += 1
                missed += 1
                now = self.turn()
                # The present version is never freed. A version that is missing again and again was never there: the
                # pin that names it is not a reader's.
                if now.version == version or missed > _MOST_MISSED:
                    raise CorruptData(f"version {version} of job {self._keys.job!r}: {gone}") from None
            time.sleep(_PAUSE_S * max(0, missed - _QUICK))
            pin = Pin.of(self._scripts.pin(patience_ms), self._layout.shards)
            patience_ms = min(2 * patience_ms, _MOST_PIN_MS)  # the link may be slower than assumed
            if pin.version >= state.version:
                version, names = pin
            else:  # another reader's pin, too old for this reader
                version, names = now.version, now.names

    def whole(self, state: State) -> tuple[Array, dict[str, Array]]:
        """Read the weights of exactly this version, and its optimizer state (slot name -> array); all (size,) float32.

        Raises ChunkGone if any of the bytes are gone, CorruptData if they are not the bytes that were committed.
        """
        keys, layout = self._keys, self._layout
        texts = self._client.together([("GET", keys.manifest(i, name)) for i, name in enumerate(state.names)])
        if state.version and not all(texts):
            raise ChunkGone("a manifest is gone")
        logged = [digests_in(text) if text else {} for text in texts]
        weights: Array = np.empty(layout.size, DTYPE)
        self._read(state.names, weights)
        slots = {slot: np.empty(layout.size, DTYPE) for slot in logged[0] if slot != "w"}
        for slot, flat in slots.items():
            self._read(state.names, flat, slot)
        for what, flat in {"w": weights, **slots}.items():
            for shard, digest in enumerate(shard_digests(layout, flat)):
                if logged[shard].get(what, digest) != digest:
                    raise CorruptData(f"version {state.version} of job {keys.job!r}, shard {shard}: damaged in Redis")
        return weights, slots

    def _read(self, names: Sequence[str], flat: Array, what: str = "w") -> None:
        self._client.get(self._gets(names, flat, what))

    def _gets(self, names: Sequence[str], flat: Array, what: str = "w") -> list[tuple[str, memoryview]]:
        def key(c: Chunk) -> str:
            return self._keys.array(c.shard, what, names[c.shard], c.number)

        chunks = [c for shard in self._layout.chunks for c in shard]
        return [(key(c), view(flat[c.start : c.stop])) for c in chunks]

    def _stream(self, names: Sequence[str], flat: Array, arrived: Arrived) -> None:
        chunks = (c for shard in self._layout.chunks for c in shard)
        for c, _ in zip(chunks, self._client.getting(self._gets(names, flat)), strict=True):
            arrived(c.start, flat[c.start : c.stop])

    def _pull(self, names: Sequence[str], flat: Array, format: Format, arrived: Arrived | None) -> None:
        """Read the weights that were staged for workers. Each chunk is decoded while the next ones arrive."""
        chunks = [c for shard in self._layout.chunks for c in shard]
        whole: Bytes = np.empty(sum(format.nbytes(c.stop - c.start) for c in chunks), np.uint8)
        parts, at = [], 0
        for c in chunks:
            parts.append(whole[at : at + format.nbytes(c.stop - c.start)])
            at += parts[-1].size
        coming = self._client.getting(
            [(self._keys.pulled(c.shard, names[c.shard], c.number), p.data) for c, p in zip(chunks, parts, strict=True)]
        )
        if len(chunks) > _FEW:
            coming = read_ahead(coming, slots=len(chunks), held=0)
        for c, part, _ in zip(chunks, parts, coming, strict=False):
            format.decode(part, flat[c.start : c.stop])
            if arrived:
                arrived(c.start, flat[c.start : c.stop])
        for _ in coming:  # gives its connection back
            pass


class ShmVersionReader(VersionReader):
    """A reader of a job over shared memory: it reads there, or the version that Redis was last given."""

    def __init__(self, access: JobAccess, segments: Segments) -> None:
        super().__init__(access)
        self._segments = segments

    def weights(self, state: State | Turn, flat: Array, format: Format = FP32, arrived: Arrived | None = None) -> int:
        """Like `VersionReader.weights`; if this process does not see the memory, read the newest weights in Redis."""
        if self._segments.here:
            return super().weights(state, flat, format, arrived)
        self.reads += 1
        return self._weights_given(state, flat)

    def mapped(self, state: State | Turn) -> ReadableSegment | None:
        """Return the weights of exactly this version, in memory that its writer shares with this process; None if this
        process does not see that memory, or another version has replaced them."""
        with suppress(ChunkGone):
            return self._segments.open(self._keys.segment("w", state.names[0]), self._layout.nbytes)
        return None

    def given(self, state: State | Turn) -> Array | None:
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

    def _weights_given(self, state: State | Turn, flat: Array) -> int:
        """Read the newest weights that Redis was given, where memory is not shared. Return their version."""
        for _ in range(_TRIES):
            record = self.mirrored() or Mirrored(state.version, state.names[0])
            with suppress(ChunkGone):
                self._client.get(self._gets((record.name,), flat))
                return record.version
            self.restarts += 1
        raise KvpsError(
            f"the weights of job {self._keys.job!r} were replaced {_TRIES} times while they were read: "
            f"have Redis given them less often (--mirror-every)"
        )

    def _read(self, names: Sequence[str], flat: Array, what: str = "w") -> None:
        segment = self._keys.segment(what, names[0])
        with suppress(ChunkGone), self._segments.open(segment, flat.nbytes) as data:
            np.copyto(flat, data.view(DTYPE))
            return
        super()._read(names, flat, what)
