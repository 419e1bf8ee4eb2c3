"""The arrays that a session lends its user to compute a gradient into, and who still has them when it is pushed.

Over shared memory they lie where the aggregator reads them. Once a contribution is accepted nobody may change it, but a
view of such an array, a tensor on it or a memoryview can be written to for as long as it lives. Each of them holds a
reference to what it looks at. If there are more references than the session and the mapping that is pushed account for,
the memory is taken away from under them, see `Made.withdraw`: what they write then is their own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.errors import LayoutMismatch
from kvps.transport.shared_memory import WritableSegment


class GradientBuffers:
    """Name -> array (`arrays`), to be computed into for the contribution `sequence`; in a segment, or in `spare`."""

    def __init__(self, layout: Layout, sequence: int, place: WritableSegment | Array) -> None:
        self.sequence = sequence
        self._made = place if isinstance(place, WritableSegment) else None
        self._memory: NDArray[Any] = place.data if isinstance(place, WritableSegment) else place
        self.arrays = layout.views(self._memory.view(DTYPE), writable=True)

    @property
    def in_place(self) -> bool:
        """Whether they lie where the aggregator reads them."""
        return self._made is not None

    def check_place(self, name: str, array: Array) -> None:
        """Raise LayoutMismatch for the gradient of that name if it lies where another one belongs: copied from there,
        it might be written over first."""
        if self._made is None or not np.may_share_memory(array, self._memory):
            return
        if array.ctypes.data != self.arrays[name].ctypes.data:
            raise LayoutMismatch(f"gradient {name!r} lies in another one's buffer: compute each into its own")

    def may_be_written(self, grads: Mapping[str, Any] | None) -> bool:
        """Whether anybody but `grads`, which is about to be pushed, may still look at the segment.

        To be asked before anything else refers to the arrays.
        """
        if self._made is None:
            return False
        if type(grads) is not dict or any(grads.get(name) is not array for name, array in self.arrays.items()):
            return True
        *arrays, memory = _references([*self.arrays.values(), self._memory])
        # Of each array: `self.arrays` and `grads`. Of the memory: the segment, `self`, and each array as its base.
        return any(count > 2 for count in arrays) or memory > 2 + len(arrays)

    def withdraw(self) -> None:
        """Take the segment's memory away from who looks at it. Raises ServerFull."""
        if self._made:
            self._made.withdraw(self._memory)

    def close(self) -> None:
        """They are a contribution now, and cannot be written to."""
        for array in self.arrays.values():
            array.flags.writeable = False


def _references(things: Sequence[object]) -> list[int]:
    """How many references there are to each, beside that of `things`."""
    return [count - _COUNTED for count in map(sys.getrefcount, things)]


_COUNTED = next(map(sys.getrefcount, [object()]))  # that of the list, and what the call itself adds
