"""What was acknowledged is what is committed, whoever still writes to the memory it was computed in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, await_version, check_chain, log_entries
from helpers.internals import lose_next_answer
from redis.exceptions import ConnectionError as RedisConnectionError

import kvps
from kvps.session.session import Session
from kvps.store import Store
from kvps.transport.redis import RedisUpload

SIZE = 300_000  # more than one chunk, and more than what leaves in one request with its push
SETTINGS: dict[str, Any] = {"optimizer": kvps.SGD(lr=1.0), "worker_timeout_ms": 60_000}
PARAMS = {"W": np.zeros((3, SIZE // 3), np.float32), "b": np.zeros(SIZE, np.float32)}
SMALL = {"W": np.zeros((3, 5), np.float32), "b": np.zeros(4, np.float32)}
Grads = dict[str, np.ndarray]


def _filled(session: Session, value: float) -> Grads:
    grads = session.buffers()
    for array in grads.values():
        array.fill(value)
    return grads


def _ones(params: Grads, value: float = 1) -> Grads:
    return {name: np.full_like(array, value) for name, array in params.items()}


def _weights(job: kvps.Job, version: int) -> set[float]:
    """All values of that version, once it is committed; none of its contributions was rejected."""
    await_version(job, version)
    assert not [fields["reason"] for _, fields in log_entries(job) if fields["kind"] == "reject"]
    assert check_chain(job) == version
    return {float(value) for array in job.snapshot()[1].values() for value in np.unique(array)}


# -- views that outlive a push -------------------------------------------------------------------------------------


def _tensor(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(array)


VIEWS: dict[str, Callable[[np.ndarray], Any]] = {
    "row": lambda array: array[0],
    "view of a view": lambda array: array[1:][0][2:],
    "matrix": lambda array: array.view(np.matrix),
    "bytes": lambda array: memoryview(array).cast("B"),
    "dlpack": np.from_dlpack,
    "tensor": _tensor,
    "pointer": lambda array: array.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
}


def _spoil(view: Any) -> None:
    view[-1 if isinstance(view, np.ndarray) else 0] = 77
    view[1] = 99


@pytest.mark.contract
@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_written_after_the_push_changes_nothing(store: Store, transport: str, kind: str) -> None:
    job = store.create_job("job", PARAMS, transport=transport, **SETTINGS)
    with job.join("w0") as session:
        session.pull()
        grads = _filled(session, 1)
        view = VIEWS[kind](grads["W"])
        assert session.push(grads) == 1
        _spoil(view)
        with aggregating(job):
            assert _weights(job, 1) == {-1}


@pytest.mark.parametrize(("kind", "pushed"), [("row", "copied"), ("bytes", "lent"), ("tensor", "lent")])
def test_views_of_all_rounds_are_written_in_all_later_rounds(store: Store, kind: str, pushed: str) -> None:
    """The memory of a contribution that is committed becomes that of a later one."""
    job = store.create_job("job", PARAMS, transport="shm", **SETTINGS)
    views = []
    with aggregating(job), job.join("w0") as session:
        for round_ in range(1, 7):
            session.pull()
            grads = _filled(session, round_)
            views.append(VIEWS[kind](grads["W"]))
            for old in views[:-1]:
                _spoil(old)
            session.push(grads if pushed == "lent" else _ones(PARAMS, round_))
            for old in views:
                _spoil(old)
            assert _weights(job, round_) == {-sum(range(round_ + 1))}


def test_without_views_the_same_memory_is_lent_again(store: Store, transport: str) -> None:
    job = store.create_job("job", PARAMS, transport=transport, **SETTINGS)
    places = set()
    with aggregating(job), job.join("w0") as session:
        for _ in range(8):
            session.pull()
            grads = _filled(session, 1)
            places.add(grads["b"].ctypes.data)
            session.push(grads)
            with pytest.raises(ValueError, match="read-only"):
                grads["b"][0] = 1
        assert _weights(job, 8) == {-8}
    assert len(places) <= 2


def test_what_a_view_was_taken_of_may_itself_be_gone(store: Store) -> None:
    """As many references as without views, but to others."""
    job = store.create_job("job", PARAMS, transport="shm", **SETTINGS)
    with job.join("w0") as session:
        session.pull()
        views = {name: memoryview(array) for name, array in _filled(session, 1).items()}
        session.push({name: np.asarray(view) for name, view in views.items()})
        views["b"][0] = 9
        with aggregating(job):
            assert _weights(job, 1) == {-1}


@pytest.mark.parametrize("nonfinite", ["reject", "skip"])
def test_a_view_of_a_push_that_was_refused_or_skipped(store: Store, nonfinite: str) -> None:
    job = store.create_job("job", PARAMS, transport="shm", nonfinite=nonfinite, **SETTINGS)
    views = []
    with aggregating(job), job.join("w0") as session:
        for _ in range(3):
            session.pull()
            grads = _filled(session, 1)
            views.append(grads["b"][:2])
            grads["b"][0] = np.nan
            if nonfinite == "reject":
                with pytest.raises(kvps.NotFinite):
                    session.push(grads)
                views[-1][0] = 1
            session.push(grads)
            for view in views:
                view[:] = 9
        assert _weights(job, 3) == {-3 if nonfinite == "reject" else 0}


def test_a_view_of_a_push_whose_answer_was_lost(store: Store) -> None:
    job = store.create_job("job", PARAMS, transport="shm", **SETTINGS)
    with job.join("w0") as session:
        session.pull()
        grads = _filled(session, 1)
        view = grads["W"][0]
        lose_next_answer()
        with pytest.raises(kvps.ServerLost):
            session.push(grads)
        assert session.push(grads) == 1
        _spoil(view)
        with aggregating(job):
            assert _weights(job, 1) == {-1}


# -- what was put, and changed before its push ---------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("params", [SMALL, PARAMS], ids=["small", "large"])
@pytest.mark.parametrize("lent", [False, True])
def test_what_was_put_and_then_changed_is_not_acknowledged_and_rejected_later(
    store: Store, params: Grads, transport: str, lent: bool
) -> None:
    """It must not change. If it does, what counts is what was sent, early or with the push."""
    job = store.create_job("job", params, transport=transport, **SETTINGS)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        grads = _filled(session, 1) if lent else _ones(params)
        for name, array in grads.items():
            session.put(name, array)
            array.fill(2)
        assert session.push() == 1
        assert _weights(job, 1) <= {-1, -2}


def test_what_was_put_and_changed_is_not_sent_again_after_a_cut(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = store.create_job("job", PARAMS, transport="redis", **SETTINGS)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        grads = _ones(PARAMS)
        session.put("b", grads["b"])
        grads["b"][-1] = 2  # in a chunk that has left

        def cut(self: Any) -> bool:
            self.drop()
            self._stored.clear()  # no answer has come
            raise RedisConnectionError("cut")

        with monkeypatch.context() as patch:
            patch.setattr(RedisUpload, "end", cut)
            with pytest.raises(kvps.WrongOrder, match="changed after it was put"):
                session.push({"W": grads["W"]})
        grads["b"][-1] = 1
        assert session.push(grads) == 1, "as it was"
        assert _weights(job, 1) == {-1}
