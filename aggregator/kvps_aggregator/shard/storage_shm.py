"""A shard whose arrays are in memory that it shares with the job's workers.

Contributions are read, and the next version is written, where they are. When the memory is lost the job goes on from
what Redis was last given (see `mirror`); what came since is lost with it, and is done again.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import NoReturn

from kvps.arrays.digest import Buffers
from kvps.arrays.formats import Bytes
from kvps.arrays.layout import DTYPE, Chunk
from kvps.connection.sockets import ChunkGone
from kvps.device.base import CPU, Device
from kvps.errors import CorruptData, LeaseLost
from kvps.job import Job
from kvps.protocol.job_state import State
from kvps.protocol.keys import segment_of
from kvps.protocol.plan import Contribution
from kvps.transport.shared_memory import Segments, SharedMemoryLost, WritableSegment
from kvps_aggregator.shard.mirror import Mirror
from kvps_aggregator.shard.shard import Shard

log = logging.getLogger("kvps.commit")

_VERSIONS = 8  # who reads one holds its lock, and two descriptors are open for each of its arrays
_SPARES = 4  # segments that are kept to be written anew, of each array
_THREADS = 4  # the memory is not faster for more
_FEW = 4  # chunks that are made as fast on one


class ShmShard(Shard):
    """The one shard of a job over shared memory."""

    def __init__(self, job: Job, number: int, term: str, record: Path | None = None, device: Device = CPU) -> None:
        super().__init__(job, number, term, record, device)
        assert job.segments is not None
        self._segments: Segments = job.segments
        self._whole = True  # Redis is given the manifest alone
        self._kept_versions = min(self._kept_versions, _VERSIONS)
        self._whats = ("w", *self._part.slots)
        self._ends = list(accumulate(self._format.nbytes(c.stop - c.start) for c in self._part.chunks))
        self._reading = ExitStack()  # the contributions of the plan that is made
        self._using = ExitStack()  # what the part's present arrays lie in, if another holder made it
        self._made: dict[str, dict[str, WritableSegment]] = {}  # by staged name, by array
        self._spares: dict[str, list[WritableSegment]] = {what: [] for what in self._whats}
        self._gone: list[str] = []
        self._helpers = min(_THREADS, os.cpu_count() or 1) - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "kvps-step")
        self.mirror = Mirror(job, term)

    def close(self) -> None:
        self.mirror.close()
        self._using.close()
        self._pool.shutdown()

    def flush(self) -> None:
        self.mirror.flush()

    def finish(self) -> None:
        super().finish()
        self.close()
        # Only what is now in Redis too, or dead: another may have gone on while this one slept. Of what Redis has the
        # last holder may have left segments, which a sweep takes for living while Redis has that.
        names = {*self._names.values(), *self.mirror.names}
        self._segments.unlink([self._job.keys.segment(what, name) for what in self._whats for name in names])

    @property
    def fetches_early(self) -> bool:
        return False

    @property
    def _expects(self) -> bool:
        return False

    # -- what the last holder left -----------------------------------------------------------------------------

    def load(self, state: State, before: str, pinned: tuple[int, str] | None) -> None:
        self.mirror.begin(state.version, state.names[self.number])  # first: it is what a rollback goes to
        try:
            super().load(state, before, pinned)
            self.mirror.start()
        except BaseException:
            self.close()
            raise

    def move(self, state: State) -> NoReturn:
        """Have the job go on in the memory of this process, for its own is lost. Raises LeaseLost, see `_roll_back`."""
        try:
            self.mirror.begin(state.version, state.names[self.number])
            self._roll_back()
        finally:
            self.close()

    def _load_bytes(self, name: str) -> None:
        self._segments.ensure()
        try:
            self._map(name)
            whole = self._contributions_are_here()
        except ChunkGone:
            # Never in memory, or all of it was given to Redis before the memory was lost.
            record = self._job.reader.mirrored()
            whole = record is not None and record.version == self.version and self._contributions_are_here()
            if whole:
                super()._load_bytes(name)
        if not whole:
            self._lose()

    def _map(self, name: str) -> None:
        nbytes = self._part.size * DTYPE.itemsize
        found = [
            self._using.enter_context(self._segments.open(self._job.keys.segment(what, name), nbytes))
            for what in self._whats
        ]
        self._part.weights = found[0].view(DTYPE)
        self._part.state = {slot: data.view(DTYPE) for slot, data in zip(self._part.slots, found[1:], strict=True)}

    def _contributions_are_here(self) -> bool:
        """A server that has lost its last writes may wait for contributions that were committed, and written over."""
        return all(c.weight == 0 or self._here_is(c) for c in self._job.inbox())

    def _here_is(self, c: Contribution) -> bool:
        with suppress(ChunkGone):
            self._segments.open(self._gradient(c), self._ends[-1]).close()
            return True
        return False

    def _lose(self) -> NoReturn:
        """Have the job go on without what is missing; not on the word of a process that cannot see whether it is."""
        if not self._segments.seen:
            raise LeaseLost(f"job {self._job.name}: its shared memory is not seen here any more")
        self._roll_back()

    def _roll_back(self) -> NoReturn:
        """Have the job go on from what Redis was given. Raises LeaseLost: all terms end with that."""
        found = self._job.scripts.rollback(self.term, secrets.token_hex(4), self._segments.memory_here())
        if found is None:
            raise CorruptData(
                f"job {self._job.name!r}: its shared memory is lost, and Redis was never given the weights"
            )
        version, lost = found  # not by its own count: it may not know what the server forgot, or last committed
        log.warning(
            "job %s: shared memory was lost: goes on from version %d, which Redis has; the last %d versions are lost "
            "and will be computed again",
            *(self._job.name, version, lost),
        )
        raise LeaseLost(f"shard {self.number} of job {self._job.name!r} has to be taken anew")

    # -- the next version --------------------------------------------------------------------------------------

    @contextmanager
    def _staging(self, name: str) -> Iterator[None]:
        made = self._segments_for(name)
        self._part.next_weights = made["w"].data.view(DTYPE)
        self._part.next_state = {slot: made[slot].data.view(DTYPE) for slot in self._part.slots}
        with ExitStack() as self._reading:
            yield

    def _segments_for(self, name: str) -> dict[str, WritableSegment]:
        """A segment for each array of a version."""
        nbytes, made = self._part.size * DTYPE.itemsize, self._made.setdefault(name, {})
        for what in self._whats:
            if what in made:
                continue
            try:
                made[what] = self._segments.make(self._job.keys.segment(what, name), nbytes, self._spares[what])
            except SharedMemoryLost:
                self._job.state()  # it was removed; or somebody has deleted the directory under a living job
                self._lose()
            self._spares[what] = [spare for spare in self._spares[what] if spare is not made[what]]
        return made

    def _here(self, c: Contribution) -> list[Bytes]:
        try:
            whole = self._reading.enter_context(self._segments.open(self._gradient(c), self._ends[-1]))
        except ChunkGone:
            # Memory is lost; or its worker saw it committed by a server that then lost its last writes.
            self._lose()
        return [whole[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def _each(self, step: Callable[[Chunk], dict[str, str]]) -> Generator[dict[str, str], None, None]:
        if self._format.lossy or self._recorder or len(self._part.chunks) < _FEW:
            yield from super()._each(step)
            return
        todo = iter(self._part.chunks)  # gives each chunk to one thread
        said: dict[int, dict[str, str]] = {}

        def work() -> None:
            for chunk in todo:
                said[chunk.number] = step(chunk)

        others = [self._pool.submit(work) for _ in range(self._helpers)]
        try:
            work()
        finally:  # nothing is written any more once this is left
            for _ in todo:
                pass
            wait(others)
        for other in others:
            other.result()
        yield from (said[chunk.number] for chunk in self._part.chunks)

    def _items(self, name: str, chunk: Chunk) -> Iterator[tuple[str, Buffers]]:
        return iter(())

    def keep_reserve(self) -> None:
        """Redis holds no version that a commit waits for."""
        self._gave_up_reserve = False

    # -- what dies ---------------------------------------------------------------------------------------------

    def live_names(self) -> set[str]:
        spares = {spare.name.split(":")[1] for each in self._spares.values() for spare in each}
        return super().live_names() | self.mirror.names | spares

    def promote(self, pinned_version: int | None) -> None:
        super().promote(pinned_version)
        self._using.close()
        self.mirror.committed(self.version)

    def _bury_contribution(self, c: Contribution) -> None:
        pass  # its worker writes it anew, or it is swept

    def _bury_version(self, version: int, reuse: bool = False) -> None:
        name = self._names.pop(version)
        if self.mirror.lets_go(version, name):
            self._dead.append(self._job.keys.manifest(self.number, name))
        made = self._made.pop(name, {})
        for what in self._whats:
            if what in made and len(self._spares[what]) < _SPARES:
                self._spares[what].append(made[what])
            else:
                self._gone.append(self._job.keys.segment(what, name))

    def retire(self) -> None:
        for what in self._whats:
            self._gone += [spare.name for spare in self._spares[what]]
            self._spares[what] = []

    def bury_segments(self, names: list[str]) -> None:
        """Have segments deleted with the next `free`."""
        self._gone += names

    def free(self) -> None:
        super().free()
        gone, self._gone = self._gone, []
        self._segments.unlink(gone)

    def _gradient(self, c: Contribution) -> str:
        return segment_of(self._gradient_keys(c)[0])
