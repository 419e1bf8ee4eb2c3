"""The wire formats of gradients, and of weights on a pull: fp32 unchanged, or shorter and lossy. Pure.

A format turns a chunk of n float32 items into bytes whose number depends on n alone, so that every reader knows it
beforehand. It rounds to nearest, ties to even, and never turns a finite item into NaN or Inf.

    fp32          4 n bytes
    bf16          2 n      the upper half of a float32: 8 bits of precision, all of its range
    fp16          2 n      IEEE 754 half: 11 bits of precision; magnitudes beyond 65504 become 65504
    int8          n + 4 ceil(n / 1024)   a float32 scale for each 1024 items, max|x| / 127; then steps in [-127, 127]
    topk:<part>   8 k      the k = ceil(part n) items of largest magnitude: k int32 places, ascending; k float32 items

What a lossy format leaves out of a gradient is not lost: the sender adds it to the next one (error feedback; Seide et
al., 2014; Karimireddy et al., 2019). The reduction is float32 with every format.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.errors import InvalidSetting, shown

Bytes = NDArray[np.uint8]

_u32 = np.uint32
_BLOCK = 1 << 10  # items that share a scale
_STRETCH = 1 << 14  # items converted at a time, so that what lies between the passes stays in the nearest cache
_HALF_MAX = np.float32(65504)
_BF16 = np.dtype(ml_dtypes.bfloat16)
_BF16_MAX = np.uint32(0x7F7F0000).view(np.float32)
_BF16_INF = 0x7F80
_SCALE_MAX = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))


class Format(Protocol):
    """One way to write float32 items as bytes."""

    @property
    def name(self) -> str:
        """The name that `format_of` takes."""

    @property
    def lossy(self) -> bool:
        """Whether decoding may give other values than were encoded."""

    def nbytes(self, items: int) -> int:
        """Return how many bytes so many items take."""

    def encode(self, values: Array, out: Bytes) -> None:
        """Write `values`, (n,) float32 and finite, to `out`, (nbytes(n),) bytes."""

    def encode_with(self, xp: Any, values: Any) -> tuple[Any, Any]:
        """Return the bytes that `encode` writes and the items that `decode` reads from them, on the device of `values`.

        `xp` is that device's `exact`. Takes all items at once, and compares integers: a GPU may flush subnormal floats.
        """

    def decode(self, data: Bytes, out: Array) -> None:
        """Read (nbytes(n),) bytes into `out`, (n,) float32. May raise ValueError if `encode` did not write them."""


@dataclass(frozen=True)
class Fp32:
    """The items unchanged, little-endian."""

    name = "fp32"
    lossy = False

    def nbytes(self, items: int) -> int:
        return 4 * items

    def encode(self, values: Array, out: Bytes) -> None:
        np.copyto(out.view(DTYPE), values)

    def encode_with(self, xp: Any, values: Any) -> tuple[Any, Any]:
        return values.view(xp.uint8), values

    def decode(self, data: Bytes, out: Array) -> None:
        np.copyto(out, data.view(DTYPE))


@dataclass(frozen=True)
class Bf16:
    """The upper halves of the items, rounded."""

    name = "bf16"
    lossy = True

    def nbytes(self, items: int) -> int:
        return 2 * items

    def encode(self, values: Array, out: Bytes) -> None:
        halves = out.view(_BF16)
        with np.errstate(over="ignore"):
            np.copyto(halves, values, casting="unsafe")
        if (out.view("<u2") & 0x7FFF).max(initial=0) >= _BF16_INF:
            np.copyto(halves, np.clip(values, -_BF16_MAX, _BF16_MAX), casting="unsafe")

    def encode_with(self, xp: Any, values: Any) -> tuple[Any, Any]:
        bits = xp.clip(values, -_BF16_MAX, _BF16_MAX).view(xp.uint32)
        odd = (bits >> _u32(16)) & _u32(1)
        halves = (bits + (odd + _u32(0x7FFF))) >> _u32(16)
        return halves.astype(xp.uint16).view(xp.uint8), (halves << _u32(16)).view(xp.float32)

    def decode(self, data: Bytes, out: Array) -> None:
        np.copyto(out, data.view(_BF16))


@dataclass(frozen=True)
class Fp16:
    """IEEE 754 halves."""

    name = "fp16"
    lossy = True

    def nbytes(self, items: int) -> int:
        return 2 * items

    def encode(self, values: Array, out: Bytes) -> None:
        halves = out.view("<f2")
        for i in range(0, values.size, _STRETCH):
            halves[i : i + _STRETCH] = within(_HALF_MAX, values[i : i + _STRETCH])

    def encode_with(self, xp: Any, values: Any) -> tuple[Any, Any]:
        halves = xp.clip(values, -_HALF_MAX, _HALF_MAX).astype(xp.float16)
        return halves.view(xp.uint8), halves.astype(xp.float32)

    def decode(self, data: Bytes, out: Array) -> None:
        np.copyto(out, data.view("<f2"))


@dataclass(frozen=True)
class Int8:
    """Steps of a 127th of the largest magnitude in each block."""

    name = "int8"
    lossy = True

    def nbytes(self, items: int) -> int:
        return items + 4 * -(-items // _BLOCK)

    def _split(self, data: Bytes, items: int) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
        scales = 4 * -(-items // _BLOCK)
        return data[:scales].view(DTYPE), data[scales:].view(np.int8)

    def encode(self, values: Array, out: Bytes) -> None:
        scales, steps = self._split(out, values.size)
        for number, i in enumerate(range(0, values.size, _STRETCH)):
            stretch = values[i : i + _STRETCH]
            blocks = -(-stretch.size // _BLOCK)
            padded = np.zeros((blocks, _BLOCK), DTYPE)
            padded.reshape(-1)[: stretch.size] = stretch
            scale = np.minimum(np.abs(padded).max(axis=1) / np.float32(127), _SCALE_MAX)
            first = number * (_STRETCH // _BLOCK)
            scales[first : first + blocks] = scale
            padded /= np.where(scale > 0, scale, np.float32(1))[:, None]
            np.rint(padded, out=padded)
            np.clip(padded, -127, 127, out=padded)  # a scale that was rounded down gives larger steps
            steps[i : i + _STRETCH] = padded.reshape(-1)[: stretch.size]

    def encode_with(self, xp: Any, values: Any) -> tuple[Any, Any]:
        blocks = -(-values.size // _BLOCK)
        padded = xp.zeros((blocks, _BLOCK), xp.float32)
        padded.reshape(-1)[: values.size] = values
        largest = _sizes(xp, padded).max(axis=1).view(xp.float32)
        scales = xp.minimum(xp.divide(largest, np.float32(127)), _SCALE_MAX).reshape(blocks, 1)
        bits = scales.view(xp.uint32)  # a comparison of floats would take subnormal ones for 0
        steps = xp.divide(padded, xp.where(bits > _u32(0), scales, np.float32(1)))
        steps = xp.clip(xp.rint(steps), np.float32(-127), np.float32(127)).astype(xp.int8)
        data = xp.concatenate([bits.reshape(-1).view(xp.uint8), steps.reshape(-1)[: values.size].view(xp.uint8)])
        return data, xp.multiply(steps.astype(xp.float32), scales).reshape(-1)[: values.size]

    def decode(self, data: Bytes, out: Array) -> None:
        scales, steps = self._split(data, out.size)
        whole = out.size - out.size % _BLOCK
        np.multiply(
            steps[:whole].reshape(-1, _BLOCK), scales[: whole // _BLOCK, None], out=out[:whole].reshape(-1, _BLOCK)
        )
        if whole < out.size:
            np.multiply(steps[whole:], scales[-1], out=out[whole:])


@dataclass(frozen=True)
class TopK:
    """Only the items of largest magnitude, a fixed part of each chunk; of equal items the first."""

    part: float
    lossy = True

    @property
    def name(self) -> str:
        return f"topk:{self.part:g}"

    def _count(self, items: int) -> int:
        return min(items, math.ceil(self.part * items))

    def nbytes(self, items: int) -> int:
        return 8 * self._count(items)

    def encode(self, values: Array, out: Bytes) -> None:
        k = self._count(values.size)
        places = _largest(np, values, k)
        out[: 4 * k].view("<i4")[:] = places
        out[4 * k :].view(DTYPE)[:] = values[places]

    def encode_with(self, xp: Any, values: Any) -> tuple[Any, Any]:
        places = _largest(xp, values, self._count(values.size)).astype(xp.int32)
        taken, decoded = values[places], xp.zeros(values.shape, xp.float32)
        decoded[places] = taken
        return xp.concatenate([places.view(xp.uint8), taken.view(xp.uint8)]), decoded

    def decode(self, data: Bytes, out: Array) -> None:
        places = data[: data.size // 2].view("<i4")
        if places.size and not 0 <= places.min() <= places.max() < out.size:
            raise ValueError("a place is not in the chunk")
        out.fill(0)
        out[places] = data[data.size // 2 :].view(DTYPE)


def _sizes(xp: Any, values: Any) -> Any:
    """Return integers that are in the order of the items' magnitudes."""
    return values.view(xp.uint32) & _u32(0x7FFFFFFF)


