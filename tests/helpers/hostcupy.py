"""The part of CuPy's interface that kvps uses, over host memory, for tests without a GPU.

Streams are as lazy as CUDA allows: queued work, computations too, runs only when something waits for it. So a copy that
nothing waits for never happens, and a copy that does not wait for a computation runs before it. Arrays refuse implicit
conversion to NumPy arrays, as CuPy's do. Page-locked memory holds NaN at first. Computations and comparisons take
subnormal numbers for zeros, as CuPy's kernels do, except those that say otherwise in PTX.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np


class CUDARuntimeError(RuntimeError):
    pass


class CompileException(Exception):
    pass


_now = threading.local()
failing: list[str] = []  # what the next wait raises
copied: list[int] = []  # items of each copy to the host that was done
uploads: list[int] = []  # items of each copy from the host that was begun


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.stream: Stream | None = None
        self.position = 0

    def synchronize(self) -> None:
        if failing:
            raise CUDARuntimeError(failing.pop())
        assert self.stream
        self.stream.run(self.position)


class Stream:
    def __init__(self, non_blocking: bool = False) -> None:
        self.device_id = _device()
        self._queue: list[Callable[[], object]] = []
        self._done = 0
        self._lock = threading.RLock()

    def queue(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    def run(self, position: int) -> None:
        with self._lock:
            while self._done < position:
                self._done += 1
                self._queue[self._done - 1]()

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.stream, event.position = self, len(self._queue)
        return event

    def wait_event(self, event: Event) -> None:
        self.queue(event.synchronize)

    def synchronize(self) -> None:
        self.run(len(self._queue))

    def __enter__(self) -> None:
        self._before = get_current_stream()
        _now.stream = self

    def __exit__(self, *_: object) -> None:
        _now.stream = self._before


def _device() -> int:
    return getattr(_now, "device", 0)


_null = Stream()


def get_current_stream() -> Stream:
    return getattr(_now, "stream", _null)


class Device:
    def __init__(self, id: int) -> None:
        self.id = id

    def use(self) -> None:
        _now.device = self.id

    def __enter__(self) -> None:
        self._before = _device()
        self.use()

    def __exit__(self, *_: object) -> None:
        _now.device = self._before


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801
    """An array on a device; `values` is the device's memory."""

    def __init__(self, values: np.ndarray, device: int | None = None) -> None:
        self.values = values
        self.device = Device(_device() if device is None else device)

    dtype = property(lambda self: self.values.dtype)
    shape = property(lambda self: self.values.shape)
    size = property(lambda self: self.values.size)
    __cuda_array_interface__ = property(lambda self: {"version": 3})

    def __array__(self, *_: object, **__: object) -> None:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __getitem__(self, part: object) -> ndarray:
        if isinstance(part, ndarray):
            return _computed(lambda: _values(self)[_values(part)])
        return ndarray(self.values[(part, ...)] if isinstance(part, int) else self.values[part], self.device.id)

    def __setitem__(self, part: object, other: object) -> None:
        index, value = (
            (_values(each) for each in (part, other)) if isinstance(part, ndarray) else (part, _values(other))
        )
        get_current_stream().queue(lambda: self.values.__setitem__(index, value))

    def __bool__(self) -> bool:
        return bool(_values(self))

    def __int__(self) -> int:
        return int(_values(self))

    __index__ = __int__

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **options: object) -> object:
        assert method == "__call__"
        if any(isinstance(each, np.ndarray) for each in inputs):
            return NotImplemented
        (out,) = options.pop("out", (None,))
        return _computed(lambda: _flushed(ufunc(*map(_flushed, map(_values, inputs)), **options)), out)

    def __float__(self) -> float:
        return float(_values(self))

    def sum(self) -> ndarray:
        return _computed(lambda: _values(self).sum())

    def all(self) -> ndarray:
        return _computed(lambda: _values(self).all())

    def max(self, axis: int) -> ndarray:
        return _computed(lambda: _values(self).max(axis=axis))

    def astype(self, dtype: object) -> ndarray:
        return _computed(lambda: _values(self).astype(dtype))

    def view(self, dtype: object) -> ndarray:
        return ndarray(self.values.view(dtype), self.device.id)

    def fill(self, value: float) -> None:
        self.values.fill(value)

    def reshape(self, *shape: int) -> ndarray:
        return ndarray(self.values.reshape(*shape), self.device.id)

    def get(
        self, stream: Stream | None = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True
    ) -> np.ndarray:
        stream = stream or get_current_stream()
        target = np.empty(self.shape, self.dtype) if out is None else out
        assert target.flags.c_contiguous
        assert target.shape == self.shape
        assert target.dtype == self.dtype

        def copy() -> None:
            np.copyto(target, self.values)
            copied.append(self.size)

        stream.queue(copy)
        if blocking:
            stream.synchronize()
        return target

    def set(self, array: np.ndarray, stream: Stream | None = None) -> None:
        assert array.shape == self.shape
        assert array.dtype == self.dtype
        (stream or get_current_stream()).queue(lambda: np.copyto(self.values, array))
        uploads.append(self.size)


