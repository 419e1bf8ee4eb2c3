"""Where a job's arrays lie, and how they get there: in Redis, or in memory that the processes of one host share.

A job's transport is chosen once, when the job is opened (`kvps.transport.opening`). Nobody else asks which it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol

from kvps.arrays.digest import Buffers
from kvps.arrays.layout import Array
from kvps.protocol.job_state import Turn
from kvps.protocol.scripts import Call
from kvps.transport.access import JobAccess
from kvps.transport.shared_memory import WritableSegment
from kvps.transport.version_reader import Arrived, VersionReader


class ChunkUpload(Protocol):
    """One contribution's chunks on their way to where an aggregator finds them: one by one by `send`, or once more by
    `resend`.

    keys       the keys that the chunks have in Redis; none if they are elsewhere
    immediate  whether chunks may leave before all of them can: else what is put may change until then
    """

    keys: list[str]
    immediate: bool

    @property
    def missing(self) -> int:
        """How many chunks are not known to have arrived. Any thread may ask."""

    @property
    def with_command(self) -> Call | None:
        """Runs a command in one step with the storing of all chunks; None if they are stored before it."""

    def send(self, number: int, value: Buffers) -> str:
        """Let the `number`-th chunk leave, unless it must not yet; its digest. It stays as it is until `end`."""

    def end(self) -> bool:
        """Wait until all that was sent is there; False if nothing was. Raises redis-py's ConnectionError or
        TimeoutError after a cut."""

    def resend(self) -> None:
        """Store the chunks that are not known to have arrived, sent or not. Raises as `end` does."""

    def drop(self) -> None:
        """What was sent is dead."""


class Uploads(Protocol):
    """The contributions of one incarnation of a worker, by their sequence numbers.

    overwrites  whether what was sent and does not count is written over by what follows, and not left on the server
    """

    overwrites: bool

    def buffer(self, seq: int, settled: int) -> WritableSegment | None:
        """Where a gradient may be computed, so that it need not be copied; None if there is no such place.

        Contributions up to the `settled`-th wait no more. Raises ServerFull, SharedMemoryLost.
        """

    def open(self, seq: int, live: bool, settled: int, in_place: bool) -> ChunkUpload:
        """The upload of one contribution. It is `live` if its chunks may be sent without asking; `in_place` if the user
        has computed into `buffer`. Raises ServerFull, SharedMemoryLost."""

    def release(self, settled: int) -> None:
        """Give up what waits no more."""


class WeightSource(Protocol):
    """The weights that one session pulls, in host memory. What it hands out is valid until it hands out the next."""

    @property
    def inline_buffer(self) -> Array | None:
        """Where the weights of a small model may come together with a turn; None if they come otherwise."""

    def weights(
        self, turn: Turn, inline: bool, rounds_done: int, look: Callable[[], Turn], arrived: Arrived | None
    ) -> tuple[int, Array]:
        """The weights of this turn, or newer ones: their version, and (size,) float32.

        `inline` says that they are in `inline_buffer`, `look` is how the session finds the newest turn, `arrived` is
        told of each part that came from Redis. Raises SharedMemoryLost, and what `VersionReader.weights` and `look`
        raise.
        """

    def close(self) -> None:
        """Forget what is coming."""


class Transport(ABC):
    """One way to move a job's arrays. `kind` is "redis" or "shm", `reader` reads whole versions of the job.

    What is not said otherwise is so where all of it is in Redis.
    """

    kind: str
    reader: VersionReader
    here = True
    """Whether this process finds the arrays."""
    seen = True
    """Whether this process could tell that they are lost."""

    @abstractmethod
    def weight_source(self, memory: Callable[[], Array], prefetch: bool) -> WeightSource:
        """The weights for one session; `memory` makes an array (size,) float32 to receive them."""

    @abstractmethod
    def uploads(self, worker: str, incarnation: str, sizes: Iterable[int]) -> Uploads:
        """The contributions of one incarnation, whose chunks have `sizes` bytes."""

    def moved(self, access: JobAccess) -> Transport:
        """The same where the job goes on in other memory, which its configuration names now. Raises CorruptData."""
        return self

    def check_here(self, why: str) -> None:
        """Raise UsageError, which ends with `why`, if this process cannot work on the arrays."""

    def safe_version(self, version: int) -> int:
        """The newest version up to `version` that a loss of shared memory would not take back."""
        return version

    def prepare(self) -> None:
        """Make what the first version needs. Raises ServerUnfit."""

    def discard(self) -> None:
        """Delete what is not in Redis."""

    def names(self) -> list[str]:
        """The names of what is not in Redis, for the sweep."""
        return []
