"""Control groups of this machine that have a limit of memory, for tests that may make them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.waiting import eventually

_GROUPS = Path("/sys/fs/cgroup")


@contextmanager
def control_group(limit: int) -> Iterator[list[str]]:
    """Make a group with so many bytes; yield the words before a command that runs in it. Skips a test that may not."""
    v1 = (_GROUPS / "memory").is_dir()
    folder = (_GROUPS / "memory" if v1 else _GROUPS) / f"kvps-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit))
    except OSError as error:
        folder.exists() and folder.rmdir()
        pytest.skip(f"no control group with a limit of memory can be made here: {error}")
    try:
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    finally:
        assert eventually(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()
