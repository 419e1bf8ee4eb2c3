"""One copy of a job's weights for all processes of this user on this host: one reads Redis, all read its memory.

The memory is a memfd: it has no name in any directory, and the kernel frees it when the last process lets go of it. A
process that finds no copy it can use takes the lock, reads the newest version from Redis, and notes where the copy is:

    <runtime directory>/copies/<job's id>    mode 0600, locked by the process that reads Redis; holds one `_Note`

The kernel drops the lock of a dead process, so another takes over at once. A process that has the lock and makes no
progress, because it was stopped, holds up no other: the others read Redis themselves, as if there were no copies.

A copy does not change while it is noted or in use. Its maker writes the memory anew, because fresh memory costs the
kernel ten times the copy into it; but only memory that is not noted any more, under its exclusive lock. A reader holds
the shared lock, and checks once it has the lock that the note is still the one that it came for.

Workers need one version each, and soon. A process that reads a version for others has locked the byte of its names in
the file, so no process waits for the read of another version. Byte 0 is shared by all processes that want versions: one
that is alone makes no copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvps.arrays.layout import DTYPE, Array
from kvps.errors import ServerUnfit
from kvps.machine import process
from kvps.machine.fork import ProcessOwner
from kvps.machine.paths import private_directory, runtime_dir
from kvps.parsing import file_name
from kvps.transport.locked_file import BYTES_CAN_BE_LOCKED, Member, byte_of, locked, opened, take_byte, untouched_s

_AVAILABLE = hasattr(os, "memfd_create")  # Linux
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if _AVAILABLE else 0
_MEMORIES = 3  # that a process keeps: the noted one, one that readers still have, and the next
_STUCK_S = 2.0  # without a chunk: then its process is stopped, or its link is too slow to wait for
_PAUSES_S = (0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, *[0.05] * 20)  # between two reads of the note
_REST, _MOST_REST_S = 3, 1.0  # after a read of Redis there is none for three times as long as it took
_POLL_S = 0.002  # between two reads of the note by a process that waits for a certain version
_ANY_AGE_IS_OLD = 1 << 63  # no copy is taken for its age
_LEAD_S = 0.03  # by which the last maker, whose memory is not fresh, comes before the others
_MOST_NOTE = 1 << 17
_NOTE = re.compile(rb"([0-9]{1,10}) ([0-9]{1,10}) ([0-9a-f]{16}) ([0-9]{1,19}) ([0-9]{1,19}) ([0-9]{1,19}) ([!-~]*)\n")

Progress = Callable[[], None]
Read = Callable[[Array, Progress], tuple[int, str]]


class _Note(NamedTuple):
    """Where a copy is, and what it holds.

    pid, fd  the process that keeps the copy open, and its descriptor
    nonce    a part of the memory's name, by which a process knows that it has opened what is meant
    asked   when its maker asked which version is the newest: nanoseconds of this host's monotonic clock
    rest     until when, by the same clock, no reader reads Redis again: workers come first
    version  the version
    name     the staged names of that version; "" if its maker does not know them
    """

    pid: int
    fd: int
    nonce: str
    asked: int
    rest: int
    version: int
    name: str

    @classmethod
    def read(cls, file: int) -> _Note | None:
        """Return the note in the file; None if there is none, or only half of one yet."""
        if not (match := _NOTE.fullmatch(os.pread(file, _MOST_NOTE, 0))):
            return None
        pid, fd, nonce, asked, rest, version, name = (word.decode() for word in match.groups())
        return cls(int(pid), int(fd), nonce, int(asked), int(rest), int(version), name)

    def write(self, file: int) -> None:
        os.ftruncate(file, 0)
        os.pwrite(file, (" ".join(map(str, self)) + "\n").encode(), 0)

    @property
    def rest_s(self) -> float:
        """For how long this process does not read Redis yet; 0 if the note is of an earlier boot."""
        lead_s = 0.0 if self.pid == os.getpid() else _LEAD_S
        left_s = (self.rest - time.monotonic_ns()) / 1e9
        return max(0.0, left_s + lead_s) if left_s <= _MOST_REST_S else 0.0


class HostCopy:
    """The copies of one job. May be used from several threads.

    reads  how many times this process has read Redis for all
    """

    def __init__(self, id: str, items: int) -> None:
        """`id` is the job's id, `items` are the float32 of its weights."""
        self._id = id
        self._nbytes = items * DTYPE.itemsize
        self._path: Path | None = None
        self._memories: list[_Memory] = []  # this process's; the one written last is the last
        self._in_use: tuple[_Note, weakref.ref[Array]] | None = None
        self._member: Member | None = None
        self._blind = False  # whether the memory of another process could not be opened here
        self._ending: Callable[[], object] | None = None
        self.reads = 0

    def newest(self, name: str, since: int, read: Read) -> tuple[int, Array] | None:
        """Return a version and its weights, (items,) float32 that nobody can write to. None if there is no copy to be
        had: then the caller reads Redis itself.

        The version is the one with the staged names `name`, or one that was the newest after `since`, a time of
        `time.monotonic_ns`. If this process is the one to read Redis, it calls `read(flat, progress)`, which fills
        `flat`, calls `progress` now and then, and returns the version and its staged names. Raises what `read` raises.
        """
        if not _AVAILABLE or (path := self._place()) is None:
            return None
        with suppress(OSError):  # no room for a copy, or a file that is not this user's
            while True:
                with opened(path) as file:
                    for pause_s in _PAUSES_S:
                        note = _Note.read(file)
                        if copy := self._noted(file, note, name, since):
                            return copy
                        rest_s = note.rest_s if note else 0.0
                        if not rest_s and locked(file, path):
                            note = _Note.read(file)
                            return self._noted(file, note, name, since) or self._made(file, path, note, read, _REST)
                        if not rest_s and untouched_s(file) > _STUCK_S:
                            return None
                        time.sleep(rest_s or pause_s)
        return None

    def exactly(self, name: str, read: Read) -> tuple[int, Array] | None:
        """Return the version with the staged names `name` and its weights, as `newest` does; but no process rests, or
        waits for a read of another version. None also if no other process is here, see `enter`, or if the kernel lets
        this process not open what another has read.

        A process that waited in vain reads Redis itself, so none waits longer than one read takes.
        """
        if not self.enter() or (path := self._place()) is None:
            return None
        with suppress(OSError), opened(path) as file:
            waited = False
            while True:
                if copy := self._noted(file, _Note.read(file), name, _ANY_AGE_IS_OLD):
                    return copy
                if take_byte(file, byte_of(name)):
                    note = _Note.read(file)  # it may have been written before the byte was locked
                    if copy := self._noted(file, note, name, _ANY_AGE_IS_OLD):
                        return copy
                    if waited or not locked(file, path):
                        return None
                    return self._made(file, path, note, read, 0)
                if waited and untouched_s(file) > _STUCK_S:
                    return None
                time.sleep(_POLL_S)
                waited = True
        return None

    def enter(self) -> bool:
        """Be one of those who call `exactly`, until this object is gone. Return whether others on this host are."""
        if self._blind or not (_AVAILABLE and BYTES_CAN_BE_LOCKED) or (path := self._place()) is None:
            return False
        with suppress(OSError):
            if not (self._member and self._member.is_at(path)):  # who deletes a note deletes the file
                self._member = Member(path)
                self._withdraw_at_end(path)
            return self._member.has_company
        return False

    def _withdraw_at_end(self, path: Path) -> None:
        """Have this process's note deleted at the end of this process, or of its use of the job."""
        own = partial(_delete_note, path, lambda pid: pid != os.getpid())
        self._ending = self._ending or weakref.finalize(self, ProcessOwner("a copy").run, own)

    def _place(self) -> Path | None:
        """Return the path of the note, in a directory that is this user's alone; None if there can be none."""
        if self._path is None:
            with suppress(ServerUnfit):
                folder = runtime_dir() / "copies"
                private_directory(folder)
                self._path = folder / file_name(self._id, "the id of a job")
        return self._path

    def _noted(self, file: int, note: _Note | None, name: str, since: int) -> tuple[int, Array] | None:
        """Return the version and weights of the note, if they are what is asked for and can be opened."""
        if not note or not (note.name == name or note.asked >= since):
            return None
        flat = self._mapped(file, note)
        return None if flat is None else (note.version, flat)

    def _mapped(self, file: int, note: _Note) -> Array | None:
        """Return the weights that the file's note tells of; None if they cannot be opened, or the note has changed."""
        if self._in_use and self._in_use[0] == note and (flat := self._in_use[1]()) is not None:
            return flat
        try:
            fd = os.open(f"/proc/{note.pid}/fd/{note.fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:  # its process has ended, or is in another container
            if isinstance(error, PermissionError):
                self._blind, self._member = True, None  # no process makes copies for this one in vain
            return None
        try:
            if not self._is_copy(fd, note.nonce):
                return None
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _Note.read(file) != note:  # it may have been written anew before it was locked
                return None
            # The mapping keeps the file open, and so the lock, until the user's last array of it is gone.
            flat = np.frombuffer(mmap.mmap(fd, self._nbytes, mmap.MAP_SHARED, mmap.PROT_READ), DTYPE)
        except BlockingIOError:
            return None
        finally:
            os.close(fd)
        self._in_use = note, weakref.ref(flat)
        if note.pid != os.getpid():
            self._memories.clear()  # another process makes the copies now
        return flat

    def _is_copy(self, fd: int, nonce: str) -> bool:
        """Return whether `fd` is memory of this user's with this nonce, which no process can cut."""
        status = os.fstat(fd)
        return (
            stat.S_ISREG(status.st_mode)
            and (status.st_uid, status.st_size) == (os.geteuid(), self._nbytes)
            and os.readlink(f"/proc/self/fd/{fd}") == f"/memfd:{_memory_name(self._id, nonce)} (deleted)"
            and fcntl.fcntl(fd, fcntl.F_GET_SEALS) == _SEALS
        )

    def _made(self, file: int, path: Path, before: _Note | None, read: Read, rest: int) -> tuple[int, Array] | None:
        """Read Redis into memory that no process uses, and note it. The caller has the lock of the file. Readers rest
        for `rest` times as long as it took."""
        os.utime(file)
        memory = next((m for m in self._memories if not (before and m.nonce == before.nonce) and m.lock()), None)
        if memory:
            self._memories.remove(memory)
        else:
            memory = _Memory(self._id, self._nbytes)
        asked = time.monotonic_ns()
        version, name = read(memory.flat, lambda: os.utime(file))
        memory.unlock()
        now = time.monotonic_ns()
        until = now + min(rest * (now - asked), round(_MOST_REST_S * 1e9))
        note = _Note(os.getpid(), memory.fd, memory.nonce, asked, until, version, name)
        note.write(file)
        self.reads += 1
        self._memories[:] = [*self._memories[1 - _MEMORIES :], memory]
        if self.reads == 1:
            for other in path.parent.iterdir():  # the notes of processes that were killed
                if other != path:
                    _delete_note(other, process.runs)
        self._withdraw_at_end(path)
        flat = self._mapped(file, note)
        return None if flat is None else (version, flat)


class _Memory:
    """Memory of this process that others may read: `flat` is its (items,) float32."""

    def __init__(self, id: str, nbytes: int) -> None:
        """Raises OSError if there is no room."""
        self.nonce = secrets.token_hex(8)
        self.fd = os.memfd_create(_memory_name(id, self.nonce), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self.flat: Array = np.frombuffer(mmap.mmap(self.fd, nbytes), DTYPE)

    def lock(self) -> bool:
        """Lock it to be written; return False if a process reads it."""
        with suppress(BlockingIOError):
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def unlock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self.fd)


def _memory_name(id: str, nonce: str) -> str:
    return f"kvps-{id}-{nonce}"


def _delete_note(path: Path, is_needed: Callable[[int], bool]) -> None:
    """Delete the note at `path` unless the process that wrote it, by its id, needs it."""
    with suppress(OSError), opened(path) as file:
        note = _Note.read(file)
        if not (note and is_needed(note.pid)) and locked(file, path):
            path.unlink()
