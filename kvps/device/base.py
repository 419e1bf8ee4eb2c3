"""The only module that knows CuPy: the devices that compute arrays, and the copies between them and host memory.

All other modules compute with the `xp` they are given, NumPy or CuPy, or take slices of an array that is being copied.
CuPy is imported by name, and only if a caller asks for a device or hands over an array that is on one.

    on the device   [ 0 | 1 | 2 | 3 ]   as its stream computes it
    host memory     [ 0 | 1 |   |   ]   page-locked; copied piece by piece on a stream that waits for the first one
    sent            [ 0 |   |   |   ]   taking a slice waits until its pieces are copied
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvps.errors import DeviceFailed, InvalidSetting, install

Array = NDArray[np.float32]


class Device:
    """A device on which gradients are computed or reduced; this class is the CPU.

    name    "cpu" or "cuda:N"
    xp      NumPy or CuPy
    exact   `xp` with arithmetic that gives NumPy's bits on every device
    """

    name = "cpu"
    xp: ModuleType = np
    exact: Any = np

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the current device of the thread in the block. Raises DeviceFailed for what the device cannot do."""
        yield

    def upload(self, array: Array) -> Any:
        """Return the array on this device, completely copied; the same array if it is there already."""
        return array

    def download(self, array: Any, out: Array) -> None:
        """Copy an array that is on this device into `out`, host memory of its shape."""
        np.copyto(out, array)

    def flat(self, array: Any) -> Any:
        """Return the items of a float32 array, contiguous and on this device; copied only where they are not."""
        return flattened(array)

    def landing(self, size: int) -> DeviceBuffer | None:
        """Return the buffer that receives `size` items from host memory; None if host memory is where they are used."""
        return None


class Cuda(Device):
    """The CUDA device of that index."""

    def __init__(self, cupy: ModuleType, index: int) -> None:
        self.name = f"cuda:{index}"
        self.xp = cupy
        self.exact = Exact(cupy)
        self._index = index

    @contextmanager
    def current(self) -> Iterator[None]:
        # Each thread has a current device of its own.
        with _in_one_line(self.xp), self.xp.cuda.Device(self._index):
            yield

    def upload(self, array: Array) -> Any:
        with self.current():
            out = self.xp.empty(array.shape, array.dtype)
            out.set(array)
            self.xp.cuda.get_current_stream().synchronize()  # a copy from page-locked memory may still be reading
            return out

    def download(self, array: Any, out: Array) -> None:
        with self.current():
            array.get(out=out)

    def flat(self, array: Any) -> Any:
        with self.current():
            if on_device(array) and (there := _taken(self.xp, array)).device.id == self._index:
                return self.xp.ascontiguousarray(there).reshape(-1)
            return self.upload(flattened(array))

    def stream(self) -> Any:
        """Return a new stream, whose work does not wait for that of other streams."""
        with self.current():
            return self.xp.cuda.Stream(non_blocking=True)

    @contextmanager
    def computing_on(self, stream: Any) -> Iterator[None]:
        """Compute on `stream`, after the work begun on the stream that is current now. Raises DeviceFailed."""
        with self.current():
            stream.wait_event(self.xp.cuda.get_current_stream().record())
            with stream:
                yield

    def landing(self, size: int) -> DeviceBuffer:
        return DeviceBuffer(self, size)


class Exact:
    """CuPy with IEEE 754 arithmetic on float32.

    CuPy makes every kernel flush subnormal numbers to zero (-ftz=true, whatever other options it is given). NumPy does
    not, so small gradients would give other residuals and another state. Only PTX states the rounding of an operation.
    Each operation is a kernel of its own, so that none is fused with the next.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        for name, ptx in {"add": "add.rn", "subtract": "sub.rn", "multiply": "mul.rn", "divide": "div.rn"}.items():
            setattr(self, name, self._operation(name, ptx, "a", "b"))
        for name, ptx in {"minimum": "min", "maximum": "max"}.items():  # of NaN and a number it is the number
            setattr(self, name, self._operation(name, ptx, "a", "b"))
        self.sqrt = self._operation("sqrt", "sqrt.rn", "a")
        self.absolute = self._operation("absolute", "abs", "a")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cupy, name)

    def _operation(self, name: str, ptx: str, *inputs: str) -> Callable[..., Any]:
        places = ", ".join(f"%{number}" for number in range(1 + len(inputs)))
        values = ", ".join(f'"f"((float){each})' for each in inputs)
        code = f'float r; asm("{ptx}.f32 {places};" : "=f"(r) : {values}); c = r'
        arguments = ", ".join(f"float32 {each}" for each in inputs)
        kernel = self._cupy.ElementwiseKernel(arguments, "float32 c", code, f"kvps_{name}")
        return lambda *arrays, out=None: kernel(*arrays) if out is None else kernel(*arrays, out)

    def partition(self, array: Any, kth: int) -> Any:
        """Sort: CuPy's partition, for the few smallest of many, does not synchronize the threads of a warp."""
        return self._cupy.sort(array)


