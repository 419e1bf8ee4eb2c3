"""The view alone: both sides hold the same bits, and what a difference leaves out comes with the next ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvps.arrays.formats import format_of
from kvps.arrays.weight_view import advance, follow, has_view

FORMATS = ["int8", "topk:0.1", "topk:1"]
SOME = hnp.arrays(np.float32, st.integers(1, 3000), elements=st.floats(-1e6, 1e6, width=32))


def advanced(name: str, weights: np.ndarray, view: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a difference, and the view after it."""
    format_, out = format_of(name), np.empty_like(view)
    sent = np.empty(format_.nbytes(view.size), np.uint8)
    advance(format_, weights, view, out, np.empty_like(view), sent)
    return sent, out


def followed(name: str, sent: np.ndarray, view: np.ndarray) -> np.ndarray:
    """Return the view of a worker that adds a difference in place."""
    out = view.copy()
    follow(format_of(name), sent, out, out, np.empty_like(out))
    return out


def test_what_is_precise_enough_needs_no_view() -> None:
    assert [has_view(format_of(name)) for name in ("fp32", "bf16", "fp16", *FORMATS)] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(SOME, st.integers(0, 9))
def test_a_worker_that_follows_holds_the_bits_of_the_aggregator(name: str, start: np.ndarray, seed: int) -> None:
    random = np.random.default_rng(seed)
    weights, here, there = start.copy(), start.copy(), start.copy()
    for _ in range(4):
        weights += random.normal(size=weights.size).astype(np.float32)
        sent, here = advanced(name, weights, here)
        there = followed(name, sent, there)
        assert there.tobytes() == here.tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_rest_are_reached(name: str) -> None:
    """What was left out comes with the next differences, although the weights change no more."""
    weights = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    view = np.zeros_like(weights)
    for _ in range(12):
        view = advanced(name, weights, view)[1]
    np.testing.assert_allclose(view, weights, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_are_not_finite_do_not_look_as_if_they_were(name: str) -> None:
    weights, view = np.ones(100, np.float32), np.zeros(100, np.float32)
    weights[7], weights[8] = np.nan, np.inf
    after = advanced(name, weights, view)[1]
    assert np.isnan(after[7])
    assert not np.isfinite(after[8]) or after[8] > 1e38
