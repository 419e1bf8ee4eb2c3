"""Arrays on a device, without one: CuPy's part is taken by hostcupy. What needs a real one is in test_cuda.py."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import hostcupy
from helpers.harness import (
    Params,
    a_plan,
    aggregating,
    any_floats,
    await_version,
    check_chain,
    large_model,
    model,
    work,
)
from helpers.optimizers import GROUPED, OPTIMIZERS
from helpers.slowly import slowly
from kvps_aggregator.step.device_step import DeviceStep
from kvps_aggregator.step.shard_arrays import ShardArrays

import kvps
from kvps.arrays.digest import digest_of
from kvps.arrays.formats import chunk_sizes, format_of
from kvps.arrays.layout import CHUNK_ITEMS, Layout
from kvps.arrays.runs import Runs
from kvps.config import JobConfig
from kvps.connection.client import Client
from kvps.connection.sockets import ChunkGone
from kvps.device import base as device_base
from kvps.device.base import Cuda, PendingArray, open_device
from kvps.optim import SGD, Adam
from kvps.session.upload import Gradients, GradientUpload
from kvps.store import Store


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cupy", hostcupy)
    hostcupy.copied.clear()  # tests of formats use hostcupy without this fixture
    yield
    hostcupy.found[:] = [2]
    hostcupy.failing.clear()
    hostcupy.copied.clear()
    hostcupy.uploads.clear()


def tiny(seed: int) -> Params:
    """Gradients for `large_model`, so small that their sums and differences are subnormal."""
    return {name: any_floats(seed, array.shape) * np.float32(1e-30) for name, array in large_model().items()}


def contributed(job: kvps.Job) -> list[tuple[str, ...]]:
    """The digests of what was sent, in the log's order."""
    return [c.digests for commit in job.log() for c in commit.plan.contributions]


def on(grads: Params) -> dict[str, hostcupy.ndarray]:
    return {name: hostcupy.asarray(grad) for name, grad in grads.items()}


# -- which device --------------------------------------------------------------------------------------------------


def test_without_a_device_it_is_numpy() -> None:
    found = open_device(None)
    assert (found.name, found.xp) == ("cpu", np)
    array = np.zeros(3, np.float32)
    assert found.upload(array) is array


