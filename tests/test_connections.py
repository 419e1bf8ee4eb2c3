"""How many connections a process may have, and what is said when there are no more."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Params, aggregating, work

import kvps
from kvps.session import Session
from kvps.store import Store

TINY = {"x": np.zeros(2, np.float32)}
ONES = {"x": np.ones(2, np.float32)}


def _one(session: Session, params: Params, round_: int) -> Params:
    return ONES


# -- this process's own limit -------------------------------------------------------------------------------------


def test_150_sessions_of_one_process_train(store: Store) -> None:
    """In BSP each that waits holds a connection, and its heartbeat needs another."""
    job = store.create_job("job", TINY, workers=150, optimizer=kvps.SGD(lr=1.0))
    with aggregating(job):
        work(job, 2, _one, workers=150)
        assert job.await_finished()
    assert [member.process["life"] for member in job.state().members.values()] == [1] * 150, "nobody was evicted"
    np.testing.assert_array_equal(job.snapshot()[1]["x"], np.float32([-2, -2]))


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_a_limit_in_the_url_is_1_or_more(store: Store, limit: str) -> None:
    with pytest.raises(kvps.InvalidSetting, match="max_connections must be 1 or more"):
        kvps.connect(f"{store.url}?max_connections={limit}")


def test_a_limit_in_the_url_is_kept_and_said(store: Store) -> None:
    with kvps.connect(f"{store.url}?max_connections=2") as limited:
        limited.client._patience_s = 0.3
        using = [limited.client._arrays.using() for _ in range(2)]
        for connection in using:
            connection.__enter__()
        with pytest.raises(kvps.ServerLost, match=r"all 2 connections to .* were in use for 0\.3 s: raise that"):
            limited.client.call("GET", "none")
        for connection in using:
            connection.__exit__(None, None, None)
        assert limited.client.call("GET", "none") is None
