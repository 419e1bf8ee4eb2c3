"""What needs a CUDA device and CuPy: `make gpu`. Skipped where there is none, and says what is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import kvps_aggregator
import numpy as np
import pytest
from helpers.harness import (
    Params,
    a_plan,
    aggregating,
    any_floats,
    await_version,
    check_chain,
    large_model,
    work,
)
from helpers.optimizers import GROUPED, OPTIMIZERS
from kvps_aggregator.step.device_step import DeviceStep
from kvps_aggregator.step.shard_arrays import ShardArrays
from kvps_workers import load_task
from kvps_workers.training_loop import train

import kvps
from kvps.arrays.formats import encoded, format_of
from kvps.arrays.layout import Layout
from kvps.config import JobConfig
from kvps.device.base import CPU, Device, open_device
from kvps.store import Store

# CuPy and PyTorch may warn of the machine they find, which is not ours to mend.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

Grad = Callable[[Params], dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Device:
    try:
        return open_device(0)
    except kvps.UsageError as error:
        pytest.skip(f"no GPU here: {error}")


@pytest.fixture
def cupy(gpu: Device) -> ModuleType:
    return gpu.xp


def trained(store: Store, name: str, device: Device, served_by: Device = CPU) -> dict[str, np.ndarray]:
    """The weights with which two workers on that device end."""
    settings = {"workers": 2, "epochs": 5, "batch_size": 64, "optimizer": kvps.SGD(lr=0.1, momentum=0.9)}
    job = store.create_job(name, load_task("digits").parameters(0), task="digits", **settings)
    stop = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        serving = pool.submit(kvps_aggregator.serve, job, stop=stop, device=served_by)
        try:
            for done in [pool.submit(train, job, device, f"w{rank}") for rank in range(2)]:
                done.result()
            serving.result()
        finally:
            stop.set()
    check_chain(job)
    return job.snapshot()[1]


def test_digits_come_out_as_with_numpy_within_rounding(store: Store, gpu: Device) -> None:
    ended = [trained(store, name, device) for name, device in (("numpy", CPU), ("cupy", gpu))]
    for name, array in ended[0].items():
        far = 1e-3 * np.abs(array).max()
        np.testing.assert_allclose(ended[1][name], array, rtol=0, atol=far, err_msg=name)


def test_digits_served_by_a_device_end_with_the_same_bits(store: Store, gpu: Device) -> None:
    ended = [trained(store, name, CPU, served_by) for name, served_by in (("cpu", CPU), ("gpu", gpu))]
    for name, array in ended[0].items():
        np.testing.assert_array_equal(ended[1][name], array, name)


# -- push and pull -------------------------------------------------------------------------------------------------


def of_cupy(cupy: ModuleType, grads: Params) -> dict[str, Any]:
    turned = cupy.asfortranarray(cupy.asarray(grads["W"]))
    return {name: cupy.asarray(grad) for name, grad in grads.items()} | {"W": turned}


def of_torch(grads: Params) -> dict[str, Any]:
    torch = cuda_torch()
    tensors = {name: torch.from_numpy(np.asarray(grad)).cuda().requires_grad_() for name, grad in grads.items()}
    return tensors | {"W": torch.from_numpy(grads["W"].T.copy()).cuda().T}


def cuda_torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return torch


@pytest.mark.parametrize("gradient_format", ["fp32", "bf16", "fp16", "int8", "topk:0.1"])
@pytest.mark.parametrize("transport", ["redis", "shm"])
@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_gradients_on_a_device_count_as_those_in_host_memory(
    store: Store, cupy: ModuleType, kind: str, transport: str, gradient_format: str
) -> None:
    def on_device(grads: Params) -> dict[str, Any]:
        return of_torch(grads) if kind == "torch" else of_cupy(cupy, grads)

    ended = []
    for name, made in (("host", lambda grads: grads), ("device", on_device)):
        optimizer = kvps.SGD(lr=0.1, momentum=0.9)
        job = store.create_job(
            name, large_model(), optimizer=optimizer, transport=transport, gradient_format=gradient_format, workers=2
        )

        def step(session: kvps.Session, params: Params, round_: int, made: Grad = made) -> dict[str, Any]:
            grads = large_model(10 * session.rank + round_)
            return made({name: g * np.float32(1 if round_ % 2 else 1e-38) for name, g in grads.items()})

        with aggregating(job):
            work(job, 3, step, 2)
            await_version(job, 3)
        ended.append(job.snapshot()[1])
    for name, array in ended[0].items():
        np.testing.assert_array_equal(ended[1][name], array, name)


@pytest.mark.parametrize("kind", ["cupy", "cupy, non-blocking", "torch"])
def test_a_gradient_that_another_stream_still_computes(store: Store, gpu: Device, kind: str) -> None:
    """Some hundred milliseconds of multiplications stand before it in its stream."""
    cupy, n = gpu.xp, 4096
    job = store.create_job("job", {"w": np.zeros((n, n), np.float32)}, optimizer=kvps.SGD(lr=1.0))

    def late(xp: Any, ones: Any) -> Any:
        for _ in range(40):
            ones = xp.matmul(ones, ones) / n
        return ones * 3

    with aggregating(job), job.join("w0", device=gpu) as session:
        for round_ in range(2):
            session.pull()
            if kind == "torch":
                torch = cuda_torch()
                with torch.cuda.stream(torch.cuda.Stream()):
                    session.push({"w": late(torch, torch.ones((n, n), device="cuda"))})
            else:
                ones = cupy.ones((n, n), cupy.float32)
                cupy.cuda.get_current_stream().synchronize()
                with cupy.cuda.Stream(non_blocking=kind != "cupy"):
                    session.push({"w": late(cupy, ones)})
            np.testing.assert_allclose(session.pull()["w"].get(), -3 * (round_ + 1), rtol=1e-3)


@pytest.mark.parametrize("gradient_format", ["bf16", "fp16", "int8", "topk:0.01", "topk:1"])
def test_a_device_encodes_to_the_same_bits(gpu: Device, gradient_format: str) -> None:
    """Any that are finite; ties between two neighbours and between equally large ones too."""
    format_, rng = format_of(gradient_format), np.random.default_rng(0)
    for size in (1, 1023, 1025, 262_144):
        values = rng.integers(0, 1 << 32, size, np.uint32)
        values[rng.random(size) < 0.3] &= 0xFFFF8000
        values[rng.random(size) < 0.3] = 0
        values[size // 2 :] &= 0x80FFFFFF  # whole blocks of which the largest is next to subnormal
        floats = np.where(np.isfinite(values.view(np.float32)), values.view(np.float32), np.float32(1))
        out = np.empty_like(floats)
        data = encoded(format_, floats)
        format_.decode(data, out)
        made = format_.encode_with(gpu.exact, gpu.xp.asarray(floats))
        assert [array.get().tobytes() for array in made] == [data.tobytes(), out.tobytes()]


@pytest.mark.parametrize("transport", ["redis", "shm"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_pulled_weights_arrive_bit_for_bit(store: Store, gpu: Device, transport: str, prefetch: bool) -> None:
    job = store.create_job("job", large_model(), optimizer=kvps.SGD(lr=1.0), transport=transport, staleness=1)
    made = [large_model()]
    with aggregating(job), job.join("w0", device=gpu, prefetch=prefetch) as session:
        for round_ in range(3):
            for name, array in session.pull().items():
                np.testing.assert_array_equal(array.get(), made[session.version][name])
            session.push(large_model(round_))
            await_version(job, round_ + 1)
            made.append(job.snapshot()[1])


def test_nan_is_refused_and_the_next_push_counts(store: Store, cupy: ModuleType) -> None:
    job = store.create_job("job", large_model(), optimizer=kvps.SGD(lr=1.0))
    bad = of_cupy(cupy, large_model(1))
    bad["V"][-1, -1] = cupy.nan
    with aggregating(job), job.join("w0") as session:
        session.pull()
        with pytest.raises(kvps.NotFinite, match="'V'"):
            session.push(bad)
        session.push(of_cupy(cupy, large_model(2)))
        for name, array in session.pull().items():
            np.testing.assert_array_equal(array, large_model()[name] - large_model(2)[name])


# -- the aggregator ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, GROUPED], ids=str)
def test_a_device_steps_to_the_same_bits(gpu: Device, optimizer: kvps.Optimizer) -> None:
    """Of all magnitudes, subnormal ones and those whose squares overflow too."""
    config, layout = JobConfig(workers=3, optimizer=optimizer), Layout.of(large_model(), shards=2)
    parts = [ShardArrays(config, layout, 1), DeviceStep(config, layout, 1, gpu)]
    weights = any_floats(0, parts[0].size)
    for part in parts:
        np.copyto(part.weights, weights)
        part.loaded()
    for version in range(1, 6):
        for chunk in parts[0].chunks:
            grads = [any_floats(10 * version + i, chunk.stop - chunk.start) for i in range(3)]
            assert [part.step(a_plan(version), chunk, grads) for part in parts] == [True, True]
        for name, array in {"w": parts[0].next_weights, **parts[0].next_state}.items():
            other = parts[1].next_weights if name == "w" else parts[1].next_state[name]
            np.testing.assert_array_equal(other.view(np.uint32), array.view(np.uint32), name)
        for part in parts:
            part.promote()


@pytest.mark.parametrize("transport", ["redis", "shm"])
def test_an_aggregator_on_a_device_commits_the_same_bits(store: Store, gpu: Device, transport: str) -> None:
    """The CPU takes over in the middle, and the other way round."""
    ended = []
    for name, devices in (("cpu", [CPU, CPU]), ("gpu", [gpu, CPU]), ("late", [CPU, gpu])):
        job = store.create_job(name, large_model(), optimizer=kvps.Adam(lr=0.1), transport=transport, workers=2)
        for half, device in enumerate(devices):
            with aggregating(job, device=device):
                work(job, 2, lambda s, params, r, half=half: large_model(7 * s.rank + 2 * half + r), 2)
                await_version(job, 2 * half + 2)
        ended.append(job.snapshot()[1])
    for other in ended[1:]:
        for name, array in ended[0].items():
            np.testing.assert_array_equal(other[name], array, name)


# -- figures -------------------------------------------------------------------------------------------------------
