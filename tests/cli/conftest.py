"""Commands that only look at a job, or change it, run in the process of the test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvps_cli import app

Printed = Callable[..., str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Printed:
    """A function that runs a command of kvps in this process, and returns what it prints: on stdout, or else on
    stderr. Errors are raised."""

    def run(*words: str, **environment: str) -> str:
        capsys.readouterr()
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        app([*words], prog_name="kvps", standalone_mode=False)
        out, err = capsys.readouterr()
        assert not (out and err)
        return out or err

    return run
