"""Arrays that the processes of one host share: each version and each contribution is a file in memory.

A segment has the name of the keys that it replaces, without the chunk's number: ``w:7.<term>``, ``opt.m:7.<term>``,
``g:w0.<incarnation>:12``. Names are never used twice. The maker of a segment writes it before any process is told its
name, and never while the name is in use. Later it may rename the file and write it anew, because fresh memory costs the
kernel more than the copy into it. It renames only under the exclusive lock. A reader holds the shared lock, and checks
once it has the lock that the file still has the name. The kernel drops the locks of dead processes.

    /dev/shm/kvps-<uid>/identity                           the nonce of this memory, see `memory_identity`
    /dev/shm/kvps-<uid>/<server>/<job's id>/<segment>      directories 0700, files 0600

A fork gets a copy of the segments that its parent writes, as of all other memory: no process sees its writes there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import shutil
import stat
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvps.arrays.formats import Bytes
from kvps.connection.sockets import ChunkGone, connection_settings
from kvps.errors import KvpsError, ServerFull, ServerUnfit
from kvps.machine.paths import is_private_below, private_directory
from kvps.parsing import JOB_ID, bytes_text, matching
from kvps.transport.memory_identity import Memory, identify, place_of

ROOT = Path("/dev/shm")
_MAP = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_FIXED, _NO_RESERVE = 0x10, 0x4000  # Linux's values: Python has names for some only, or only in late versions
_IN_PLACE = mmap.MAP_PRIVATE | _FIXED | _NO_RESERVE


def available() -> bool:
    """Return whether this host has memory that processes share by name."""
    return ROOT.is_dir() and os.access(ROOT, os.W_OK)


def free_bytes() -> int:
    """Return how many bytes of shared memory are left."""
    status = os.statvfs(ROOT)
    return status.f_bavail * status.f_frsize


class SharedMemoryLost(KvpsError):
    """The directory of a job's segments does not exist (any more)."""


def folder_of(url: str) -> Path:
    """Return the directory of all segments of a server's jobs."""
    return ROOT / f"kvps-{os.getuid()}" / _server_of(url)


def _server_of(url: str) -> str:
    settings = connection_settings(url)
    if path := settings.get("path"):  # containers that share /dev/shm may each have a server at this path
        where = f"{path} {place_of(Path(path).parent)}"
    else:
        where = f"{settings.get('host')}:{settings.get('port')}"
    return hashlib.sha256(where.encode()).hexdigest()[:16]


def memory_of(url: str) -> str:
    """Return the memory for a job that is created here, on the server at `url`. Raises ServerUnfit, ServerFull."""
    return str(Memory.at(ROOT, _server_of(url)))


def sees(memory: str) -> bool:
    """Return whether this process sees `memory`. Raises CorruptData."""
    return Memory.of(memory).seen(ROOT)


def forget(folder: Path, root: Path | None = None) -> None:
    """Delete a directory of segments, and the directory of its server if that is then empty. Do nothing if they are
    not this user's alone: another user could have the files of a third one deleted."""
    if not is_private_below(root or ROOT, folder):
        return
    gone = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    with suppress(OSError):
        folder.rename(gone)  # first: no process makes a segment in it while it is emptied
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(OSError):
        if folder.parent.parent.parent == ROOT:
            folder.parent.rmdir()


class ReadableSegment:
    """A segment to be read: `data` is its (nbytes,) bytes, read-only, which do not change until `close`."""

    def __init__(self, file: _File) -> None:
        self.data = file.data
        self._file: _File | None = file

    def close(self) -> None:
        """Let the bytes change from now on. May be called again."""
        file, self._file = self._file, None
        if file:
            file.leave()

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):  # its file may have been closed just before
            self.close()

    def __enter__(self) -> Bytes:
        return self.data

    def __exit__(self, *_: object) -> None:
        self.close()


