"""How a job's parameters lie in one flat, contiguous float32 buffer, cut into shards and chunks. Pure.

    flat       [ W1 ............ | b1 | W2 ........ | b2 ]     parameters, in the order they were given
    shards     [ 0 ................. | 1 ............... ]     even parts, each with one holder
    chunks     [ 0:0 | 0:1 | 0:2 | 0:3 | 1:0 | 1:1 | 1:2 ]     at most 1 MiB, each one Redis string

Chunks ignore where parameters begin, so a model of 160 tensors is sent like a model of one. If the job has parts, which
workers may pull and push alone, a chunk ends where a parameter of another part begins. Buffers, which no optimizer
steps, come after all parameters that are trained.

A model that is published has arrays of any dtype (`kvps.arrays.dtypes`). Each begins at a word of 4 bytes, and its last
word is padded with zeros. Nothing computes with these words (`kvps.arrays.state_dict`).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, groupby
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvps.arrays.dtypes import DTYPES, FLOAT32, dtype_of, memory_of, published_as
from kvps.arrays.inputs import all_fit, check_mapping, check_name, shape_of, state_of
from kvps.arrays.pieces import BUFFER_KINDS, Buffer, Chunk, Parameter, Piece
from kvps.device.base import flattened
from kvps.errors import InvalidSetting, LayoutMismatch, counted, some_of
from kvps.parsing import MOST_SHARDS, Fields, refuse, text, whole

Array = NDArray[np.float32]

DTYPE = np.dtype("<f4")
CHUNK_BYTES = 1 << 20
CHUNK_ITEMS = CHUNK_BYTES // DTYPE.itemsize
CHUNKS_AHEAD = 3
"""Chunks that a reader asks for ahead: a server copies all of them before it sends the first."""
MOST_ITEMS = 1 << 33
"""The most items of a model: 32 GiB of float32."""
_MOST_PARAMETERS = 1 << 20
_MOST_AXES = 64
_OTHERS = ("", *(name for name in DTYPES if name != FLOAT32.name))


@dataclass(frozen=True)
class Layout:
    """The parameters of a job, then its buffers, and the number of shards. `size` is in float32 items, `nbytes` in
    bytes. `tied` maps further names of a published array to the name under which it is stored."""

    parameters: tuple[Parameter, ...]
    shards: int
    tied: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, params: Mapping[str, Any], shards: int = 1) -> Layout:
        """Return the layout of `params` (name -> array or `Buffer`), in their order, but buffers last.

        Raises LayoutMismatch, InvalidSetting.
        """
        check_mapping(params, "parameters")
        start, out = 0, []
        for name, given in sorted(params.items(), key=lambda item: isinstance(item[1], Buffer)):
            value, buffer = given if isinstance(given, Buffer) else (given, "")
            check_name(name)
            out.append(
                Parameter(name, shape_of(value, name, "buffer" if buffer else "parameter"), start, buffer=buffer)
            )
            start = out[-1].stop
        _check_size(start)
        if not {p.buffer for p in out} <= {"", out[-1].buffer} <= {"", *BUFFER_KINDS}:
            raise InvalidSetting(f"all buffers of a job must be of one kind, of {', '.join(BUFFER_KINDS)}")
        return cls(tuple(out), 1).of_shards(shards)

    @classmethod
    def of_state(cls, state: Any, shards: int = 1, dtype: object = None) -> Layout:
        """Return the layout of a model that is published: a module of PyTorch, or name -> array of any of `DTYPES`.

        Names and their order are the state dict's. A tied array is stored once, under its first name. With `dtype`
        ("bfloat16", "float16", "float32") floats of more bits are published as that. Raises as `of` does.
        """
        narrow, start, out = published_as(dtype), 0, list[Parameter]()
        tied, first = dict[str, str](), dict[Hashable, str]()
        for name, value in state_of(state).items():
            check_name(name)
            own = dtype_of(value, name)
            if (before := first.setdefault(memory_of(value), name)) != name:
                tied[name] = before
                continue
            of = narrow if narrow and own.narrows_to(narrow) else own
            out.append(Parameter(name, tuple(map(int, value.shape)), start, dtype="" if of is FLOAT32 else of.name))
            start = out[-1].stop
        _check_size(start)
        return cls(tuple(out), 1, tied).of_shards(shards)

    def of_shards(self, shards: int) -> Layout:
        """Return the layout of the same parameters in so many shards. Raises InvalidSetting."""
        if self.size < shards:
            raise InvalidSetting(
                f"shards must not exceed the {counted(self.size, 'item')} of the model, it is {shards}"
            )
        return replace(self, shards=shards)

    def in_parts(self, parts: Mapping[str, str]) -> Layout:
        """Return the layout of the same parameters in parts: parameter -> part, see `kvps.arrays.parts`."""
        return replace(self, parameters=tuple(p._replace(part=parts[p.name]) for p in self.parameters))

    @property
    def size(self) -> int:
        return self.parameters[-1].stop

    @cached_property
    def trains(self) -> bool:
        """Whether all arrays are float32, as those that are computed with."""
        return not any(p.dtype for p in self.parameters)

    @property
    def buffer_kind(self) -> str:
        """The kind of the job's buffers, one of `BUFFER_KINDS`; "" if the job has none."""
        return self.parameters[-1].buffer

    @cached_property
    def buffer_start(self) -> int:
        """The first item of a buffer: those before it are of parameters that are trained."""
        return next((p.start for p in self.parameters if p.buffer), self.size)

    def buffer_start_in(self, chunk: Chunk) -> int:
        """Return which of a chunk's items is the first one of a buffer."""
        return min(max(self.buffer_start, chunk.start), chunk.stop) - chunk.start

    @property
    def nbytes(self) -> int:
        return self.size * DTYPE.itemsize

    def shard_range(self, shard: int) -> tuple[int, int]:
        """Return the first item of a shard, and the item after its last."""
        return self.size * shard // self.shards, self.size * (shard + 1) // self.shards

    @cached_property
    def chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        """The chunks of each shard. They have CHUNK_ITEMS items, or fewer before the end of a shard or a part."""

        def of(shard: int) -> Iterator[Chunk]:
            low, high = self.shard_range(shard)
            numbers = count()
            for part, start, stop in self._stretches:
                end = min(stop, high)
                for first in range(max(start, low), end, CHUNK_ITEMS):
                    yield Chunk(shard, next(numbers), first, min(first + CHUNK_ITEMS, end), part)

        return tuple(tuple(of(shard)) for shard in range(self.shards))

    def parameters_in(self, part: str) -> list[Parameter]:
        """Return the parameters of a part; all of them for ""."""
        return [p for p in self.parameters if part in ("", p.part)]

    def chunks_in(self, part: str) -> list[Chunk]:
        """Return the chunks of a part, shard by shard; those of the whole model for ""."""
        return [chunk for shard in self.chunks for chunk in shard if chunk.in_part(part)]

    @cached_property
    def _stretches(self) -> tuple[tuple[str, int, int], ...]:
        """Neighbouring parameters of one part: its name, the first item, and the item after the last."""
        out = []
        for part, neighbours in groupby(self.parameters, lambda p: p.part):
            run = list(neighbours)
            out.append((part, run[0].start, run[-1].stop))
        return tuple(out)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts, in the order of their first parameters; () in a job without parts."""
        return tuple(dict.fromkeys(p.part for p in self.parameters if p.part))

    def check_part(self, part: object) -> None:
        """Raise InvalidSetting unless `part` is the name of a part, or "" for the whole model."""
        if part != "" and part not in self.parts:
            has = f"it has {some_of(self.parts)}" if self.parts else "it has none: give parts= to create_job"
            raise InvalidSetting(f"the job has no part {part!r}: {has}")

    def views(self, flat: Array, writable: bool = False) -> dict[str, Array]:
        """Return name -> view into `flat` (shape (size,), float32), of its dtype, read-only unless `writable`."""
        whole = flat.view()
        whole.flags.writeable = writable  # so are the views of it
        return self.cut(whole)

    def cut(self, flat: Any) -> dict[str, Any]:
        """Return name -> view into `flat` (shape (size,), float32), which may be on a device if all are float32."""
        if not self.trains:
            return {p.name: p.items_in(flat).reshape(p.shape) for p in self.parameters}
        return {
            name: flat[place] if shape is None else flat[place].reshape(shape) for name, place, shape in self._places
        }

    @cached_property
    def _places(self) -> list[tuple[str, slice, tuple[int, ...] | None]]:
        """Of each parameter the name, its items, and its shape if that is not flat."""
        return [(p.name, slice(p.start, p.stop), None if len(p.shape) == 1 else p.shape) for p in self.parameters]

    def hosted(self, arrays: Mapping[str, Any], what: str) -> list[Array]:
        """Return the arrays in layout order, in host memory, flat and contiguous; copied only where they are not.

        `what` ("gradient", "parameter") is for messages. Raises LayoutMismatch if a name is missing or extra, or a
        dtype or shape differs.
        """
        return [flattened(array) for array in self.rest(arrays, what).values()]

    def rest(
        self, arrays: Mapping[str, Any], what: str, has: Callable[[int], bool] | None = None, part: str = ""
    ) -> dict[int, Any]:
        """Return number -> array of the part's parameters, without those for which `has` is true. Raises LayoutMismatch
        as `hosted` does, and for a layout that has other arrays than float32."""
        check_mapping(arrays, f"{what}s")
        if not self.trains:
            raise LayoutMismatch(
                f"the job has arrays of other dtypes than float32: it is published, and has no {what}s"
            )
        wanted = self.numbers
        if part or has:
            wanted = {p.name: wanted[p.name] for p in self.parameters_in(part) if not (has and has(wanted[p.name]))}
        if arrays.keys() != wanted.keys():
            raise LayoutMismatch(f"{what}s do not fit the job: {self._differences(arrays, wanted, part)}")
        out = {number: arrays[name] for name, number in wanted.items()}
        if not all_fit(out.values(), map(attrgetter("shape"), map(self.parameters.__getitem__, out))):
            for number, array in out.items():
                self.check(number, array, what)
        return out

    def _differences(self, arrays: Mapping[str, Any], wanted: Mapping[str, int], part: str) -> str:
        """Return in words what is missing in `arrays`, or too much."""
        again = [name for name in arrays if name in self.numbers and name not in wanted]
        unknown = [str(name) for name in arrays if name not in self.numbers]
        names = {"missing": [name for name in wanted if name not in arrays], "unknown": unknown}
        names[f"not in part {part}" if part else "put already"] = again
        return "; ".join(f"{how} {some_of(each)}" for how, each in names.items() if each)

    def check(self, number: int, array: Any, what: str) -> None:
        """Raise LayoutMismatch if `array` cannot be the `number`-th one."""
        p = self.parameters[number]
        self.check_shape(number, shape_of(array, p.name, "buffer" if p.buffer else what), what)

    def check_shape(self, number: int, shape: tuple[int, ...], what: str) -> None:
        """Raise LayoutMismatch unless the `number`-th array has this shape."""
        p = self.parameters[number]
        if shape != p.shape:
            what = "buffer" if p.buffer else what
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
                if low < high:
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
                "parameters": [
                    {"name": p.name, "shape": p.shape, "start": p.start}
                    | {key: value for key in ("part", "buffer", "dtype") if (value := getattr(p, key))}
                    for p in self.parameters
                ],
            }
            | ({"tied": dict(self.tied)} if self.tied else {})
        )

    @classmethod
    def from_json(cls, stored: object) -> Layout:
        """Return the layout that `to_json` wrote: from the text, or what it says. Raises CorruptData for any other."""
        f = Fields.of_json(stored, "the layout")
        f.one_of("dtype", (DTYPE.str,))
        f.whole("chunk_bytes", CHUNK_BYTES, CHUNK_BYTES)
        parameters, stop, buffer = list[Parameter](), 0, ""
        for each in f.sequence("parameters", _MOST_PARAMETERS):
            p = Fields(each, "the layout: a parameter")
            name = p.text("name")
            shape = [whole(n, f"the shape of {name!r}", 0, MOST_ITEMS) for n in p.sequence("shape", _MOST_AXES)]
            part = p.name("part") if "part" in p else ""
            buffer = p.one_of("buffer", (buffer,) if buffer else ("", *BUFFER_KINDS), "")  # of one kind, and last
            dtype = p.one_of("dtype", ("",) if buffer else _OTHERS, "")
            whole(math.prod(n or 1 for n in shape), f"the items of {name!r}")  # NumPy cuts no view of more
            parameters.append(Parameter(name, tuple(shape), p.whole("start", stop, stop), part, buffer, dtype))
            stop = whole(parameters[-1].stop, f"the end of {name!r}", 0, MOST_ITEMS)
        if len({bool(parameter.part) for parameter in parameters}) > 1:
            refuse("the layout", "of parameters that all have a part, or none", stored)
        if parameters and parameters[-1].part and parameters[-1].buffer:
            refuse("the layout", "of parts or of buffers, and not of both", stored)
        if len({parameter.name for parameter in parameters}) != len(parameters):
            refuse("the layout", "of parameters with different names", stored)
        whole(stop, "the layout: size", 1)
        shards = whole(len(f.sequence("shards", MOST_SHARDS)), "the layout: shards", 1, stop)
        return cls(tuple(parameters), shards, _tied(f, {p.name for p in parameters}))


def _tied(f: Fields, names: Set[str]) -> dict[str, str]:
    """Return what a stored layout says of tied arrays. Raises CorruptData unless each is one of the others `names`."""
    tied = f.fields("tied").as_dict() if "tied" in f else {}
    whole(len(tied), "the layout: tied arrays", 0, _MOST_PARAMETERS)
    for name, stored in tied.items():
        if text(name, "the layout: a tied name") in names or not isinstance(stored, str) or stored not in names:
            refuse("the layout", "of tied arrays with names of their own, each stored under another", stored)
    return tied


def _check_size(size: int) -> None:
    """Raise LayoutMismatch unless a job may have as many items."""
    if not size:
        raise LayoutMismatch("a job needs at least one parameter that has items")
    if size > MOST_ITEMS:
        raise LayoutMismatch(f"a job has at most {MOST_ITEMS} items, and these parameters have {size}")
