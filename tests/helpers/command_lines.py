"""The commands of kvps that stand in scripts, manifests and pages, held against the real options. Nothing runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

import kvps_cli
import typer

_APP = typer.main.get_command(kvps_cli.app)
_WORD = r"""(?:[^\s;|&<>()"'`]|"[^"\n]*"|'[^'\n]*')+"""
_COMMAND = re.compile(rf"(?<![^\s;|&(!])kvps((?: +(?!#){_WORD})+)")


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield each command of kvps in a shell's text, without the word kvps. The value of each variable is 1."""
    text = re.sub(r"\$\{?\w+(?::-\w+)?\}?", "1", re.sub(r"\\\n", " ", text))
    for found in _COMMAND.finditer(text):
        words = shlex.split(found[1])
        if words[0] in _APP.commands:  # type: ignore[attr-defined]
            yield words


def check_parses(words: Sequence[str]) -> None:
    """Parse a command, without the word kvps, as the command line does. Raises AssertionError if kvps refuses it."""
    command, rest = _APP, list(words)
    try:
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        command.make_context(words[0], rest)
    except Exception as error:
        raise AssertionError(f"kvps {shlex.join(words)}: {getattr(error, 'message', '') or repr(error)}") from None
