"""GPUs are shown where a driver knows some, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvps_monitor.top.gpu import Gpus

DRIVER = Path("/proc/driver/nvidia").exists()


@pytest.mark.skipif(DRIVER, reason="this machine has the driver")
def test_a_machine_without_a_driver_has_none() -> None:
    assert Gpus().look() == []


@pytest.mark.gpu
@pytest.mark.skipif(not DRIVER, reason="this machine has no driver for NVIDIA GPUs")
def test_a_gpu_has_a_name_and_memory() -> None:
    found = Gpus().look()
    assert found, "there is a CUDA device"
    for number, gpu in enumerate(found):
        assert gpu.number == number
        assert gpu.name
        assert 0 <= gpu.used <= gpu.memory
        assert gpu.memory > 1 << 28
        assert gpu.busy is None or 0 <= gpu.busy <= 1
