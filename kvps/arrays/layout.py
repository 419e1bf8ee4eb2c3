"""How a job's parameters lie in one flat, contiguous float32 buffer, cut into shards and chunks. Pure.

    flat       [ W1 ............ | b1 | W2 ........ | b2 ]     parameters, in the order they were given
    shards     [ 0 ................. | 1 ............... ]     even parts, each with one holder
    chunks     [ 0:0 | 0:1 | 0:2 | 0:3 | 1:0 | 1:1 | 1:2 ]     at most 1 MiB, each one Redis string

Chunks ignore where parameters begin, so a model of 160 tensors is sent like a model of one.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvps.arrays.inputs import check_mapping, shape_of
from kvps.device.base import flattened
from kvps.errors import InvalidSetting, LayoutMismatch
from kvps.parsing import MOST_TEXT, Fields, refuse, whole

Array = NDArray[np.float32]

DTYPE = np.dtype("<f4")
CHUNK_BYTES = 1 << 20
CHUNK_ITEMS = CHUNK_BYTES // DTYPE.itemsize
MOST_ITEMS = 1 << 33
"""The most items of a model: 32 GiB of float32."""
_MOST_PARAMETERS = 1 << 20
_MOST_SHARDS = 1_000
_MOST_AXES = 64


class Parameter(NamedTuple):
    """One named array: `shape`, and where it begins in the flat buffer (`start`, in items)."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


class Chunk(NamedTuple):
    """Items `start` to `stop` of the flat buffer: the `number`-th string of its shard."""

    shard: int
    number: int
    start: int
    stop: int


