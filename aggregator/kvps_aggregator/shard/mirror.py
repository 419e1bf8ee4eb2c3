"""Copies the newest version of a job over shared memory to Redis, once a second, on a thread beside the commits.

The copy is for redis-cli, for readers on other hosts, and to go on from if the memory is lost. It has the keys of a job
over Redis. A record (`mirror.lua`) says which version Redis has, and holds the job's other state at that version.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack

from kvps.arrays.digest import Buffers, view
from kvps.arrays.formats import Bytes
from kvps.arrays.layout import DTYPE
from kvps.connection.sockets import ChunkGone
from kvps.errors import JobNotFound, KvpsError, LeaseLost
from kvps.job import Job
from kvps.protocol.answers import ServerRestarted
from kvps.protocol.job_state import State
from kvps.protocol.worker_states import committed
from kvps.transport.shm import ShmTransport

log = logging.getLogger("kvps.mirror")

EVERY_S = 1.0
"""Seconds between the beginnings of two copies, and before one that failed is made again."""
_LEAST_S = 0.01  # between two copies that take longer
_KEPT = 2  # versions kept in Redis: the newest, and the one before it for its readers


class Mirror:
    """The mirror of one job, written by the holder of its shard under `term`."""

    def __init__(self, job: Job, transport: ShmTransport, term: str) -> None:
        self._job = job
        self._segments = transport.segments
        self._reader = transport.reader
        self._term = term
        self._noted: list[str] = []  # names of the versions that Redis has
        self._giving = ""  # name of the version that it is being given
        self._newest = self._mirrored = -1
        self._oldest = 0  # versions before this one are being deleted
        self._lock = threading.Lock()
        self._one = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def names(self) -> set[str]:
        """The names of the versions that Redis has, or is being given."""
        with self._lock:
            return {*self._noted, self._giving} - {""}

    def begin(self, version: int, name: str) -> None:
        """Go on from the last holder's mirror. `version` is the committed one, `name` its staged name."""
        self._newest = version
        if record := self._reader.mirrored():
            self._noted, self._mirrored = [record.name], record.version
        else:  # Redis has the version that the job was created with
            self._noted = [name]
            self._note(self._state())

    def start(self) -> None:
        """Start the thread that gives Redis the newest version once in a while, the present one too."""
        self._thread = threading.Thread(target=self._run, name=f"kvps-mirror-{self._job.name}", daemon=True)
        self._thread.start()

    def committed(self, version: int) -> None:
        """Note that `version` is committed."""
        self._newest = version

    def lets_go(self, version: int, name: str) -> bool:
        """Note that a version's segments are deleted now. Return whether Redis need not keep the version either."""
        with self._lock:
            self._oldest = max(self._oldest, version + 1)
            return name not in (*self._noted, self._giving)

    def flush(self) -> None:
        """Give Redis the committed version now. Raises KvpsError, ServerRestarted."""
        with self._one:
            self._give()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        pause_s = EVERY_S
        while not self._ended.wait(pause_s):
            began, pause_s = time.monotonic(), EVERY_S
            try:
                if self._newest > self._mirrored:
                    self.flush()
            except (LeaseLost, ServerRestarted, JobNotFound):
                return  # the next holder mirrors the job, if there is one
            except KvpsError as error:
                if self._job.access.client.closed:
                    return
                log.warning("job %s: Redis was not given the weights: %s", self._job.name, error)
            except Exception:
                log.exception("job %s: Redis was not given the weights", self._job.name)
            else:
                pause_s = max(_LEAST_S, began + EVERY_S - time.monotonic())

    def _give(self) -> None:
        state = self._claimed()
        if state is None:
            return
        name, keys, nbytes = state.names[0], self._job.access.keys, self._job.layout.nbytes
        try:
            with ExitStack() as held:
                arrays = {
                    what: held.enter_context(self._segments.open(keys.segment(what, name), nbytes))
                    for what in self._whats
                }
                self._job.access.client.put(self._items(name, arrays), wait_for_room=False)
            self._note(state)
        except ChunkGone:
            raise KvpsError(f"version {state.version} is not in {self._segments.folder} any more") from None
        finally:
            self._settle(name, state)

    def _claimed(self) -> State | None:
        """Return the job's state, and keep its version's manifest from now on; None if Redis has that version."""
        for _ in range(2):
            state = self._state()
            with self._lock:
                if state.version == self._mirrored:
                    return None
                if state.version >= self._oldest:
                    self._giving = state.names[0]
                    return state
        raise KvpsError("the server knows an earlier version than this holder")

    def _state(self) -> State:
        return self._job.access.reader.state(states=True)

    def _items(self, name: str, arrays: Mapping[str, Bytes]) -> list[tuple[str, Buffers]]:
        keys = self._job.access.keys
        flats = {what: data.view(DTYPE) for what, data in arrays.items()}
        return [
            (keys.array(0, what, name, c.number), [view(flat[c.start : c.stop])])
            for what, flat in flats.items()
            for c in self._job.layout.chunks[0]
        ]

    def _note(self, state: State) -> None:
        """Write the record: Redis has the bytes of this version, and this is the job's other state at it."""
        # An aggregator of an earlier version of kvps would restore the workers as they are here: it refuses what
        # "replaces" a head that no version has.
        record = rollback_record(state) | {"name": state.names[0], "replaces": "-"}
        self._job.access.scripts.mirror(self._term, state.run_id, json.dumps(record))
        with self._lock:
            self._mirrored = state.version

    def _settle(self, name: str, state: State) -> None:
        """Delete the oldest version from Redis if this one was given whole, else what was stored of this one."""
        with self._lock:
            given, self._giving = self._mirrored == state.version, ""
            if given and name not in self._noted:
                self._noted.append(name)
            dead = self._noted[:-_KEPT] if given else [] if name in self._noted else [name]
            self._noted = self._noted[-_KEPT:]
        array, chunks = self._job.access.keys.array, self._job.layout.chunks[0]
        for each in dead:
            keys = [array(0, what, each, chunk.number) for what in self._whats for chunk in chunks]
            self._job.access.scripts.free(0, self._term, state.run_id, keys)  # the sweep deletes the manifest

    @property
    def _whats(self) -> tuple[str, ...]:
        return ("w", *self._job.config.optimizer.slots)


def rollback_record(state: State) -> dict[str, object]:
    """Return what `rollback.lua` takes of a state to continue from, with numbers as text because Lua would round
    them."""
    members = state.members.values()
    return {
        "version": str(state.version),
        "head": state.head,
        "names": state.names,
        "entry": state.last_entry,
        "clock": {worker: str(count) for worker, count in state.clock.items()},
        "skip": {m.worker: str(m.skip) for m in members},
        "workers": {m.worker: json.dumps(m.process) for m in members},
        "units": dict(state.units),
        "states": committed(state.states),
    }
