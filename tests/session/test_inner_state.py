"""The state of an inner optimizer, stored while its worker is away, and read as bytes that anybody may have written."""

from __future__ import annotations

import contextlib
import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from helpers.harness import aggregating
from hypothesis import given
from hypothesis import strategies as st

import kvps
from kvps.arrays.layout import CHUNK_ITEMS
from kvps.session.inner_state import from_bytes, to_bytes
from kvps.store import Store

ONE = {"x": np.ones(5000, np.float32)}


def test_what_is_stored_is_read_back() -> None:
    state = {
        "step:x": np.array(7, np.int64),
        "m:x": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "lr": np.array(0.1, np.float64),
    }
    back = from_bytes(to_bytes(state), "the state")
    assert back.keys() == state.keys()
    for name, array in state.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(back[name], array)


def test_other_types_are_refused() -> None:
    with pytest.raises(kvps.UsageError, match="'x' is int8: give float32, float64 or int64"):
        to_bytes({"x": np.zeros(3, np.int8)})
    with pytest.raises(kvps.CorruptData, match="the state holds 'x' as int8"):
        from_bytes(safetensors.numpy.save({"x": np.zeros(3, np.int8)}), "the state")


@given(st.binary(max_size=200), st.integers(0, 120), st.integers(0, 255))
def test_bytes_that_nobody_wrote_are_one_error(noise: bytes, place: int, value: int) -> None:
    changed = bytearray(to_bytes({"m": np.ones(5, np.float32)}))
    changed[place % len(changed)] = value
    for data in (noise, bytes(changed), struct.pack("<Q", len(noise)) + noise):
        with contextlib.suppress(kvps.CorruptData):
            from_bytes(data, "the state")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_session_that_comes_back_has_the_state_that_it_left(store: Store, shards: int) -> None:
    """More than one chunk of it; passed on by who pushes nothing, and gone with the next push."""
    job = store.create_job("job", ONE, shards=shards, worker_timeout_ms=60_000)
    state = {"m": np.random.default_rng(0).random(2 * CHUNK_ITEMS + 7, np.float32), "step": np.array(3, np.int64)}
    with aggregating(job):
        session = job.join("w0")
        assert session.inherited_state() == {}
        session.pull()
        session.push(ONE)
        session.leave(finished=False, state=state)
        for _ in range(2):
            session = job.join("w0")
            for name, array in session.inherited_state().items():
                np.testing.assert_array_equal(array, state[name])
            assert len(session.inherited_state()) == 2
            session.leave(finished=False)
        session = job.join("w0")
        session.pull()
        session.push(ONE)
        session.leave(finished=False)
        session = job.join("w0")
        assert session.inherited_state() == {}
        session.leave(finished=True, state=state | {"flag": np.array(True)})  # it is not stored, and so not checked
        assert job.state().members["w0"].residual == "", "who has done all its rounds does not come back"
    store.remove_job("job")
    assert not list(store.client.scan("kvps:{job*"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("1-a:1:-:ab:999999999999", "must be a whole number from 0 to"),
        *(
            (name, "the name of a stored residual")
            for name in ("x", "a*:1:0", "1-a:x:0", "1-a:" + "9" * 5000 + ":0", "1-a:1:-:ab", "1-a:1:-:ab:-5")
        ),
        ("1-a:1:-:ab:7", "is not there"),
    ],
)
def test_a_name_that_another_program_wrote_is_refused_in_a_line(store: Store, name: str, words: str) -> None:
    job = store.create_job("job", ONE, worker_timeout_ms=60_000)
    job.join("w0").leave(finished=False)
    key, field = job.access.keys.workers, "w0"
    entry = json.loads(store.client.call("HGET", key, field))
    store.client.call("HSET", key, field, json.dumps(entry | {"residual": name}))
    with job.join("w0") as session:
        with pytest.raises(kvps.CorruptData, match=words) as caught:
            session.inherited_state()
        assert "\n" not in str(caught.value)
