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
the body reads before its first write, or not at all: these are not looked at before, for the read itself refuses
another type, and nothing was written then. USES names the files in `include/` whose functions the script calls.

While a cluster moves a slot, some of its keys are on another node, and a script would fail at the first of them. The
last key of each script of a job, `never`, does not exist: a script that names such a key gets TRYAGAIN then, before it
begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
        """Return the code of a script so that a read of a key of another type is answered as `opening` answers it."""
        read = [(i, key.type) for i, key in enumerate(self.keys, 1) if key.name in self.reads]
        if not read:
            return code
        places, types = ", ".join(f"KEYS[{i}]" for i, _ in read), ", ".join(repr(type_) for _, type_ in read)
        return (
            f"local function run()\n{code}\nend\nlocal ran, answer = pcall(run)\nif ran then return answer end\n"
            f"local types = {{ {types} }}\nfor i, key in ipairs({{ {places} }}) do\n"
            f"  local want = types[i]\n{_REFUSAL}end\nerror(answer, 0)\n"
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

    def _checked_types(self) -> str:
        read, typed, rare = ([key.type for key in keys] for keys in self._kinds())
        assert read + typed + rare == [key.type for key in self.keys[: len(read + typed + rare)]], (
            "keys with a type come first: those that are read before all writes, others, rare ones"
        )
        lua = _check(typed, len(read)) if typed else ""
        if rare:
            first = len(read + typed) + 1
            present = f"redis.call('EXISTS', unpack(KEYS, {first}, {first + len(rare) - 1}))"
            lua += f"if {present} > 0 then\n{_check(rare, first - 1)}end\n"
        return lua

    def _kinds(self) -> tuple[list[Key], list[Key], list[Key]]:
        """Return the keys with a type: those that are read before all writes, others that are always there, rare
        ones."""
        typed = [key for key in self.keys if key.type and not key.many]
        others = [key for key in typed if key.name not in self.reads]
        return (
            [key for key in typed if key.name in self.reads],
            [key for key in others if not key.is_rare],
            [key for key in others if key.is_rare],
        )

    def _named_arguments(self) -> str:
        number = len(self.arguments)
        lua = f"local {', '.join(self.arguments)} = unpack(ARGV, 1, {number})\n" if number else ""
        if self.rest:
            lua += f"local {self.rest} = {{}}\n"
            lua += f"for i = {number + 1}, #ARGV do {self.rest}[i - {number}] = ARGV[i] end\n"
        return lua


def _check(types: Sequence[str], behind: int) -> str:
    """Return the Lua that checks the types of the keys behind so many others."""
    wanted, place = ", ".join(map(repr, types)), f"{behind} + i" if behind else "i"
    return f"for i, want in ipairs({{ {wanted} }}) do\n  local key = KEYS[{place}]\n{_REFUSAL}end\n"


def split_header(text: str) -> tuple[str, str]:
    """Return the comments at the beginning of a text, and the rest."""
    lines = text.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if not line.startswith("--")), len(lines))
    return "".join(lines[:end]), "".join(lines[end:])
