"""Where a job's arrays are, and how they get there: in Redis, or in memory that the processes of one host share.

A job's transport is chosen once, when the job is opened (`kvps.transport.opening`). Its users do not ask which it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from kvps.arrays.digest import Buffers
from kvps.arrays.layout import Array
from kvps.transport.access import JobAccess
from kvps.transport.shared_memory import WritableSegment
from kvps.transport.version_reader import VersionReader
from kvps.transport.weight_reader import WeightReader


class ChunkUpload(ABC):
    """The chunks of one contribution on their way to the aggregator: sent one by one by `send`, or again by `resend`.

    The defaults here are right where no network can lose a chunk.

    keys       the keys that the chunks have in Redis; empty if they are not in Redis
    immediate  whether chunks may leave before all of them are there; if not, arrays that were put may change until then
    held       the (key, value) of chunks that are to be stored in one step with the command that accepts them
    """

    keys: list[str]
    immediate: bool
    held: Sequence[tuple[str, Buffers]] = ()

    @property
    def missing(self) -> int:
        """How many chunks are not known to have arrived. Any thread may ask."""
        return 0

    @abstractmethod
    def send(self, number: int, value: Buffers) -> str:
        """Send the `number`-th chunk as soon as it may leave. Return its digest. It must not change until `end`."""

    def flush(self) -> None:
        """Wait until all sent chunks have left the memory they are in. Does not raise: `end` does."""

    @abstractmethod
    def end(self) -> bool:
        """Wait until all sent chunks are stored. Return False if none was sent. Raises redis-py's ConnectionError or
        TimeoutError after a cut."""

    @abstractmethod
    def resend(self) -> None:
        """Store the chunks that are not known to have arrived, sent or not. Raises as `end` does."""

    def drop(self) -> None:
        """Give up the chunks: they will never be accepted."""


class Uploads(ABC):
    """The contributions of one incarnation of a worker, by their sequence numbers.

    overwrites  whether the next contribution overwrites bytes that were sent and do not count; else they stay behind
    """

    overwrites: bool

    def buffer(self, seq: int, settled: int) -> WritableSegment | None:
        """Return a segment to compute a gradient into, so that it need not be copied; None if there is none.

        Contributions up to the `settled`-th wait no more. Raises ServerFull, SharedMemoryLost.
        """
        return None

    @abstractmethod
    def open(self, seq: int, live: bool, settled: int, in_place: bool, part: str) -> ChunkUpload:
        """Return the upload of one contribution, of a `part` of the model or, if that is "", of all of it.

        `live` says that chunks may be sent without asking first whether it was accepted, `in_place` that the user has
        computed into `buffer`. Raises ServerFull, SharedMemoryLost.
        """

    def release(self, settled: int) -> None:
        """Give up the bytes of contributions up to the `settled`-th, which wait no more."""


class Transport(ABC):
    """One way to move a job's arrays. `reader` reads whole versions of the job.

    The defaults here are right for a job whose arrays are all in Redis.
    """

    reader: VersionReader
    here = True
    """Whether this process can reach the arrays."""
    seen = True
    """Whether this process could tell that the arrays are lost."""

    @abstractmethod
    def weight_reader(self, memory: Callable[[], Array], prefetch: bool) -> WeightReader:
        """Return the reader of one session, which reads ahead with `prefetch`; `memory` makes an array (size,) float32
        to receive weights."""

    @abstractmethod
    def uploads(self, worker: str, incarnation: str, sizes: Iterable[int]) -> Uploads:
        """Return the contributions of one incarnation, whose chunks have `sizes` bytes."""

    def moved(self, access: JobAccess) -> Transport:
        """Return the transport for the job in other memory, which the config of `access` names. Raises CorruptData."""
        return self

    def check_here(self, why: str) -> None:
        """Raise UsageError, with a message that ends in `why`, if this process cannot reach the arrays."""

    def safe_version(self, version: int) -> int:
        """Return the newest version up to `version` that a loss of shared memory would not undo."""
        return version

    def prepare(self) -> None:
        """Make the directory that the first version needs, if any. Raises ServerUnfit."""

    def discard(self) -> None:
        """Delete all bytes that are not in Redis."""

    def names(self) -> list[str]:
        """Return the names of all bytes that are not in Redis, for the sweep."""
        return []
