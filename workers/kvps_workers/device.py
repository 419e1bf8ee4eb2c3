"""The one module that knows CuPy. Everything else computes with the `xp` it is given: NumPy or CuPy."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kvps.errors import InvalidSetting


@dataclass(frozen=True)
class Device:
    """Where gradients are computed: `name` is "cpu" or "cuda:N", `xp` is NumPy or CuPy."""

    name: str
    xp: ModuleType

    def upload(self, array: Any) -> Any:
        """The array on this device; the same array if it is there already."""
        return array if self.xp is np else self.xp.asarray(array)


def open_device(gpu: int | None) -> Device:
    """The CPU for None, else the GPU of that index. Raises InvalidSetting, saying what there is.

    Must run before anything touches CUDA: the process is bound to that one device.
    """
    if gpu is None:
        return Device("cpu", np)
    if gpu < 0:
        raise InvalidSetting(f"--gpu wants an index from 0, not {gpu}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        raise InvalidSetting(
            "--gpu needs CuPy, which is not installed: pip install 'kvps[cuda12]' or 'kvps[cuda13]', "
            "or leave --gpu out to compute with NumPy"
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
    cupy.cuda.Device(gpu).use()
    return Device(f"cuda:{gpu}", cupy)
