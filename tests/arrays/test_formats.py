"""Each wire format alone: against a slow and plain definition, at its edges, and with what it leaves out fed back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import hostcupy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvps.arrays.formats import encoded, format_of, leave_out
from kvps.device.base import Exact
from kvps.errors import InvalidSetting

LOSSY = ["bf16", "fp16", "int8", "topk:0.01", "topk:1"]
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ARRAYS = hnp.arrays(np.float32, st.integers(1, 3000), elements=FINITE)


def through(name: str, values: np.ndarray) -> np.ndarray:
    format_, out = format_of(name), np.empty_like(values)
    data = np.empty(format_.nbytes(values.size), np.uint8)
    format_.encode(values, data)
    format_.decode(data, out)
    return out


def nearest_bf16(value: np.float32) -> float:
    """By definition: of the two neighbours that have a zero lower half the nearer, of equals the even one."""
    bits = int(np.float32(abs(value)).view(np.uint32))
    low = bits & 0xFFFF0000
    high = min(low + 0x10000, 0x7F7F0000)
    a, b = (float(np.uint32(x).view(np.float32)) for x in (low, high))
    x = abs(float(value))
    near = a if x - a < b - x or (x - a == b - x and (low >> 16) % 2 == 0) else b
    return float(np.copysign(near, value))


@settings(max_examples=60)
@given(ARRAYS)
def test_bf16_is_the_nearest(values: np.ndarray) -> None:
    assert through("bf16", values).tolist() == [nearest_bf16(v) for v in values]


@settings(max_examples=60)
@given(ARRAYS)
def test_fp16_is_the_nearest_and_saturates(values: np.ndarray) -> None:
    got = through("fp16", values)
    small = np.abs(values) < 65504
    assert np.array_equal(got[small], values[small].astype(np.float16).astype(np.float32))
    assert np.array_equal(got[~small], np.copysign(np.float32(65504), values[~small]))


@settings(max_examples=60)
@given(hnp.arrays(np.float32, st.integers(1, 3000), elements=st.floats(-1e6, 1e6, width=32)))
def test_int8_is_off_by_half_a_step_at_most(values: np.ndarray) -> None:
    got = through("int8", values)
    for i in range(0, values.size, 1024):
        block = values[i : i + 1024]
        step = np.abs(block).max() / 127
        assert np.abs(got[i : i + 1024] - block).max() <= step * 0.5001 + 1e-37


@settings(max_examples=60)
@given(ARRAYS, st.sampled_from([0.01, 0.3, 1.0]))
def test_topk_keeps_the_largest(values: np.ndarray, part: float) -> None:
    got = through(f"topk:{part}", values)
    k = int(np.ceil(part * values.size))
    kept = np.sort(np.abs(got))[::-1][:k]
    assert np.array_equal(kept, np.sort(np.abs(values))[::-1][:k])
    assert np.isin(got, np.append(values, 0)).all()


@settings(max_examples=60)
@given(hnp.arrays(np.float32, st.integers(1, 3000), elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0])))
def test_topk_takes_the_first_of_equals(values: np.ndarray) -> None:
    """np.argpartition takes others with AVX2 than without: a run of it could be proved on its own kind only."""
    k = int(np.ceil(0.3 * values.size))
    data = encoded(format_of("topk:0.3"), values)
    places = np.argsort(-np.abs(values), kind="stable")[:k]
    assert data[: 4 * k].view("<i4").tolist() == np.sort(places).tolist()


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=30)
@given(values=ARRAYS)
def test_what_was_finite_stays_so(name: str, values: np.ndarray) -> None:
    assert np.isfinite(through(name, values)).all()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 1 << 14, (1 << 14) + 1, 262_144])
def test_every_length_comes_back(name: str, size: int) -> None:
    values = np.random.default_rng(size).normal(size=size).astype(np.float32)
    got = through(name, values)
    if name != "topk:0.01":
        assert np.abs(got - values).max() < 0.05
    again = through(name, got)
    if name != "int8":  # whose scale is made anew of what is left
        assert np.array_equal(again, got), "what it gives it can say exactly"


def test_how_many_bytes_are_sent() -> None:
    lengths = {name: format_of(name).nbytes(300_000) for name in ("fp32", "bf16", "fp16", "int8", "topk:0.25")}
    halves = dict.fromkeys(("bf16", "fp16", "topk:0.25"), 600_000)
    assert lengths == {"fp32": 1_200_000, "int8": 300_000 + 4 * 293} | halves


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_left_out_comes_with_the_next(name: str) -> None:
    """Error feedback: the sum of what was sent differs from the sum of what was meant by one residual, not by many."""
    rng, format_ = np.random.default_rng(1), format_of(name)
    residual, scratch = np.zeros(5000, np.float32), np.empty(5000, np.float32)
    data = np.empty(format_.nbytes(5000), np.uint8)
    meant, sent = np.zeros(5000), np.zeros(5000)
    for _ in range(400):
        gradient = rng.normal(size=5000).astype(np.float32) * np.float32(1e-3)
        residual += gradient
        meant += gradient
        format_.encode(residual, data)
        leave_out(format_, residual, data, scratch)
        sent += scratch
    assert np.abs(meant - sent - residual).max() < 1e-5
    if name != "topk:0.01":
        assert np.abs(residual).max() < 1e-4
    else:
        assert np.abs(residual).max() < np.abs(meant).max() + 1e-2


@st.composite
def any_bits(draw: st.DrawFn) -> np.ndarray:
    """Finite float32 of random bits; some are chosen by Hypothesis, among them both zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.integers(0, 2**32, draw(st.integers(1, 3000)), np.uint32).view(np.float32)
    values[~np.isfinite(values)] = -0.0
    chosen = draw(st.lists(FINITE | st.sampled_from([0.0, -0.0]), max_size=min(40, values.size)))
    values[: len(chosen)] = chosen
    rng.shuffle(values)
    return values


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("xp", [np, Exact(hostcupy)], ids=["numpy", "cupy"])
@settings(max_examples=40)
@given(values=any_bits())
def test_the_same_bits_where_arrays_are_on_a_device(name: str, xp: Any, values: np.ndarray) -> None:
    """What is decoded too, to the sign of a zero: the residual is made of it."""
    format_, out = format_of(name), np.empty_like(values)
    data = encoded(format_, values)
    format_.decode(data, out)
    made = format_.encode_with(xp, xp.asarray(values))
    there = [array if xp is np else array.get() for array in made]
    assert [array.tobytes() for array in there] == [data.tobytes(), out.tobytes()]


@pytest.mark.parametrize("name", ["fp64", "topk", "topk:0", "topk:1.5", "topk:nan", "topk:x", "int4", ""])
def test_unknown_names(name: str) -> None:
    with pytest.raises(InvalidSetting, match="gradient_format must be one of fp32"):
        format_of(name)
