"""Texts of Lua scripts, and how they are run: by their digests, so that a round does not send them again."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import groupby
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from redis.exceptions import NoScriptError

from kvps import parsing
from kvps.errors import KvpsError, NotPermitted
from kvps.protocol.script_header import Header, Key, split_header

T = TypeVar("T")
Call = Callable[..., Any]
"""Runs a Redis command and returns its reply; repeats the command while the server cannot be reached."""

_LOAD_S, _LOOK_S = 10.0, 0.05  # how long, and how often, a user that may not load scripts waits for another process


FUNCTION = re.compile(r"^local function (\w+)(?:\(.* end$|\(.*\n(?:.*\n)*?end$)", re.MULTILINE)
"""A function of an included file, on one line or up to a line that is `end`."""
_CONSTANT = re.compile(
    r"\b(NAME_CHARACTERS|LONGEST_NAME|LARGEST_RANK|MOST_BASES|MOST_GROUP|MOST_IDS|MOST_ITEMS|MOST_OPEN_UNITS|MOST_PIN|MOST_SHARDS|MOST_TAKEN)\b"
)
_PLACE = re.compile(r"@?user_script: ?(\d+)")
"""A line of a script's text, as Redis names it in an error."""


class Piece(NamedTuple):
    """A part of a Lua file, which begins at its line `line`."""

    file: str
    line: int
    lua: str


@dataclass(frozen=True, eq=False)
class Script:
    """One script. Its text has the header of its file, the functions that it uses, and the body of its file. `places`
    says which lines these are: the first one in the text -> the file, and the line there."""

    name: str
    text: str
    places: Mapping[int, tuple[str, int]]

    @cached_property
    def sha(self) -> str:
        """The SHA-1 digest by which the server knows it."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    @cached_property
    def header(self) -> Header:
        """What its header says."""
        return Header.parse(self.text)

    @property
    def commands(self) -> set[str]:
        """The Redis commands that it calls."""
        return set(re.findall(r"redis\.p?call\('(\w+)'", self.text))

    def command(self, known: object, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the command that runs it, where `known` knows the keys and `values` has the arguments by name."""
        keys: list[str] = []
        for part in _named_once(self, known):
            keys += part.keys(known, values) if isinstance(part, Key) else part
        return ("EVALSHA", self.sha, len(keys), *keys, *self.header.ordered_arguments(values))

    def located(self, error: KvpsError) -> KvpsError:
        """Return an error of this script, which names file and line in place of a line of the text."""

        def place(match: re.Match[str]) -> str:
            line = int(match[1])
            first = max(first for first in self.places if first <= line)
            file, line_there = self.places[first]
            return f"{file}:{line_there + line - first}"

        error.args = (_PLACE.sub(place, str(error)), *error.args[1:])
        return error


@lru_cache(1024)
def _named_once(script: Script, known: object) -> list[Key | list[str]]:
    """Return the keys of a script in their order: lists of names where no argument changes them, because every round
    uses them again."""
    parts: list[Key | list[str]] = []
    for are_fixed, keys in groupby(script.header.keys, attrgetter("is_fixed")):
        if are_fixed:
            parts.append([getattr(known, key.name) for key in keys])
        else:
            parts += keys
    return parts


class Request(NamedTuple, Generic[T]):
    """One call of a script, which may be sent together with others: see `send_together`.

    command  what is sent
    parse    makes the reply a value, or raises the error that it stands for
    """

    command: Sequence[Any]
    parse: Callable[[list[Any]], T]


def load_scripts(package: str) -> dict[str, Script]:
    """Return the scripts in the folder `lua` of a package."""
    folder = resources.files(package) / "lua"
    texts, include = read_sources(folder), read_sources(folder / "include")
    return {name: compose(name, text, include) for name, text in texts.items()}


def read_sources(folder: Traversable) -> dict[str, str]:
    """Return the texts of the Lua files in a folder, by name, with the constants that are Python's."""
    files = {path.name: path for path in folder.iterdir() if path.name.endswith(".lua")}
    return {name.removesuffix(".lua"): _with_constants(files[name].read_text("utf-8")) for name in sorted(files)}


