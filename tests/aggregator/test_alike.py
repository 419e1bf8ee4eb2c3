"""Workers that all train the same batches are told so in one line, and nobody else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.harness import Params, aggregating, gradient, model, work

from kvps.session.session import Session
from kvps.store import Store

LINE = (
    "job job: 2 workers have pushed the same gradient in versions 1 to 3, bit for bit: each trains the same batches. "
    "Divide the data by rank, or let the job hand out the batches"
)


def _same(session: Session, params: Params, round_: int) -> Params:
    return gradient(params, 0, round_)


def _zeros(session: Session, params: Params, round_: int) -> Params:
    return {name: np.zeros_like(array) for name, array in params.items()}


def _own(session: Session, params: Params, round_: int) -> Params:
    return gradient(params, session.rank, round_)


def _own_from_the_third_on(session: Session, params: Params, round_: int) -> Params:
    return gradient(params, session.rank * (round_ > 1), round_)


@pytest.mark.parametrize(
    ("step", "workers", "settings", "lines"),
    [
        (_same, 2, {}, [LINE]),
        (_same, 2, {"shards": 2, "gradient_format": "int8"}, [LINE]),
        (_same, 1, {}, []),
        (_own, 2, {}, []),
        (_own_from_the_third_on, 2, {}, []),
        (_zeros, 2, {"shards": 2}, []),
        (_zeros, 2, {"gradient_format": "int8"}, []),
        (_zeros, 2, {"gradient_format": "topk:0.5"}, []),
    ],
)
def test_the_same_gradients_of_all_workers_are_told_once(
    store: Store,
    caplog: pytest.LogCaptureFixture,
    step: Callable[..., Params],
    workers: int,
    settings: dict[str, Any],
    lines: list[str],
) -> None:
    job = store.create_job("job", model(), workers=workers, **settings)
    with aggregating(job):
        work(job, 6, step, workers)
    assert [record.getMessage() for record in caplog.records if record.name == "kvps.commit"] == lines
