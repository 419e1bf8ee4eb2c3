"""The rules that PyTorch does not have, held against their papers; tests/torch/test_optimizer.py has the others."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from helpers.optimizers import OPTIMIZERS
from hypothesis import given, settings
from hypothesis import strategies as st

import kvps
from kvps import optim
from kvps.arrays.digest import chunked, weights_sha256
from kvps.arrays.layout import CHUNK_ITEMS, Layout

LONG = 200
DELAYED = [
    kvps.DelayedNesterov(lr=0.1, every=1),
    kvps.DelayedNesterov(lr=0.1, every=4),
    kvps.DelayedNesterov(lr=0.1, momentum=0.5, every=7, c=0.1),
    kvps.DelayedNesterov(lr=0.1, every=5, c=0.2, maximize=True),
]


@pytest.mark.parametrize("optimizer", DELAYED, ids=str)
def test_delayed_nesterov_is_algorithm_3_of_its_paper_bit_for_bit(optimizer: kvps.DelayedNesterov) -> None:
    """200 steps of a loop as the paper writes it, where t counts from 0, in float32."""
    one = np.float32
    lr, beta, n, c = one(0.1), optimizer.momentum, optimizer.every, optimizer.c
    rng = np.random.default_rng(1)
    theta = weights = rng.normal(size=50).astype(np.float32)
    momentum, delta = np.zeros(50, np.float32), np.zeros(50, np.float32)
    state = {slot: np.zeros(50, np.float32) for slot in optimizer.slots}
    for t in range(LONG):
        g = rng.normal(size=50).astype(np.float32)
        weights, state = _stepped(optimizer, t + 1, weights, g.copy(), state)
        g = -g if optimizer.maximize else g
        delta = delta + g
        if (t + 1) % n == 0:
            momentum = one(beta) * momentum + delta / one(n)
            theta = theta - (g / one(n) + one((1 - c * n + c) * beta) * momentum) * lr
            delta = np.zeros_like(delta)
        else:
            theta = theta - (g / one(n) + one(c * beta) * momentum) * lr
        assert weights.tobytes() == theta.tobytes(), t


@pytest.mark.parametrize(
    "optimizer", [kvps.Yogi(weight_decay=0.01), kvps.Yogi(0.1, beta1=0.5, beta2=0.9, eps=1e-8)], ids=str
)
def test_yogi_is_algorithm_2_of_its_paper_bit_for_bit(optimizer: kvps.Yogi) -> None:
    """200 steps of a loop as the paper writes it, in float32; some gradients are 0, and one is repeated."""
    one = np.float32
    b1, b2, eps, lr = one(1 - optimizer.beta1), one(1 - optimizer.beta2), one(optimizer.eps), one(optimizer.lr)
    rng = np.random.default_rng(1)
    x = weights = rng.normal(size=50).astype(np.float32)
    m, v = np.zeros(50, np.float32), np.zeros(50, np.float32)
    state = {slot: np.zeros(50, np.float32) for slot in optimizer.slots}
    for step in range(1, LONG + 1):
        g = rng.normal(size=50).astype(np.float32) * one(10.0 ** rng.integers(-4, 5))
        g[:5], g[5:10] = 0, 3
        weights, state = _stepped(optimizer, step, weights, g.copy(), state)
        g = g + x * one(optimizer.weight_decay)
        m = m + b1 * (g - m) if b1 < 0.5 else g - (one(1) - b1) * (g - m)  # the same, from the nearer end
        v = v - b2 * np.sign(v - g * g) * (g * g)
        x = x - m / (np.sqrt(v) + eps) * lr
        assert weights.tobytes() == x.tobytes(), step
    assert (v >= 0).all()


@pytest.mark.parametrize("optimizer", [kvps.Lion(), kvps.Lion(0.01, beta1=0.5, weight_decay=0.1)], ids=str)
def test_lion_is_algorithm_2_of_its_paper_bit_for_bit(optimizer: kvps.Lion) -> None:
    """200 steps of a loop as the paper writes it, in float32; some gradients are 0."""
    one = np.float32
    rng = np.random.default_rng(1)
    x = weights = rng.normal(size=50).astype(np.float32)
    m, state = np.zeros(50, np.float32), {"m": np.zeros(50, np.float32)}
    for step in range(1, LONG + 1):
        g = rng.normal(size=50).astype(np.float32)
        g[:5] = 0
        weights, state = _stepped(optimizer, step, weights, g.copy(), state)
        change = np.sign(m * one(optimizer.beta1) + g * one(1 - optimizer.beta1)) * one(optimizer.lr)
        x = x * one(1 - optimizer.lr * optimizer.weight_decay) - change
        m = m * one(optimizer.beta2) + g * one(1 - optimizer.beta2)
        assert weights.tobytes() == x.tobytes(), step


def test_a_long_gradient_makes_no_nan_in_yogi() -> None:
    yogi = kvps.Yogi(0.1, beta2=0.0)
    weights, state = np.zeros(3, np.float32), {slot: np.zeros(3, np.float32) for slot in yogi.slots}
    for step, g in enumerate([1e20, 3e38, -3e38, 0, 1e-30, 1e20], 1):
        with np.errstate(over="ignore", under="ignore", invalid="raise", divide="raise"):
            weights, state = _stepped(yogi, step, weights, np.float32([g, g, -g]), state)
        assert np.isfinite(weights).all()
        assert np.isfinite(state["v"]).all()


def _stepped(
    optimizer: optim.Optimizer, step: int, weights: np.ndarray, gradient: np.ndarray, state: dict[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the weights and the state after a step. The present weights are only read."""
    weights = weights.view()
    weights.flags.writeable = False
    out, state_out = np.empty_like(weights), {slot: np.empty_like(array) for slot, array in state.items()}
    optimizer.update(weights, gradient, state, out, state_out, optimizer.lr_at(0), step)
    return out, state_out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("delayed-nesterov", "delayed-nesterov needs every"),
        ("delayed-nesterov:every=true", "delayed-nesterov: every must be a whole number from 1 to 1000000, not True"),
        ("delayed-nesterov:every=2,c=0.6", "delayed-nesterov: c must be from 0 to 1/every, it is 0.6"),
        ("sgd:momentum=1", "sgd: momentum must be in [0, 1), it is 1"),
        ("adam:beta2=-0.1", "adam: beta2 must be in [0, 1), it is -0.1"),
        ("adagrad:eps=0", "adagrad: eps must be above 0, it is 0"),
        ("adam:weight_decay=-1", "adam: weight_decay must not be negative, it is -1"),
        ("adadelta:rho=2", "adadelta: rho must be in [0, 1], it is 2"),
        ("sgd:nesterov=true", "sgd: nesterov needs a momentum above 0"),
    ],
)
def test_a_number_out_of_its_range_is_one_line(text: str, words: str) -> None:
    with pytest.raises(kvps.InvalidSetting) as caught:
        optim.parse(text)
    assert str(caught.value) == words


