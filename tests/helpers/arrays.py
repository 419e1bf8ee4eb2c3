"""Comparisons of models: arrays by name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def assert_same_bits(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], name)
        assert one[name].tobytes() == other[name].tobytes(), f"{name}: a zero of another sign, or another dtype"


def assert_close(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], far: float = 3e-6) -> None:
    """Within `far` of an array's largest item: float32 rounds at 6e-8, and errors grow from step to step."""
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=far * np.abs(other[name]).max(), err_msg=name)
