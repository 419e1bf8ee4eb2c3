"""The chaos suite in its short form: every family of faults, small, with a seed that is printed."""

from __future__ import annotations

import time

import pytest
from chaos.__main__ import SHORT, run


@pytest.mark.parametrize("name", list(SHORT))
def test_all_is_as_promised(name: str) -> None:
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}: python -m chaos --short --only {name} --seed {seed}")
    result = run(name, SHORT[name], seed)
    assert result.problems == []
    assert result.injected >= result.needed > 0
