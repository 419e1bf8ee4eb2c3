"""What a command prints: results on stdout; messages for people, errors and the log on stderr.

Names, reasons and file names may come from anybody. What a terminal would obey is written as its code here, where text
leaves.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvps.errors import InvalidSetting, counted, printable
from kvps.machine import launcher
from kvps.parsing import json_of


def say(message: str) -> None:
    """Print one message for people, without delay."""
    leave_lost_terminal()
    print(printable(message), file=sys.stderr, flush=True)


def loss_text(loss: float | None) -> str:
    """Return a loss for a table, "-" for none; one that has grown beyond all use is no wider than others."""
    if loss is None:
        return "-"
    return f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.3g}"


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    print(json_of(value))


def write_file(option: str, path: Path, content: str | bytes) -> None:
    """Write the file that an option names. Raises InvalidSetting."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidSetting(f"{option} {path}: {error.strerror}") from None


@contextmanager
def surviving_its_reader(survives: bool) -> Iterator[None]:
    """If the reader of what the block prints has ended, as tee does of Ctrl-C too, print nowhere from then on."""
    try:
        yield
    except BrokenPipeError:
        if not survives:
            raise
        print_nowhere(1, 2)


def leave_lost_terminal() -> None:
    """Print nowhere what would go to a terminal that has hung up: each write would fail, and end what is to end in
    order, or under nohup at its own end."""
    for stream in (1, 2):
        with suppress(OSError):  # it is closed
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                print_nowhere(stream)


def print_nowhere(*streams: int) -> None:
    """Send what is still to be printed to these streams nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


# -- the log ------------------------------------------------------------------------------------------------------


def start_log(quiet: bool, verbose: int) -> bool:
    """Print the log of kvps, and return whether the command itself must print only results and errors.

    By default it shows INFO, as of kills and failovers, but only warnings in a process that kvps up or kvps run
    started, because they report the rest. With `quiet` it shows only errors, with `verbose` INFO with times, and from 2
    on DEBUG too. Raises InvalidSetting.
    """
    if quiet and verbose:
        raise InvalidSetting("--quiet and --verbose exclude each other")
    launched = bool(launcher.own())
    level = logging.ERROR if quiet else logging.WARNING if launched else logging.INFO
    if verbose:
        level = logging.INFO if verbose == 1 else logging.DEBUG
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s" if verbose else None))
    log = logging.getLogger("kvps")
    log.addHandler(handler)
    log.setLevel(level)
    log.propagate = False
    return quiet or launched


def log_options(quiet: bool, verbose: int) -> list[str]:
    """Return the options that make a process which this one starts log as much as this one."""
    return ["--quiet"] if quiet else ["--verbose"] * verbose


class _ToStderr(logging.Handler):
    """A handler that looks up sys.stderr for each record, because a live table replaces it while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def seconds_text(seconds: float) -> str:
    """Return a time in words: 10 minutes, 1 minute, 90 seconds."""
    minutes, rest = divmod(seconds, 60)
    if minutes and not rest:
        return counted(round(minutes), "minute")
    return f"{seconds:g} second{'' if seconds == 1 else 's'}"
