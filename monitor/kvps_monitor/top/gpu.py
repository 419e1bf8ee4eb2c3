"""What the NVIDIA GPUs of this machine do, asked of their driver through NVML. A machine without one has none."""

from __future__ import annotations

from typing import NamedTuple

import pynvml


class Gpu(NamedTuple):
    """One GPU at one instant. `busy` is the share, 0 to 1, of the last moments in which it computed; None if the driver
    does not say it. `used` and `memory` are bytes."""

    number: int
    name: str
    busy: float | None
    used: int
    memory: int


class Gpus:
    """The GPUs of this machine; none if there is no driver."""

    def __init__(self) -> None:
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:
            self._handles = []

    def look(self) -> list[Gpu]:
        """Return what each GPU does now, without those that do not answer."""
        return [gpu for number, handle in enumerate(self._handles) if (gpu := _look(number, handle))]


def _look(number: int, handle: object) -> Gpu | None:
    try:
        name = pynvml.nvmlDeviceGetName(handle)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:
        return None
    try:
        busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except pynvml.NVMLError:  # a part of a GPU (MIG) does not know it
        busy = None
    return Gpu(number, name if isinstance(name, str) else name.decode(), busy, int(memory.used), int(memory.total))
