"""The header of a Lua script, which is its only binding: it names the keys and arguments for Lua and for Python.

A script begins with comments. Some of their lines are read here, each as often as it is needed:

    -- KEYS version:hash trace(worker):stream term(*):string dead... never
    -- ARGV job worker traces...
    -- USES numbers units

A key has the name of an attribute or method of the object that knows the keys (`kvps.protocol.keys.JobKeys`):
`trace(worker)` is the key for the argument `worker`, `term(*)` the keys of all shards. `dead...` and `traces...` are
lists that the caller gives. The body finds a key as `keys.version`, a list as `keys.dead`, an argument as the local
`worker`. Before the body, a key of another type than the header says is refused: it would make the script fail in the
middle of its writes. USES names the files in `include/` whose functions the script calls.

While a cluster moves a slot, some of its keys are on another node, and a script would fail at the first of them. The
last key of each script of a job, `never`, does not exist: a script that names such a key gets TRYAGAIN then, before it
begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_KEY = re.compile(r"(?P<name>\w+)(?:\((?P<of>\w+|\*)\))?(?P<given>\.\.\.)?(?::(?P<type>\w+))?")
_REFUSAL = (
    "  local is = redis.call('TYPE', key).ok\n"
    "  if is ~= 'none' and is ~= want then return { 'WRONGTYPE', key, is, want } end\n"
)


class Key(NamedTuple):
    """One key of a script, or a list of keys: one `of` each shard ("*"), or a list that is `given` by the caller."""

    name: str
    of: str
    given: bool
    type: str

    @classmethod
    def parse(cls, text: str) -> Key:
        """Parse one word of a line KEYS."""
        match = _KEY.fullmatch(text)
        assert match, text
        return cls(match["name"], match["of"] or "", bool(match["given"]), match["type"] or "")

    @property
    def many(self) -> bool:
        """Whether it is a list."""
        return self.given or self.of == "*"

    def keys(self, known: object, values: Mapping[str, Any]) -> list[str]:
        """Return the keys that it stands for, where `known` knows keys and `values` has the arguments."""
        if self.given:
            return list(values[self.name])
        key = getattr(known, self.name)
        if self.of == "*":
            return [key(shard) for shard in range(values["shards"])]
        return [key(values[self.of]) if self.of else key]


class Header(NamedTuple):
    """The keys, arguments and includes of a script, and the codes of its answers."""

    keys: tuple[Key, ...]
    arguments: tuple[str, ...]
    uses: tuple[str, ...]
    codes: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Header:
        """Parse the comments at the beginning of a script."""
        comments = split_header(text)[0]

        def words(kind: str) -> list[str]:
            return [word for line in re.findall(rf"^-- {kind} (.+)$", comments, re.MULTILINE) for word in line.split()]

        codes = frozenset(re.findall(r"\{([A-Z]+)", comments.partition("-- Returns ")[2]))
        return cls(tuple(map(Key.parse, words("KEYS"))), tuple(words("ARGV")), tuple(words("USES")), codes)

    def named_keys(self, known: object, values: Mapping[str, Any]) -> list[str]:
        """Return all keys in their order."""
        return [key for each in self.keys for key in each.keys(known, values)]

    def ordered_arguments(self, values: Mapping[str, Any]) -> list[Any]:
        """Return the arguments in their order."""
        arguments: list[Any] = []
        for name in self.arguments:
            if name.endswith("..."):
                arguments += values[name[:-3]]
            else:
                arguments.append(values[name])
        return arguments

    def opening(self) -> str:
        """Return the Lua that checks the types of keys, and names lists of keys and arguments."""
        return self._checked_types() + self._named_lists() + self._named_arguments()

    def placed(self, code: str) -> str:
        """Return Lua code with KEYS[3] for keys.config: to make a table of all keys would cost a call 1 to 3 us.
        Raises KeyError for a key that is not in the header."""
        places = {key.name: f"KEYS[{i}]" for i, key in enumerate(self.keys, 1) if not key.many}
        places |= {key.name: f"keys.{key.name}" for key in self.keys if key.many}
        return re.sub(r"\bkeys\.(\w+)", lambda match: places[match[1]], code)

    def _named_lists(self) -> str:
        lists = [i for i, key in enumerate(self.keys) if key.many]
        if not lists:
            return ""
        first, others = lists[0], len(self.keys) - len(lists)
        lua = f"local keys, each = {{}}, (#KEYS - {others}) / {len(lists)}\n"
        for i, key in enumerate(self.keys[first : first + len(lists)]):
            place = f"{first} + {i} * each + i" if i else f"{first} + i"
            lua += f"keys.{key.name} = {{}}\nfor i = 1, each do keys.{key.name}[i] = KEYS[{place}] end\n"
            if key.type:
                lua += f"for i, key in ipairs(keys.{key.name}) do\n  local want = {key.type!r}\n{_REFUSAL}end\n"
        return lua

    def _checked_types(self) -> str:
        types = [key.type for key in self.keys if key.type and not key.many]
        assert types == [key.type for key in self.keys[: len(types)]], "keys with a type come first"
        if not types:
            return ""
        wanted = ", ".join(map(repr, types))
        return f"for i, want in ipairs({{ {wanted} }}) do\n  local key = KEYS[i]\n{_REFUSAL}end\n"

    def _named_arguments(self) -> str:
        one = [name for name in self.arguments if not name.endswith("...")]
        lua = f"local {', '.join(one)} = unpack(ARGV, 1, {len(one)})\n" if one else ""
        for name in (argument.removesuffix("...") for argument in self.arguments[len(one) :]):
            lua += f"local {name} = {{}}\nfor i = {len(one) + 1}, #ARGV do {name}[i - {len(one)}] = ARGV[i] end\n"
        return lua


def split_header(text: str) -> tuple[str, str]:
    """Return the comments at the beginning of a text, and the rest."""
    lines = text.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if not line.startswith("--")), len(lines))
    return "".join(lines[:end]), "".join(lines[end:])
