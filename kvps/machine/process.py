"""Which process a worker is, so that the job can tell a dead one from a silent one. Linux says more than others."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def identity(device: str = "cpu") -> dict[str, Any]:
    """What a worker says of its process: host, pid, and what makes the pid unique (boot, namespace, start time)."""
    pid = os.getpid()
    return {
        "host": host(),
        "pid": pid,
        "start": _start_time(pid),
        "space": _space(),
        "device": device,
    }


def mark(pid: int) -> str:
    """One process of this machine in a word: host:pid:start time, the last since pids are used again."""
    return f"{host()}:{pid}:{_start_time(pid)}"


def host() -> str:
    """What this machine is called."""
    return socket.gethostname()


def is_dead(process: Mapping[str, Any]) -> bool:
    """Whether the process that gave this identity is surely gone. Of another machine's nothing is sure."""
    if not process.get("space") or process["space"] != _space():
        return False
    return _start_time(int(process["pid"])) != str(process["start"])


def runs(pid: int) -> bool:
    """Whether a process of this machine runs; a zombie does not. Elsewhere than on Linux nothing is known: False."""
    return _start_time(pid) != ""


def ending_with_this(command: Sequence[str]) -> list[str]:
    """The command that becomes `command` and is sent SIGTERM when this process, which starts it, ends however it ends.

    This file runs it by name, without kvps and its libraries: what is started need not be Python.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def die_with_parent(parent: int) -> None:
    """Have this process sent SIGTERM when `parent`, which started it, ends however it ends (Linux only)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the request was made
        os.kill(os.getpid(), signal.SIGTERM)


@cache
@lru_cache
def boot() -> str:
    """Which start of which kernel this process runs under; "" where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _space() -> str:
    """The boot and the pid namespace in which pids mean something; "" where that is not known."""
    try:
        return f"{boot()}/{os.readlink('/proc/self/ns/pid')}" if boot() else ""
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """When the process began, in ticks since boot; "" if there is none (a zombie counts as none)."""
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
