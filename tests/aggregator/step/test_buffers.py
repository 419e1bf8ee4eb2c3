"""Buffers of a version: the mean of the workers' own or those of the lowest rank, whatever the optimizer does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import hostcupy
from helpers.harness import aggregating, any_floats, gradient, work
from helpers.optimizers import OPTIMIZERS
from kvps_aggregator.step.device_step import DeviceStep
from kvps_aggregator.step.reduce import reduce_buffers
from kvps_aggregator.step.shard_arrays import ShardArrays

import kvps
from kvps.arrays.layout import CHUNK_ITEMS, Layout
from kvps.arrays.pieces import BUFFER_KINDS, Buffer
from kvps.config import JobConfig
from kvps.device.base import Cuda
from kvps.protocol.plan import Contribution, Plan
from kvps.store import Store

ITEMS = 1000
Params = dict[str, np.ndarray]


def mean_of(rows: list[np.ndarray], weights: list[int]) -> np.ndarray:
    """The mean as the page of `reduce_buffers` has it, in float32."""
    mean, total = rows[0], weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total += weight
        mean = mean + (row - mean) * np.float32(weight / total)
    return mean


def made_of(rows: list[np.ndarray], weights: list[int], kind: str) -> np.ndarray:
    out = np.empty(rows[0].size - 3, np.float32)
    rest = [row.tobytes() for row in reduce_buffers(iter(rows), weights, kind, out)]
    assert rest == [row[:3].tobytes() for row in rows]
    return out


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_each_is_its_formula(count: int) -> None:
    rng = np.random.default_rng(count)
    rows = list(rng.standard_normal((count, ITEMS + 3), np.float32))
    weights = rng.integers(1, 100, count).tolist()
    assert made_of(rows, weights, "rank0").tobytes() == rows[0][3:].tobytes()
    average = made_of(rows, weights, "average")
    np.testing.assert_array_equal(average, mean_of([row[3:] for row in rows], weights))
    exact = np.average(np.array(rows, np.float64), 0, weights)[3:]
    np.testing.assert_allclose(average, exact, rtol=0, atol=3e-7 * np.abs(rows).max())


@pytest.mark.parametrize("count", [2, 3, 7, 49])
def test_what_no_worker_changes_stays_and_no_variance_becomes_negative(count: int) -> None:
    """A sum that is divided again would not do: seven times a value, by seven, is another one now and then."""
    same = any_floats(1, ITEMS + 3)
    with np.errstate(under="ignore", over="ignore"):
        np.testing.assert_array_equal(made_of([same] * count, [5] * count, "average"), same[3:])
        rows = [np.abs(any_floats(seed, ITEMS + 3)) * (seed % 2) for seed in range(count)]
        assert (made_of(rows, list(range(1, count + 1)), "average") >= 0).all()


def model(kind: str) -> dict[str, Any]:
    """A model whose buffers begin within its second chunk and end in its third."""
    rng = np.random.default_rng(0)
    shapes = {"W": (CHUNK_ITEMS,), "b": (ITEMS,), "mean": (CHUNK_ITEMS,), "count": ()}
    arrays = {name: np.abs(np.asarray(rng.standard_normal(shape, np.float32))) for name, shape in shapes.items()}
    return arrays | {name: Buffer(arrays[name], kind) for name in ("mean", "count")}


def plain(arrays: dict[str, Any]) -> Params:
    return {name: value.value if isinstance(value, Buffer) else value for name, value in arrays.items()}


def a_plan(version: int, weights: list[int]) -> Plan:
    found = tuple(Contribution(f"w{i}", "1-0", 1, 1, 0, weight, "-", None) for i, weight in enumerate(weights))
    return Plan(version, version, "", "", len(weights), 0, found, ())


GROUPED = kvps.Adam(0.1, weight_decay=0.1, groups=(kvps.ParameterGroup("*", amsgrad=True),))


def parts_of(config: JobConfig, layout: Layout, arrays: Params) -> Iterator[ShardArrays]:
    for number in range(layout.shards):
        yield (part := ShardArrays(config, layout, number))
        np.copyto(part.weights, np.concatenate([a.reshape(-1) for a in arrays.values()])[part.low : part.high])


def stepped(parts: list[ShardArrays], plan: Plan, rows: list[np.ndarray], scale: float | None = None) -> np.ndarray:
    for part in parts:
        for chunk in part.chunks:
            of_chunk = [row[chunk.start : chunk.stop] for row in rows]
            if scale is None:
                assert part.step(plan, chunk, of_chunk)
                continue
            reduced = np.empty(chunk.stop - chunk.start, np.float32)
            assert not math.isnan(part.reduce(plan, chunk, of_chunk, reduced))
            part.apply_scaled(plan, chunk, reduced, np.float32(scale))
        part.promote()
    return np.concatenate([part.weights for part in parts])


@pytest.mark.parametrize(
    ("optimizer", "kind", "scale"),
    [*((optimizer, "average", 0.25) for optimizer in OPTIMIZERS), (GROUPED, "average", None), (GROUPED, "rank0", 0.25)],
    ids=str,
)
def test_no_optimizer_steps_them_and_they_change_no_step(
    optimizer: kvps.optim.Optimizer, kind: str, scale: float | None
) -> None:
    """Parameters end as without buffers. `scale` is that of a gradient that is clipped."""
    arrays = model(kind)
    layout = Layout.of(arrays, 3)
    trained = {name: value for name, value in arrays.items() if not isinstance(value, Buffer)}
    without = Layout.of(trained)
    parts = list(parts_of(JobConfig(optimizer=optimizer, shards=3), layout, plain(arrays)))
    others = list(parts_of(JobConfig(optimizer=optimizer), without, trained))
    for version in (1, 2):
        rows = [any_floats(10 * version + i, layout.size) for i in range(3)]
        weights = [1, 0, 1]  # the second counts as zeros, and is none of those that are reduced
        with np.errstate(over="ignore", under="ignore"):
            now = stepped(parts, a_plan(version, weights), rows[::2], scale)
            same = stepped(others, a_plan(version, weights), [row[: without.size] for row in rows[::2]], scale)
            want = rows[0] if kind == "rank0" else mean_of(rows[::2], [1, 1])
        assert now[: layout.buffer_start].tobytes() == same.tobytes()
        assert now[layout.buffer_start :].tobytes() == want[layout.buffer_start :].tobytes()
        for part in parts:
            for state in part.state.values():
                assert not state[max(layout.buffer_start - part.low, 0) :].any()
    before = now[layout.buffer_start :].tobytes()
    assert stepped(parts, a_plan(3, [0, 0]), [], scale)[layout.buffer_start :].tobytes() == before


@pytest.mark.parametrize("kind", BUFFER_KINDS)
def test_a_device_makes_the_same_bits(kind: str) -> None:
    arrays = model(kind)
    layout, config = Layout.of(arrays), JobConfig(optimizer=GROUPED)
    here, there = ShardArrays(config, layout, 0), DeviceStep(config, layout, 0, Cuda(hostcupy, 0))
    for part in (here, there):
        np.copyto(part.weights, any_floats(0, layout.size))
        part.loaded()
    for version, scale in ((1, None), (2, 0.5), (3, None)):
        rows = [any_floats(10 * version + i, layout.size) for i in range(3)] if version < 3 else []
        weights = [1, 1, 1] if version < 3 else [0]
        with np.errstate(over="ignore", under="ignore"):
            ends = [stepped([part], a_plan(version, weights), rows, scale) for part in (here, there)]
        assert ends[0].tobytes() == ends[1].tobytes()


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted", "median", "trimmed:0.3", "own_rules:median"])
def test_no_reduction_adds_them_up(reduction: str, own_rules: Path) -> None:
    arrays = model("average")
    layout, weights = Layout.of(arrays), [3, 1, 4]
    config = JobConfig(reduction=reduction, workers=3, staleness=-1, staleness_scaling="inverse")
    rows = [any_floats(i, layout.size) * np.float32(1e-9) for i in range(3)]
    now = stepped(list(parts_of(config, layout, plain(arrays))), a_plan(9, weights), rows)
    np.testing.assert_array_equal(now[layout.buffer_start :], mean_of(rows, weights)[layout.buffer_start :])


@pytest.mark.parametrize("kind", BUFFER_KINDS)
def test_norms_leave_them_out(store: Store, kind: str) -> None:
    """Those of rank 0 are large, and no gradient is clipped or rejected for that."""
    arrays = {"W": np.zeros(ITEMS, np.float32), "mean": Buffer(np.zeros(ITEMS, np.float32), kind)}
    own = [np.full(ITEMS, value, np.float32) for value in (1e6, 1, 2)]
    job = store.create_job(
        "job", arrays, workers=3, shards=3, reject_norm=2, optimizer=kvps.SGD(lr=1.0, clip_norm=10.0)
    )

    def step(session: kvps.Session, params: Params, round_: int) -> Params:
        return {"W": np.full(ITEMS, 0.01, np.float32), "mean": own[session.rank]}

    with aggregating(job, shards=[0, 2]), aggregating(job, shards=[1]):
        work(job, 2, step, workers=3)
        job.await_finished()
    weights = job.snapshot()[1]
    np.testing.assert_array_equal(weights["W"], np.full(ITEMS, np.float32(-0.02)))
    np.testing.assert_array_equal(weights["mean"], own[0] if kind == "rank0" else mean_of(own, [1, 1, 1]))


@pytest.mark.parametrize("kind", BUFFER_KINDS)
def test_stale_ones_take_the_place_of_those_before(store: Store, kind: str) -> None:
    """In ASP. Differences to what was pulled would add up: 10 - 9 - 9 is no variance."""
    variance = Buffer(np.full(4, 10, np.float32), kind)
    job = store.create_job("job", {"W": np.zeros(4, np.float32), "var": variance}, workers=2, staleness=-1)
    grads = {"W": np.ones(4, np.float32), "var": np.ones(4, np.float32)}
    with aggregating(job), job.join("w0") as first, job.join("w1") as second:
        first.pull()
        second.pull()
        first.push(grads)
        second.push(grads)
        first.leave()
        second.leave()
        job.await_finished()
        np.testing.assert_array_equal(job.snapshot()[1]["var"], grads["var"])


@pytest.mark.parametrize("word", ["bf16", "fp16", "int8", "topk:0.1"])
def test_a_format_that_rounds_is_refused(store: Store, word: str) -> None:
    for name in ("gradient_format", *(["weight_format"] if word != "fp16" else [])):
        said = f"^{name} {word} would round the buffers too, .*: choose fp32, or"
        with pytest.raises(kvps.InvalidSetting, match=said) as error:
            store.create_job("job", model("average"), **{name: word})
        assert "\n" not in str(error.value)
    assert store.jobs() == []


def test_a_group_that_names_a_buffer_is_refused(store: Store) -> None:
    groups = (kvps.ParameterGroup("mean", lr=0.5),)
    with pytest.raises(kvps.InvalidSetting, match="no parameter is called 'mean', which a parameter group names"):
        store.create_job("job", model("rank0"), optimizer=kvps.SGD(groups=groups))
    job = store.create_job("job", model("rank0"), optimizer=kvps.SGD(groups=(kvps.ParameterGroup("*", lr=0.5),)))
    assert job.layout.buffer_kind == "rank0"


def test_buffers_that_are_not_finite_are_refused(store: Store) -> None:
    arrays = model("average") | {"mask": Buffer(np.full(3, -np.inf, np.float32), "average")}
    with pytest.raises(kvps.NotFinite, match="buffer 'mask' holds NaN or Inf: mend it, register it with persistent="):
        store.create_job("job", arrays)
    job = store.create_job("job", model("average"), workers=1)
    with job.join("w0") as session:
        grads = gradient(session.pull(), 0, 0)
        with pytest.raises(kvps.NotFinite, match="buffer 'mean' holds NaN or Inf and was not sent"):
            session.push(grads | {"mean": np.full(CHUNK_ITEMS, np.nan, np.float32)})
        assert session.push(grads) == 1
