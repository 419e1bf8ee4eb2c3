"""`kvps inspect`: the numbers of a whole version, one parameter or all, and how far they come between two looks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.commands import refused
from helpers.harness import aggregating, await_version, model
from helpers.internals import abandon

import kvps
from kvps.arrays.pieces import Buffer
from kvps.store import Store

SGD = kvps.SGD(lr=1.0)


Inspect = Callable[..., str]


@pytest.fixture
def inspect(store: Store, printed: Callable[..., str]) -> Inspect:
    """A function that returns what `kvps inspect` prints."""
    return lambda *arguments: printed("inspect", *arguments, KVPS_REDIS_URL=store.url)


@pytest.mark.slow
def test_each_parameter_has_its_numbers(store: Store, inspect: Inspect) -> None:
    weights = model() | {"mean": Buffer(np.ones(3, np.float32), "average")}
    job = store.create_job("j", weights, shards=2, workers=2)
    with job.join("w0") as w0, job.join("w1"):
        w0.push(w0.pull())
        assert "1 contribution waiting: w0 round 1" in inspect("j")
        found = json.loads(inspect("j", "--json"))
        abandon(w0)  # it would wait for its commit
    assert (found["version"], found["waiting"]) == (0, [{"worker": "w0", "round": 1, "base": 0}])
    assert [p["parameter"] for p in found["parameters"]] == list(weights)
    for p, array in zip(found["parameters"], model().values(), strict=False):
        assert (p["shape"], p["dtype"], p["change"]) == (list(array.shape), "float32", None)
        assert p["norm"] == pytest.approx(float(np.linalg.norm(array.astype(np.float64).reshape(-1))))
        assert (p["least"], p["greatest"]) == (array.min(), array.max())
        assert "histogram" not in p
    assert {shard for p in found["parameters"] for shard in p["shards"]} == {0, 1}
    assert [p.get("buffer") for p in found["parameters"]] == [None, None, None, "average"]


@pytest.mark.slow
def test_a_pattern_chooses(store: Store, inspect: Inspect) -> None:
    names = ["layers.0.w", "layers.1.w", "head.w"]
    parts = {"l": "layers.*", "r": "head.*"}
    store.create_job("j", {name: np.ones((2, 3), np.float32) for name in names}, parts=parts)
    assert [(p["parameter"], p["part"]) for p in json.loads(inspect("j", "layers.*", "--json"))["parameters"]] == [
        (name, "l") for name in names[:2]
    ]
    lines = inspect("j", "layers.*").splitlines()
    assert len(lines) == 4
    assert "2 x 3" in lines[-1]


@pytest.mark.slow
def test_it_shows_the_version_that_is_committed(store: Store, inspect: Inspect) -> None:
    job = store.create_job("j", {"x": np.zeros(8, np.float32)}, workers=1, optimizer=SGD)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.push({"x": np.arange(8, dtype=np.float32)})
        await_version(job, 1)
    found = json.loads(inspect("j", "x", "--json"))
    (x,) = found["parameters"]
    assert (found["version"], x["least"], x["greatest"], x["mean"], x["zeros"]) == (1, -7, 0, -3.5, 1)
    assert sum(b["items"] for b in x["histogram"]) == 8
    shown = inspect("j", "x").splitlines()
    assert shown[0] == "version 1  0 contributions waiting"
    assert len(shown) == 3 + len(x["histogram"])
    assert all("█" in line for line, b in zip(shown[3:], x["histogram"], strict=True) if b["items"])


@pytest.mark.slow
def test_it_looks_again_and_says_how_far_the_weights_came(store: Store, start: Any) -> None:
    job = store.create_job("j", {"x": np.full(4, 2, np.float32)}, workers=1, optimizer=SGD)
    looking = start("inspect", "j", "--every", "0.1", "--redis", store.url)
    looking.until("0.00%")
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.push({"x": np.full(4, 0.5, np.float32)})
        assert "25.00%" in looking.until("25.00%")
    assert looking.end() == 128 + 15


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("j", "nothing"), 2, "job j has no parameter 'nothing': it has "),
        (("j", "--every", "0"), 2, "--every"),
        (("other",), 1, "other"),
    ],
)
def test_what_is_wrong_is_one_line(store: Store, arguments: tuple[str, ...], code: int, words: str) -> None:
    store.create_job("j", model())
    assert words in refused("inspect", *arguments, code=code, KVPS_REDIS_URL=store.url)
