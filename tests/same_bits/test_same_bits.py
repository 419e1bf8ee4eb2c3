"""The proof of the same bits in its short form, with a seed that is printed."""

from __future__ import annotations

import time

import pytest

from same_bits.__main__ import SHORT, train

EVERY_DAY = ("threads", "checkpoints", "cnn-turns", "faults")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EVERY_DAY else pytest.mark.slow) for name in SHORT]
)
def test_the_weights_are_the_same_bits(name: str) -> None:
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}: python -m same_bits --short --only {name} --seed {seed}")
    runs = train(name, SHORT[name], seed)
    assert runs
    assert [run.did for run in runs if bool(run.problems) != bool(run.fault)] == []
