"""The arrays that a session lends its user to compute a gradient into, and the check whether they are still in use.

Over shared memory they lie where the aggregator reads them. An accepted contribution must not change, but a view of
such an array, a tensor on it or a memoryview can be written to as long as it exists. Each of these holds a reference to
the array or its memory. If there are more references than the session and the pushed mapping account for, the memory is
taken away from under them, see `WritableSegment.withdraw`: they then write to a private copy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.arrays.pieces import Parameter
from kvps.errors import LayoutMismatch
from kvps.transport.shared_memory import WritableSegment


class GradientBuffers:
    """Arrays by name, in a segment or in spare memory, into which one contribution is computed."""

    def __init__(self, layout: Layout, place: WritableSegment | Array) -> None:
        self._made = place if isinstance(place, WritableSegment) else None
        self._memory: NDArray[Any] = place.data if isinstance(place, WritableSegment) else place
        self.arrays = layout.views(self._memory.view(DTYPE), writable=True)

    @property
    def in_place(self) -> bool:
        """Whether the arrays lie where the aggregator reads them."""
        return self._made is not None

    def check_place(self, name: str, array: Array) -> None:
        """Raise LayoutMismatch if the gradient `name` lies where another one belongs: it might be overwritten before it
        is copied from there."""
        if self._made is None or not np.may_share_memory(array, self._memory):
            return
        if array.ctypes.data != self.arrays[name].ctypes.data:
            raise LayoutMismatch(f"gradient {name!r} lies in another one's buffer: compute each into its own")

    def run(self, parameters: Sequence[Parameter], run: range, arrays: Sequence[Array]) -> Array | None:
        """Return the gradients of a run of parameters, end to end, if `arrays` are its own arrays, else None."""
        if any(self.arrays[parameters[n].name] is not array for n, array in zip(run, arrays, strict=True)):
            return None
        return self._memory.view(DTYPE)[parameters[run.start].start : parameters[run[-1]].stop]

    def may_be_written(self, grads: Mapping[str, Any] | None) -> bool:
        """Return whether anything but `grads`, which is about to be pushed, may still refer to the segment.

        Must be called before anything else refers to the arrays.
        """
        if self._made is None:
            return False
        if type(grads) is not dict or any(grads.get(name) is not array for name, array in self.arrays.items()):
            return True
        *arrays, memory = _references([*self.arrays.values(), self._memory])
        # Expected for each array: `self.arrays`, `grads`; for the memory: the segment, `self`, each array as its base.
        return any(count > 2 for count in arrays) or memory > 2 + len(arrays)

    def withdraw(self) -> None:
        """Take the segment's memory away from everything that refers to it. Raises ServerFull."""
        if self._made:
            self._made.withdraw(self._memory)

    def close(self) -> None:
        """Make the arrays read-only, because they are a contribution now."""
        for array in self.arrays.values():
            array.flags.writeable = False


def _references(things: Sequence[object]) -> list[int]:
    """Return how many references there are to each thing, besides the one of `things`."""
    return [count - _COUNTED for count in map(sys.getrefcount, things)]


_COUNTED = next(map(sys.getrefcount, [object()]))  # the reference of the list, and those that the call itself adds