def _values(array: object) -> object:
    """Return the values to compute with, after all work that is queued on the current stream."""
    if isinstance(array, ndarray):
        get_current_stream().synchronize()
        return array.values
    assert not isinstance(array, np.ndarray), "CuPy computes with its own arrays only"
    return array


def _computed(compute: Callable[[], object], out: ndarray | None = None) -> ndarray:
    """Return an array that holds the result of `compute` once the current stream gets there."""
    with np.errstate(all="ignore"):  # a device does not warn
        found = np.asarray(compute())
    if out is None:
        out = empty(found.shape, found.dtype)
    get_current_stream().queue(lambda: np.copyto(out.values, found))
    return out


def _flushed(value: object) -> object:
    """Return `value` with zeros for subnormal numbers."""
    if getattr(value, "dtype", None) != np.float32:
        return value
    return np.where(np.abs(value) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), value), value)


class ElementwiseKernel:
    """A kernel of one PTX instruction that rounds to nearest, if it rounds, and flushes nothing."""

    def __init__(self, inputs: str, outputs: str, code: str, name: str) -> None:
        (instruction,) = re.findall(r'asm\("((?:add|sub|mul|div|sqrt)\.rn|min|max|abs)\.f32 [%0-9, ]+;"', code)
        names = {"add.rn": "add", "sub.rn": "subtract", "mul.rn": "multiply", "div.rn": "divide", "sqrt.rn": "sqrt"}
        names |= {"min": "minimum", "max": "maximum", "abs": "absolute"}
        self._function, self._inputs = getattr(np, names[instruction]), inputs.count("float32 ")
        assert outputs == "float32 c"

    def __call__(self, *arrays: object) -> ndarray:
        if types := {a.dtype for a in arrays if isinstance(a, ndarray)} - {np.dtype(np.float32)}:
            raise TypeError(f"a kernel of float32 gets {types}")
        out = arrays[self._inputs] if len(arrays) > self._inputs else None
        return _by_numpy(self._function, *arrays[: self._inputs], out=out)


_MOVING = "clip concatenate flatnonzero where"  # these change no bit of a float, except where clip limits it
_FUNCTIONS = f"count_nonzero minimum rint sort {_MOVING}"
_TYPES = "float16 float32 int8 int32 uint8 uint16 uint32"


def __getattr__(name: str) -> object:
    if name in _TYPES.split():
        return getattr(np, name)
    if name in _FUNCTIONS.split():
        function = getattr(np, name)
        return partial(_by_numpy, function if name in _MOVING.split() else lambda *args: _flushed(function(*args)))
    raise AttributeError(name)


def _by_numpy(function: Callable[..., object], *args: object, out: ndarray | None = None) -> ndarray:
    def compute() -> object:
        return function(*([*map(_values, each)] if isinstance(each, list) else _values(each) for each in args))

    return _computed(compute, out)


def copyto(target: ndarray, source: ndarray) -> None:
    _computed(lambda: _values(source), target)


def empty(shape: object, dtype: object) -> ndarray:
    return ndarray(np.full(shape, np.nan if np.dtype(dtype).kind == "f" else 85, dtype))


def zeros(shape: object, dtype: object) -> ndarray:
    return ndarray(np.zeros(shape, dtype))


def asarray(array: object) -> ndarray:
    return array if isinstance(array, ndarray) else ndarray(np.array(array))


def ascontiguousarray(array: ndarray) -> ndarray:
    if array.values.flags.c_contiguous:
        return array
    made = empty(array.shape, array.dtype)
    get_current_stream().queue(lambda: np.copyto(made.values, array.values))
    return made


def from_dlpack(array: object) -> ndarray:
    """Return the array that another library says is on a device."""
    assert array.__dlpack_device__() == (2, 0)
    return ndarray(np.from_dlpack(array.on_host))


def _page_locked(size: int) -> memoryview:
    return memoryview(bytearray(b"\xff" * size))


found = [2]


def _count() -> int:
    if not found[0]:
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
    return found[0]


cuda = SimpleNamespace(
    Device=Device,
    Event=Event,
    Stream=Stream,
    get_current_stream=get_current_stream,
    PinnedMemory=_page_locked,
    PinnedMemoryPointer=lambda memory, offset: memory[offset:],
    runtime=SimpleNamespace(getDeviceCount=_count, CUDARuntimeError=CUDARuntimeError),
    compiler=SimpleNamespace(CompileException=CompileException),
)


@contextmanager
def computing(values: np.ndarray) -> object:
    """Yield an array that another stream computes, and only when waited for; that stream is current in the block."""
    made = empty(values.shape, values.dtype)
    with (stream := Stream()):
        stream.queue(lambda: np.copyto(made.values, values))
        yield made
