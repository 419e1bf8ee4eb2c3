"""Locks of a file end with who took them, whatever has inherited the open file."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvps.transport import locked_file
from kvps.transport.locked_file import BYTES_CAN_BE_LOCKED, locked, opened, take_byte


@pytest.mark.skipif(not BYTES_CAN_BE_LOCKED, reason="bytes of a file are locked on 64-bit Linux")
def test_a_fork_that_lives_on_keeps_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "note"
    with opened(path) as file:
        assert locked(file, path)
        assert take_byte(file, 5)
        member = locked_file.Member(path)
        if not (child := os.fork()):
            signal.pause()
            os._exit(0)
    try:
        del member
        alone = locked_file.Member(path)
        assert not alone.has_company
        with opened(path) as other:
            assert locked(other, path)
            assert take_byte(other, 5)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
