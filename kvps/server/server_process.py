"""The start of a server process on this host: its settings, which stand in no command line, and what its log says."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvps.machine.child_process import ChildProcess
from kvps.machine.files import private

START_S = 15.0
LOAD_S = 600.0  # a server with data loads it first
_LOOK_AGAIN_S = 0.02


def launched(command: Sequence[str], settings: Mapping[str, str], log: Path, guarded: bool = False) -> ChildProcess:
    """Start a server that reads its settings from its standard input and says into `log` what goes wrong.

    With `guarded` the command is a guard's (see `watchdog`): a line "end" follows, and the input stays open. Raises
    OSError if it cannot be started.
    """
    text = "".join(f"{name} {value}\n" for name, value in settings.items())
    with open(log, "w", opener=private) as output:
        # In a session of its own: Ctrl-C in the terminal must first reach the processes that need the server to leave.
        # The server makes its files with the modes that the umask leaves.
        server = ChildProcess(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, umask=0o077
        )
    assert server.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, and its log says why
        server.stdin.write(text.encode() + (b"end\n" if guarded else b""))
        if guarded:
            server.stdin.flush()
        else:
            server.stdin.close()
    return server


def comes_true(done: Callable[[], bool], patience_s: float, child: ChildProcess | None = None) -> bool:
    """Poll until `done` returns True. Return False if patience or the child, if there is one, has ended before that.

    Servers, and nodes of a cluster, announce to nobody what they do.
    """
    deadline = time.monotonic() + patience_s
    while not (holds := done()) and time.monotonic() < deadline and (child is None or child.poll() is None):
        time.sleep(_LOOK_AGAIN_S)
    return holds


def quoted(text: str) -> str:
    """Return a text as one word of a server's settings; a control character would end the line."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda control: f"\\x{ord(control[0]):02x}", escaped) + '"'


def last_lines(log: Path) -> str:
    """Return the last two lines of a server's log as one; "" if there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "; ".join(re.sub(r"^\d+:.*? [#*-] ", "", line).strip() for line in lines[-2:] if line.strip())
