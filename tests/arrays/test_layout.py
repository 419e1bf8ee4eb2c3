"""The layout of a job that has buffers: they come last, all alike, and are stored so."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvps
from kvps.arrays.layout import CHUNK_ITEMS, Layout
from kvps.arrays.pieces import BUFFER_KINDS, Buffer, Parameter

MEAN = Buffer(np.zeros(5, np.float32), "average")
W = np.zeros((3, 4), np.float32)


def test_buffers_come_after_all_that_is_trained() -> None:
    layout = Layout.of({"mean": MEAN, "W": W, "var": MEAN, "b": W[0]}, 4)
    assert layout.parameters == (
        Parameter("W", (3, 4), 0),
        Parameter("b", (4,), 12),
        Parameter("mean", (5,), 16, buffer="average"),
        Parameter("var", (5,), 21, buffer="average"),
    )
    assert (layout.buffer_start, layout.size, layout.buffer_kind) == (16, 26, "average")
    assert [[layout.buffer_start_in(chunk) for chunk in shard] for shard in layout.chunks] == [[6], [7], [3], [0]]
    assert layout.of_shards(1).parameters == layout.parameters


def test_a_job_without_buffers_is_stored_as_ever() -> None:
    layout = Layout.of({"W": W})
    assert (layout.buffer_start, layout.buffer_kind) == (12, "")
    assert json.loads(layout.to_json())["parameters"] == [{"name": "W", "shape": [3, 4], "start": 0}]


@pytest.mark.parametrize("kind", BUFFER_KINDS)
def test_a_stored_layout_is_the_same(kind: str) -> None:
    large = Buffer(np.zeros(CHUNK_ITEMS, np.float32), kind)
    layout = Layout.of({"large": large, "W": W, "none": Buffer(np.float32(0).reshape(()), kind)}, 3)
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    "kind", [("sum", "sum"), ("average", "rank0"), ("average", ""), (["average"], ["average"]), (1, 1)]
)
def test_a_stored_layout_of_other_buffers_is_refused(kind: tuple[object, object]) -> None:
    stored = json.loads(Layout.of({"W": W, "mean": MEAN, "var": MEAN}).to_json())
    for p, word in zip(stored["parameters"][1:], kind, strict=True):
        p["buffer"] = word
    with pytest.raises(kvps.CorruptData, match="the layout: a parameter: buffer must be one of"):
        Layout.from_json(json.dumps(stored))


def test_what_is_refused() -> None:
    for buffers in ({"a": MEAN._replace(kind="sum")}, {"a": MEAN, "b": MEAN._replace(kind="rank0")}):
        with pytest.raises(kvps.InvalidSetting, match="all buffers of a job must be of one kind, of average, rank0"):
            Layout.of({"W": W} | buffers)
    with pytest.raises(kvps.LayoutMismatch, match="buffer 'a' is float64: kvps moves float32"):
        Layout.of({"W": W, "a": Buffer(np.zeros(2), "average")})
    with pytest.raises(kvps.LayoutMismatch, match=r"buffer 'a' has shape \(2,\), the job's has \(5,\)"):
        Layout.of({"W": W, "a": MEAN}).hosted({"W": W, "a": np.zeros(2, np.float32)}, "gradient")
    with pytest.raises(kvps.InvalidSetting, match="shards must not exceed the 17 items of the model, it is 18"):
        Layout.of({"W": W, "a": MEAN}).of_shards(18)