def _with_constants(text: str) -> str:
    return _CONSTANT.sub(lambda match: str(getattr(parsing, match[0])), text)


def compose(name: str, text: str, include: Mapping[str, str]) -> Script:
    """Return the script of a file's text, with the included functions that it comes to call."""
    functions: dict[str, Piece] = {}  # each behind the functions that it calls

    def use(text: str) -> None:
        for each in Header.parse(text).uses:
            use(include[each])
            for match in FUNCTION.finditer(include[each]):
                functions[match[1]] = Piece(f"include/{each}.lua", _line(match.string, match.start()), match[0])

    use(text)
    header, (comments, body) = Header.parse(text), split_header(text)
    pieces = [Piece(f"{name}.lua", _line(text, len(comments)), body)]
    code = header.guarded(header.opening() + body)
    for function, piece in reversed(functions.items()):
        if re.search(rf"\b{function}\(", code):
            code = f"{piece.lua}\n{code}"
            pieces.append(piece)
    whole = f"{comments}\n{code}"
    places = {_line(whole, whole.index(lua)): (file, line) for file, line, lua in pieces}
    return Script(name, f"{comments}\n{header.placed(code)}", {1: (f"{name}.lua", 1), **places})


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def evaluate(call: Call, scripts: Mapping[str, Script], command: Sequence[Any], load: Call | None = None) -> list[Any]:
    """Run one of the scripts by its command, see `with_scripts`. `load` is the call that loads them, if it is another
    one."""
    try:
        return with_scripts(load or call, scripts, lambda: list(call(*command)))
    except KvpsError as error:
        raise _located(error, scripts, command) from None


def _located(error: KvpsError, scripts: Mapping[str, Script], command: Sequence[Any]) -> KvpsError:
    """Return the error of a script's command with file and line, see `Script.located`."""
    script = next((script for script in scripts.values() if script.sha == command[1]), None)
    return script.located(error) if script else error  # none, if a test has put another in its place


def with_scripts(call: Call, scripts: Mapping[str, Script], run: Callable[[], T]) -> T:
    """Return what `run` returns, which runs some of the scripts. If the server lacks one, load all and run again.

    A restart of the server forgets all scripts, so one that is missing stands for all. A worker or a reader may have a
    user that must not load scripts: it waits until another process has. Raises NotPermitted if none does.
    """
    with suppress(NoScriptError):
        return run()
    return _run_again(call, scripts, run)


def send_together(
    each: Callable[[Sequence[Any]], list[Any]], call: Call, scripts: Mapping[str, Script], commands: Sequence[Any]
) -> list[Any]:
    """Run scripts by `each`, which sends many commands in one request. Return their replies, or KvpsErrors.

    A script that the server lacks is run again by `call`, alone.
    """
    return [
        _reply_or_error(call, scripts, command, reply) for command, reply in zip(commands, each(commands), strict=True)
    ]


def _reply_or_error(call: Call, scripts: Mapping[str, Script], command: Sequence[Any], reply: Any) -> Any:
    try:
        if isinstance(reply, NoScriptError):
            reply = _run_again(call, scripts, lambda: call(*command))
    except KvpsError as error:
        reply = error
    return _located(reply, scripts, command) if isinstance(reply, KvpsError) else reply


def _run_again(call: Call, scripts: Mapping[str, Script], run: Callable[[], T]) -> T:
    """Return what `run` returns, which has just lacked a script: load all of them if it still does."""
    deadline = time.monotonic() + _LOAD_S
    with suppress(NoScriptError):
        return run()  # it may have been one of many in a request, of which an earlier one has loaded them since
    while time.monotonic() < deadline:
        with suppress(NotPermitted):
            for script in scripts.values():
                _load(call, script)
        with suppress(NoScriptError):
            return run()
        time.sleep(_LOOK_S)
    raise NotPermitted(
        "the server does not have kvps's scripts (any more), and nobody who may load them does: run kvps aggregator "
        "start there, or give this user +script|load"
    )


def _load(call: Call, script: Script) -> None:
    try:
        call("SCRIPT LOAD", script.text)
    except KvpsError as error:
        raise script.located(error) from None
