"""Where one shard's bytes lie: what the two ways to store them have in common."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvps.arrays.digest import Buffers
from kvps.arrays.formats import Bytes
from kvps.arrays.layout import Chunk
from kvps.protocol.job_state import State
from kvps.protocol.plan import Contribution, Plan

Step = Callable[[Chunk], dict[str, str]]
"""Makes one chunk of the next version; the digest of each of its arrays."""


class Storage(Protocol):
    """The bytes of one shard, in the hands of its holder.

    stores_with_ready  whether all that Redis is given of a version is small enough to go with `ready`, in one step
    """

    stores_with_ready: bool

    def load(self, state: State, before: str, pinned: tuple[int, str] | None) -> None:
        """Have the committed weights and optimizer state in the shard's arrays, and go on from there.

        `before` is the shard's staged name one version ago, `pinned` version and name that a slow reader holds. Raises
        ChunkGone, CorruptData; LeaseLost if the job has to go on in other memory.
        """

    def loaded(self) -> None:
        """What was loaded is what was committed."""

    def contribution(self, c: Contribution) -> list[Bytes] | None:
        """The chunks of a contribution, if they need not be fetched. Raises LeaseLost."""

    def fetch_one_early(self, waiting: Callable[[], Sequence[Contribution]]) -> bool:
        """Fetch a contribution that waits for those of others; False if there is none, or it is not worth it."""

    def staging(self, name: str) -> AbstractContextManager[None]:
        """Around the making of the version of this name. Raises ServerFull, LeaseLost."""

    def each_chunk(self, step: Step) -> Generator[dict[str, str], None, None]:
        """What `step` returns for each chunk, in order."""

    def items(self, name: str, chunk: Chunk) -> Iterator[tuple[str, Buffers]]:
        """What Redis is given of a chunk of the next version: keys and values."""

    def make_room(self) -> None:
        """Give up what a commit can do without, on a server that is full. Raises LeaseLost, ServerRestarted."""

    def promote(self, plan: Plan, name: str, pinned: int | None) -> None:
        """The version of `plan`, staged under `name`, is committed: what no reader can want any more is dead."""

    def live_names(self) -> set[str]:
        """The staged names that may still be read, or become a version."""

    def bury(self, keys: Iterable[str]) -> None:
        """Have keys of this slot deleted with the next `free`."""

    def bury_segments(self, names: Iterable[str]) -> None:
        """Have segments deleted with the next `free`."""

    def retire(self) -> None:
        """Nothing more will be stored: bury what was kept for that."""

    def free(self) -> None:
        """Delete the bytes that died.

        Raises LeaseLost if another may do that now, ServerRestarted if they may live again.
        """

    def restore_reserve(self) -> None:
        """Hold the room again that `make_room` gave up."""

    def keep_reserve(self) -> None:
        """On a server whose memory is limited, hold room for one version more. Raises nothing if there is none."""

    def flush(self) -> None:
        """Leave in Redis all that is committed. Raises KvpsError, ServerRestarted."""

    def finish(self) -> None:
        """The job is finished: leave nothing elsewhere than in Redis. Raises KvpsError."""

    def close(self) -> None:
        """Nothing of this shard is used here any more."""
