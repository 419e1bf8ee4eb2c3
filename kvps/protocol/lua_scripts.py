"""Texts of Lua scripts, and how they are run: by their digests, so that a round does not send them again."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any, Generic, NamedTuple, TypeVar

from redis.exceptions import NoScriptError

from kvps.errors import KvpsError, NotPermitted

T = TypeVar("T")
Call = Callable[..., Any]
"""Runs a Redis command and returns its reply; repeats the command while the server cannot be reached."""

_LOAD_S, _LOOK_S = 10.0, 0.05  # how long, and how often, a user that may not load scripts waits for another process


@dataclass(frozen=True)
class Script:
    """The text of one script."""

    name: str
    text: str

    @cached_property
    def sha(self) -> str:
        """The SHA-1 digest by which the server knows it."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    @property
    def commands(self) -> set[str]:
        """The Redis commands that it calls."""
        return set(re.findall(r"redis\.p?call\('(\w+)'", self.text))


class Request(NamedTuple, Generic[T]):
    """One call of a script, which may be sent together with others: see `send_together`.

    command  what is sent
    parse    makes the reply a value, or raises the error that it stands for
    """

    command: Sequence[Any]
    parse: Callable[[list[Any]], T]


def load_scripts(package: str, names: Iterable[str]) -> dict[str, Script]:
    """Return the scripts in the folder `lua` of a package, each with that folder's prelude before it."""
    folder = resources.files(package) / "lua"
    prelude = (folder / "_prelude.lua").read_text("utf-8")
    return {name: Script(name, prelude + (folder / f"{name}.lua").read_text("utf-8")) for name in names}


def evaluate(
    call: Call, scripts: Mapping[str, Script], name: str, keys: Sequence[str], *args: object, load: Call | None = None
) -> list[Any]:
    """Run the script of that name, see `with_scripts`. `load` is the call that loads them, if it is another one."""
    script = scripts[name]
    return with_scripts(load or call, scripts, lambda: list(call("EVALSHA", script.sha, len(keys), *keys, *args)))


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
        _reply_or_error(call, scripts, command) if isinstance(reply, NoScriptError) else reply
        for command, reply in zip(commands, each(commands), strict=True)
    ]


def _reply_or_error(call: Call, scripts: Mapping[str, Script], command: Sequence[Any]) -> Any:
    try:
        return _run_again(call, scripts, lambda: call(*command))
    except KvpsError as error:
        return error


def _run_again(call: Call, scripts: Mapping[str, Script], run: Callable[[], T]) -> T:
    """Return what `run` returns, which has just lacked a script: load all of them if it still does."""
    deadline = time.monotonic() + _LOAD_S
    with suppress(NoScriptError):
        return run()  # it may have been one of many in a request, of which an earlier one has loaded them since
    while time.monotonic() < deadline:
        with suppress(NotPermitted):
            for script in scripts.values():
                call("SCRIPT LOAD", script.text)
        with suppress(NoScriptError):
            return run()
        time.sleep(_LOOK_S)
    raise NotPermitted(
        "the server has lost kvps's scripts, and nobody who may load them does: run kvps aggregator start"
    )
