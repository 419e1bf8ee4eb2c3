"""Small neighbours of a layout, which are moved together: the same weights, however they are pushed."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from helpers.harness import aggregating
from helpers.waiting import eventually

import kvps
from kvps.arrays.layout import CHUNK_ITEMS, Layout
from kvps.arrays.pieces import Buffer
from kvps.arrays.runs import SMALL_ITEMS, Runs
from kvps.session.session import Session
from kvps.store import Store

PARAMS = {
    "a": np.zeros((2, 3), np.float32),
    "b": np.zeros((), np.float32),
    "large": np.zeros((3, SMALL_ITEMS), np.float32),
    "c": np.zeros(5, np.float32),
    "d": np.zeros((2, 1, 2), np.float32),
    "e": np.zeros(7, np.float32),
}
SETTINGS = {"workers": 1, "optimizer": kvps.SGD(lr=1.0), "worker_timeout_ms": 60_000}


def test_small_neighbours_are_one_run() -> None:
    layout = Layout.of(PARAMS | {"mean": Buffer(np.zeros(2, np.float32), "average")}, 2)
    runs = Runs(layout)
    assert runs.numbers == [range(2), range(2, 3), range(3, 6), range(6, 7)]
    assert runs.of == [0, 0, 1, 2, 2, 2, 3]
    assert [(p.name, p.start, p.stop) for p in runs.layout.parameters] == [
        ("a", 0, 7),
        ("large", 7, 7 + 3 * SMALL_ITEMS),
        ("c", 7 + 3 * SMALL_ITEMS, layout.size - 2),
        ("mean", layout.size - 2, layout.size),
    ]
    assert runs.layout.chunks == layout.chunks
    full = Layout.of({f"p{i}": np.zeros(SMALL_ITEMS, np.float32) for i in range(3 * CHUNK_ITEMS // SMALL_ITEMS)})
    assert [len(run) for run in Runs(full).numbers] == [CHUNK_ITEMS // SMALL_ITEMS] * 3, "no run exceeds a chunk"
    parts = full.in_parts({p.name: p.name for p in full.parameters})
    assert all(len(run) == 1 for run in Runs(parts).numbers)


def _gradient() -> dict[str, np.ndarray]:
    at, grads = 1, {}
    for name, array in PARAMS.items():
        grads[name] = np.arange(at, at + array.size, dtype=np.float32).reshape(array.shape)
        at += array.size
    return grads


def _pushed(session: Session, how: str) -> None:
    grads = _gradient()
    if how == "lent":
        lent = session.buffers()
        for name, array in lent.items():
            array[...] = grads[name]
        session.push(lent)
    elif how == "some lent":
        lent = session.buffers()
        lent["d"][...] = grads["d"]
        session.push(grads | {"d": lent["d"]})
    elif how == "put":
        for name in ("e", "large", "a", "d"):
            session.put(name, grads.pop(name))
        session.push(grads)
    else:
        session.push({name: np.array(array, order="F") for name, array in reversed(grads.items())})


@pytest.mark.parametrize("format", ["fp32", "bf16"])
@pytest.mark.parametrize("how", ["lent", "some lent", "put", "plain"])
def test_each_way_to_push_makes_the_same_weights(store: Store, transport: str, how: str, format: str) -> None:
    shards = 2 if transport == "redis" else 1
    job = store.create_job("job", PARAMS, transport=transport, gradient_format=format, shards=shards, **SETTINGS)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        _pushed(session, how)
        weights = session.pull()
        for name, grad in _gradient().items():
            np.testing.assert_allclose(weights[name], -grad, rtol=0 if format == "fp32" else 0.01, err_msg=name)
        assert all(not array.flags.writeable for array in weights.values())


def test_nan_in_a_small_array_is_named(store: Store) -> None:
    job = store.create_job("job", PARAMS, **SETTINGS)
    with job.join("w0") as session:
        session.pull()
        with pytest.raises(kvps.NotFinite, match="gradient 'd' holds NaN or Inf"):
            session.push(_gradient() | {"d": np.full((2, 1, 2), np.nan, np.float32)})
        assert session.push(_gradient()) == 1


def calls_of(action: Callable[[], object]) -> int:
    """How many functions of Python an action calls."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def test_many_small_arrays_cost_no_call_each(store: Store, transport: str) -> None:
    """A pull and a push of 2,000 arrays: less than one function of Python for each."""
    params = {f"p{i}": np.zeros((2, 3), np.float32) for i in range(2_000)}
    job = store.create_job("job", params, transport=transport, **SETTINGS)
    with aggregating(job), job.join("w0") as session:
        for round_ in range(3):
            assert eventually(lambda done=round_: job.state().version == done)
            counted = calls_of(session.pull), calls_of(lambda: session.push(params))
    assert max(counted) < len(params), counted
