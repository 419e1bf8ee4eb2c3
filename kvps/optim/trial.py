"""Tries an optimizer and a reduction of the user's own on small arrays, before a job begins.

Each is computed twice, as a whole and in parts as shards and chunks cut it, and must give the same bits. Results are
filled with NaN before, so an item that is not written is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvps.errors import InvalidSetting
from kvps.optim import CustomOptimizer, Optimizer, reductions

_Array = NDArray[np.float32]
_ITEMS = 1_001
_WHOLE = (slice(0, _ITEMS),)
_PARTS = (slice(0, 1), slice(1, 337), slice(337, _ITEMS))
_VERSIONS = 3
_COUNTS = (1, 2, 3, 5)


def try_out(optimizer: Optimizer, reduction: str) -> None:
    """Raise InvalidSetting, in one line, if one of them is code of the user's own that cannot be used."""
    for settings in optimizer.variants:
        if isinstance(settings, CustomOptimizer):
            _compare(f"optimizer {settings.name!r}", partial(_steps, settings))
    if name := reductions.parse(reduction).name:
        _compare(f"reduction {name!r}", partial(_reduced, reductions.custom(name)))


def _compare(title: str, compute: Callable[[Iterable[slice]], Iterator[tuple[str, _Array]]]) -> None:
    with np.errstate(all="ignore"):
        first, again, cut = (list(compute(parts)) for parts in (_WHOLE, _WHOLE, _PARTS))
    for number, (what, array) in enumerate(first):
        if not np.isfinite(array).all():
            raise InvalidSetting(
                f"{title}: a trial on small arrays left NaN or Inf in {what}: write every item of it, in place"
            )
        for other, why in ((again, "in a second call"), (cut, "if the arrays are cut: compute each item by itself")):
            if other[number][1].tobytes() != array.tobytes():
                raise InvalidSetting(f"{title}: a trial on small arrays gave other bits of {what} {why}")


def _steps(settings: CustomOptimizer, parts: Iterable[slice]) -> Iterator[tuple[str, _Array]]:
    """Make a few versions. Yield the name of each array that is made, and the array."""
    rng = np.random.default_rng(0)
    weights, state = _numbers(rng), {slot: np.zeros(_ITEMS, np.float32) for slot in settings.own_slots}
    for version in range(1, _VERSIONS + 1):
        gradient, out = _numbers(rng), _unwritten()
        state_out = {slot: _unwritten() for slot in state}
        for part in parts:
            before, after = ({slot: arrays[slot][part] for slot in arrays} for arrays in (state, state_out))
            lr = settings.lr_at(version)
            settings.step(weights[part], gradient[part], before, out[part], after, lr, version, np)
        yield "out", out
        yield from ((f"state_out[{slot!r}]", array) for slot, array in state_out.items())
        weights, state = out, state_out


def _reduced(function: reductions.Function, parts: Iterable[slice]) -> Iterator[tuple[str, _Array]]:
    """Reduce different numbers of contributions."""
    rng = np.random.default_rng(0)
    for count in _COUNTS:
        rows, out = [_numbers(rng) for _ in range(count)], _unwritten()
        for part in parts:
            function([row[part].copy() for row in rows], list(range(1, count + 1)), out[part], np)
        yield "out", out


def _numbers(rng: np.random.Generator) -> _Array:
    """Return numbers as gradients have them, zeros among them."""
    numbers = rng.standard_normal(_ITEMS, np.float32)
    numbers[rng.integers(0, _ITEMS, 50)] = 0
    return numbers


def _unwritten() -> _Array:
    return np.full(_ITEMS, np.nan, np.float32)