def _largest(xp: Any, values: Any, k: int) -> Any:
    """Return the places of the k items of largest magnitude, ascending. Of equal items the first are taken: where a
    partition puts them depends on the processor, and a run must be the same on all."""
    sizes = _sizes(xp, values)
    least = xp.partition(sizes, sizes.size - k)[sizes.size - k]
    chosen = sizes > least
    equal = xp.flatnonzero(sizes == least)
    chosen[equal[: k - int(xp.count_nonzero(chosen))]] = True
    return xp.flatnonzero(chosen)


def within(limit: np.float32, values: Array) -> Array:
    """Return the values clipped to [-limit, limit]; copied only if any is beyond."""
    return values if values.max() <= limit and values.min() >= -limit else np.clip(values, -limit, limit)


_NAMED: dict[str, Format] = {each.name: each for each in (Fp32(), Bf16(), Fp16(), Int8())}
FP32: Format = _NAMED["fp32"]


def known_format(name: object) -> Format | None:
    """Return the format of that name; None if there is none."""
    if not isinstance(name, str):
        return None
    kind, _, part = name.partition(":")
    with suppress(ValueError):
        if kind == "topk" and 0 < float(part) <= 1:
            return TopK(float(part))
    return _NAMED.get(name)


def format_of(name: object) -> Format:
    """Return the format of that name. Raises InvalidSetting."""
    if format := known_format(name):
        return format
    raise InvalidSetting(
        f"gradient_format must be one of {', '.join(_NAMED)}, topk:PART with a PART up to 1, not {shown(name)}"
    )


def chunk_sizes(layout: Layout, format: Format) -> list[int]:
    """Return how many bytes each chunk takes, shard by shard."""
    return [format.nbytes(chunk.stop - chunk.start) for chunk in layout.chunks_in("")]


def encoded_size(layout: Layout, format: Format, part: str = "") -> int:
    """Return how many bytes a part of the model takes, "" for all of it."""
    return sum(format.nbytes(chunk.stop - chunk.start) for chunk in layout.chunks_in(part))


def encoded(format: Format, values: Array) -> Bytes:
    """Return the bytes of `values`, (n,) float32."""
    out = np.empty(format.nbytes(values.size), np.uint8)
    format.encode(values, out)
    return out


def leave_out(format: Format, values: Array, sent: Bytes, scratch: Array) -> None:
    """Reduce `values` to what `sent`, their encoded form, leaves out of them; `scratch` has the same shape."""
    format.decode(sent, scratch)
    np.subtract(values, scratch, out=values)
