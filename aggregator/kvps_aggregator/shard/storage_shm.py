"""A shard whose arrays are in memory that the holder shares with the job's workers.

Contributions are read in place, and the next version is written in place. If the memory is lost, the job continues from
the version that Redis was last given (see `mirror`): later versions are lost too, and are computed again.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from typing import NoReturn

from kvps.arrays.formats import Bytes, format_of
from kvps.arrays.layout import DTYPE
from kvps.connection.sockets import ChunkGone
from kvps.errors import CorruptData, LeaseLost, counted
from kvps.job import Job
from kvps.protocol.job_state import State
from kvps.protocol.keys import segment_of
from kvps.protocol.plan import Contribution, Plan
from kvps.transport.shared_memory import SharedMemoryLost, WritableSegment
from kvps.transport.shm import ShmTransport
from kvps_aggregator.shard.lifecycle import Versions
from kvps_aggregator.shard.mirror import Mirror
from kvps_aggregator.shard.storage import Step, Storage
from kvps_aggregator.step.shard_arrays import ShardArrays

log = logging.getLogger("kvps.commit")

_VERSIONS = 8  # at most are kept: a reader locks the one it reads, and each array of one costs two open descriptors
_SPARES = 4  # dead segments of each array that are kept to be written anew
_THREADS = 4  # with more the memory is no faster
_FEW = 4  # with fewer chunks one thread is as fast


class ShmStorage(Storage):
    """The `Storage` of a job over shared memory, which has one shard.

    `parallel` allows making chunks on several threads. `memory_lost` is the user's word that the job's memory is lost,
    though this process cannot see that.
    """

    def __init__(
        self, job: Job, transport: ShmTransport, term: str, arrays: ShardArrays, parallel: bool, memory_lost: bool
    ) -> None:
        super().__init__(job, 0, term, arrays, Versions(job.layout.nbytes * (1 + len(arrays.slots)), _VERSIONS))
        self._segments = transport.segments
        self._reader = transport.reader
        self._memory_lost = memory_lost
        format_ = format_of(job.config.gradient_format)
        self._ends = list(accumulate(format_.nbytes(c.stop - c.start) for c in arrays.chunks))
        self._parallel = parallel and not format_.lossy and len(arrays.chunks) >= _FEW
        self._reading = ExitStack()  # the contributions of the plan that is being made
        self._using = ExitStack()  # the segments of the present arrays, if another holder made them
        self._segments_of: dict[str, dict[str, WritableSegment]] = {}  # staged name -> array -> segment
        self._spares: dict[str, list[WritableSegment]] = {what: [] for what in self._whats}
        self._gone: list[str] = []
        self._helpers = min(_THREADS, os.cpu_count() or 1) - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "kvps-step")
        self._mirror = Mirror(job, transport, term)

    def close(self) -> None:
        self._mirror.close()
        self._using.close()
        self._pool.shutdown()

    def flush(self) -> None:
        self._mirror.flush()

    def finish(self) -> None:
        self.flush()
        self.close()
        # Unlink only versions that are dead or in Redis too: another holder may have gone on while this process slept.
        # The last holder may have left segments of the versions in Redis, and a sweep takes these for live.
        names = {*self._versions.names.values(), *self._mirror.names}
        self._segments.unlink([self._job.access.keys.segment(what, name) for what in self._whats for name in names])

    # -- what the last holder left -----------------------------------------------------------------------------

    def load(self, state: State, before: str, pinned: tuple[int, str] | None) -> None:
        name = state.names[0]
        self._version = state.version
        self._dead.begin(state)
        self._mirror.begin(state.version, name)  # first: a rollback goes to what it notes
        try:
            if self._memory_lost and not self._segments.seen:
                self._roll_back()
            self._read(state, name)
        except BaseException:
            self.close()
            raise
        self._versions.begin(state.version, name, before, pinned)

    def loaded(self) -> None:
        self._mirror.start()

    def _read(self, state: State, name: str) -> None:
        self._segments.ensure()
        try:
            self._map(name)
            whole = self._contributions_are_here()
        except ChunkGone:
            # The version was never in memory, or Redis was given all of it before the memory was lost.
            record = self._reader.mirrored()
            whole = record is not None and record.version == state.version and self._contributions_are_here()
            if whole:
                self._read_from_redis(state.version, name)
        if not whole:
            self._lose()

    def _map(self, name: str) -> None:
        nbytes = self._arrays.size * DTYPE.itemsize
        arrays = [
            self._using.enter_context(self._segments.open(self._job.access.keys.segment(what, name), nbytes))
            for what in self._whats
        ]
        self._arrays.weights = arrays[0].view(DTYPE)
        self._arrays.state = {slot: data.view(DTYPE) for slot, data in zip(self._arrays.slots, arrays[1:], strict=True)}

    def _contributions_are_here(self) -> bool:
        """Return whether memory has the inbox's contributions: a server that lost writes may list overwritten ones."""
        return all(c.weight == 0 or self._is_here(c) for c in self._job.access.reader.inbox())

    def _is_here(self, c: Contribution) -> bool:
        with suppress(ChunkGone):
            self._segments.open(self._gradient(c), self._ends[-1]).close()
            return True
        return False

    def _lose(self) -> NoReturn:
        """Roll the job back, or only raise LeaseLost if this process cannot see whether the memory is really lost."""
        if not self._segments.seen:
            raise LeaseLost(f"job {self._job.name}: its shared memory is not seen here any more")
        self._roll_back()

    def _roll_back(self) -> NoReturn:
        """Roll the job back to the version that Redis was given. Raises LeaseLost, for all terms end with that."""
        rolled_back = self._job.access.scripts.rollback(self._term, secrets.token_hex(4), self._segments.memory_here())
        if rolled_back is None:
            raise CorruptData(
                f"job {self._job.name!r}: its shared memory is lost, and Redis was never given the weights"
            )
        version, lost = rolled_back  # this process's own count may miss what the server lost or committed last
        log.warning(
            "job %s: shared memory was lost: goes on from version %d, which Redis has; lost the last %s, to be "
            "computed again",
            self._job.name,
            version,
            counted(lost, "version"),
        )
        raise LeaseLost(f"shard 0 of job {self._job.name!r} has to be taken anew")

    # -- the next version --------------------------------------------------------------------------------------

    @contextmanager
    def staging(self, name: str) -> Iterator[None]:
        made = self._made(name)
        self._arrays.next_weights = made["w"].data.view(DTYPE)
        self._arrays.next_state = {slot: made[slot].data.view(DTYPE) for slot in self._arrays.slots}
        with ExitStack() as self._reading:
            yield

    def _made(self, name: str) -> dict[str, WritableSegment]:
        """Return array -> segment for a version, and make the missing segments."""
        nbytes, made = self._arrays.size * DTYPE.itemsize, self._segments_of.setdefault(name, {})
        for what in self._whats:
            if what in made:
                continue
            try:
                made[what] = self._segments.make(self._job.access.keys.segment(what, name), nbytes, self._spares[what])
            except SharedMemoryLost:
                self._job.state()  # raises JobNotFound if the job was removed; else its directory was deleted
                self._lose()
            self._spares[what] = [spare for spare in self._spares[what] if spare is not made[what]]
        return made

    def contribution(self, c: Contribution) -> list[Bytes]:
        try:
            whole = self._reading.enter_context(self._segments.open(self._gradient(c), self._ends[-1]))
        except ChunkGone:
            # The memory is lost; or the worker wrote it over after a commit that the server has lost since.
            self._lose()
        return [whole[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def each_chunk(self, step: Step) -> Generator[dict[str, str], None, None]:
        if not self._parallel:
            yield from super().each_chunk(step)
            return
        todo = iter(self._arrays.chunks)  # gives each chunk to one thread
        digests: dict[int, dict[str, str]] = {}

        def work() -> None:
            for chunk in todo:
                digests[chunk.number] = step(chunk)

        others = [self._pool.submit(work) for _ in range(self._helpers)]
        try:
            work()
        finally:  # after this method no thread may still write
            for _ in todo:
                pass
            wait(others)
        for other in others:
            other.result()
        yield from (digests[chunk.number] for chunk in self._arrays.chunks)

    def promote(self, plan: Plan, name: str, pinned: int | None) -> None:
        # Contributions are not discarded: the worker writes their segments anew, or a sweep finds them.
        self._version = plan.version
        self._versions.names[plan.version] = name
        for version, old in self._versions.expired(plan.version, pinned):
            self._discard_version(version, old)
        self._using.close()
        self._mirror.committed(plan.version)

    # -- dead bytes --------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        for version, name in self._versions.before(self._version):
            self._discard_version(version, name)
        self.free()

    def live_names(self) -> set[str]:
        spares = {spare.name.split(":")[1] for each in self._spares.values() for spare in each}
        return super().live_names() | self._mirror.names | spares

    def _discard_version(self, version: int, name: str) -> None:
        if self._mirror.lets_go(version, name):
            self._dead.discard([self._job.access.keys.manifest(0, name)])
        made = self._segments_of.pop(name, {})
        for what in self._whats:
            if what in made and len(self._spares[what]) < _SPARES:
                self._spares[what].append(made[what])
            else:
                self._gone.append(self._job.access.keys.segment(what, name))

    def discard_segments(self, names: Iterable[str]) -> None:
        self._gone += names

    def retire(self) -> None:
        for what in self._whats:
            self._gone += [spare.name for spare in self._spares[what]]
            self._spares[what] = []

    def free(self, wait: bool = False) -> None:
        super().free()
        gone, self._gone = self._gone, []
        self._segments.unlink(gone)

    def _gradient(self, c: Contribution) -> str:
        return segment_of(self.gradient_keys(c)[0])
