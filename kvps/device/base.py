"""The one module that knows CuPy: where arrays are computed, and how they come from there into host memory.

Everything else computes with the `xp` it is given, NumPy or CuPy, or takes slices of what arrives. CuPy is loaded by
name, for who asks for a device or hands over an array that is on one, and for nobody else.

    on the device   [ 0 | 1 | 2 | 3 ]   as its stream computes it
    host memory     [ 0 | 1 |   |   ]   page-locked; copied piece by piece on a stream that waits for that one
    sent            [ 0 |   |   |   ]   a piece is waited for when it is asked for
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

from kvps.errors import DeviceFailed, InvalidSetting

Array = NDArray[np.float32]


class Device:
    """Where gradients are computed, or reduced; this is the CPU.

    name    "cpu" or "cuda:N"
    xp      NumPy or CuPy
    exact   the same, with arithmetic that makes NumPy's bits on any device
    """

    name = "cpu"
    xp: ModuleType = np
    exact: Any = np

    @contextmanager
    def current(self) -> Iterator[None]:
        """Around what computes on it, on any thread. Raises DeviceFailed for what the device cannot do."""
        yield

    def upload(self, array: Array) -> Any:
        """The array on this device, and whole there; the same array if it is there already."""
        return array

    def download(self, array: Any, out: Array) -> None:
        """Copy an array that is on this device into host memory of its shape."""
        np.copyto(out, array)

    def flat(self, array: Any) -> Any:
        """The items of a float32 array, contiguous and on this device; copied only where they are not."""
        return flattened(array)

    def landing(self, size: int) -> DeviceBuffer | None:
        """Where arrays of so many items come to from host memory; None if that is where they are wanted."""
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
        # Which device is current is a matter of each thread.
        with _in_one_line(self.xp), self.xp.cuda.Device(self._index):
            yield

    def upload(self, array: Array) -> Any:
        with self.current():
            out = self.xp.empty(array.shape, array.dtype)
            out.set(array)
            self.xp.cuda.get_current_stream().synchronize()  # from page-locked memory it may still be read
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
        """An order of its own for what is computed on it."""
        with self.current():
            return self.xp.cuda.Stream(non_blocking=True)

    @contextmanager
    def computing_on(self, stream: Any) -> Iterator[None]:
        """Compute on one of its streams, after what was begun on the one that is current now. Raises DeviceFailed."""
        with self.current():
            stream.wait_event(self.xp.cuda.get_current_stream().record())
            with stream:
                yield

    def landing(self, size: int) -> DeviceBuffer:
        return DeviceBuffer(self, size)


class Exact:
    """CuPy with IEEE 754's arithmetic on float32.

    CuPy has every kernel flush subnormal numbers to zero (-ftz=true, whatever else it is told), and NumPy does not:
    small gradients would leave other residuals and another state behind. Only PTX says for itself how it is rounded.
    Each operation is a kernel of its own, so that none is fused with the next.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        for name, ptx in {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div"}.items():
            setattr(self, name, self._operation(name, ptx, "a", "b"))
        self.sqrt = self._operation("sqrt", "sqrt", "a")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cupy, name)

    def _operation(self, name: str, ptx: str, *inputs: str) -> Callable[..., Any]:
        places = ", ".join(f"%{number}" for number in range(1 + len(inputs)))
        values = ", ".join(f'"f"((float){each})' for each in inputs)
        code = f'float r; asm("{ptx}.rn.f32 {places};" : "=f"(r) : {values}); c = r'
        arguments = ", ".join(f"float32 {each}" for each in inputs)
        kernel = self._cupy.ElementwiseKernel(arguments, "float32 c", code, f"kvps_{name}")
        return lambda *arrays, out=None: kernel(*arrays) if out is None else kernel(*arrays, out)

    def partition(self, array: Any, kth: int) -> Any:
        """CuPy's own, for the few smallest of many, has the threads of a warp wait for nobody."""
        return self._cupy.sort(array)


CPU = Device()