class Piece(NamedTuple):
    """Items `start` to `stop` of the `number`-th parameter."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The parameters of a job and the number of shards. `size` is in float32 items, `nbytes` in bytes."""

    parameters: tuple[Parameter, ...]
    shards: int

    @classmethod
    def of(cls, params: Mapping[str, Any], shards: int = 1) -> Layout:
        """Return the layout of `params` (name -> array), in their order. Raises LayoutMismatch, InvalidSetting."""
        check_mapping(params, "parameters")
        if not params:
            raise LayoutMismatch("a job needs at least one parameter")
        start, out = 0, []
        for name, value in params.items():
            if not isinstance(name, str) or not name or len(name) > MOST_TEXT or not name.isprintable():
                raise LayoutMismatch(
                    f"parameter names must be printable strings of 1 to {MOST_TEXT} characters, not {name!r}"
                )
            if name == "__metadata__":
                raise LayoutMismatch("no parameter may be named '__metadata__': that is no tensor in a checkpoint")
            out.append(Parameter(name, shape_of(value, name, "parameter"), start))
            start = out[-1].stop
        if start > MOST_ITEMS:
            raise LayoutMismatch(f"a job has at most {MOST_ITEMS} items, and these parameters have {start}")
        if start < shards:
            raise InvalidSetting(f"shards must not exceed the {start} items of the model, it is {shards}")
        return cls(tuple(out), shards)

    @property
    def size(self) -> int:
        return self.parameters[-1].stop

    @property
    def nbytes(self) -> int:
        return self.size * DTYPE.itemsize

    def shard_range(self, shard: int) -> tuple[int, int]:
        """Return the first item of a shard, and the item after its last."""
        return self.size * shard // self.shards, self.size * (shard + 1) // self.shards

    @cached_property
    def chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        """The chunks of each shard; all but the last have CHUNK_ITEMS items."""
        out = []
        for shard in range(self.shards):
            low, high = self.shard_range(shard)
            starts = range(low, high, CHUNK_ITEMS)
            out.append(tuple(Chunk(shard, i, s, min(s + CHUNK_ITEMS, high)) for i, s in enumerate(starts)))
        return tuple(out)

    def views(self, flat: Array, writable: bool = False) -> dict[str, Array]:
        """Return name -> view into `flat` (shape (size,), float32), read-only unless `writable`."""
        out = self.cut(flat)
        for view in out.values():
            view.flags.writeable = writable
        return out

    def cut(self, flat: Any) -> dict[str, Any]:
        """Return name -> view into `flat` (shape (size,), float32), which may be on a device."""
        return {p.name: flat[p.start : p.stop].reshape(p.shape) for p in self.parameters}

    def hosted(self, arrays: Mapping[str, Any], what: str) -> list[Array]:
        """Return the arrays in layout order, in host memory, flat and contiguous; copied only where they are not.

        `what` ("gradient", "parameter") is for messages. Raises LayoutMismatch if a name is missing or extra, or a
        dtype or shape differs.
        """
        return [flattened(array) for array in self.rest(arrays, what, lambda _: False).values()]

    def rest(self, arrays: Mapping[str, Any], what: str, has: Callable[[int], bool]) -> dict[int, Any]:
        """Return number -> array of the parameters for which `has` is false. Raises LayoutMismatch as `hosted` does."""
        check_mapping(arrays, f"{what}s")
        wanted = {p.name: number for number, p in enumerate(self.parameters) if not has(number)}
        missing = [name for name in wanted if name not in arrays]
        extra = [str(name) for name in arrays if name not in self.numbers]
        again = [name for name in arrays if name in self.numbers and name not in wanted]
        wrong = {"missing": missing, "unknown": extra, "put already": again}
        if any(wrong.values()):
            said = "; ".join(f"{how} {', '.join(names)}" for how, names in wrong.items() if names)
            raise LayoutMismatch(f"{what}s do not fit the job: {said}")
        for name, number in wanted.items():
            self.check(number, arrays[name], what)
        return {number: arrays[name] for name, number in wanted.items()}

    def check(self, number: int, array: Any, what: str) -> None:
        """Raise LayoutMismatch if `array` cannot be the `number`-th one."""
        p = self.parameters[number]
        shape = shape_of(array, p.name, what)
        if shape != p.shape:
            raise LayoutMismatch(f"{what} {p.name!r} has shape {shape}, the job's has {p.shape}")

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Name -> the parameter's number."""
        return {p.name: number for number, p in enumerate(self.parameters)}

    @cached_property
    def chunks_of(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each parameter, the chunks that have a piece of it, as (shard, number)."""
        out: list[list[tuple[int, int]]] = [[] for _ in self.parameters]
        for shard, chunks in enumerate(self.pieces):
            for number, pieces in enumerate(chunks):
                for piece in pieces:
                    out[piece.number].append((shard, number))
        return tuple(map(tuple, out))

    @cached_property
    def pieces(self) -> tuple[tuple[tuple[Piece, ...], ...], ...]:
        """For each shard, for each of its chunks: the pieces of parameters it is made of."""
        starts = [p.start for p in self.parameters]

        def of(chunk: Chunk) -> Iterator[Piece]:
            for number in range(bisect_right(starts, chunk.start) - 1, len(starts)):
                p = self.parameters[number]
                if p.start >= chunk.stop:
                    return
                low, high = max(chunk.start, p.start), min(chunk.stop, p.stop)
                yield Piece(number, low - p.start, high - p.start)

        return tuple(tuple(tuple(of(chunk)) for chunk in chunks) for chunks in self.chunks)

    def to_json(self) -> str:
        """Return the text that is stored under the job's layout key."""
        return json.dumps(
            {
                "dtype": DTYPE.str,
                "size": self.size,
                "shards": [self.shard_range(i) for i in range(self.shards)],
                "chunk_bytes": CHUNK_BYTES,
                "parameters": [{"name": p.name, "shape": p.shape, "start": p.start} for p in self.parameters],
            }
        )

    @classmethod
    def from_json(cls, text: object) -> Layout:
        """Return the layout that `to_json` wrote: from the text, or what it says. Raises CorruptData for any other."""
        f = Fields.of_json(text, "the layout")
        f.one_of("dtype", (DTYPE.str,))
        f.whole("chunk_bytes", CHUNK_BYTES, CHUNK_BYTES)
        parameters, stop = list[Parameter](), 0
        for each in f.sequence("parameters", _MOST_PARAMETERS):
            p = Fields(each, "the layout: a parameter")
            name = p.text("name")
            shape = [whole(n, f"the shape of {name!r}", 1, MOST_ITEMS) for n in p.sequence("shape", _MOST_AXES)]
            parameters.append(Parameter(name, tuple(shape), p.whole("start", stop, stop)))
            stop = whole(parameters[-1].stop, f"the end of {name!r}", 1, MOST_ITEMS)
        if len({parameter.name for parameter in parameters}) != len(parameters):
            refuse("the layout", "of parameters with different names", text)
        whole(stop, "the layout: size", 1)
        return cls(tuple(parameters), whole(len(f.sequence("shards", _MOST_SHARDS)), "the layout: shards", 1, stop))
