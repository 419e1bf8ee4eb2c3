"""Arrays without items, as the weight of Linear(4, 0): they take part in everything, and have no bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.harness import aggregating, check_chain

import kvps
from kvps.arrays.layout import CHUNK_ITEMS, Layout
from kvps.arrays.runs import SMALL_ITEMS
from kvps.arrays.summary import summary
from kvps.history.checkpoint import Checkpoint
from kvps.store import Store

PARAMS = {
    "first": np.zeros((4, 0), np.float32),
    "W": np.ones((3, SMALL_ITEMS), np.float32),
    "between": np.zeros(0, np.float32),
    "b": np.ones(5, np.float32),
    "large": np.ones(CHUNK_ITEMS - 5 - 3 * SMALL_ITEMS, np.float32),
    "last": np.zeros((0, 2), np.float32),
}


@pytest.mark.parametrize("shards", [1, 3])
def test_the_layout_has_them(shards: int) -> None:
    layout = Layout.of(PARAMS, shards)
    assert Layout.from_json(layout.to_json()) == layout
    assert [p.size for p in layout.parameters if not p.size] == [0, 0, 0]
    assert all(piece.start < piece.stop for chunks in layout.pieces for pieces in chunks for piece in pieces)
    with pytest.raises(kvps.LayoutMismatch, match="at least one parameter that has items"):
        Layout.of({"first": PARAMS["first"]})


def test_a_job_with_them_trains_and_is_stored(store: Store, transport: str, tmp_path: Path) -> None:
    job = store.create_job("job", PARAMS, workers=1, transport=transport, optimizer=kvps.SGD(lr=1.0))
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.push(PARAMS)
        session.pull()
        session.put("between", PARAMS["between"])
        session.put("last", PARAMS["last"])
        session.push({name: array for name, array in PARAMS.items() if name not in ("between", "last")})
        weights = session.pull()
    for name, array in PARAMS.items():
        np.testing.assert_array_equal(weights[name], -array)
    assert check_chain(job) == 2
    job.checkpoint().write(str(tmp_path / "x"))
    restored = store.restore_job(Checkpoint.load(str(tmp_path / "x")), "again")
    assert restored.snapshot()[1]["first"].shape == (4, 0)
    assert summary(restored.snapshot()[1]["last"]).norm == 0
