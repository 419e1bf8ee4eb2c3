"""What the shell completes: names of jobs, tasks and optimizers. `kvps --install-completion` has the shell ask for it.

A shell that waits, or prints an error over the line that somebody types, is worse than none: what cannot be found is
left out.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvps.errors import KvpsError

_WAITS_S = 0.5  # for a server
_METHODS = {"parameters", "data", "gradient"}  # of a task
_LARGEST = 1 << 20  # bytes of a module that is read


def jobs(incomplete: str) -> list[str]:
    """Return the jobs whose names begin so, of the server in KVPS_REDIS_URL or else of the private server."""
    from kvps.connection.client import Client
    from kvps.server import private_server
    from kvps.store import Store

    with suppress(KvpsError, OSError):
        if url := os.environ.get("KVPS_REDIS_URL") or private_server.running():
            with Store(Client(url, _WAITS_S)) as store:
                return [name for name in store.jobs() if name.startswith(incomplete)]
    return []


def tasks(incomplete: str) -> list[str]:
    """Return the built-in tasks, and the classes of modules in this directory that look like one, whose names begin
    so. No module is imported."""
    from kvps_workers.task import BUILT_IN

    found = [*BUILT_IN, *(f"{path.stem}:{name}" for path in sorted(Path().glob("*.py")) for name in _classes(path))]
    return [name for name in found if name.startswith(incomplete)]


def optimizers(incomplete: str) -> list[str]:
    """Return the optimizers whose names begin so."""
    from kvps.optim import OPTIMIZERS

    return [name for name in OPTIMIZERS if name.startswith(incomplete)]


def _classes(path: Path) -> Iterator[str]:
    with suppress(OSError, SyntaxError, ValueError, RecursionError):
        if path.stat().st_size <= _LARGEST:
            for each in ast.parse(path.read_bytes()).body:
                has = {part.name for part in getattr(each, "body", ()) if isinstance(part, ast.FunctionDef)}
                if isinstance(each, ast.ClassDef) and has >= _METHODS:
                    yield each.name
