"""Values of a parametrized test that only `make test-all` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slowly(values: Iterable[Any]) -> list[Any]:
    """Return each value, or tuple of values, as a parameter that is marked slow."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow) for v in values]
