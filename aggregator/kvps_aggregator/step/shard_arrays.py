"""One shard in memory: its weights and optimizer state, and beside them the next version's. Pure, without Redis.

The holder of a shard and the replay of a log compute with this one class, so a replay gets the committed bits. So does
a device: every operation is one IEEE 754 operation on float32 items (see `kvps.device.base.Exact`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from kvps.arrays.digest import digest_of, finite, fold, view
from kvps.arrays.formats import Bytes, format_of
from kvps.arrays.layout import CHUNK_ITEMS, DTYPE, Array, Layout
from kvps.arrays.pieces import Chunk, Piece
from kvps.arrays.weight_view import VIEW, advance
from kvps.config import JobConfig
from kvps.errors import NotFinite
from kvps.optim import CustomOptimizer, Optimizer
from kvps.protocol.plan import Plan
from kvps_aggregator.step import reduce


class _Stretch(NamedTuple):
    """Items `start` to `stop` of a shard that step alike: with the same settings, None for buffers; all of them or none
    `left_out` of this version, and of so many versions before, if the optimizer counts its steps (`skipped`)."""

    settings: Optimizer | None
    start: int
    stop: int
    left_out: bool = False
    skipped: int = 0


class ShardArrays:
    """Shard `number` of a job. Arrays are (size,) float32; `state` is slot name -> array, zeros at first: the
    optimizer's state, and, in host memory alone, the view if workers pull differences.

    `skipped` is in how many versions each parameter was left out, because no contribution had a gradient for it, by its
    number in the layout; only of those whose optimizer counts its steps.

    They are arrays of `xp`: NumPy, or a device's `exact`. Methods that return memory or digests are for NumPy alone.
    `step` makes the next version, a chunk a call, on any threads; the present version stays as it is until `promote`.
    """

    def __init__(self, config: JobConfig, layout: Layout, number: int, xp: Any = np) -> None:
        """Raises InvalidSetting for an optimizer or a reduction of the user's own that is not found here."""
        config.optimizer.prepare()
        reduce.prepare(config.reduction)
        self.chunks = layout.chunks[number]
        self.low, self.high = layout.shard_range(number)
        self.size = self.high - self.low
        self.slots = config.slots if xp is np else config.optimizer.slots
        self._xp = xp
        self.weights, self.next_weights = self._empty(), self._empty()
        self.state = {slot: xp.zeros(self.size, DTYPE) for slot in self.slots}
        self.next_state = {slot: self._empty() for slot in self.slots}
        format_ = format_of(config.weight_format)
        self._pull_format = format_ if VIEW in self.slots else None
        self._differences = {
            c.number: _bytes(format_.nbytes(c.stop - c.start)) for c in self.chunks if self._pull_format
        }
        self.skipped: Mapping[int, int] = {}
        self.next_skipped: Mapping[int, int] = {}
        self._scratch = threading.local()
        self._config = config
        self._layout = layout
        self.number = number
        self._stretches = _stretches(config.optimizer, layout, number)

    def _empty(self) -> Array:
        array: Array = self._xp.empty(self.size, DTYPE)
        return array

    def loaded(self) -> None:
        """Go on from the weights and state that were just read into their arrays."""

    def step(
        self, plan: Plan, chunk: Chunk, gradients: Iterable[Array], reduced: Callable[[float], None] | None = None
    ) -> bool:
        """Make a chunk of the plan's version from `gradients`: its part of each contribution that counts and has it, in
        plan order. `reduced` is called before the step, with the reduced gradient's sum of squares.

        Each has shape (chunk's items,), is not written to, and is no longer used when the second one after it is
        requested. Return False, and make nothing, if one of them, or what they are reduced to, is not finite.
        """
        total = self.scratch(chunk.stop - chunk.start)
        square_sum = self.reduce(plan, chunk, gradients, total) if plan.has(chunk) else 0.0
        if reduced:
            reduced(square_sum)
        if math.isnan(square_sum):
            return False
        self.apply(plan, chunk, total)
        return True

    def reduce(self, plan: Plan, chunk: Chunk, gradients: Iterable[Array], out: Array) -> float:
        """Write the gradient that a chunk of the plan's contributions make into `out`, and behind it the buffers, if
        the chunk has some; see `step`. Return the gradient's sum of squares, NaN if anything is not finite."""
        counting = plan.counting_in(chunk)
        start, kind = self._layout.buffer_start_in(chunk), self._layout.buffer_kind
        return reduce.reduce_plan(self._config, plan, counting, gradients, out[:start], out[start:], kind, self._xp)

    def sizes(self, plan: Plan, chunk: Chunk, gradients: Iterable[Array]) -> list[float]:
        """Return the largest magnitude that each contribution of a chunk, in host memory, has where it is reduced."""
        return reduce.sizes(self._config, plan, plan.counting_in(chunk), gradients)

    def apply_scaled(self, plan: Plan, chunk: Chunk, gradient: Array, scale: np.float32) -> None:
        """Make a chunk of the plan's version from the reduced gradient times `scale`, and the buffers behind it."""
        start, total = self._layout.buffer_start_in(chunk), self.scratch(gradient.size)
        np.multiply(gradient[:start], scale, out=total[:start])
        np.copyto(total[start:], gradient[start:])
        self.apply(plan, chunk, total)

    def apply(self, plan: Plan, chunk: Chunk, gradient: Array) -> None:
        """Make a chunk of the plan's version from the reduced gradient and buffers, (chunk's items,), which are
        overwritten. A chunk that no contribution has stays as it is."""
        part_of = slice(chunk.start - self.low, chunk.stop - self.low)
        left_out = plan.left_out(chunk.part)
        self.next_skipped = self._skipped_with(left_out)
        if plan.has(chunk):
            for stretch in self._stretches_of(chunk, left_out):
                items = slice(stretch.start, stretch.stop)
                reduced = gradient[items.start - part_of.start : items.stop - part_of.start]
                if stretch.left_out:
                    self._copy(items)
                elif stretch.settings:
                    self._update(stretch.settings, plan, items, reduced, plan.version - stretch.skipped)
                else:
                    self._replace(plan, items, reduced)
        else:
            self._copy(part_of)
        self.advance_view(chunk)

    def _stretches_of(self, chunk: Chunk, left_out: Set[int]) -> list[_Stretch]:
        """Return the stretches of a chunk, cut also where parameters are or were left out."""
        if not left_out and not self.skipped:
            return self._stretches[chunk.number]
        pieces = self._layout.pieces[self.number][chunk.number]
        return _cut(pieces, chunk.start - self.low, self._settings, left_out, self.skipped)

    def _skipped_with(self, left_out: Set[int]) -> Mapping[int, int]:
        """Return `skipped` after a version that leaves these parameters out."""
        if not left_out:
            return self.skipped
        counting = (n for n in left_out if (settings := self._settings[n]) and settings.counts_steps)
        return {**self.skipped, **{n: self.skipped.get(n, 0) + 1 for n in counting}}

    @cached_property
    def _settings(self) -> list[Optimizer | None]:
        return _settings(self._config.optimizer, self._layout)

    def _copy(self, part_of: slice) -> None:
        self.next_weights[part_of] = self.weights[part_of]
        for slot in self._config.optimizer.slots:
            self.next_state[slot][part_of] = self.state[slot][part_of]

    def _replace(self, plan: Plan, part_of: slice, buffers: Array) -> None:
        """Put the buffers of the plan's contributions in the place of those before, if any of these counts."""
        self._xp.copyto(self.next_weights[part_of], buffers if plan.counting else self.weights[part_of])
        for slot in self._config.optimizer.slots:
            self.next_state[slot][part_of].fill(0)

    def _update(self, settings: Optimizer, plan: Plan, part_of: slice, gradient: Array, step: int) -> None:
        """Step parameters of the same settings: `part_of` this shard. It is their `step`-th, counted from 1. `gradient`
        is overwritten."""
        state, state_out = (
            {slot: arrays[slot][part_of] for slot in settings.own_slots} for arrays in (self.state, self.next_state)
        )
        progress = self._config.progress(plan.version - 1, plan.progress)
        lr = self._config.optimizer.lr_of(settings, progress, plan.lr)
        weights, out = self.weights[part_of], self.next_weights[part_of]
        with np.errstate(over="ignore", invalid="ignore"):  # the check tells of it
            settings.update(weights, gradient, state, out, state_out, lr, step, self._xp)
        self._check_finite(settings, part_of.start, {"weights": out, **state_out})
        for slot in self._config.optimizer.slots:
            if slot not in state:  # only other groups need it
                self.next_state[slot][part_of].fill(0)

    def _check_finite(self, settings: Optimizer, start: int, made: Mapping[str, Array]) -> None:
        """Raise NotFinite, with the parameter's name, if an array that a step has made of finite ones holds NaN or Inf.
        The arrays begin with item `start` of this shard."""
        for what, array in made.items():
            if finite(array):
                continue
            item = self.low + start + int(np.flatnonzero(~np.isfinite(array))[0])
            parameter = next(p.name for p in self._layout.parameters if item < p.stop)
            own = settings if isinstance(settings, CustomOptimizer) else None
            name, advice = (own.name, "mend it") if own else (settings.kind, "lower its learning rate")
            fault = f"optimizer {name!r} makes NaN or Inf in the {what} of {parameter!r} of finite gradients"
            if self._config.nonfinite == "reject":
                fault += (
                    f": {advice}, or create the job with nonfinite='skip', which rejects contributions that do this"
                )
            raise NotFinite(fault)

    def advance_view(self, chunk: Chunk) -> None:
        """Make a chunk of the next view, if there is one, from the next weights."""
        if self._pull_format:
            weights, before, out = (
                self.stretch(array, chunk) for array in (self.next_weights, self.state[VIEW], self.next_state[VIEW])
            )
            advance(self._pull_format, weights, before, out, self.scratch(out.size), self._differences[chunk.number])

    def pulled(self, chunk: Chunk) -> Bytes:
        """Return what workers pull of a chunk of the next version, if that is the difference to their view; it is valid
        until the chunk is made again."""
        return self._differences[chunk.number]

    def scratch(self, items: int) -> Array:
        """Return this thread's own buffer for sums, because chunks may be made on several threads."""
        if not hasattr(self._scratch, "total"):
            self._scratch.total = self._xp.empty(min(self.size, CHUNK_ITEMS), DTYPE)
        total: Array = self._scratch.total[:items]
        return total

    def made(self, chunk: Chunk) -> dict[str, memoryview]:
        """Return array name -> memory of a chunk of the next version, for its weights ("w") and each slot."""
        return {
            what: view(self.stretch(array, chunk))
            for what, array in {"w": self.next_weights, **self.next_state}.items()
        }

    def stretch(self, array: Array, chunk: Chunk) -> Array:
        """Return a chunk's items of an array of this shard."""
        return array[chunk.start - self.low : chunk.stop - self.low]

    def promote(self) -> None:
        """Make the next version the present one."""
        self.weights, self.next_weights = self.next_weights, self.weights
        self.state, self.next_state = self.next_state, self.state
        self.skipped = self.next_skipped

    def stretches(self, array: Array) -> Iterator[memoryview]:
        """Return the memory of each chunk in an array of this shard."""
        return (view(self.stretch(array, chunk)) for chunk in self.chunks)

    def digest(self, array: Array) -> str:
        """Return the digest of an array of this shard, as contributions and commits log it."""
        return fold(digest_of([stretch]) for stretch in self.stretches(array))


