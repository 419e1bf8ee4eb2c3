"""How a session reads weights: by one kind of reader, and some readers are wrapped around another one.

VersionReader     reads a whole version from Redis; `ShmVersionReader`: where the aggregator wrote it
ViewReader        reads the differences to what it has, and a whole view only where it must
DifferenceReader  reads the lossless differences to what the user has, and a whole version only where it must
HostPull          has one worker of a host read for the others
Prefetch          reads the next version while the worker computes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvps.arrays.layout import Array
from kvps.protocol.job_state import RoundState

Arrived = Callable[[int, Array], None]
"""Is called with the first item and the values of each stretch of the weights that has come from Redis, and again if it
comes again, in another version."""


class PullRequest(NamedTuple):
    """What a session asks of its reader.

    state        the round state that admits the worker's next round: only this version, or a newer one, will do
    rounds_done  the rounds that the worker has done
    newest       returns the newest round state
    into         (size,) float32, where a reader with `receives` puts the weights
    arrived      is told of the weights on their way, if they come from Redis
    part         the part of the model that is needed, "" for all of it; the other weights may be anything
    held         the staged names of the version that is in `into`, () if that is not known
    """

    state: RoundState
    rounds_done: int
    newest: Callable[[], RoundState]
    into: Array
    arrived: Arrived | None = None
    part: str = ""
    held: tuple[str, ...] = ()


class Weights(NamedTuple):
    """One version: its number, its staged names (one for each shard), and the weights, (size,) float32."""

    version: int
    names: tuple[str, ...]
    flat: Array


class WeightReader(Protocol):
    """Reads weights for one session, on one thread at a time.

    receives  whether the weights come into the array that is given; else they are in memory of the reader's own, and
              valid until it reads again
    """

    receives: bool

    def read(self, request: PullRequest) -> Weights:
        """Return the weights that are asked for. Raises SharedMemoryLost, CorruptData if bytes are missing that must
        exist, and what `newest` raises."""

    def close(self) -> None:
        """Stop what goes on between two reads. May be called again, and from any thread."""
