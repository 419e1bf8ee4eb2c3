"""The header of a Lua script, which is its only binding: it names the keys and arguments for Lua and for Python.

A script begins with comments. Some of their lines are read here, each as often as it is needed:

    -- KEYS version:hash trace(worker):stream pin:string? term(*):string dead... never
    -- ARGV job worker traces...
    -- READS version
    -- USES numbers units

A key has the name of an attribute or method of the object that knows the keys (`kvps.protocol.keys.JobKeys`):
`trace(worker)` is the key for the argument `worker`, `term(*)` the keys of all shards. `dead...` and `traces...` are
lists that the caller gives. The body finds a key as `keys.version`, a list as `keys.dead`, an argument as the local
`worker`. Before the body, a key of another type than the header says is refused: it would make the script fail in the
middle of its writes. A key with a ? seldom exists: one look finds that none of those is there. READS names keys that
the body reads before its first write, or not at all, and the key that this write writes. These are not looked at: the
command itself refuses another type, and nothing was written then. All streams are looked at in one XREAD, which reads
nothing. USES names the files in `include/` whose functions the script calls.

While a cluster moves a slot, some of its keys are on another node, and a script would fail at the first of them. The
last key of each script of a job, `never`, does not exist: a script that names such a key gets TRYAGAIN then, before it
begins. Its name is a secret of the process, or a reader of the job could make it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_KEY = re.compile(r"(?P<name>\w+)(?:\((?P<of>\w+|\*)\))?(?P<given>\.\.\.)?(?::(?P<type>\w+)(?P<rare>\??))?")
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
    is_rare: bool

    @classmethod
    def parse(cls, text: str) -> Key:
        """Parse one word of a line KEYS."""
        match = _KEY.fullmatch(text)
        assert match, text
        return cls(match["name"], match["of"] or "", bool(match["given"]), match["type"] or "", bool(match["rare"]))

    @property
    def many(self) -> bool:
        """Whether it is a list."""
        return self.given or self.of == "*"

    @property
    def is_fixed(self) -> bool:
        """Whether no argument changes it."""
        return not (self.many or self.of)

    def keys(self, known: object, values: Mapping[str, Any]) -> list[str]:
        """Return the keys that it stands for if it is not fixed, where `known` knows keys and `values` has the
        arguments."""
        if self.given:
            return list(values[self.name])
        key = getattr(known, self.name)
        if self.of == "*":
            return [key(shard) for shard in range(values["shards"])]
        return [key(values[self.of])]


class Header(NamedTuple):
    """The keys, arguments and includes of a script, and the codes of its answers. `rest` is a list of arguments behind
    the others, "" if there is none."""

    keys: tuple[Key, ...]
    reads: frozenset[str]
    arguments: tuple[str, ...]
    rest: str
    uses: tuple[str, ...]
    codes: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Header:
        """Parse the comments at the beginning of a script."""
        comments = split_header(text)[0]

        def words(kind: str) -> list[str]:
            return [word for line in re.findall(rf"^-- {kind} (.+)$", comments, re.MULTILINE) for word in line.split()]

        codes = frozenset(re.findall(r"\{([A-Z]+)", comments.partition("-- Returns ")[2]))
        arguments = words("ARGV")
        rest = arguments.pop().removesuffix("...") if arguments and arguments[-1].endswith("...") else ""
        keys, reads = tuple(map(Key.parse, words("KEYS"))), frozenset(words("READS"))
        return cls(keys, reads, tuple(arguments), rest, tuple(words("USES")), codes)

    def ordered_arguments(self, values: Mapping[str, Any]) -> list[Any]:
        """Return the arguments in their order."""
        arguments = [values[name] for name in self.arguments]
        return [*arguments, *values[self.rest]] if self.rest else arguments

    def opening(self) -> str:
        """Return the Lua that checks the types of keys, and names lists of keys and arguments."""
        return self._checked_types() + self._named_lists() + self._named_arguments()

    def guarded(self, code: str) -> str:
        """Return the code of a script so that, if it fails because a key has another type, it answers which.

        What else a command of it raises is a text here, as "OOM command not allowed". It is returned as an error, which
        keeps that code; Lua's own `error` would not."""
        typed = [(number, key) for number, key in self._typed() if not key.many]
        if not typed:
            return code
        return (
            f"local function run()\n{code}\nend\nlocal ran, answer = pcall(run)\nif ran then return answer end\n"
            f"{_check(typed)}return {{ err = answer:find('^%u+ ') and answer or 'ERR ' .. answer }}\n"
        )

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

    def _typed(self) -> list[tuple[int, Key]]:
        """Return the keys with a type, each with its place, from 1."""
        return [(number, key) for number, key in enumerate(self.keys, 1) if key.type]

    def _checked_types(self) -> str:
        typed = [(number, key) for number, key in self._typed() if not key.many and key.name not in self.reads]
        streams = [number for number, key in typed if key.type == "stream" and not key.is_rare]
        others = [(number, key) for number, key in typed if key.type != "stream" and not key.is_rare]
        rare = [(number, key) for number, key in typed if key.is_rare]
        lua = ""
        if streams:  # one call for all of them, which reads nothing
            ends = ", ".join(["'$'"] * len(streams))
            lua += f"redis.call('XREAD', 'count', 1, 'streams', {_places(streams)}, {ends})\n"
        if others:
            lua += _check(others)
        if rare:
            lua += f"if redis.call('EXISTS', {_places(number for number, _ in rare)}) > 0 then\n{_check(rare)}end\n"
        return lua

    def _named_arguments(self) -> str:
        number = len(self.arguments)
        lua = f"local {', '.join(self.arguments)} = unpack(ARGV, 1, {number})\n" if number else ""
        if self.rest:
            lua += f"local {self.rest} = {{}}\n"
            lua += f"for i = {number + 1}, #ARGV do {self.rest}[i - {number}] = ARGV[i] end\n"
        return lua


def _places(numbers: Iterable[int]) -> str:
    return ", ".join(f"KEYS[{number}]" for number in numbers)


def _check(keys: Sequence[tuple[int, Key]]) -> str:
    """Return the Lua that checks the types of these keys."""
    wanted = ", ".join(repr(key.type) for _, key in keys)
    places = _places(number for number, _ in keys)
    each = f"for i, key in ipairs({{ {places} }}) do\n  local want = wanted[i]\n{_REFUSAL}end\n"
    return f"local wanted = {{ {wanted} }}\n{each}"


def split_header(text: str) -> tuple[str, str]:
    """Return the comments at the beginning of a text, and the rest."""
    lines = text.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if not line.startswith("--")), len(lines))
    return "".join(lines[:end]), "".join(lines[end:])
