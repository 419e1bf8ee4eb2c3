"""Identifies the shared memory that a job's segments are in.

Processes of one host need not see the same /dev/shm: a container may have its own. So a job names its memory by a nonce
in a file there, and only a process that sees this memory may say that the segments are lost.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvps.errors import ServerFull, ServerUnfit
from kvps.machine import process
from kvps.machine.paths import private_directory
from kvps.parsing import matching

_IDENTITY = "identity"
_NONCE = re.compile("[0-9a-f]{32}")
_MEMORY = re.compile(
    r"([^/]{1,255})/([0-9]{1,10})/([0-9a-f]{16})/([0-9a-f]{32})/([0-9a-f-]{0,36})/([0-9]{1,20}\.[0-9]{1,20})", re.ASCII
)


@dataclass(frozen=True)
class Memory:
    """One /dev/shm as one user's processes see it, and in it the directory of one server's jobs.

    host    the name of its machine, for messages
    user    the uid of the only user whose processes use it
    server  the name of the directory
    nonce   the content of its file `identity`
    boot    the start of the kernel under which it was made; "" if unknown
    place   device and inode of /dev/shm; no two directories that exist under one kernel have both the same
    """

    host: str
    user: int
    server: str
    nonce: str
    boot: str
    place: str

    @classmethod
    def at(cls, root: Path, server: str, nonce: str = "") -> Memory:
        """Return this user's memory at `root`. If it has no identity, give it one: `nonce`, or a fresh one.

        Raises ServerUnfit if its place belongs to another user, ServerFull.
        """
        return cls(process.host(), os.getuid(), server, identify(root, nonce), process.boot(), place_of(root))

    @classmethod
    def of(cls, text: str) -> Memory:
        """Parse the text that `str` made. Raises CorruptData."""
        matching(text, "the memory of a job", _MEMORY, "a place in shared memory")
        host, user, *others = text.split("/")
        return cls(host, int(user), *others)

    def __str__(self) -> str:
        return "/".join(map(str, (self.host, self.user, self.server, self.nonce, self.boot, self.place)))

    def seen(self, root: Path) -> bool:
        """Return whether `root` is this memory's /dev/shm: it has the nonce, or had it before it was emptied.

        An emptied one has the same kernel, device and inode. If another directory once had those, then it is gone.
        """
        if self.user != os.getuid():
            return False
        same_place = self.boot != "" and (self.boot, self.place) == (process.boot(), place_of(root))
        return same_place or _identity(root) == self.nonce


def place_of(root: Path) -> str:
    try:
        status = root.stat()
    except OSError:
        return ""
    return f"{status.st_dev}.{status.st_ino}"


def _identity(root: Path) -> str:
    """Return the nonce of this user's memory at `root`; "" if there is none, or another user wrote it."""
    try:
        fd = os.open(root / f"kvps-{os.getuid()}" / _IDENTITY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with open(fd, "rb") as file:
        nonce = file.read(64).decode("ascii", "replace") if os.fstat(fd).st_uid == os.getuid() else ""
    return nonce if _NONCE.fullmatch(nonce) else ""


def identify(root: Path, nonce: str) -> str:
    """Return the nonce of this user's memory at `root`. If it has none, give it this one, or a fresh one."""
    folder = root / f"kvps-{os.getuid()}"
    private_directory(folder)
    if present := _identity(root):
        return present
    fresh = folder / f".{_IDENTITY}.{secrets.token_hex(4)}"
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(nonce or secrets.token_hex(16))
        with suppress(FileExistsError):  # another process was quicker
            os.link(fresh, folder / _IDENTITY)
    except OSError as error:
        raise ServerFull(f"{folder} cannot be written ({error.strerror}): make room, or choose 'redis'") from None
    finally:
        fresh.unlink(missing_ok=True)
    if present := _identity(root):
        return present
    raise ServerUnfit(f"{folder / _IDENTITY} is not a file that kvps wrote: delete it")