class WritableSegment:
    """A segment that this process writes: `data` is its (nbytes,) bytes."""

    def __init__(self, folder: Path, name: str, nbytes: int) -> None:
        """Raises ServerFull if there is no room, SharedMemoryLost."""
        self.name = name
        self._folder = os.fspath(folder)
        try:
            self._fd = os.open(
                os.path.join(self._folder, name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
            )
        except FileNotFoundError:
            raise SharedMemoryLost(f"{folder} is gone: the job was removed, or its memory was") from None
        try:
            os.posix_fallocate(self._fd, 0, nbytes)  # else full memory is a SIGBUS in the middle of a write
            self.data: Bytes = self._mapped(nbytes)
        except OSError as error:
            self.unlink()
            raise _no_room(error, nbytes) from None
        _written_here.add(self)

    def _mapped(self, nbytes: int) -> Bytes:
        return np.frombuffer(mmap.mmap(self._fd, nbytes, _MAP), np.uint8)

    def detach(self) -> None:
        """Map the bytes privately in the same place, in a fork, so that its writes there stay in this process."""
        try:
            _map_privately(self.data.ctypes.data, self.data.size, self._fd)
        except OSError:
            os.abort()  # this process would write into what its parent pushes

    def withdraw(self, lent: Bytes) -> None:
        """Detach `lent`, which was `data` when it was lent, from the segment, and map `data` to another place.

        A write to `lent` then goes to copies of the pages, private to this process, and changes nothing in the segment.
        May be called again for the same memory. Raises ServerFull.
        """
        place = lent.ctypes.data
        try:
            if self.data.ctypes.data == place:  # first, so that after an interrupt `data` is still the segment
                self.data = self._mapped(lent.nbytes)
            _map_privately(place, lent.nbytes, self._fd)
        except OSError as error:
            raise _no_room(error, lent.nbytes) from None

    def renamed(self, name: str) -> bool:
        """Rename it, to be written anew. Return False if a process still reads it, or it was swept."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        new = os.path.join(self._folder, name)
        try:
            with suppress(FileNotFoundError):
                os.rename(os.path.join(self._folder, self.name), new)
            if _inode(new) != os.fstat(self._fd).st_ino:
                return False
            self.name = name  # also if an earlier call renamed it and was interrupted before this line
            return True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def unlink(self) -> None:
        """Delete the name; a process that reads the segment keeps its bytes."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, self.name))

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self._fd)


_written_here: weakref.WeakSet[WritableSegment] = weakref.WeakSet()
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t]


def _detach_all() -> None:
    for made in _written_here:
        made.detach()


os.register_at_fork(after_in_child=_detach_all)


def _map_privately(place: int, nbytes: int, fd: int) -> None:
    """Replace a shared mapping of a file by a private one, in place. Threads that read or write there meet no gap."""
    if _mmap(place, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, _IN_PLACE, fd, 0) != place:
        raise OSError(ctypes.get_errno(), "mmap")


def _no_room(error: OSError, nbytes: int) -> OSError | ServerFull:
    """Return ServerFull if the kernel's error means that memory is full, else the error."""
    if error.errno not in (errno.ENOSPC, errno.ENOMEM):
        return error
    return ServerFull(
        f"{ROOT} is full ({bytes_text(free_bytes())} left of {bytes_text(nbytes)}): make room there, remove jobs "
        f"(kvps rm), or create the job with --transport redis"
    )


