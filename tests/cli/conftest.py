"""Commands that only look at a job, or change it, run in the process of the test."""

from __future__ import annotations

import logging
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
        log = logging.getLogger("kvps")
        before = log.handlers[:], log.level, log.propagate
        try:
            app([*words], prog_name="kvps", standalone_mode=False)
        finally:
            # Or each command would print what the threads of this process log once more, and tests behind it would log
            # otherwise than alone.
            log.handlers, log.propagate = before[0], before[2]
            log.setLevel(before[1])
        out, err = capsys.readouterr()
        assert not (out and err)
        return out or err

    return run
