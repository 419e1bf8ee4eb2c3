"""Reductions of contributions, held against their formulas, and the same bits on every device."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers import hostcupy
from helpers.harness import any_floats
from kvps_aggregator.step.reduce import reduce, reduce_plan

import kvps
from kvps.device.base import Exact
from kvps.optim import reductions
from kvps.protocol.plan import Contribution, Plan
from kvps.store import Store

KINDS = ["mean", "sum", "weighted", "median", "trimmed:0.1", "trimmed:0.34", "trimmed:.49"]
ITEMS = 1001


def _reduced(kind: str, rows: np.ndarray, xp: object = np) -> np.ndarray:
    out = np.full(rows.shape[1], np.nan, np.float32)
    weights = list(range(1, len(rows) + 1))
    square_sum = reduce(reductions.parse(kind), rows, weights, max(1, len(rows)), out)
    assert square_sum == pytest.approx(float(np.sum(np.square(out, dtype=np.float64))), rel=1e-4)
    return out


@pytest.mark.parametrize("count", [1, 2, 3, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_each_reduction_is_its_formula(kind: str, count: int) -> None:
    rows = np.random.default_rng(count).standard_normal((count, ITEMS), np.float32)
    before, ordered = rows.copy(), np.sort(rows.astype(np.float64), axis=0)
    if kind.startswith("trimmed"):
        cut = int(reductions.parse(kind).part * count)
        want = ordered[cut : count - cut].mean(axis=0)
    else:
        weights = np.arange(1.0, count + 1)
        plain = rows.astype(np.float64)
        want = {
            "mean": plain.mean(axis=0),
            "sum": plain.sum(axis=0),
            "weighted": weights @ plain / weights.sum(),
            "median": np.median(plain, axis=0),
        }[kind]
    np.testing.assert_allclose(_reduced(kind, rows), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(rows, before, "contributions are only read")


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_gives_the_same_bits(kind: str) -> None:
    """Also for subnormal numbers and zeros of both signs."""
    rows = np.stack([any_floats(seed, ITEMS) for seed in range(5)])
    rows[:, :7] = np.float32([[0.0], [-0.0], [1e-45], [-1e-45], [-0.0]])
    there = [hostcupy.asarray(row) for row in rows]
    out = hostcupy.empty(ITEMS, np.float32)
    square_sum = reduce(reductions.parse(kind), there, [1, 2, 3, 4, 5], 5, out, Exact(hostcupy))
    hostcupy.get_current_stream().synchronize()
    assert out.values.tobytes() == _reduced(kind, rows).tobytes()
    assert square_sum == pytest.approx(float(np.sum(np.square(out.values, dtype=np.float64))), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_cutting_a_shard_changes_no_bit(kind: str) -> None:
    rows = np.stack([any_floats(seed, ITEMS) for seed in range(4)])
    parts = [_reduced(kind, rows[:, low:high]) for low, high in [(0, 1), (1, 500), (500, ITEMS)]]
    assert np.concatenate(parts).tobytes() == _reduced(kind, rows).tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(kind: str, bad: float) -> None:
    """By the median too, which would not show it."""
    rows = np.ones((3, ITEMS), np.float32)
    rows[1, 17] = bad
    assert math.isnan(reduce(reductions.parse(kind), rows, [1, 1, 1], 3, np.empty(ITEMS, np.float32)))
    there, exact = [hostcupy.asarray(row) for row in rows], Exact(hostcupy)
    assert math.isnan(reduce(reductions.parse(kind), there, [1, 1, 1], 3, hostcupy.empty(ITEMS, np.float32), exact))


@pytest.mark.parametrize("kind", ["sum", "median"])
def test_a_result_that_overflows_is_seen_though_each_contribution_is_finite(kind: str) -> None:
    """The median of an even number is the mean of the two in the middle, and their sum may be too large."""
    rows = np.full((2, ITEMS), 3e38, np.float32)
    with np.errstate(over="ignore"):
        assert math.isnan(reduce(reductions.parse(kind), rows, [1, 1], 2, np.empty(ITEMS, np.float32)))


@pytest.mark.parametrize("kind", KINDS)
def test_without_contributions_the_gradient_is_zeros(kind: str) -> None:
    assert not _reduced(kind, np.empty((0, 5), np.float32)).any()


def test_weights_are_for_jobs_that_take_them(store: Store) -> None:
    params = {"x": np.zeros(2, np.float32)}
    with store.create_job("plain", params).join("w0") as session:
        session.pull()
        with pytest.raises(kvps.InvalidSetting, match="this job's is mean: leave it out, or create the job with"):
            session.push(params, weight=3)
        assert session.push(params) == 1
    job = store.create_job("weighted", params, reduction="weighted")
    with job.join("w0") as session:
        session.pull()
        for weight in (0, -1, 2**31 + 1, 1.5, True, "3", float("nan")):
            with pytest.raises(kvps.InvalidSetting, match="weight must be a whole number from 1 to 2147483648, not"):
                session.push(params, weight=weight)
        assert session.push(params, weight=np.int64(2**31)) == 1
        assert [c.weight for c in job.access.reader.inbox()] == [2**31]


def _plan_on(*bases: int) -> Plan:
    """A plan of version 6, of contributions computed on these versions; one more counts as zeros."""
    counted = [Contribution(f"w{i}", "1-0", 1, 1, base, 1, "", None) for i, base in enumerate(bases)]
    return Plan(1, 6, "", "", 4, 5, (*counted, Contribution("w9", "1-0", 1, 1, 0, 0, "-", None)), ())


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [("mean", "inverse"), ("sum", "inverse-sqrt"), ("weighted", "none"), ("median", "inverse"), ("mean", "none")],
)
def test_stale_contributions_count_for_less(kind: str, scaling: str) -> None:
    rows = np.random.default_rng(3).standard_normal((3, ITEMS), np.float32)
    config = kvps.JobConfig(workers=4, staleness=-1, reduction=kind, staleness_scaling=scaling)
    out = np.empty(ITEMS, np.float32)
    plan = _plan_on(5, 4, 1)
    assert reduce_plan(config, plan, plan.counting, iter(rows), out, out[ITEMS:], "") > 0
    stale = np.array([0, 1, 4])
    factor = {"none": np.ones(3), "inverse": 1 / (1 + stale), "inverse-sqrt": (1 + stale) ** -0.5}[scaling]
    scaled = rows * factor.astype(np.float32)[:, None]
    want = {"mean": scaled.sum(0) / 4, "sum": scaled.sum(0), "weighted": scaled.mean(0), "median": np.median(scaled, 0)}
    np.testing.assert_allclose(out, want[kind], rtol=1e-5, atol=1e-6)


def test_what_overflows_leaves_the_other_items_of_a_users_reduction_alone(own_rules: Path) -> None:
    """A replay reduces all chunks at once, an aggregator one by one: an item may not depend on its neighbours."""
    rows = np.random.default_rng(0).standard_normal((3, 10), np.float32)
    rows[1, 4], rows[2, 7] = np.inf, np.nan
    mine, outs = reductions.parse("own_rules:median"), []
    for cuts in ([0, 10], [0, 4, 5, 10]):
        out = np.empty(10, np.float32)
        sums = [
            reduce(mine, [row[low:high] for row in rows], [1, 1, 1], 3, out[low:high]) for low, high in pairwise(cuts)
        ]
        assert any(map(math.isnan, sums))
        outs.append(out.tobytes())
    there, exact = hostcupy.empty(10, np.float32), Exact(hostcupy)
    assert math.isnan(reduce(mine, [hostcupy.asarray(row) for row in rows], [1, 1, 1], 3, there, exact))
    hostcupy.get_current_stream().synchronize()
    assert outs[0] == outs[1] == there.values.tobytes()
    np.testing.assert_array_equal(np.frombuffer(outs[0], np.float32)[:4], np.median(rows[:, :4], axis=0))