CPU = Device()


def open_device(gpu: int | None) -> Device:
    """Return the CPU for None, else the GPU of that index. Raises InvalidSetting, which says what devices there are.

    Call it before anything else uses CUDA: it makes that device the current one of the calling thread.
    """
    if gpu is None:
        return CPU
    if gpu < 0:
        raise InvalidSetting(f"--gpu wants an index from 0, not {gpu}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError:
        raise InvalidSetting(
            f"--gpu needs CuPy, which is not installed: {install('cuda12')} (or cuda13), or leave --gpu out to compute "
            f"with NumPy"
        ) from None
    except ImportError as error:
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise InvalidSetting(
            f"--gpu needs CuPy, which is installed but cannot be loaded ({reason}); leave --gpu out to compute with "
            f"NumPy"
        ) from None
    try:
        devices = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise InvalidSetting(
            f"--gpu {gpu}: CUDA finds no device ({error}); leave --gpu out to compute with NumPy"
        ) from None
    if gpu >= devices:
        limit = f", CUDA_VISIBLE_DEVICES is {visible}" if visible is not None else ""
        raise InvalidSetting(f"--gpu {gpu}: this machine has {devices} CUDA device(s), numbered from 0{limit}")
    try:
        cupy.cuda.Device(gpu).use()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise InvalidSetting(f"--gpu {gpu}: that device cannot be used ({error}); give another") from None
    return Cuda(cupy, gpu)


class DeviceBuffer:
    """A flat array on a CUDA device, (size,) float32, which is copied there from host memory part by part."""

    def __init__(self, device: Cuda, size: int) -> None:
        self._device = device
        self._stream = device.stream()
        self._some = False
        # Allocated on this stream, so that CuPy reuses it for nothing else while a copy to it is under way.
        with device.computing_on(self._stream):
            self._flat = device.xp.empty(size, np.float32)

    def begin(self) -> None:
        """Begin to write the array anew, after the work begun on the current stream, which may still read it."""
        with self._device.computing_on(self._stream):
            self._some = False

    def arrived(self, start: int, part: Array) -> None:
        """Begin to copy `part` to item `start` on. If `part` changes after that, this must be called with it again."""
        with self._device.current():
            self._flat[start : start + part.size].set(part, self._stream)
        self._some = True

    def whole(self, host: Array) -> Any:
        """Return the array once `host` is copied to it. All parts have `arrived` before, or none: then copy it here."""
        if not self._some:
            self.arrived(0, host)
        with self._device.current():
            _record(self._device.xp, self._stream).synchronize()
        return self._flat


def device_of(arrays: Iterable[Any]) -> Device:
    """Return the device of the first array that is on a CUDA device; the CPU if none is."""
    for array in filter(on_device, arrays):
        cupy = _cupy()
        assert cupy
        with _in_one_line(cupy):
            return Cuda(cupy, _taken(cupy, array).device.id)
    return CPU


# -- host memory ---------------------------------------------------------------------------------------------------


def empty(items: int, device: str, dtype: Any = np.float32) -> NDArray[Any]:
    """Return uninitialized host memory, (items,), for copies from and to the device of that name.

    For a CUDA device it is page-locked if CuPy can do that, so that copies are direct and need no waiting.
    """
    kind, _, index = device.partition(":")
    cupy = _cupy() if kind == "cuda" else None
    if cupy:
        with suppress(cupy.cuda.runtime.CUDARuntimeError, ValueError), cupy.cuda.Device(int(index or 0)):
            # Not from CuPy's pool, which rounds up to a power of two.
            nbytes = items * np.dtype(dtype).itemsize
            memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(nbytes), 0)
            return np.frombuffer(memory, dtype, items)
    return np.empty(items, dtype)


def on_device(array: Any) -> bool:
    """Return whether `PinnedStaging` can copy an array: it is in the memory of a CUDA device, and CuPy is installed."""
    # Detached: a PyTorch tensor that requires a gradient raises for this attribute.
    return hasattr(_detached(array), "__cuda_array_interface__") and _cupy() is not None


