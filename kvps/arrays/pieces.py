"""What a layout is made of: named arrays, chunks, and the pieces of arrays that make up a chunk. Pure."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvps.arrays.dtypes import DTYPES, FLOAT32, Dtype

BUFFER_KINDS = ("average", "rank0")
"""How a version's buffers are made of those of the workers: their average, or those of the lowest rank."""


class Buffer(NamedTuple):
    """An array of a model that no optimizer steps, such as a running mean, in the place of a parameter's `value`.

    In the place of its gradient, each worker pushes its own. `kind` is one of `BUFFER_KINDS`.
    """

    value: Any
    kind: str


class Parameter(NamedTuple):
    """One named array: `shape`, and where it begins in the flat buffer (`start`, in words of 4 bytes).

    part    the part of the model that it belongs to, "" in a job without parts
    buffer  one of `BUFFER_KINDS`, or "" for a parameter that is trained
    dtype   the name of one of `kvps.arrays.dtypes.DTYPES`, or "" for float32, whose words are its items
    """

    name: str
    shape: tuple[int, ...]
    start: int
    part: str = ""
    buffer: str = ""
    dtype: str = ""

    @property
    def size(self) -> int:
        """How many words of the flat buffer it has. The last one is padded with zeros."""
        return -(-self.nbytes // FLOAT32.itemsize) if self.dtype else math.prod(self.shape)

    @property
    def items(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_as(self) -> Dtype:
        return DTYPES[self.dtype] if self.dtype else FLOAT32

    @property
    def nbytes(self) -> int:
        """How many bytes its items have, without padding."""
        return self.items * self.stored_as.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.size

    def items_in(self, flat: NDArray[Any]) -> NDArray[Any]:
        """Return the view of its items, (items,) of its dtype, in the flat buffer, (size,) float32 in host memory."""
        return flat[self.start : self.stop].view(np.uint8)[: self.nbytes].view(self.stored_as.numpy)


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