class Segments:
    """The segments of one job. May be used from several threads."""

    def __init__(self, memory: str, id: str, root: Path | None = None) -> None:
        """Raises CorruptData if `memory` or `id` is malformed. `root` is /dev/shm unless it is given."""
        self._memory = Memory.of(memory)
        self._id = matching(id, "the id of a job", *JOB_ID)
        self._root = root or ROOT
        self.folder = self._root / f"kvps-{self._memory.user}" / self._memory.server / id
        self._folder = os.fspath(self.folder)
        self._ours: tuple[int, int, int, int] | None = None  # the directory that was found to be this user's alone
        self._recognized = False
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()

    @property
    def here(self) -> bool:
        """Whether this process sees the memory that the segments are in, and their directory exists."""
        if not self._is_ours():
            return False
        if not self._recognized:  # kept: what a process sees at a path stays, and an aggregator asks every round
            self._recognized = self._memory.seen(self._root)
        return self._recognized

    @property
    def seen(self) -> bool:
        """Whether this process sees the memory that the segments are or were in, and so can tell if they are lost."""
        return self._is_ours() is not False and self._memory.seen(self._root)

    def _is_ours(self) -> bool | None:
        """Return whether the directory is this user's alone; None if it does not exist."""
        with suppress(OSError):
            status = os.stat(self._folder, follow_symlinks=False)
            if (status.st_dev, status.st_ino, status.st_mode, status.st_uid) == self._ours:
                return True  # asked in every round; nobody else can have changed the directories above it since
            ours = is_private_below(self._root, self.folder)
            self._ours = (status.st_dev, status.st_ino, status.st_mode, status.st_uid) if ours else None
            return ours
        return is_private_below(self._root, self.folder)

    def check_ours(self) -> None:
        """Raise ServerUnfit if others may write to the directory: they could cut a file that is mapped here."""
        if self._is_ours() is False:
            raise ServerUnfit(
                f"{self.folder} and the two directories above it must be yours with mode 0700, and no links: mend "
                f"them, or create the job with --transport redis"
            )

    def moved_to(self, memory: str) -> Segments:
        """Return the segments of the same job in another memory. Raises CorruptData."""
        return Segments(memory, self._id, self._root)

    def memory_here(self) -> str:
        """Return this process's memory, for a job that continues here. Raises ServerUnfit, ServerFull."""
        nonce = self._memory.nonce if self._memory.seen(self._root) else ""
        return str(Memory.at(self._root, self._memory.server, nonce))

    def ensure(self) -> None:
        """Make the directory. Raises ServerUnfit if another user owns its place."""
        identify(self._root, self._memory.nonce)
        for path in (self.folder.parent.parent, self.folder.parent, self.folder):
            private_directory(path)

    def make(self, name: str, nbytes: int, spare: Sequence[WritableSegment] = ()) -> WritableSegment:
        """Return a segment to write: the first of `spare` that no process reads, or a new one.

        Raises ServerFull, SharedMemoryLost.
        """
        for made in spare:
            if made.data.size == nbytes and made.renamed(name):
                return made
        # Only this process makes a segment of this name, and only now. A file of that name was left by an interrupted
        # call, and no process was told of it.
        self.check_ours()
        self.unlink([name])
        return WritableSegment(self.folder, name, nbytes)

    def open(self, name: str, nbytes: int) -> ReadableSegment:
        """Open a segment to be read. Raises ChunkGone if there is none of this name and length, ServerUnfit if it or
        its directory is not this user's alone."""
        path = os.path.join(self._folder, name)
        while (inode := _inode(path)) is not None:
            with self._lock:
                file = self._file(inode, path, nbytes)
            if not file:
                continue
            if not file.enter():  # it is being renamed
                break
            if _inode(path) == inode:  # else it was renamed before it was locked
                if file.data.size == nbytes:
                    return ReadableSegment(file)
                file.leave()
                raise _wrong_size(name, file.data.size, nbytes)
            file.leave()
        raise ChunkGone(f"segment {name} is gone")

    def _file(self, inode: int, path: str, nbytes: int) -> _File | None:
        if inode not in self._files:
            self._files = {number: file for number, file in self._files.items() if not file.forgotten}
            self.check_ours()
            try:
                file = _File(path, nbytes)
            except FileNotFoundError:
                return None
            self._files[file.inode] = file
        return self._files.get(inode)

    def names(self) -> list[str]:
        """Return the names of all segments."""
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self.folder)) if self._is_ours() else []
        return []

    def unlink(self, names: Sequence[str]) -> None:
        """Delete names; a process that reads such a segment keeps its bytes."""
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(self.folder / name)

    def remove(self) -> None:
        """Delete all segments, and their directory, see `forget`."""
        forget(self.folder, self._root)


def _inode(path: str) -> int | None:
    try:
        return os.stat(path, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


def _wrong_size(name: str, size: int, nbytes: int) -> ChunkGone:
    return ChunkGone(f"segment {name} has {size} bytes, not {nbytes}")


class _File:
    """A file that is mapped here for reading, however often it is renamed; locked while it has a reader."""

    def __init__(self, path: str, nbytes: int) -> None:
        """Raises FileNotFoundError, ChunkGone for another size, ServerUnfit if it is no file of this user's.

        Nothing of another size is mapped: who reads behind the end of a file is ended by SIGBUS.
        """
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ServerUnfit(f"{path} cannot be opened ({error.strerror}): delete it") from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ServerUnfit(f"{path} is not a file of yours: delete it")
        if status.st_size != nbytes:
            raise _wrong_size(os.path.basename(path), status.st_size, nbytes)
        self.inode = status.st_ino
        self.data: Bytes = np.frombuffer(mmap.mmap(self._fd, nbytes, _MAP, mmap.PROT_READ), np.uint8)
        self._readers = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def forgotten(self) -> bool:
        """Whether it has no reader here and no name any more."""
        return not self._readers and not os.fstat(self._fd).st_nlink

    def enter(self) -> bool:
        """Lock it for one more reader; return whether that worked. Does not wait: its maker may sleep with the lock."""
        with self._lock, suppress(BlockingIOError):
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._readers += 1
            return True
        return False

    def leave(self) -> None:
        if self._pid != os.getpid():  # a fork shares the file's lock; its copy of `_lock` may be held for ever
            return
        with self._lock:
            self._readers -= 1
            if not self._readers:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self._fd)
