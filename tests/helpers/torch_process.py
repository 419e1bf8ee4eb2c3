"""Processes of tests with PyTorch: forked from one that has imported it, which takes each Python seconds."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.distributed", "kvps.torch", "helpers.ddp", "helpers.group_member"])


class TorchProcess:
    """A process that runs `code` with `arguments` in sys.argv, as `python -c` does. It must not outlive the test."""

    def __init__(self, code: str, *arguments: str) -> None:
        number, path = tempfile.mkstemp(prefix="kvps-t-")
        os.close(number)
        self._said = Path(path)
        self._process = _FORKS.Process(target=_run, args=(code, arguments, path))
        self._process.start()

    def ended(self, timeout_s: float = 120) -> tuple[int | None, str]:
        """Wait until it has ended; return its exit code (None: it runs still), and all that it has said."""
        self._process.join(timeout_s)
        return self._process.exitcode, self._said.read_text()

    def end(self) -> None:
        """Kill it, and forget what it said."""
        self._process.kill()
        self._process.join()
        self._said.unlink()


def _run(code: str, arguments: tuple[str, ...], path: str) -> None:
    with open(path, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
