"""A file that processes of one user lock: all of it, or single bytes, which need not exist. So a name can be locked, as
the byte that `byte_of` gives it.

A lock belongs to an open file. The kernel drops it once its last descriptor is closed, however the process ends. A fork
has descriptors of the same open file, so whoever has locked it unlocks it too. The lock of the file and those of its
bytes are independent.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "hhqqi0q"  # struct flock where a long has 64 bits: type, whence, start, length, process

BYTES_CAN_BE_LOCKED = hasattr(fcntl, "F_OFD_GETLK") and struct.calcsize("l") == 8  # 64-bit Linux


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield a descriptor of the file, which is made if it is missing. Raises OSError, also if another user owns it."""
    file, owner = _open(path), os.getpid()
    try:
        yield file
    finally:
        if os.getpid() == owner:
            _unlock(file)
        os.close(file)


def _unlock(file: int) -> None:
    """Drop the lock of the file, and those of all its bytes: a fork may have the open file for longer."""
    fcntl.flock(file, fcntl.LOCK_UN)
    if BYTES_CAN_BE_LOCKED:
        all_bytes = struct.pack(_LOCK, fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, all_bytes)


def _open(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return file
    os.close(file)
    raise PermissionError(f"{path} is not a file of this user's")


def untouched_s(file: int) -> float:
    """Return how long ago the file was touched. Until a clock that was set back gets there again, that is long ago."""
    return abs(time.time() - os.fstat(file).st_mtime)


def locked(file: int, path: Path) -> bool:
    """Lock the file and return True; False if another process has the lock, or the file was deleted meanwhile."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.stat(path, follow_symlinks=False).st_ino == os.fstat(file).st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


def byte_of(name: str) -> int:
    """Return the byte, 1 or a later one, that stands for a name; two names rarely have the same."""
    return 1 + zlib.crc32(name.encode())


def take_byte(file: int, byte: int, kind: int = fcntl.F_WRLCK) -> bool:
    """Lock a byte, for this open file alone unless `kind` is F_RDLCK. Return False if another one has locked it."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_LOCK, kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES
        return False
    return True


class Member:
    """A process of this host that wants certain versions, as long as this object is there."""

    _BYTE = 0

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be this user's."""
        self._fd, self._owner = _open(path), os.getpid()
        take_byte(self._fd, self._BYTE, fcntl.F_RDLCK)

    def is_at(self, path: Path) -> bool:
        """Return whether its file is still the one at `path`."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._fd), os.stat(path, follow_symlinks=False))
        return False

    @property
    def has_company(self) -> bool:
        """Whether there is another one."""
        asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, self._BYTE, 1, 0)
        return bool(struct.unpack(_LOCK, fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            if os.getpid() == self._owner:
                _unlock(self._fd)
            os.close(self._fd)
