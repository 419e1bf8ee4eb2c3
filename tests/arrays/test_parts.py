"""The parts of a model: which parameter is in which, and how chunks follow them."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

import kvps
from kvps.arrays.layout import CHUNK_ITEMS, Layout
from kvps.arrays.parts import fragments, part_of_each, with_parts

NAMES = ["a.w", "a.b", "head.w", "b.w"]


def test_patterns_name_parts() -> None:
    assert part_of_each({"body": ["a.*", "b.w"], "head": "head.*"}, NAMES) == {
        "a.w": "body",
        "a.b": "body",
        "b.w": "body",
        "head.w": "head",
    }


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"body": "a.*"}, "parameter 'head.w' is in no part"),
        ({"body": "*", "head": "head.*"}, "parameter 'head.w' is in parts body and head"),
        ({"body": "*", "tail": "x.*"}, "part tail names 'x\\.\\*', which matches no parameter"),
        ({"b\n": "*"}, "the name of a part must be"),
        ({"": "*"}, "the name of a part must be"),
        ({1: "*"}, "the name of a part must be"),
        ({"body": 3}, "part body must have names of parameters"),
        ({"body": [None]}, "part body must have names of parameters"),
        ({}, "a model has 1 to"),
        ("head.*", "parts must map names to names of parameters, as {'head': 'head\\.\\*'}, not 'head\\.\\*'"),
        ([("head", "*")], "parts must map names to names of parameters"),
    ],
)
def test_parts_that_do_not_fit_are_one_line(parts: Any, why: str) -> None:
    with pytest.raises(kvps.InvalidSetting, match=why) as refused:
        part_of_each(parts, NAMES)
    assert "\n" not in str(refused.value)


def test_no_fragment_is_empty_and_all_are_runs_of_neighbours() -> None:
    rng = random.Random(7)
    for _ in range(500):
        sizes = {f"p{i}": rng.choice([1, 1, 5, 100, 1_000]) for i in range(rng.randint(1, 12))}
        number = rng.randint(1, len(sizes))
        found = list(fragments(sizes, number).values())
        assert list(dict.fromkeys(found)) == sorted(set(found), key=int) == [str(i) for i in range(number)]
        each = Counter(dict.fromkeys(found, 0))
        for fragment, size in zip(found, sizes.values(), strict=True):
            each[fragment] += size
        assert max(each.values()) <= sum(sizes.values()) / number + max(sizes.values())
    assert list(fragments(dict.fromkeys("abcdef", 10), 3).values()) == ["0", "0", "1", "1", "2", "2"]
    with pytest.raises(kvps.InvalidSetting, match="fragments must not exceed the 2 parameters"):
        fragments({"a": 1, "b": 1}, 3)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_chunk_belongs_to_one_part(shards: int) -> None:
    """Parts that alternate and are smaller and larger than a chunk; the layout is read as it was written."""
    params = {f"{'ab'[i % 2]}{i}": np.zeros(size, np.float32) for i, size in enumerate([3, CHUNK_ITEMS + 7, 1, 9, 900])}
    layout = with_parts(Layout.of(params, shards), {"a": "a*", "b": "b*"}, 0)
    assert Layout.from_json(layout.to_json()) == layout
    end = 0
    for shard, chunks in enumerate(layout.chunks):
        assert chunks[0].start == layout.shard_range(shard)[0]
        assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
        for chunk, pieces in zip(chunks, layout.pieces[shard], strict=True):
            assert chunk.start == end
            assert 0 < chunk.stop - chunk.start <= CHUNK_ITEMS
            assert {layout.parameters[piece.number].part for piece in pieces} == {chunk.part}
            end = chunk.stop
    assert end == layout.size
    assert sorted(layout.chunks_in("a") + layout.chunks_in("b")) == sorted(layout.chunks_in(""))


@pytest.mark.parametrize("part", [7, "", "a b", None, "x" * 65])
def test_a_part_that_kvps_did_not_write_is_corrupt(part: object) -> None:
    layout = with_parts(Layout.of({"a": np.zeros(3, np.float32)}), {"all": "*"}, 0)
    spoilt = json.loads(layout.to_json())
    spoilt["parameters"][0]["part"] = part
    with pytest.raises(kvps.CorruptData, match="the layout: a parameter: part must be"):
        Layout.from_json(json.dumps(spoilt))


def test_a_layout_with_parts_and_buffers_is_corrupt() -> None:
    spoilt = json.loads(with_parts(Layout.of({"a": np.zeros(3, np.float32)}), {"all": "*"}, 0).to_json())
    spoilt["parameters"][0]["buffer"] = "average"
    with pytest.raises(kvps.CorruptData, match="parts or of buffers"):
        Layout.from_json(json.dumps(spoilt))
