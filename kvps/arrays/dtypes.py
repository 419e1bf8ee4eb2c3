"""The dtypes that a published array may have, and the bits of such arrays in host memory. Pure.

Training computes in float32 alone. A published model keeps the dtypes that it has: here they are only moved, and looked
at for NaN and Inf. Names are those of NumPy and ml_dtypes, which are PyTorch's too. All are little-endian.
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvps.arrays.inputs import of_pytorch, wrong_kind
from kvps.device.base import flattened
from kvps.errors import InvalidSetting, LayoutMismatch, shown

Bytes = NDArray[np.uint8]

_PIECE = 1 << 17  # items that are checked at once; their bits fit the cache


class Dtype(NamedTuple):
    """`name`, as in "bfloat16"; `numpy`, its dtype there; `safetensors`, as in "BF16".

    special  the bits that are all set in NaN and Inf, and in no number; 0 if each value is a number
    """

    name: str
    numpy: np.dtype[Any]
    safetensors: str
    special: int = 0

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize

    def widens_to(self, other: Dtype) -> bool:
        """Return whether `other` is a wider dtype of floats that holds each number of this one exactly."""
        return other.name in _EXACT_IN.get(self.name, ())

    def narrows_to(self, other: Dtype) -> bool:
        """Return whether arrays of this dtype may be published as `other`: both are floats, `other` has fewer bits."""
        return bool(self.special) and other.name in _PUBLISHED_AS.values() and other.itemsize < self.itemsize


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("float32", np.dtype("<f4"), "F32", 0x7F80_0000),
        Dtype("float64", np.dtype("<f8"), "F64", 0x7FF0_0000_0000_0000),
        Dtype("float16", np.dtype("<f2"), "F16", 0x7C00),
        Dtype("bfloat16", np.dtype(ml_dtypes.bfloat16), "BF16", 0x7F80),
        Dtype("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), "F8_E4M3", 0x7F),  # NaN alone; it has no Inf
        Dtype("float8_e5m2", np.dtype(ml_dtypes.float8_e5m2), "F8_E5M2", 0x7C),
        *(Dtype(f"int{8 * size}", np.dtype(f"<i{size}"), f"I{8 * size}") for size in (1, 2, 4, 8)),
        *(Dtype(f"uint{8 * size}", np.dtype(f"<u{size}"), f"U{8 * size}") for size in (1, 2, 4, 8)),
        Dtype("bool", np.dtype("?"), "BOOL"),
    )
}
"""Name -> dtype. A layout names one where it is not float32."""
FLOAT32 = DTYPES["float32"]
_EXACT_IN = {
    "float8_e4m3fn": ("float16", "bfloat16", "float32", "float64"),
    "float8_e5m2": ("float16", "bfloat16", "float32", "float64"),
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
}
_PUBLISHED_AS = {name: name for name in ("float32", "bfloat16", "float16")}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def published_as(dtype: object) -> Dtype | None:
    """Return the dtype that floats of more bits are published as: a name, or a dtype of PyTorch, NumPy or JAX; None for
    None, with which each array keeps its own. Raises InvalidSetting."""
    if dtype is None:
        return None
    word = dtype if isinstance(dtype, str) else str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    name = _SHORT.get(word, word)
    if name not in _PUBLISHED_AS:
        raise InvalidSetting(f"dtype must be one of {', '.join(_PUBLISHED_AS)}, not {shown(dtype)}")
    return DTYPES[name]


def dtype_of(value: Any, name: str) -> Dtype:
    """Return the dtype of an array of NumPy, PyTorch or JAX, on any device. `name` is for the message of the
    LayoutMismatch that it raises for anything else, and for a dtype that is not in `DTYPES`."""
    if wrong := wrong_kind(value, name, ""):
        raise LayoutMismatch(f"array {name!r} is {wrong}")
    word = word_of(value)
    if word not in DTYPES:
        raise LayoutMismatch(f"array {name!r} is of {word}, and a published one is of {', '.join(DTYPES)}")
    return DTYPES[word]


def word_of(value: Any) -> str:
    """Return the dtype of an array in one word, the same for all libraries."""
    return str(value.dtype).removeprefix("torch.")


def memory_of(value: Any) -> Hashable:
    """Return what is equal for two names of one array: tied tensors of PyTorch, or the same array of NumPy.

    Names of one array of JAX are not tied: nothing changes it, so it may stand for several that are alike at first.
    Once an array is gone, its memory and its id may be used again.
    """
    if of_pytorch(value) and value.numel() and (address := value.data_ptr()):
        return address, str(value.device), tuple(value.shape), tuple(value.stride()), value.dtype
    return id(value) if isinstance(value, np.ndarray) else object()


def host_bits(value: Any) -> NDArray[Any]:
    """Return the items of an array whose dtype is in `DTYPES` as NumPy's, (items,), contiguous, in host memory, bit for
    bit. They are copied only where they are elsewhere or have gaps."""
    if not of_pytorch(value):
        return flattened(value)
    torch = importlib.import_module("torch")
    tensor = value.detach().cpu().resolve_neg().contiguous()
    # A tensor of one item or none may have any stride, and PyTorch sees no bytes then. It gives NumPy no bfloat16 and
    # no float8, but their bytes.
    out: NDArray[Any] = (
        tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().view(DTYPES[word_of(value)].numpy)
    )
    return out


def tensor_on(array: NDArray[Any], dtype: Dtype) -> Any:
    """Return a tensor of PyTorch on the memory of a contiguous array, (items,). If the array is read-only, the tensor
    must only be read."""
    torch = importlib.import_module("torch")
    return torch.from_numpy(exposed(array.view(np.uint8))).view(getattr(torch, dtype.name))


def exposed(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array on the same memory that says it is writable: PyTorch warns of others, even if it only reads."""
    return np.asarray(_Exposed(array))


class _Exposed:
    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory alive for its users
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}


def all_finite(array: NDArray[Any], dtype: Dtype) -> bool:
    """Return whether an array, (items,), contiguous, has no NaN or Inf. Looks at the exponents of pieces that fit the
    cache: NumPy converts each item of a 16- or 8-bit float before it can say."""
    if not dtype.special:
        return True
    bits = array.view(f"<u{dtype.itemsize}")
    special = bits.dtype.type(dtype.special)
    masked = np.empty(min(bits.size, _PIECE), bits.dtype)
    for start in range(0, bits.size, _PIECE):
        piece = bits[start : start + _PIECE]
        if np.bitwise_and(piece, special, out=masked[: piece.size]).max() == special:
            return False
    return True
