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


@pytest.mark.parametrize("command", ["up", "run"])
def test_the_options_that_people_use_fit_110_lines(command: str, shown: Shown) -> None:
    text = shown(command)
    assert len(text.splitlines()) <= 110
    assert {"--job", "--workers", "--staleness", "--optimizer", "--lr", "--checkpoints", "--redis"} <= _options(text)


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("command", ["up", "run", "create", "submit", "log", "aggregator start"])
def test_a_help_text_is_as_wide_as_the_terminal_up_to_100_columns(command: str, columns: int, shown: Shown) -> None:
    lines = shown(command, "--help-all", columns).splitlines()
    assert min(columns, 100) - 10 < max(map(len, lines)) <= min(columns, 100)
    headings = [line for line in lines if re.match(r"\w[\w ]*:$", line)]
    assert headings.index("Options:") <= 1
    assert headings[-1] == "Server:"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_shows_every_option_and_help_says_how_many_more(command: str, shown: Shown) -> None:
    text, every = shown(command), _options(shown(command, "--help-all"))
    left_out = re.search(rf"^kvps {command} --help-all shows (\d+) more options?\.$", text, re.MULTILINE)
    assert _options(text) <= every
    assert len(every - _options(text)) == (int(left_out[1]) if left_out else 0)
    declared = {name for option in ALL[command].params for name in option.opts if name.startswith("--")}
    assert every == {"--help", *declared} - (set() if left_out else {"--help-all"})


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_shows_the_first_sentence_of_each_command(group: str, shown: Shown) -> None:
    rows = re.findall(r"^  (\w+) +([A-Z].*)", shown(group), re.MULTILINE)
    assert [f"{group} {name}".strip() for name, _ in rows] == [w for w in ALL if w.rpartition(" ")[0] == group]
    assert "..." not in "".join(sentence for _, sentence in rows)
    assert shown(group, "--help-all") == shown(group)


def test_an_option_behind_the_program_of_kvps_run_is_the_programs() -> None:
    with pytest.raises(InvalidSetting, match="there is no program 'no-such-program'"):
        app(["run", "no-such-program", "--help-all"], prog_name="kvps", standalone_mode=False)


def test_every_command_that_has_a_url_has_the_options_of_its_connection() -> None:
    names = {"redis", "tls_ca", "tls_cert", "tls_key", "patience"}
    has = [names & {option.name for option in ALL[words].params} for words in COMMANDS]
    assert names in has
    assert all(found in (names, set()) for found in has)
