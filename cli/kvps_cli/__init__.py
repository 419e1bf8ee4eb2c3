"""The command `kvps`: it connects store, aggregator and workers. Nothing else knows all packages."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated, Any

import typer

import kvps
from kvps.connection import patience
from kvps.errors import KvpsError, UsageError, some_of
from kvps_cli.commands import Commands
from kvps_cli.help_text import WIDEST
from kvps_cli.output import leave_lost_terminal, print_nowhere


def _print_version(asked: bool) -> None:
    if asked:
        print(f"kvps {kvps.__version__}")
        raise typer.Exit


app = typer.Typer(
    name="kvps",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
)


@app.callback()
def _kvps(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A parameter server that keeps its whole state in Redis."""


_received: list[int] = []
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(app: typer.Typer = app) -> None:
    """Run the command line of `app`. An error is one line on stderr, with exit code 2 for usage and 1 for all else."""
    try:  # from here on, for a signal may come as soon as it has its handler
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, _interrupt)
        code = _flushed(_run(app))
    except (KeyboardInterrupt, typer.Abort):
        code = _flushed(128 + (_received[0] if _received else signal.SIGINT))
    sys.exit(code)


def _run(app: typer.Typer) -> int:
    try:
        code: Any = app(prog_name=app.info.name, standalone_mode=False)
        # Typer turns an interrupt into 130, whichever signal it came from.
        return 128 + _received[0] if _received else code if isinstance(code, int) else 0
    except KvpsError as error:
        if os.environ.get("KVPS_TRACEBACK"):
            traceback.print_exception(error)
        return _fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except BrokenPipeError:  # the reader of our output (head, less) has closed the pipe
        print_nowhere(1)
        return 0
    except OSError as error:  # of stdout, or of a file that had been opened: both have no name
        if error.errno not in _NO_ROOM or error.filename:
            raise
        return _no_room(error)
    except Exception as error:
        # Typer's own exceptions know their exit code and message; the base class is not a public name.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            return 2
        return _fail(_instead(error) or error.format_message() + _elsewhere(error, app), 2)


def _instead(error: Exception) -> str:
    """Return what takes the place of an unknown option, if an older version of kvps had it, or which tasks there are if
    one is missing, else ""."""
    from kvps.config.gone import GONE, OF_SCRIPTS

    if type(error).__name__ == "MissingParameter" and getattr(getattr(error, "param", None), "name", "") == "task":
        return "TASK is missing: digits, or MODULE:ATTRIBUTE of a module in this directory"
    option = getattr(error, "option_name", "")
    instead = (GONE | OF_SCRIPTS).get(option.removeprefix("--").replace("-", "_"))
    return f"there is no {option} any more: {instead}" if instead else ""


def _elsewhere(error: Exception, app: typer.Typer) -> str:
    """Return which commands have an option that another one was given, "" for any other error."""
    if type(error).__name__ != "NoSuchOption":
        return ""
    option, found = getattr(error, "option_name", ""), []
    for name, command in getattr(typer.main.get_command(app), "commands", {}).items():
        parts = getattr(command, "commands", None) or {"": command}
        found += [
            f"kvps {name} {part}".rstrip()
            for part, each in parts.items()
            if any(option in param.opts for param in each.params)
        ]
    return f"; {some_of(found)} {'has' if len(found) == 1 else 'have'} it" if found else ""


def _flushed(code: int) -> int:
    """Write what has been printed, and return the exit code. Python itself would do that later, and with a traceback if
    it fails."""
    try:
        if sys.stdout:  # None if the program was started without one
            sys.stdout.flush()
    except BrokenPipeError:
        print_nowhere(1)
    except OSError as error:
        print_nowhere(1)
        return code or _no_room(error)
    return code


def _no_room(error: OSError) -> int:
    return _fail(f"{error.strerror} while writing: make room, or send the output elsewhere", 1)


def _fail(message: str, code: int) -> int:
    print(f"kvps: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _interrupt(number: int, _: FrameType | None) -> None:
    """Leave through every `finally` on Ctrl-C, SIGTERM and SIGHUP; a second signal ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    leave_lost_terminal()
    first = not _received
    _received.append(number)
    if first:  # a signal that comes while this sets it, and so holds its lock, would wait for ever
        patience.ending.set()
    raise KeyboardInterrupt
