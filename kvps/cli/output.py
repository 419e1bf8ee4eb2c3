"""What a command prints: lines for a person on stderr, tables and JSON on stdout, and the log."""

from __future__ import annotations

import logging
import sys

from rich.console import Console


def plain_console() -> Console:
    """A console for what stands in Redis: names in brackets are no markup, `:100:` is no emoji."""
    return Console(markup=False, emoji=False)


def say(message: str) -> None:
    """One line for a person, at once."""
    print(message, file=sys.stderr, flush=True)


def log_to_stderr(quiet: bool) -> None:
    """Show what the parts log: all that changes hands, or with `quiet` only what is wrong."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING if quiet else logging.INFO, stream=sys.stderr)
