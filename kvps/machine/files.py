"""Files and directories that are their owner's only, whatever the umask is: what a job learns is private."""

from __future__ import annotations

import os
from pathlib import Path


def private(path: str, flags: int) -> int:
    """Open a file as `open(..., opener=private)` asks for; a file that this makes has mode 0600. Raises OSError."""
    return os.open(path, flags, 0o600)


def make_directory(path: Path) -> None:
    """Make a directory, and those above it that are missing, with mode 0700. Raises OSError."""
    if not path.parent.exists():
        make_directory(path.parent)  # mkdir(parents=True) would give these the mode that the umask leaves
    path.mkdir(mode=0o700, exist_ok=True)


def sync_directory(directory: Path) -> None:
    """Make sure that a rename in a directory survives a power cut."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
