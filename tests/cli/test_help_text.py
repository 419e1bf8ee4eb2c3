"""What --help and --help-all of each command show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from kvps_cli import app

from kvps.errors import InvalidSetting

Shown = Callable[..., str]


def _all_of(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield the words of each command, and the command: also those that have commands of their own."""
    for name, command in group.commands.items():
        yield name, command
        if hasattr(command, "commands"):
            yield from ((f"{name} {words}", each) for words, each in _all_of(command))


ALL = dict(_all_of(typer.main.get_command(app)))
GROUPS = ["", *(words for words, each in ALL.items() if hasattr(each, "commands"))]
COMMANDS = [words for words in ALL if words not in GROUPS]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Return what a command prints for a help option."""

    def of(command: str, option: str = "--help", columns: int = 100) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        app([*command.split(), option], prog_name="kvps", standalone_mode=False)
        printed = capsys.readouterr().out
        assert printed.startswith(f"Usage: kvps {command}")
        return printed

    return of


def _options(text: str) -> set[str]:
    """Return the options that have a line in a help text."""
    names = (re.split(" {2,}", line)[0] for line in re.findall("^  (-.*)", text, re.MULTILINE))
    return {option for name in names for option in re.findall("--[a-z-]+", name)}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_shows_every_option_and_help_says_how_many_more(command: str, shown: Shown) -> None:
    text, every = shown(command), _options(shown(command, "--help-all"))
    left_out = re.search(rf"^kvps {command} --help-all shows (\d+) more options?\.$", text, re.MULTILINE)
    assert _options(text) <= every
    assert len(every - _options(text)) == (int(left_out[1]) if left_out else 0)
    declared = {name for option in ALL[command].params for name in option.opts if name.startswith("--")}
    assert every == {"--help", *declared} - (set() if left_out else {"--help-all"})


def test_an_option_behind_the_program_of_kvps_run_is_the_programs() -> None:
    with pytest.raises(InvalidSetting, match="there is no program 'no-such-program'"):
        app(["run", "no-such-program", "--help-all"], prog_name="kvps", standalone_mode=False)


def test_every_command_that_has_a_url_has_the_options_of_its_connection() -> None:
    names = {"redis", "tls_ca", "tls_cert", "tls_key", "patience"}
    has = [names & {option.name for option in ALL[words].params} for words in COMMANDS]
    assert names in has
    assert all(found in (names, set()) for found in has)
