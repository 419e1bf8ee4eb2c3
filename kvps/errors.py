"""The errors of kvps, as one tree. Every message says what happened and what to do.

KvpsError
├── UsageError            the call or an argument is wrong; nothing was changed
│   ├── InvalidName       a name that a job or a worker cannot have
│   ├── InvalidSetting    a setting out of its range
│   ├── InvalidTask       a task that cannot be found, or is no task
│   ├── LayoutMismatch    missing or extra parameter, wrong dtype or shape
│   ├── NotFinite         a gradient or parameter with NaN or Inf
│   └── WrongOrder        push without pull, a closed session, another thread's session
├── ServerError
│   ├── NoServer          no server answers there, or none could be started
│   ├── ServerUnfit       too old, evicting, read-only, or another user's
│   ├── ServerFull        the server's memory is full: nothing was stored, and the call may be made again
│   └── ServerLost        the server answered before and no longer does
│       └── TooManyClients   the server refuses another connection
├── JobError
│   ├── JobNotFound
│   ├── JobExists
│   ├── ItemsRefused      items of experience that a version cannot be trained on (any more)
│   └── CorruptData       bytes in Redis are missing or do not match their digest
├── WorkerError
│   ├── TaskFailed        the user's task raised an error, or returned an invalid value
│   ├── ContributionLate  its round was committed without it, and the job drops late ones
│   ├── WorkerAlive       the id belongs to a living worker
│   ├── WorkerEvicted     this incarnation was evicted or replaced; it must join again
│   └── GroupLost         a member of the worker's process group has died; make a new group, and join again
├── DeviceFailed          a CUDA call failed, or the device has no memory left
└── LeaseLost             another aggregator holds the shard now

RunEnds               a SystemExit, and no KvpsError: `except Exception` does not catch it
├── JobStopped        the job was stopped, and this worker has done its last round
└── JobSuspended      the job was suspended; it goes on later, from here
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def printable(text: str) -> str:
    """Return a text as a person may see it: what a terminal would obey, or could not show, is written as its code.

    Names, reasons and settings in messages come from Redis, where anybody with the password may have written them.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, noun: str) -> str:
    """Return "1 worker" or "3,000 workers" for the noun "worker"."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def install(extra: str = "") -> str:
    """Return how to install kvps, or an optional part of it. There is no release yet: under its name, a package index
    has nothing, or what a stranger put there."""
    return f"pip install '.{extra and f'[{extra}]'}' in a clone of kvps"


_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m|\t)")


def coloured(text: str) -> str:
    """Return a line of a user's program for a terminal: `printable`, but with its tabs and colours.

    Colours end with the line, because the next one may be another program's.
    """
    if text.isprintable():
        return text
    pieces = _COLOUR.split(text)  # every second one is a colour or a tab
    safe = "".join(piece if i % 2 else printable(piece) for i, piece in enumerate(pieces))
    return f"{safe}\x1b[0m" if "\x1b" in safe else safe


_SHOWN = 80
_NAMED = 5


def shown(value: object) -> str:
    """Return a value for a message: one line, of which no more than 80 characters are shown."""
    text = re.sub(r"\s*\n\s*", " ", repr(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def some_of(names: Sequence[object]) -> str:
    """Join names for a message; of more than 5, only the first 5, and how many others there are."""
    listed = ", ".join(map(str, names[:_NAMED]))
    return listed if len(names) <= _NAMED else f"{listed} and {counted(len(names) - _NAMED, 'other')}"


class KvpsError(Exception):
    """Base of all errors that kvps raises on purpose. Its message is one that a person may see, see `printable`."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


class UsageError(KvpsError, ValueError):
    """The call or an argument is wrong; nothing was changed."""


class InvalidName(UsageError):
    """A name that a job or a worker cannot have: see `kvps.parsing.NAME`."""


class InvalidSetting(UsageError):
    """A setting out of its range."""


class InvalidTask(UsageError):
    """A task that cannot be found, cannot be loaded, or lacks what a task must have."""


class LayoutMismatch(UsageError):
    """Arrays that do not fit the job's layout: a name, a dtype or a shape."""


class NotFinite(UsageError):
    """An array that holds NaN or Inf."""


class WrongOrder(UsageError):
    """A call that cannot be made now: push without pull, a closed session, another thread's session."""


class ServerError(KvpsError):
    """Base of the errors about the Redis server."""


class NoServer(ServerError):
    """No server answers at the URL, or none could be started."""


class ServerUnfit(ServerError):
    """A server that kvps must not train on: too old, evicting, read-only, or another user's."""


class ServerFull(ServerError):
    """The server's memory is full or would be. Nothing was changed; repeat the call once there is room."""


class NotPermitted(ServerError):
    """The server does not let this user run the command, or use its keys: see `kvps acl`."""


class ServerLost(ServerError):
    """The server answered before and no longer does."""


class TooManyClients(ServerLost):
    """The server has as many clients as its maxclients allows, and refused one more connection."""


class JobError(KvpsError):
    """Base of the errors about one job."""


class JobNotFound(JobError):
    """No job of that name is on this server."""


class JobExists(JobError):
    """A job of that name is already on this server."""


class ItemsRefused(JobError):
    """A version names items of experience that are too old, or not taken any more. Nothing was committed."""


class CorruptData(JobError):
    """Bytes under the job's keys are missing or differ from their digest."""


class WorkerError(KvpsError):
    """Base of the errors about one worker."""


class TaskFailed(WorkerError):
    """A task raised an error, which is the ``__cause__`` of this one, or returned an invalid value."""


class ContributionLate(WorkerError):
    """The round was committed without this contribution, and the job drops late ones: pull, and compute anew."""


class WorkerAlive(WorkerError):
    """The worker id belongs to a living process; `entry` is the job's record of that process (host, pid, ...)."""

    def __init__(self, message: str, entry: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.entry = entry


class WorkerEvicted(WorkerError):
    """This incarnation was evicted or replaced. Its acknowledged contributions still count; join again to continue."""


class GroupLost(WorkerError):
    """A member of the worker's process group has died. What was acknowledged counts; join again with a new group."""


class RunEnds(SystemExit):
    """Base of what ends a worker's loop because somebody has asked for it. A script that does not catch it ends without
    a traceback, with its `code`."""

    exit_code = 0

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))
        self.code = self.exit_code


class JobStopped(RunEnds):
    """The job was stopped, and this worker has done its last round. The end of the session's `with` block catches it,
    and the script goes on behind it. The exit code is 0."""


class JobSuspended(RunEnds):
    """The job was suspended, and this worker has done the last round for now: let it end the script. The exit code is
    75, EX_TEMPFAIL: the same command goes on later."""

    exit_code = 75


class DeviceFailed(KvpsError):
    """A CUDA call failed, or the device has no memory left."""


class LeaseLost(KvpsError):
    """Another aggregator holds the shard now; this aggregator can no longer commit anything for it."""


def not_to_be_pickled(what: str, instead: str) -> UsageError:
    """Return the error of an object that is to be copied to another process: `what` says whose it is, `instead` what to
    hand over."""
    return UsageError(f"{what}, and cannot be pickled: {instead}")
