"""The sources of Lua scripts, and what in them does not fit their headers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources

from kvps.protocol.lua_scripts import FUNCTION, read_sources
from kvps.protocol.script_header import Header, split_header

_KEYWORDS = (
    *("and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in"),
    *("local", "nil", "not", "or", "repeat", "return", "then", "true", "until", "while"),
)
_LIBRARY = (
    *("cjson", "error", "ipairs", "math", "pairs", "pcall", "redis", "string", "table", "tonumber", "type", "unpack"),
)
_OPTIONS = {"BEFORE", "COUNT", "LIMIT", "MAXLEN", "MINID", "PX", "WITHSCORES"}


class Sources:
    """The scripts of a package, and the functions that they include."""

    def __init__(self, package: str) -> None:
        folder = resources.files(package) / "lua"
        self.texts, self.include = read_sources(folder), read_sources(folder / "include")
        functions = [(file, match) for file, text in self.include.items() for match in FUNCTION.finditer(text)]
        self._files = {match[1]: file for file, match in functions}
        self._bodies = {match[1]: match[0] for _, match in functions}

    def called(self, code: str) -> set[str]:
        """Return the included functions that some code calls itself."""
        return self._files.keys() & set(re.findall(r"(?<!function )\b(\w+)\(", code))

    def reached(self, code: str) -> str:
        """Return code, and that of all included functions that it comes to call."""
        names: set[str] = set()
        while more := self.called(code + "\n".join(self._bodies[name] for name in names)) - names:
            names |= more
        return code + "\n".join(self._bodies[name] for name in sorted(names))

    def misfits(self, script: str) -> Iterator[str]:
        """Say what does not fit in a script: names, includes and answers that only its header has, or only its body."""
        text = self.texts[script]
        header, body = Header.parse(text), split_header(text)[1]
        yield from self.misused(text)
        code = bare(body)
        reached = self.reached(header.guarded(header.opening() + body))
        keys = {key.name for key in header.keys if not key.name.startswith("never")}
        yield from _difference("key", keys, set(re.findall(r"\bkeys\.(\w+)", bare(self.reached(body)))))
        arguments = {*header.arguments, header.rest} - {""}
        unread = {name for name in arguments if not re.search(rf"(?<![.\w]){name}\b", code)}
        yield from (f"argument {name} is never read" for name in sorted(unread))
        yield from (f"argument {name} hides an included function" for name in sorted(arguments & self._files.keys()))
        known = {*_KEYWORDS, *_LIBRARY, "KEYS", "ARGV"} | self._files.keys() | arguments | {"keys"} | _declared(code)
        names = set(re.findall(r"(?<![.:\w])([A-Za-z_]\w*)\b(?! = )", code))
        yield from (f"{name} is declared nowhere" for name in sorted(names - known))
        yield from _difference("answer", set(header.codes), _codes(reached))
        explained = {
            name for names in re.findall(r"^--   (\w[\w, ]*): ", text, re.MULTILINE) for name in names.split(", ")
        }
        yield from (f"{name} is explained, and is no name" for name in sorted(explained - arguments - keys))

    def misused(self, text: str) -> Iterator[str]:
        """Say which includes a file names and does not need, or needs and does not name; and what it reads by place."""
        uses, code = set(Header.parse(text).uses), split_header(text)[1]
        own = {match[1] for match in FUNCTION.finditer(text)}
        yield from _difference("include", uses, {self._files[name] for name in self.called(code) - own})
        yield from (f"{found} reads by place" for found in re.findall(r"[\w)]\[\d+\]|\b(?:KEYS|ARGV)\b", bare(code)))


def bare(code: str) -> str:
    """Return code without its comments, and with empty strings."""
    return re.sub(r"'[^'\n]*'", "''", re.sub(r"--[^\n]*", "", code))


def _declared(code: str) -> set[str]:
    """Return the names of locals, parameters and loops."""
    lists = re.findall(r"local (?!function)([\w, ]+)|function \w*\(([\w, .]*)\)|for ([\w, ]+?) (?:in|=)", code)
    lists += [(name, "", "") for name in re.findall(r"local function (\w+)", code)]
    return {name for names in lists for name in re.findall(r"\w+", ",".join(names))}


def _codes(code: str) -> set[str]:
    """Return the words in capitals that are neither commands nor options of commands."""
    code = re.sub(r"--[^\n]*", "", code)
    return set(re.findall(r"(?<!call\()'([A-Z]{2,})'", code)) - _OPTIONS


def _difference(kind: str, header: set[str], body: set[str]) -> Iterator[str]:
    yield from (f"{kind} {name} is only in the header" for name in sorted(header - body))
    yield from (f"{kind} {name} is not in the header" for name in sorted(body - header))