@pytest.mark.parametrize(
    ("gpu", "count", "words"),
    [
        (-1, 2, "wants an index from 0, not -1"),
        (2, 2, "this machine has 2 CUDA device.s., numbered from 0, CUDA_VISIBLE_DEVICES is 0,1"),
        (0, 0, "CUDA finds no device .*cudaErrorNoDevice.*leave --gpu out"),
    ],
)
def test_a_device_that_is_not_there(
    cupy: None, monkeypatch: pytest.MonkeyPatch, gpu: int, count: int, words: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    hostcupy.found[:] = [count]
    with pytest.raises(kvps.UsageError, match=words):
        open_device(gpu)


def test_a_device_that_is_taken(cupy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(self: hostcupy.Device) -> None:
        raise hostcupy.CUDARuntimeError("cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy")

    monkeypatch.setattr(hostcupy.Device, "use", busy)
    with pytest.raises(kvps.UsageError, match=r"--gpu 1: that device cannot be used .*busy"):
        open_device(1)


def test_a_device_is_the_current_one(cupy: None) -> None:
    found = open_device(1)
    assert (found.name, found.xp, hostcupy._device()) == ("cuda:1", hostcupy, 1)
    hostcupy.Device(0).use()


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(kvps.UsageError, match="CuPy, which is not installed: pip install"):
        open_device(0)


def test_cupy_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(
        "raise ImportError('\\n=====\\nlibcudart.so.12: cannot open\\n')".replace("=====", "")
    )
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(kvps.UsageError, match=r"cannot be loaded \(libcudart.so.12: cannot open\); leave"):
        open_device(0)


# -- out -----------------------------------------------------------------------------------------------------------


def test_a_slice_waits_for_its_last_item_and_no_more() -> None:
    waited: list[int] = []
    array = PendingArray(np.arange(25, dtype=np.float32), 10, [lambda i=i: waited.append(i) for i in range(3)])
    assert array.size == 25
    np.testing.assert_array_equal(array[3:10], np.arange(3, 10))
    assert waited == [0]
    np.testing.assert_array_equal(array[5:11], np.arange(5, 11))
    np.testing.assert_array_equal(array[20:99], np.arange(20, 25))
    assert array[7:7].size == 0
    assert waited == [0, 1, 2, 0]


class Noted:
    """Says what a chunk held when it was to leave, and how much had come by then."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []

    def send(self, number: int, value: object) -> str:
        self.sent.append((number, sum(hostcupy.copied)))
        return digest_of(value)


def test_a_chunk_leaves_while_the_next_is_still_coming(cupy: None) -> None:
    layout, way = Layout.of({"w": np.zeros(3 * CHUNK_ITEMS + 5, np.float32)}), Noted()
    array = hostcupy.asarray(np.arange(layout.size, dtype=np.float32))
    GradientUpload(Runs(layout), None, way, checks_finite=True).add(
        [Gradients(0, 1, device_base.PinnedStaging(layout.size, CHUNK_ITEMS).bring(array, 0))]
    )
    assert way.sent == [(0, CHUNK_ITEMS), (1, 2 * CHUNK_ITEMS), (2, 3 * CHUNK_ITEMS), (3, 3 * CHUNK_ITEMS + 5)]


@pytest.mark.parametrize(
    ("transport", "gradient_format"),
    [("redis", "fp32"), ("shm", "int8"), *slowly([("shm", "fp32"), ("redis", "topk:0.1")])],
)
def test_gradients_on_a_device_count_as_those_in_host_memory(
    store: Store, cupy: None, transport: str, gradient_format: str
) -> None:
    """Several rounds, for host memory is written again; some arrays on a device, some not, some not contiguous; one is
    put as soon as its layer is done."""
    ended, sent = {}, {}
    for where in ("host", "device"):
        job = store.create_job(
            *(where, large_model()),
            optimizer=SGD(lr=0.1, momentum=0.9),
            transport=transport,
            gradient_format=gradient_format,
            workers=2,
        )

        def step(session: kvps.Session, params: Params, round_: int, where: str = where) -> dict[str, object]:
            grads = (large_model if round_ % 2 else tiny)(10 * session.rank + round_)
            if where == "host":
                return grads
            session.put("V", hostcupy.asarray(grads.pop("V")))
            turned = hostcupy.ndarray(np.asfortranarray(grads["W"]))
            return on(grads) | {"W": turned, "b": grads["b"]}

        with aggregating(job):
            work(job, 3, step, 2)
            await_version(job, 3)
        ended[where] = job.snapshot()
        sent[where] = contributed(job)
        assert check_chain(job) == 3
    assert sent["host"] == sent["device"]
    for name, array in ended["host"][1].items():
        np.testing.assert_array_equal(array, ended["device"][1][name])


@pytest.mark.parametrize("gradient_format", ["bf16", "int8", "topk:0.1"])
def test_only_what_is_sent_comes_from_the_device(store: Store, cupy: None, gradient_format: str) -> None:
    job = store.create_job("job", large_model(), optimizer=SGD(lr=1.0), gradient_format=gradient_format)
    grads = on(large_model(1))
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.push(grads)
        assert sum(hostcupy.copied) == sum(chunk_sizes(job.layout, format_of(gradient_format)))


@pytest.mark.parametrize("gradient_format", [*slowly(["bf16", "topk:0.1"]), "int8"])
def test_what_was_left_out_goes_from_device_to_host_and_back(store: Store, cupy: None, gradient_format: str) -> None:
    """It is stored by who leaves; each incarnation finds it, wherever that computes, and goes on to the same bits. Of a
    parameter without a gradient nothing is sent, and what was left out waits."""
    ended = []
    settings = {"optimizer": SGD(lr=1.0), "gradient_format": gradient_format, "missing": "skip"}
    for name, places in (("stays", [dict, dict, dict]), ("moves", [on, dict, on])):
        job = store.create_job(name, large_model(), **settings)
        with aggregating(job):
            for life, place in enumerate(places):
                with job.join("w0") as session:
                    for round_ in range(2):
                        session.pull()
                        grads = tiny(2 * life + round_)
                        if round_:
                            grads.pop(next(iter(grads)))
                        session.push(place(grads))
                    await_version(job, 2 * life + 2)
                    session.leave(finished=False)
        ended.append((contributed(job), [array.tobytes() for array in job.snapshot()[1].values()]))
        assert check_chain(job) == 6
    assert ended[0] == ended[1]


def test_a_gradient_that_another_stream_still_computes(store: Store, cupy: None) -> None:
    job = store.create_job("job", {"w": np.zeros(1000, np.float32)}, optimizer=SGD(lr=1.0))
    grad = np.arange(1000, dtype=np.float32)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        with hostcupy.computing(grad) as late:
            assert np.isnan(late.values).all(), "not computed yet"
            session.push({"w": late})
        np.testing.assert_array_equal(session.pull()["w"], -grad)


class Elsewhere:
    """Another library's array on a device."""

    dtype, shape = "float32", (3,)
    __cuda_array_interface__ = property(lambda self: {"version": 2})

    def __init__(self) -> None:
        self.on_host = np.arange(3, dtype=np.float32)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self) -> None:
        raise AssertionError("hostcupy takes what is on the host")


class Tensor:
    """As PyTorch's that requires a gradient: it refuses even to say where it is."""

    dtype, shape = "torch.float32", (3,)

    @property
    def __cuda_array_interface__(self) -> object:
        raise RuntimeError("Use var.detach()")

    def detach(self) -> TensorDetached:
        return TensorDetached()


class TensorDetached(Elsewhere):
    def detach(self) -> TensorDetached:
        return self

    def cpu(self) -> np.ndarray:
        return self.on_host


@pytest.mark.parametrize(("kind", "here"), [(Elsewhere, True), (Tensor, True), (Tensor, False)])
def test_arrays_of_other_libraries_come_by_dlpack_and_a_tensor_needs_no_cupy(
    store: Store, cupy: None, monkeypatch: pytest.MonkeyPatch, kind: type, here: bool
) -> None:
    if not here:
        monkeypatch.setitem(sys.modules, "cupy", None)
    job = store.create_job("job", {"w": np.zeros(3, np.float32)}, optimizer=SGD(lr=1.0))
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.push({"w": kind()})
        np.testing.assert_array_equal(session.pull()["w"], [0, -1, -2])
    assert bool(hostcupy.copied) == here


@pytest.mark.parametrize("gradient_format", ["fp32", "bf16"])
def test_nan_on_a_device_is_refused_and_the_next_push_counts(store: Store, cupy: None, gradient_format: str) -> None:
    """It is found in the last chunk, when others have left, and what came of it lies where the next one comes."""
    job = store.create_job("job", large_model(), optimizer=SGD(lr=1.0), gradient_format=gradient_format)
    bad = large_model(1)
    bad["V"][-1, -1] = np.nan
    with aggregating(job), job.join("w0") as session:
        session.pull()
        with pytest.raises(kvps.NotFinite, match="'V'"):
            session.push(on(bad))
        assert session.push(on(large_model(2))) == 1
        after = session.pull()
    if gradient_format == "fp32":
        for name, array in after.items():
            np.testing.assert_array_equal(array, large_model()[name] - large_model(2)[name])


@pytest.mark.parametrize("gradient_format", ["fp32", "bf16"])
def test_a_device_that_fails_is_said_in_one_line(store: Store, cupy: None, gradient_format: str) -> None:
    """Nothing of it had counted, or left: another gradient may be pushed instead."""
    job = store.create_job("job", large_model(), optimizer=SGD(lr=1.0), gradient_format=gradient_format)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        hostcupy.failing.append("cudaErrorIllegalAddress: an illegal memory access was encountered")
        with pytest.raises(kvps.DeviceFailed, match=r"^the CUDA device failed: cudaErrorIllegalAddress: .*"):
            session.push(on(large_model(1)))
        assert session.push(on(large_model(2))) == 1
        session.leave(finished=False)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        assert session.push(on(large_model(1))) == 2


def test_who_leaves_a_device_that_has_failed_leaves(store: Store, cupy: None) -> None:
    """Without what was left out there: the others must not wait for it."""
    job = store.create_job("job", large_model(), optimizer=SGD(lr=1.0), gradient_format="bf16")
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.push(on(large_model(1)))
        await_version(job, 1)
        hostcupy.failing.append("cudaErrorLaunchFailure")
        session.leave(finished=False)
        assert not hostcupy.failing
        assert (job.state().members["w0"].state, job.state().members["w0"].residual) == ("gone", "")


def test_a_device_without_room_fails_a_pull_and_no_join(
    store: Store, cupy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has joined is waited for, so that it must be there to leave."""

    def full(*_: object) -> None:
        raise MemoryError("Out of memory allocating 4 bytes")

    job = store.create_job("job", large_model(), optimizer=SGD(lr=1.0))
    with job.join("w0", device=Cuda(hostcupy, 0)) as session:
        with monkeypatch.context() as patch:
            patch.setattr(hostcupy, "empty", full)
            with pytest.raises(kvps.DeviceFailed, match="the CUDA device failed: Out of memory"):
                session.pull()
        for name, array in session.pull().items():
            np.testing.assert_array_equal(array.get(), large_model()[name])
        session.leave(finished=False)


def test_a_job_begins_with_parameters_on_a_device(store: Store, cupy: None) -> None:
    job = store.create_job("job", on(model()))
    for name, array in job.snapshot()[1].items():
        np.testing.assert_array_equal(array, model()[name])


# -- in ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [False, True])
def test_weights_for_a_named_device_come_into_page_locked_memory(store: Store, cupy: None, prefetch: bool) -> None:
    job = store.create_job("job", large_model(), optimizer=SGD(lr=1.0), staleness=1, transport="redis")
    with aggregating(job), job.join("w0", device="cuda:0", prefetch=prefetch) as session:
        for round_ in range(3):
            for array in session.pull().values():
                root = array
                while isinstance(root.base, np.ndarray):
                    root = root.base
                assert isinstance(root.base, memoryview), "hostcupy's page-locked memory"
            session.push(large_model(round_))


@pytest.mark.parametrize(
    ("settings", "parts"),
    [({"transport": "redis"}, 3), ({"transport": "redis", "weight_format": "bf16"}, 3), ({"transport": "shm"}, 1)],
    ids=str,
)
def test_weights_arrive_on_the_device(store: Store, cupy: None, settings: dict[str, str], parts: int) -> None:
    """Part by part as they are received, and not before what is computed on the last ones has been computed."""
    weights = {name: np.round(4 * array) for name, array in large_model().items()}  # bf16 says them exactly
    job = store.create_job("job", weights, optimizer=SGD(lr=1.0), **settings)
    used: list[np.ndarray] = []
    with aggregating(job), job.join("w0", device=Cuda(hostcupy, 0)) as session:
        for round_ in range(3):
            hostcupy.uploads.clear()
            pulled = session.pull()
            assert (len(hostcupy.uploads), sum(hostcupy.uploads)) == (parts, job.layout.size)
            hostcupy.get_current_stream().queue(lambda flat=pulled["W"]: used.append(flat.values.copy()))
            for name, array in weights.items():
                np.testing.assert_array_equal(pulled[name].values, array - round_)
            session.push({name: np.ones_like(array) for name, array in weights.items()})
        session.pull()
    for round_, array in enumerate(used):
        np.testing.assert_array_equal(array, weights["W"] - round_)
    assert len(used) == 3


def test_a_view_has_the_same_bits_on_a_device(store: Store, cupy: None) -> None:
    """An aggregator with a device makes the view of one without, and a worker's device has what a CPU has."""
    views: dict[str, list[bytes]] = {}
    for name, device in {"cpu": device_base.CPU, "gpu": Cuda(hostcupy, 0)}.items():
        job = store.create_job(name, large_model(), workers=2, shards=2, weight_format="int8", transport="redis")
        there = job.join("w1", device=Cuda(hostcupy, 0))
        with aggregating(job, device=device), job.join("w0") as here, there:
            for round_ in range(4):
                view, uploaded = here.pull(), there.pull()
                for parameter, array in view.items():
                    np.testing.assert_array_equal(uploaded[parameter].values, array)
                views.setdefault(name, []).append(b"".join(array.tobytes() for array in view.values()))
                here.push(large_model(round_)), there.push(large_model(-round_ - 1 & 7))
    assert views["cpu"] == views["gpu"]


def test_weights_that_were_fetched_ahead_arrive_at_once(store: Store, cupy: None) -> None:
    job = store.create_job("job", large_model(), optimizer=SGD(lr=1.0), staleness=1, transport="redis")
    made = [large_model()]
    with aggregating(job), job.join("w0", device=Cuda(hostcupy, 0), prefetch=True) as session:
        for round_ in range(4):
            for name, array in session.pull().items():
                np.testing.assert_array_equal(array.values, made[session.version][name])
            session.push(large_model(round_))
            await_version(job, round_ + 1)
            made.append(job.snapshot()[1])


def test_a_version_that_goes_while_it_comes(store: Store, cupy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the one that came instead are on the device, and none of it."""
    both = {"workers": 2, "reduction": "sum"}
    job = store.create_job("job", large_model(), optimizer=SGD(lr=1.0), staleness=-1, transport="redis", **both)
    getting = Client.getting

    def gone(self: Client, items: object) -> Iterator[None]:
        monkeypatch.undo()
        monkeypatch.setitem(sys.modules, "cupy", hostcupy)
        stream = getting(self, items)
        yield next(stream)
        yield next(stream)
        other.pull()
        other.push(large_model(1))
        await_version(job, 1)
        raise ChunkGone("it took too long")

    with aggregating(job), job.join("w0", device=Cuda(hostcupy, 0)) as session, job.join("w1") as other:
        monkeypatch.setattr(Client, "getting", gone)
        pulled = session.pull()
        assert session.version == 1
        for name, array in pulled.items():
            np.testing.assert_array_equal(array.get(), large_model()[name] - large_model(1)[name])


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "cuda:fast", "my box"])
def test_a_device_is_but_a_name_where_cupy_is_not(store: Store, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    job = store.create_job("job", model())
    with job.join("w0", device=name) as session:
        for key, array in session.pull().items():
            np.testing.assert_array_equal(array, model()[key])
        assert job.state().members["w0"].worker == "w0"
        session.leave(finished=False)


# -- the aggregator ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer", [GROUPED, *(pytest.param(each, marks=pytest.mark.slow) for each in OPTIMIZERS)], ids=str
)
def test_a_twin_makes_what_a_part_makes(cupy: None, optimizer: kvps.Optimizer) -> None:
    config, layout = JobConfig(workers=2, optimizer=optimizer), Layout.of(large_model(), shards=2)
    parts = [ShardArrays(config, layout, 1), DeviceStep(config, layout, 1, Cuda(hostcupy, 0))]
    for part in parts:
        np.copyto(part.weights, any_floats(0, parts[0].size))
        part.loaded()
    for version in range(1, 4):
        plan = a_plan(version)
        if version == 2:  # no contribution has a gradient of one of the parameters
            lacking = tuple(c._replace(lacks="1") for c in plan.contributions)
            plan = dataclasses.replace(plan, contributions=lacking)
        for chunk in parts[0].chunks:
            grads = [any_floats(10 * version + i, chunk.stop - chunk.start) for i in range(2)]
            with np.errstate(over="ignore", under="ignore"):
                assert [part.step(plan, chunk, grads) for part in parts] == [True, True]
        made = [[bytes(memory) for c in part.chunks for memory in part.made(c).values()] for part in parts]
        assert made[0] == made[1]
        for part in parts:
            part.promote()
    counts = any(each.counts_steps for each in optimizer.variants)
    assert dict(parts[0].skipped) == dict(parts[1].skipped) == ({1: 1} if counts else {})


@pytest.mark.parametrize("transport", [*slowly(["redis"]), "shm"])
def test_an_aggregator_on_a_device_commits_the_same_bits(store: Store, cupy: None, transport: str) -> None:
    """It is taken over in the middle, by one that reads weights and state anew."""
    shards = 2 if transport == "redis" else 1
    config = {"optimizer": Adam(lr=0.1), "transport": transport, "shards": shards, "workers": 2}
    ended = []
    for name, devices in (("cpu", [device_base.CPU] * 2), ("gpu", [Cuda(hostcupy, 0), Cuda(hostcupy, 1)])):
        job = store.create_job(name, large_model(), **config)
        for half, found in enumerate(devices):
            with aggregating(job, device=found):
                work(job, 2, lambda s, params, r, half=half: large_model(7 * s.rank + 2 * half + r), 2)
                await_version(job, 2 * half + 2)
        assert check_chain(job) == 4
        ended.append(job.snapshot()[1])
    for name in ended[0]:
        np.testing.assert_array_equal(ended[0][name], ended[1][name])
