"""Files and directories that are their owner's only, whatever the umask is: what a job learns is private."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from kvps.errors import InvalidSetting


def private(path: str, flags: int) -> int:
    """Open a file as `open(..., opener=private)` asks for; a file that this makes has mode 0600. Raises OSError."""
    return os.open(path, flags, 0o600)


def own(path: str, flags: int) -> int:
    """Open a file as `private` does, to add to it. Raises OSError if another user could have put it there.

    In a directory where others may write too, a link would have this process write into any file of its user.
    """
    number = regular(path, flags | os.O_NOFOLLOW)
    # The owner of the directory could do all of that anyway; and a file system may give all files one owner.
    if os.geteuid() and os.fstat(number).st_uid not in (os.geteuid(), os.stat(os.path.dirname(path) or ".").st_uid):
        os.close(number)
        raise PermissionError(errno.EPERM, "it belongs to another user", path)
    return number


def regular(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=regular)`. Raises OSError for what is no regular file: a FIFO blocks."""
    number = os.open(path, flags | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return number


def make_directory(path: Path) -> None:
    """Make a directory, and those above it that are missing, with mode 0700. Raises OSError."""
    if not path.parent.exists():
        make_directory(path.parent)  # mkdir(parents=True) would give these the mode that the umask leaves
    path.mkdir(mode=0o700, exist_ok=True)


def writable_directory(option: str, directory: Path) -> Path:
    """Return the directory that an option names, and make it if missing. Raises InvalidSetting if not writable."""
    try:
        make_directory(directory)
    except OSError as error:
        raise InvalidSetting(f"{option} {directory}: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InvalidSetting(f"{option} {directory}: no permission to write there")
    return directory.resolve()


def sync_directory(directory: Path) -> None:
    """Make sure that a rename in a directory survives a power cut."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
