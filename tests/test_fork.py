"""What crosses a fork stays the parent's: a child cannot use it, and does nothing to it when it ends."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forker import ROUNDS
from harness import aggregating, gradient, large_model

import kvps
from kvps.store import Store

FORKER = str(Path(__file__).with_name("forker.py"))
PATIENT = {"worker_timeout_ms": 3_600_000, "optimizer": kvps.SGD(lr=0.1)}


def _forked(store: Store, children: list[str], *options: str, **settings: Any) -> list[list[str]]:
    """What a worker says of its children, which then goes on; its weights are those of a run without a fork."""
    params = large_model()
    job = store.create_job("job", params, **PATIENT | settings)
    command = [sys.executable, FORKER, store.url, "job", ",".join(children), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stdout
        said = [line.split() for line in islice(worker.stdout, len(children))]
        with aggregating(job):
            rest, errors = worker.communicate(timeout=60)
            job.await_finished()
    assert worker.returncode == 0, errors
    assert not rest
    version, weights = job.snapshot()
    assert version == ROUNDS
    expected = params
    for round_ in range(ROUNDS):
        grads = gradient(params if options else expected, 0, round_)
        expected = {name: value - np.float32(0.1) * grads[name] for name, value in expected.items()}
    assert all(np.array_equal(weights[name], expected[name]) for name in params)
    return said


@pytest.mark.parametrize("transport", ["redis", "shm"])
def test_a_child_does_nothing_to_what_its_parent_made(store: Store, transport: str) -> None:
    children = ["uses", "closes", "exits", "raises", "collects", "uses-at-once", "closes-at-once", "process", "pool"]
    for name, status, commands, same in _forked(store, children, transport=transport):
        assert (name, status, commands, same) == (name, "1" if name == "raises" else "0", "0", "True")


def test_a_child_of_a_worker_that_fetches_ahead(store: Store) -> None:
    """Its other thread goes on asking for the next version meanwhile, so commands are not counted."""
    children = ["uses", "exits", "collects"]
    said = _forked(store, children, "--prefetch", transport="redis", staleness=-1, max_pending=1)
    assert [[name, status, same] for name, status, _, same in said] == [[name, "0", "True"] for name in children]


@pytest.mark.parametrize("transport", ["redis", "shm"])
def test_a_child_connects_and_joins_anew(store: Store, transport: str) -> None:
    (name, status, _, _), *rest = _forked(store, ["connects"], transport=transport)
    assert (name, status, rest) == ("connects", "0", [])
