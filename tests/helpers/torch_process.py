"""Processes of tests with PyTorch: forked from one that has imported it, which takes each Python seconds."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.distributed", "kvps.torch", "helpers.ddp", "helpers.group_member"])


class TorchProcess:
    """A process that calls `run` of a module that it can import. It must not outlive the test."""

    def __init__(self, run: Callable[..., None], *arguments: Any) -> None:
        number, path = tempfile.mkstemp(prefix="kvps-t-")
        os.close(number)
        self._said = Path(path)
        self._process = _FORKS.Process(target=_run, args=(path, run, arguments))
        self._process.start()

    def ended(self) -> tuple[int | None, str]:
        """Wait until it has ended; return its exit code (None: it runs still), and all that it has said."""
        self._process.join(120)
        return self._process.exitcode, self._said.read_text()

    def end(self) -> None:
        """Kill it, and forget what it said."""
        self._process.kill()
        self._process.join()
        self._said.unlink()


def run_code(code: str, *arguments: str) -> None:
    """Run code with `arguments` in sys.argv, as `python -c` does."""
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


def _run(path: str, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with open(path, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    run(*arguments)