def test_a_constant_gradient_has_no_variance_and_makes_no_nan() -> None:
    """The mean of its squares is the square of its mean, but for rounding, which may go either way."""
    rmsprop = kvps.RMSprop(0.01, alpha=0.5, centered=True)
    gradient = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    weights, state = np.zeros(1000, np.float32), {slot: np.zeros(1000, np.float32) for slot in rmsprop.slots}
    for step in range(1, 60):
        weights, state = _stepped(rmsprop, step, weights, gradient.copy(), state)
    assert (state["square"] < state["mean"] * state["mean"]).any()
    assert np.isfinite(weights).all()


def test_a_zero_gradient_leaves_lion_where_it_is() -> None:
    """Its sign is 0. The smallest number has a sign, on every device."""
    smallest = np.finfo(np.float32).smallest_subnormal
    gradient = np.array([0.0, -0.0, smallest, -smallest, 1e38, -1e-38], np.float32)
    zeros = np.zeros(6, np.float32)
    weights, _ = _stepped(kvps.Lion(1.0, beta1=0.0), 1, zeros, gradient, {"m": zeros})
    np.testing.assert_array_equal(weights, [0, 0, -1, 1, -1, 1])


def test_each_rule_is_tried() -> None:
    assert {type(each) for each in OPTIMIZERS} == set(optim.OPTIMIZERS.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_cutting_a_shard_changes_no_bit(optimizer: optim.Optimizer) -> None:
    rng = np.random.default_rng(1)
    weights, gradient = rng.normal(size=(2, 1001)).astype(np.float32)
    state = {slot: np.abs(rng.normal(size=1001)).astype(np.float32) for slot in optimizer.slots}

    def stepped(cuts: list[int]) -> bytes:
        out, grad = np.empty_like(weights), gradient.copy()
        state_out = {slot: np.empty_like(array) for slot, array in state.items()}
        for low, high in zip([0, *cuts], [*cuts, 1001], strict=True):
            old, new = ({k: v[low:high] for k, v in s.items()} for s in (state, state_out))
            optimizer.update(weights[low:high], grad[low:high], old, out[low:high], new, 0.1, 3)
        return out.tobytes() + b"".join(v.tobytes() for v in state_out.values())

    assert stepped([]) == stepped([1, 7, 500, 999])


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 3 * CHUNK_ITEMS // 2), min_size=1, max_size=6), shards=st.integers(1, 9))
def test_chunks_tile_the_parameters_in_order(sizes: list[int], shards: int) -> None:
    rng = np.random.default_rng(sum(sizes))
    params = {f"p{i}": rng.integers(0, 99, n).astype(np.float32) for i, n in enumerate(sizes)}
    if sum(sizes) < shards:
        with pytest.raises(kvps.InvalidSetting):
            Layout.of(params, shards)
        return
    layout = Layout.of(params, shards)
    assert Layout.from_json(layout.to_json()) == layout
    flat = np.concatenate(list(params.values()))
    parts = chunked(layout, layout.hosted(params, "parameter"))
    assert len(parts) == shards
    assert all(sum(p.nbytes for p in chunk) <= 1 << 20 for shard in parts for chunk in shard)
    assert b"".join(piece for shard in parts for chunk in shard for piece in chunk) == flat.tobytes()
    ends = [(c.start, c.stop) for shard in layout.chunks for c in shard]
    assert ends[0][0] == 0
    assert ends[-1][1] == layout.size
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    for name, value in layout.views(flat).items():
        np.testing.assert_array_equal(value, params[name])
        assert not value.flags.writeable
    assert weights_sha256(flat) == weights_sha256(flat.copy())


def test_settings_say_what_was_chosen_in_one_line() -> None:
    step = kvps.SGD(lr=kvps.schedules.StepLR(0.1, every=100), momentum=0.9, nesterov=True)
    assert str(step) == "sgd(lr=step(initial=0.1, every=100), momentum=0.9, nesterov=True)"
    assert str(kvps.Adam(lr=kvps.schedules.CosineAnnealingLR(0.1, over=10))) == "adam(lr=cosine(initial=0.1, over=10))"
    assert str(kvps.AdamW()) == "adamw(lr=0.001)"


def test_a_subclass_of_a_rule_does_not_take_its_name() -> None:
    class Mine(kvps.Adam):
        """Whose step nobody else has."""

    assert optim.OPTIMIZERS["adam"] is kvps.Adam
    assert type(optim.parse("adam")) is kvps.Adam
    assert Mine().kind == "adam"