def _stretches(optimizer: Optimizer, layout: Layout, shard: int) -> list[list[_Stretch]]:
    """Return the stretches of each chunk of a shard, in the order of their items, where no parameter is left out."""
    low, _ = layout.shard_range(shard)
    chunks = layout.chunks[shard]
    if not optimizer.groups and not layout.buffer_kind:
        return [[_Stretch(optimizer, chunk.start - low, chunk.stop - low)] for chunk in chunks]
    settings = _settings(optimizer, layout)
    return [_cut(layout.pieces[shard][chunk.number], chunk.start - low, settings) for chunk in chunks]


def _settings(optimizer: Optimizer, layout: Layout) -> list[Optimizer | None]:
    """Return the settings of each parameter, None for buffers."""
    of_each = optimizer.of_each([p.name for p in layout.parameters])
    return [None if p.buffer else setting for p, setting in zip(layout.parameters, of_each, strict=True)]


def _cut(
    pieces: Sequence[Piece],
    start: int,
    settings: Sequence[Optimizer | None],
    left_out: Set[int] = frozenset(),
    skipped: Mapping[int, int] = MappingProxyType({}),
) -> list[_Stretch]:
    """Cut the pieces of parameters that a chunk is made of, from item `start` of its shard on, into stretches.
    Neighbours that step alike are one."""

    def kind(piece: Piece) -> tuple[int, bool, int]:
        return id(settings[piece.number]), piece.number in left_out, skipped.get(piece.number, 0)

    stretches = []
    for (_, is_left_out, count), group in groupby(pieces, kind):
        alike = list(group)
        stop = start + sum(piece.stop - piece.start for piece in alike)
        stretches.append(_Stretch(settings[alike[0].number], start, stop, is_left_out, count))
        start = stop
    return stretches


def _bytes(count: int) -> Bytes:
    return np.empty(count, np.uint8)