def open_device(gpu: int | None) -> Device:
    """The CPU for None, else the GPU of that index. Raises InvalidSetting, saying what there is.

    Must run before anything touches CUDA: it makes that device the one of the calling thread.
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
            "--gpu needs CuPy, which is not installed: pip install 'kvps[cuda12]' or 'kvps[cuda13]', "
            "or leave --gpu out to compute with NumPy"
        ) from None
    except ImportError as error:
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise InvalidSetting(
            f"--gpu needs CuPy, which is installed but cannot be loaded ({reason}); leave --gpu out to compute with "
            f"NumPy"
        ) from None
    try:
        found = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise InvalidSetting(
            f"--gpu {gpu}: CUDA finds no device ({error}); leave --gpu out to compute with NumPy"
        ) from None
    if gpu >= found:
        limit = f", CUDA_VISIBLE_DEVICES is {visible}" if visible is not None else ""
        raise InvalidSetting(f"--gpu {gpu}: this machine has {found} CUDA device(s), numbered from 0{limit}")
    try:
        cupy.cuda.Device(gpu).use()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise InvalidSetting(f"--gpu {gpu}: that device cannot be used ({error}); give another") from None
    return Cuda(cupy, gpu)


class DeviceBuffer:
    """A flat array on a CUDA device, (size,) float32, which comes there from host memory, part by part."""

    def __init__(self, device: Cuda, size: int) -> None:
        self._device = device
        self._stream = device.stream()
        self._some = False
        # Of that stream's memory: once freed, nobody else is given it before what is still on its way there has come.
        with device.computing_on(self._stream):
            self._flat = device.xp.empty(size, np.float32)

    def begin(self) -> None:
        """It is written anew from here on, once what was begun on the stream that is current has been computed."""
        with self._device.computing_on(self._stream):
            self._some = False

    def arrived(self, start: int, part: Array) -> None:
        """Begin to copy what has come for item `start` on, and must stay as it is; or come again, and be told again."""
        with self._device.current():
            self._flat[start : start + part.size].set(part, self._stream)
        self._some = True

    def whole(self, host: Array) -> Any:
        """Wait until all of it is there that `host` holds: all parts were told of, or none."""
        if not self._some:
            self.arrived(0, host)
        with self._device.current():
            _record(self._device.xp, self._stream).synchronize()
        return self._flat


def device_of(arrays: Iterable[Any]) -> Device:
    """Where the first of them is that is on a CUDA device; the CPU if none is."""
    for array in filter(on_device, arrays):
        cupy = _cupy()
        assert cupy
        with _in_one_line(cupy):
            return Cuda(cupy, _taken(cupy, array).device.id)
    return CPU


# -- host memory ---------------------------------------------------------------------------------------------------


def empty(items: int, device: str, dtype: Any = np.float32) -> NDArray[Any]:
    """Host memory for what comes from or goes to the device of that name, (items,), with anything in it.

    For a CUDA device it is page-locked if CuPy can do that: copied straight from there, and without waiting.
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
    """Whether a `Staging` can bring it: it is in the memory of a CUDA device, and CuPy is here."""
    # PyTorch refuses to say for one that requires a gradient.
    return hasattr(_detached(array), "__cuda_array_interface__") and _cupy() is not None


def flattened(array: Any) -> Array:
    """The items of a float32 array in host memory, contiguous; copied only where they are not."""
    array = _detached(array)
    if hasattr(array, "cpu"):  # PyTorch does it without CuPy
        array = array.cpu()
    elif hasattr(array, "__cuda_array_interface__") and hasattr(array, "get"):  # a pandas.Series has a get() too
        array = array.get()
    return np.ascontiguousarray(array).reshape(-1)


class PendingArray:
    """A flat array on its way into `host`. A slice of it is host memory; taking one waits until that is there.

    `waits` has for each `step` items what returns once they, and all before them, have come.
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
    """Host memory through which arrays come from CUDA devices: (size,), allocated with the first of them.

    They come `step` items at a time. Written again for the next contribution, once nobody reads of the last any more.
    """

    def __init__(self, size: int, step: int, dtype: Any = np.float32) -> None:
        self._size = size
        self._step = step
        self._dtype = dtype
        self._memory: NDArray[Any] | None = None
        self._stream: Any = None

    def bring(self, array: Any, start: int) -> PendingArray:
        """Begin to copy a whole array, of any shape, to where item `start` is. Raises DeviceFailed.

        It comes as the stream leaves it that is current now (of a tensor PyTorch's), and must not change before it has.
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
        """Begin to copy; what returns once that is done, and keeps the source until then."""
        source.get(stream=self._stream, out=target, blocking=False)
        with cupy.cuda.Device(self._stream.device_id):
            event = _record(cupy, self._stream)
        return partial(_wait, cupy, event, source)


def _record(cupy: ModuleType, stream: Any) -> Any:
    """An event that is waited for asleep, not spinning: others need the processor meanwhile."""
    return stream.record(cupy.cuda.Event(block=True, disable_timing=True))


def _wait(cupy: ModuleType, event: Any, source: object) -> None:
    with _in_one_line(cupy):
        event.synchronize()


def _taken(cupy: ModuleType, array: Any) -> Any:
    """The same memory as CuPy's array, on its device, whole as soon as the current stream there is."""
    array = _detached(array)
    if isinstance(array, cupy.ndarray):  # which asarray would copy to the device that is current
        return array
    if hasattr(array, "__dlpack__"):
        return cupy.from_dlpack(array)  # has that stream wait for PyTorch's, if it is another one
    return cupy.asarray(array)


def _cupy() -> ModuleType | None:
    try:
        return importlib.import_module("cupy")
    except ImportError:
        return None


def _detached(array: Any) -> Any:
    """The same memory without what autograd knows of it."""
    return array.detach() if hasattr(array, "detach") else array


@contextmanager
def _in_one_line(cupy: ModuleType) -> Iterator[None]:
    """Have what CUDA, its compiler or the device's memory refuse said as kvps says it."""
    try:
        yield
    except (RuntimeError, MemoryError, cupy.cuda.compiler.CompileException) as error:
        raise DeviceFailed(f"the CUDA device failed: {str(error) or type(error).__name__}") from error
