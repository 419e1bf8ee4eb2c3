"""A shard whose arrays are in memory that it shares with the job's workers; and the mirror that Redis has of it.

Contributions are read, and the next version is written, where they are. Redis is given the weights and the optimizer
state now and then, under the keys that they have without shared memory: for redis-cli, for readers elsewhere, and to go
on from when the memory is lost. What came since is lost with it then, and is done again.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from pathlib import Path

from kvps.checkpoint import units_anew, workers_anew
from kvps.errors import JobNotFound, KvpsError, LeaseLost
from kvps.formats import Bytes
from kvps.job import Job
from kvps.keys import segment_of
from kvps.layout import DTYPE, Chunk
from kvps.plan import Contribution
from kvps.scripts import NewLife
from kvps.shared import Made, Segments
from kvps.state import State
from kvps.transport import ChunkGone
from kvps.wire import Buffers, view
from kvps_aggregator.shard import Shard

log = logging.getLogger("kvps.mirror")

_SPARES = 4  # segments that are kept to be written anew, of each array
_RETRY_S = 1.0
_THREADS = 4  # the memory is not faster for more
_FEW = 4  # chunks that are made as fast on one


class SharedShard(Shard):
    """The one shard of a job over shared memory."""

    def __init__(self, job: Job, number: int, term: str, record: Path | None = None) -> None:
        super().__init__(job, number, term, record)
        assert job.segments is not None
        self._segments: Segments = job.segments
        self._whats = ("w", *self._part.slots)
        self._ends = list(accumulate(self._format.nbytes(c.stop - c.start) for c in self._part.chunks))
        self._using = ExitStack()  # what the part's present arrays lie in, if another holder made it
        self._made: dict[str, dict[str, Made]] = {}  # by staged name, by array
        self._spares: dict[str, list[Made]] = {what: [] for what in self._whats}
        self._gone: list[str] = []
        self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "kvps-step")
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
        self._segments.unlink(self._segments.names())

    @property
    def fetches_early(self) -> bool:
        return False

    # -- what the last holder left -----------------------------------------------------------------------------

    def load(self, state: State, before: str, pinned: tuple[int, str] | None) -> None:
        super().load(state, before, pinned)
        self.mirror.begin(self.version, state.names[self.number])

    def _load_bytes(self, name: str) -> None:
        self._segments.ensure()
        try:
            self._map(name)
            whole = self._contributions_are_here()
        except ChunkGone:
            # Never in memory, or all of it was given to Redis before the memory was lost.
            record = self.mirror.record()
            whole = record in (None, self.version) and self._contributions_are_here()
            if whole:
                super()._load_bytes(name)
        if not whole:
            self._roll_back()

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

    def _roll_back(self) -> None:
        """Have the job go on from what Redis was given. Raises LeaseLost: all terms end with that."""
        version = self._job.scripts.rollback(self.term, secrets.token_hex(4))
        if version is None:
            raise ChunkGone("the shared memory that held it is lost, and Redis was never given it")
        log.warning(
            "job %s: shared memory was lost: goes on from version %d, which Redis has; the last %d versions are lost "
            "and will be computed again",
            *(self._job.name, version, self.version - version),
        )
        raise LeaseLost(f"shard {self.number} of job {self._job.name!r} has to be taken anew")

    # -- the next version --------------------------------------------------------------------------------------

    @contextmanager
    def _staging(self, name: str) -> Iterator[None]:
        nbytes = self._part.size * DTYPE.itemsize
        made = self._made.setdefault(name, {})
        for what in self._whats:
            if what not in made:
                try:
                    made[what] = self._segments.make(self._job.keys.segment(what, name), nbytes, self._spares[what])
                except JobNotFound as gone:
                    self._job.state()  # or else the memory was lost under a living job
                    raise LeaseLost(f"shard {self.number} has to be taken anew: {gone}") from None
                self._spares[what] = [spare for spare in self._spares[what] if spare is not made[what]]
        self._part.next_weights = made["w"].data.view(DTYPE)
        self._part.next_state = {slot: made[slot].data.view(DTYPE) for slot in self._part.slots}
        self._reading = ExitStack()
        with self._reading:
            yield

    def _here(self, c: Contribution) -> list[Bytes] | None:
        try:
            whole = self._reading.enter_context(self._segments.open(self._gradient(c), self._ends[-1]))
        except ChunkGone:
            return None
        return [whole[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def _each(self, step: Callable[[Chunk], dict[str, str]]) -> Generator[dict[str, str], None, None]:
        if self._format.lossy or self._recorder or len(self._part.chunks) < _FEW:
            yield from super()._each(step)
            return
        steps = [self._pool.submit(step, chunk) for chunk in self._part.chunks]
        try:
            for stepped in steps:
                yield stepped.result()
        finally:  # nothing is written any more once this is left
            for stepped in steps:
                stepped.cancel()
            wait(steps)

    def _items(self, name: str, chunk: Chunk) -> Iterator[tuple[str, Buffers]]:
        return iter(())

    def keep_reserve(self) -> None:
        """Redis holds no version that a commit waits for."""
        self._gave_up_reserve = False

    # -- what dies ---------------------------------------------------------------------------------------------

    def live_names(self) -> set[str]:
        spares = {spare.name.split(":")[1] for each in self._spares.values() for spare in each}
        return super().live_names() | set(self.mirror.names) | spares

    def promote(self, pinned_version: int | None) -> None:
        super().promote(pinned_version)
        self._using.close()
        self.mirror.committed(self.version)

    def _bury_contribution(self, c: Contribution) -> None:
        pass  # its worker writes it anew, or it is swept

    def _bury_version(self, version: int, reuse: bool = False) -> None:
        name = self._names.pop(version)
        if self.mirror.leaves(version, name):
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


class Mirror:
    """Gives Redis the newest version of a job over shared memory, on a thread of its own, beside the commits.

    `names` are the versions that Redis has, or is being given: the newest, and the one before it for its readers.
    """

    def __init__(self, job: Job, term: str) -> None:
        assert job.segments is not None
        self._job = job
        self._term = term
        self._segments = job.segments
        self.names: deque[str] = deque()
        self._newest = self._mirrored = -1
        self._oldest = 0  # versions before this one are being deleted
        self._last = 0.0
        self._wake = threading.Condition()
        self._one = threading.Lock()
        self._stopped = self._idle = False
        self._thread: threading.Thread | None = None

    def record(self) -> int | None:
        """The version that Redis was last given, if it ever was."""
        text = self._job.client.call("GET", self._job.keys.mirror)
        return int(json.loads(text)["version"]) if text else None

    def begin(self, version: int, name: str) -> None:
        """Go on where the last holder's mirror was: `version` of that name is what is committed."""
        text = self._job.client.call("GET", self._job.keys.mirror)
        if text:
            record = json.loads(text)
            self.names.append(record["name"])
            self._mirrored = int(record["version"])
        else:
            self.names.append(name)  # the job's first, which it was created with
        self._newest, self._last = version, time.monotonic()
        if not text:
            self._note(self._job.state())
        self._thread = threading.Thread(target=self._run, name=f"kvps-mirror-{self._job.name}", daemon=True)
        self._thread.start()

    def committed(self, version: int) -> None:
        """Have it given to Redis when it is time."""
        with self._wake:
            self._newest = version
            if self._idle or self._wait_s() == 0:
                self._wake.notify()

    def leaves(self, version: int, name: str) -> bool:
        """Whether Redis need not keep what it has of a version that is deleted now: this is told once of each."""
        with self._wake:
            self._oldest = version + 1
            return name not in self.names

    def flush(self) -> None:
        """Give Redis what is committed, now. Raises KvpsError."""
        with self._one:
            self._give()

    def close(self) -> None:
        """End the thread."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def _wait_s(self) -> float | None:
        """How long the newest version has to wait; None for ever."""
        config, behind = self._job.config, self._newest - self._mirrored
        if behind <= 0:
            return None
        if config.mirror_versions:
            return 0.0 if behind >= config.mirror_versions else None
        return max(0.0, self._last + config.mirror_s - time.monotonic())

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._stopped and (wait_s := self._wait_s()) != 0:
                    self._idle = wait_s is None
                    self._wake.wait(wait_s)
                self._idle = False
                if self._stopped:
                    return
            try:
                self.flush()
            except (LeaseLost, NewLife, JobNotFound):
                return  # another holder's business by now
            except KvpsError as error:
                log.warning("job %s: Redis was not given the weights: %s", self._job.name, error)
            except Exception:
                log.exception("job %s: Redis was not given the weights", self._job.name)
            with self._wake:
                if self._mirrored < self._newest and not self._stopped:
                    self._wake.wait(_RETRY_S)

    def _give(self) -> None:
        job = self._job
        state, held = self._hold()
        if not held:
            return
        name = state.names[0]
        with held:
            self._last = time.monotonic()
            chunks = job.layout.chunks[0]
            items: list[tuple[str, Buffers]] = []
            for what, data in self._arrays.items():
                values = data.view(DTYPE)
                for c in chunks:
                    items.append((job.keys.array(0, what, name, c.number), [view(values[c.start : c.stop])]))
            job.client.put(items, wait_for_room=False)
        self._note(state)
        while len(self.names) > 2:
            self._free(self.names.popleft(), state.server)

    def _hold(self) -> tuple[State, ExitStack | None]:
        """The job as it is, and its bytes held; None if Redis has them."""
        job = self._job
        while True:
            state = job.state()
            if state.version <= self._mirrored:
                return state, None
            whats = ["w", *job.config.optimizer.slots]
            with self._wake:
                if state.version < self._oldest:
                    continue
                self.names.append(state.names[0])  # from here on its manifest stays
            with ExitStack() as holding:
                try:
                    self._arrays = {
                        what: holding.enter_context(
                            self._segments.open(job.keys.segment(what, state.names[0]), job.layout.nbytes)
                        )
                        for what in whats
                    }
                except ChunkGone:
                    self.names.remove(state.names[0])
                    raise KvpsError(f"version {state.version} is not in {self._segments.folder} any more") from None
                return state, holding.pop_all()

    def _note(self, state: State) -> None:
        """Note that Redis has the bytes of this version, and all else that it was."""
        entries = {worker.worker: json.dumps(worker.process) for worker in state.members.values()}
        record = {
            "version": str(state.version),
            "head": state.head,
            "name": state.names[0],
            "entry": state.bell,
            "clock": {worker: str(count) for worker, count in state.clock.items()},
            "workers": workers_anew(entries, awaited=False),
            "units": units_anew(state.units),
        }
        self._job.scripts.mirror(self._term, state.server, json.dumps(record))
        with self._wake:
            self._mirrored = state.version

    def _free(self, name: str, life: str) -> None:
        keys, chunks = self._job.keys, self._job.layout.chunks[0]
        whats = ("w", *self._job.config.optimizer.slots)
        dead = [keys.manifest(0, name), *(keys.array(0, what, name, c.number) for what in whats for c in chunks)]
        self._job.scripts.free(0, self._term, life, dead)