def flattened(array: Any) -> Array:
    """Return the items of a float32 array in host memory, contiguous; copied only where they are not."""
    array = _detached(array)
    if hasattr(array, "cpu"):  # PyTorch does it without CuPy
        array = array.cpu()
    elif hasattr(array, "__cuda_array_interface__") and hasattr(array, "get"):  # a pandas.Series has a get() too
        array = array.get()
    return np.ascontiguousarray(array).reshape(-1)


class PendingArray:
    """A flat array that is being copied into `host`. A slice is host memory; taking it waits until it is copied.

    `waits` has a callable for each `step` items, which returns once they and all before them are copied.
    """

    def __init__(self, host: NDArray[Any], step: int, waits: Sequence[Callable[[], object]]) -> None:
        self.size = host.size
        self._host = host
        self._step = step
        self._waits = waits

    def __getitem__(self, part: slice) -> NDArray[Any]:
        stop = part.indices(self.size)[1]
        if stop:
            self._waits[(stop - 1) // self._step]()
        return self._host[part]


Flat = Any
"""A flat float32 array of which slices are taken: NumPy's, a `PendingArray`, or one on a device."""


class PinnedStaging:
    """Host memory, (size,), through which arrays are copied from CUDA devices; allocated with the first array.

    Copies are of `step` items each. The next contribution overwrites the last one, once nothing reads it any more.
    """

    def __init__(self, size: int, step: int, dtype: Any = np.float32) -> None:
        self._size = size
        self._step = step
        self._dtype = dtype
        self._memory: NDArray[Any] | None = None
        self._stream: Any = None

    def bring(self, array: Any, start: int) -> PendingArray:
        """Begin to copy a whole array, of any shape, to item `start` on. Raises DeviceFailed.

        It waits for the current stream (for a tensor, PyTorch's). Do not change the array until it is done.
        """
        cupy = _cupy()
        assert cupy
        with _in_one_line(cupy):
            source = _taken(cupy, array)
            with source.device:
                flat = cupy.ascontiguousarray(source).reshape(-1)
                computed = cupy.cuda.get_current_stream().record()
                if self._memory is None:
                    self._memory = empty(self._size, f"cuda:{source.device.id}", self._dtype)
                    self._stream = cupy.cuda.Stream(non_blocking=True)
            self._stream.wait_event(computed)
            host, step = self._memory[start : start + flat.size], self._step
            waits = [self._copy(cupy, flat[i : i + step], host[i : i + step]) for i in range(0, flat.size, step)]
        return PendingArray(host, step, waits)

    def _copy(self, cupy: ModuleType, source: Any, target: Array) -> Callable[[], object]:
        """Begin to copy; return a callable that waits for the copy, and that keeps the source alive."""
        source.get(stream=self._stream, out=target, blocking=False)
        with cupy.cuda.Device(self._stream.device_id):
            event = _record(cupy, self._stream)
        return partial(_wait, cupy, event, source)


def _record(cupy: ModuleType, stream: Any) -> Any:
    """Record an event. Its waiter sleeps instead of spinning, because other threads need the processor."""
    return stream.record(cupy.cuda.Event(block=True, disable_timing=True))


def _wait(cupy: ModuleType, event: Any, source: object) -> None:
    with _in_one_line(cupy):
        event.synchronize()


def _taken(cupy: ModuleType, array: Any) -> Any:
    """Return the same memory as a CuPy array on its device, complete once the current stream there has caught up."""
    array = _detached(array)
    if isinstance(array, cupy.ndarray):  # asarray would copy it to the current device
        return array
    if hasattr(array, "__dlpack__"):
        return cupy.from_dlpack(array)  # makes the current stream wait for PyTorch's, if they differ
    return cupy.asarray(array)


def _cupy() -> ModuleType | None:
    try:
        return importlib.import_module("cupy")
    except ImportError:
        return None


def _detached(array: Any) -> Any:
    """Return the same memory without its autograd history."""
    return array.detach() if hasattr(array, "detach") else array


@contextmanager
def _in_one_line(cupy: ModuleType) -> Iterator[None]:
    """Raise DeviceFailed for errors of CUDA, its compiler or the device's memory."""
    try:
        yield
    except (RuntimeError, MemoryError, cupy.cuda.compiler.CompileException) as error:
        raise DeviceFailed(f"the CUDA device failed: {str(error) or type(error).__name__}") from error
