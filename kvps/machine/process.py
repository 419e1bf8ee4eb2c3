"""The identity of processes, by which a job can tell a dead worker from a silent one. Only on Linux is it complete."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

_PR_SET_PDEATHSIG = 1
_NAMESPACES = ("/proc/self/ns/pid", "/proc/self/ns/time")


def identity(device: str = "cpu") -> dict[str, Any]:
    """Return what identifies this process: host, pid, and what makes the pid unique (boot, namespaces, start time)."""
    pid = os.getpid()
    return {"host": host(), "pid": pid, "start": _start_time(pid), "space": space(), "device": device}


def mark(pid: int) -> str:
    """Return one word for a process of this machine: host:pid:start time, because pids are used again."""
    return f"{host()}:{pid}:{_start_time(pid)}"


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def is_dead(process: Mapping[str, Any]) -> bool:
    """Return whether the process of this identity is certainly gone; False on another machine, where it is unknown."""
    if not process.get("space") or process["space"] != space():
        return False
    return not (began := _start_time(int(process["pid"]))) or began != process.get("start")


def is_this(process: Mapping[str, Any]) -> bool:
    """Return whether the process of this identity is the calling one."""
    me = identity()
    return all(process.get(name) == me[name] for name in ("host", "pid", "start"))


def runs(pid: int) -> bool:
    """Return whether a process of this machine runs; a zombie does not. Outside Linux this is unknown: False."""
    return _start_time(pid) != ""


def catches(pid: int, number: int) -> bool:
    """Return whether a process of this machine handles a signal by a function of its own. Outside Linux this is
    unknown: False."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return False
    return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)


def own_input() -> BinaryIO:
    """Return the standard input of this process, which has an empty one from now on.

    So a task of the user that asks for input gets EOFError, and does not wait for or eat what this process is told.
    """
    taken = os.fdopen(os.dup(0), "rb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return taken


def ending_with_this(command: Sequence[str]) -> list[str]:
    """Return a command that becomes `command` and is sent SIGTERM when this process, which starts it, ends in any way.

    It runs this file by name, without importing kvps or its libraries; `command` need not be Python.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def die_with_parent(parent: int) -> None:
    """Have this process sent SIGTERM when `parent`, which started it, ends in any way (Linux only)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before the request was made
        os.kill(os.getpid(), signal.SIGTERM)


@cache
def boot() -> str:
    """Return the id of the kernel's present boot; "" where it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def space() -> str:
    """Return the boot, and the namespaces in which pids and start times are valid here; "" where they are unknown."""
    try:
        names = [os.readlink(link) for link in _NAMESPACES if os.path.lexists(link)]  # an older kernel has none of time
        return "/".join([boot(), *names]) if boot() and names else ""
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Return when the process began, in ticks since boot; "" if there is no such process (a zombie counts as none)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()  # the command's name may hold spaces and parentheses
    return "" if fields[0] in "ZX" else fields[19]


def _become(parent: int, command: list[str]) -> None:
    die_with_parent(parent)  # the kernel remembers it through exec
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
