"""What a layout is made of: named arrays, chunks, and the pieces of arrays that make up a chunk. Pure."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

BUFFER_KINDS = ("average", "rank0")
"""How a version's buffers are made of those of the workers: their average, or those of the lowest rank."""


class Buffer(NamedTuple):
    """An array of a model that no optimizer steps, such as a running mean, in the place of a parameter's `value`.

    In the place of its gradient, each worker pushes its own. `kind` is one of `BUFFER_KINDS`.
    """

    value: Any
    kind: str


class Parameter(NamedTuple):
    """One named array: `shape`, and where it begins in the flat buffer (`start`, in items).

    part    the part of the model that it belongs to, "" in a job without parts
    buffer  one of `BUFFER_KINDS`, or "" for a parameter that is trained
    """

    name: str
    shape: tuple[int, ...]
    start: int
    part: str = ""
    buffer: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


class Chunk(NamedTuple):
    """Items `start` to `stop` of the flat buffer: the `number`-th string of its shard. All belong to one `part`."""

    shard: int
    number: int
    start: int
    stop: int
    part: str = ""

    def in_part(self, part: str) -> bool:
        """Return whether a contribution or a pull of this part has the chunk; "" is the whole model."""
        return part in ("", self.part)


class Piece(NamedTuple):
    """Items `start` to `stop` of the `number`-th parameter."""

    number: int
    start: int
    stop: int
