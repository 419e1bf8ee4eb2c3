"""Reads whole versions of a job: never half of one, and without waiting for any other process.

Bytes are immutable and live until two versions later, unless memory is full. A reader that is slower finds a chunk
gone. It then pins a version and reads that one, so that no storm of commits can starve it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

import numpy as np

from kvps.arrays.digest import shard_digests
from kvps.arrays.formats import FP32, Bytes, Format, format_of
from kvps.arrays.layout import DTYPE, Array
from kvps.arrays.pieces import Chunk
from kvps.arrays.weight_view import VIEW
from kvps.connection.replica_reader import SlotItems
from kvps.connection.sockets import ChunkGone
from kvps.errors import CorruptData
from kvps.protocol.job_state import AnyState, RoundState, State
from kvps.protocol.manifest import digests_in, skipped_in
from kvps.transport.access import JobAccess
from kvps.transport.host_copy import HostCopy, Progress
from kvps.transport.read_ahead import read_ahead
from kvps.transport.state_reader import StateReader
from kvps.transport.stored_view import StoredView
from kvps.transport.weight_reader import Arrived, PullRequest, Weights

_MOST_PIN_MS = 600_000
_MOST_MISSED, _QUICK, _PAUSE_S = 40, 8, 0.05  # reads that found their version gone: after 8, there is a growing pause
SHARED_BYTES = 1 << 20  # a smaller model is read faster than a copy of it is found
_SAME_MS = 200  # after this time the same version is read again at once
_FEW = 4  # chunks, for which a second thread is not worth it
_CHECKED_BYTES = 256 << 20  # a smaller model is allocated without a look at what Redis has of it


class VersionReader(StateReader):
    """A reader of the state and the weights of one job. It keeps nothing but counts, so threads may share it.

    format       the format in which weights are staged for workers
    reads        how many times weights were read
    differences  how many times the differences of a version to the one before were read
    restarts     how many times a read began anew because its version was gone
    """

    receives = True

    def __init__(self, access: JobAccess) -> None:
        super().__init__(access)
        self.format = format_of(access.config.weight_format)
        self._view = StoredView(access.client, access.keys, access.layout, self.format)
        self._replicas = access.replicas
        self._copy = HostCopy(self._keys.id, self._layout.size)
        self._shown: tuple[RoundState, int] | None = None  # the newest that was read, and when, by `time.monotonic_ns`
        self.reads = self.differences = self.restarts = 0

    @property
    def fetched(self) -> int:
        """How often this process has read the weights from Redis for all processes of its host."""
        return self._copy.reads

    def check_stored(self) -> None:
        """Raise CorruptData unless Redis has as many bytes of a large model's weights as its layout says.

        A process that opens a job asks once, so that no layout of a few bytes has it allocate gigabytes.
        """
        if self._layout.nbytes <= _CHECKED_BYTES:
            return
        chunks = self._layout.chunks_in("")
        names: tuple[str, ...] = ()
        while names != (now := self._stored_names(self.round_state())):  # else a commit may have freed it
            names = now
            lengths = self._client.each(
                [("STRLEN", self._keys.weights(c.shard, names[c.shard], c.number)) for c in chunks]
            )
            if lengths == [(c.stop - c.start) * DTYPE.itemsize for c in chunks]:
                return
        damage = CorruptData(
            f"Redis does not have the {self._layout.nbytes:,} bytes of weights that the layout of job "
            f"{self._keys.job!r} says: another program wrote it, or deleted the bytes"
        )
        raise self._client.lacking(damage)

    def _stored_names(self, state: RoundState) -> tuple[str, ...]:
        """Return the staged names, one for each shard, of the newest version that Redis has."""
        return state.names

    def read(self, request: PullRequest) -> Weights:
        """Read what was staged for workers, in the job's weight format."""
        return self.fetch(request.state, request.into, self.format, request.arrived, request.part)

    def close(self) -> None:
        """Nothing goes on between two reads."""

    def fetch(
        self, state: AnyState, flat: Array, format: Format = FP32, arrived: Arrived | None = None, part: str = ""
    ) -> Weights:
        """Read the weights of `state`, or of a newer version, into `flat`, (size,) float32; with a `part` of the model,
        only that.

        `format` is the format in which they come: fp32, or the job's weight format. `arrived` is called if they come
        from Redis. Raises CorruptData if bytes are missing that must exist.
        """

        def read(names: tuple[str, ...]) -> None:
            if format.lossy:
                self._decode(names, flat, arrived, part)
            elif arrived:
                self._stream(names, flat, arrived, part)
            else:
                self._read(names, flat, part=part)

        return Weights(*self._until_whole(state, read), flat)

    def view(self, state: RoundState, flat: Array, arrived: Arrived | None) -> Weights:
        """Read the whole view of `state`, or of a newer version, as `fetch` does, and raise what it raises."""

        def read(names: tuple[str, ...]) -> None:
            self._view.read(dict(enumerate(names)), flat)
            if arrived:
                arrived(0, flat)

        return Weights(*self._until_whole(state, read), flat)

    def _until_whole(self, state: AnyState, read: Callable[[tuple[str, ...]], None]) -> tuple[int, tuple[str, ...]]:
        """Call `read` with the names of `state`, or of newer versions, until no chunk is gone. Return the version that
        it has read, and its names. Raises CorruptData if bytes are missing that must exist."""
        self.reads += 1
        version, names, patience_ms = state.version, state.names, self._patience_ms()
        missed = 0
        while True:
            try:
                read(names)
                return version, names
            except ChunkGone as gone:
                self.restarts += 1
                missed += 1
                now = self.round_state()
                # The present version is never freed. A failover in a cluster may lose it: its holder stores it again.
                # If a version stays missing, no reader pinned it: the pin was forged or is damaged.
                if (now.version == version and not self._client.is_cluster) or missed > _MOST_MISSED:
                    damage = CorruptData(f"version {version} of job {self._keys.job!r}: {gone}")
                    raise self._client.lacking(damage) from None
            time.sleep(_PAUSE_S * max(0, missed - _QUICK))
            pin = self._pin(patience_ms)
            patience_ms = min(2 * patience_ms, _MOST_PIN_MS)  # the link may be slower than assumed
            if pin and pin.version >= state.version:
                version, names = pin
            else:  # another reader's pin, too old for this reader; or none
                version, names = now.version, now.names

    def newest(self) -> tuple[int, Array]:
        """Return the newest version and its weights, (size,) float32 that must not be written to.

        Processes of one host share one copy. If the version is the one that the last call returned, a moment before,
        the call waits for the next one, for `_SAME_MS` at the most: who reads in a loop leaves the processor to those
        who train. Raises as `weights` does.
        """
        since, last = time.monotonic_ns(), self._shown
        wait_ms = round(_SAME_MS - (since - last[1]) / 1e6) if last else 0
        state = self.next_round_state("", last[0], None, wait_ms)[0] if last and wait_ms > 0 else self.round_state()
        newest = self._newest(state, since)
        self._shown = state, time.monotonic_ns()
        return newest

    def _newest(self, state: RoundState, since: int) -> tuple[int, Array]:
        def read(flat: Array, progress: Progress) -> tuple[int, str]:
            version, names = self._snapshot(self.round_state(), flat, progress)
            return version, ",".join(names)

        if self._layout.nbytes >= SHARED_BYTES and (copy := self._copy.newest(",".join(state.names), since, read)):
            return copy
        return self._alone(state)

    def _alone(self, state: RoundState) -> tuple[int, Array]:
        """Read the weights into memory of this process."""
        flat: Array = np.empty(self._layout.size, DTYPE)
        return self._snapshot(state, flat, lambda: None)[0], flat

    def _snapshot(self, state: RoundState, flat: Array, progress: Progress) -> tuple[int, tuple[str, ...]]:
        """Read as `fetch` does, but take from replicas what they have. `progress` is called now and then."""
        replicas = self._replicas
        if not replicas:
            return self.fetch(state, flat, arrived=lambda *_: progress())[:2]

        def read(names: tuple[str, ...]) -> None:
            items = replicas.read(self._by_shard(names, flat), progress)
            for _ in self._client.getting(items):
                progress()

        return self._until_whole(state, read)

    def _by_shard(self, names: Sequence[str], flat: Array) -> list[SlotItems]:
        """Return what to read of each shard. Its manifest is stored last; version 0 has none, and its names are new."""
        gets = iter(self._gets(names, flat))
        marks = [self._keys.manifest(i, name) if int(name.partition(".")[0]) else "" for i, name in enumerate(names)]
        shards = zip(marks, self._layout.chunks, strict=True)
        return [SlotItems(mark, list(islice(gets, len(chunks)))) for mark, chunks in shards]

    def whole(self, state: State) -> tuple[Array, dict[str, Array], dict[int, int]]:
        """Read the weights of exactly this version, and its optimizer state (slot name -> array), all (size,) float32;
        and in how many versions each parameter was left out, see `skipped_in`.

        Raises ChunkGone if any of the bytes are gone, CorruptData if they are not the bytes that were committed.
        """
        keys, layout = self._keys, self._layout
        texts = self._client.gather([("GET", keys.manifest(i, name)) for i, name in enumerate(state.names)])
        if state.version and not all(texts):
            raise ChunkGone("a manifest is gone")
        logged = [digests_in(text) if text else {} for text in texts]
        weights: Array = np.empty(layout.size, DTYPE)
        self._read(state.names, weights)
        slots = {slot: np.empty(layout.size, DTYPE) for slot in logged[0] if slot != "w"}
        for slot, flat in slots.items():
            if slot == VIEW:
                self._view.read(dict(enumerate(state.names)), flat)
            else:
                self._read(state.names, flat, slot)
        for what, flat in {"w": weights, **slots}.items():
            for shard, digest in enumerate(shard_digests(layout, flat)):
                if logged[shard].get(what, digest) != digest:
                    raise CorruptData(f"version {state.version} of job {keys.job!r}, shard {shard}: damaged in Redis")
        skipped = dict[int, int]()
        for text in filter(None, texts):
            skipped |= skipped_in(text, state.version, len(layout.parameters))
        return weights, slots, skipped

    def read_exactly(self, names: Sequence[str], flat: Array) -> None:
        """Read the version of these staged names. Raises ChunkGone if any of its bytes are gone."""
        self._read(names, flat)

    def _read(self, names: Sequence[str], flat: Array, what: str = "w", part: str = "") -> None:
        self._client.get(self._gets(names, flat, what, part))

    def _stream(self, names: Sequence[str], flat: Array, arrived: Arrived, part: str) -> None:
        coming = self._client.getting(self._gets(names, flat, part=part))
        for c, _ in zip(self._layout.chunks_in(part), coming, strict=True):
            arrived(c.start, flat[c.start : c.stop])

    def _decode(self, names: Sequence[str], flat: Array, arrived: Arrived | None, part: str) -> None:
        """Read the weights that were staged for workers in a lossy format."""

        def take(c: Chunk, encoded: Bytes) -> None:
            self.format.decode(encoded, flat[c.start : c.stop])
            if arrived:
                arrived(c.start, flat[c.start : c.stop])

        self.staged(names, take, part)

    def staged(self, names: Sequence[str], take: Callable[[Chunk, Bytes], None], part: str = "") -> None:
        """Read what was staged for workers in the job's weight format, and call `take` with each chunk and its bytes,
        while the next ones arrive. Raises ChunkGone."""
        chunks = self._layout.chunks_in(part)
        sizes = [self.format.nbytes(c.stop - c.start) for c in chunks]
        memory: Bytes = np.empty(sum(sizes), np.uint8)
        each = [memory[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
        coming = self._client.getting(
            [(self._keys.pulled(c.shard, names[c.shard], c.number), e.data) for c, e in zip(chunks, each, strict=True)]
        )
        if len(chunks) > _FEW:
            coming = read_ahead(coming, slots=len(chunks), held=0)
        for c, encoded, _ in zip(chunks, each, coming, strict=False):
            take(c, encoded)
        for _ in coming:  # gives its connection back
            pass
