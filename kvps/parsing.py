"""Parses what Redis or a file holds into typed values within bounds; anything else raises CorruptData.

Whoever may write to the server may have written any of it. So a value is parsed here before it is used as a size, a
loop's bound, a part of a key or a path, or text that a person sees.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any, NoReturn

from kvps.errors import CorruptData, InvalidSetting

LARGEST = 2**53 - 1
"""The largest whole number that Lua holds exactly."""
NAME_CHARACTERS, LONGEST_NAME = "A-Za-z0-9_.=-", 64
"""What a name may be made of, as sets of Python and of Lua write it: scripts get the rule from here."""
NAME = re.compile(rf"(?![.=])[{NAME_CHARACTERS}]{{1,{LONGEST_NAME}}}", re.ASCII)
"""The name of a job, a worker or a part of a model.

Names are in keys, hash tags of a cluster, ACL patterns, URLs and the names of files, and are words in the texts of the
log. One that begins with a dot would be a hidden file or a directory above, and one that begins with = a formula to a
spreadsheet. Names of new jobs and workers do not begin with - either (`kvps.protocol.keys.check_new_name`).
"""
NAME_IN_WORDS = "1 to 64 of A-Z, a-z, 0-9, _, -, . and =, the first not . or ="
WORD = re.compile(r"[A-Za-z0-9.-]{1,128}", re.ASCII)
"""A head, a history, a run id, an incarnation, a term or the staged name of a version."""
JOB_ID = re.compile(r"[0-9a-f]{8}", re.ASCII), "8 hexadecimal digits"
STAGED_NAME = re.compile(r"[0-9]{1,16}\.[A-Za-z0-9-]{1,110}", re.ASCII), "the staged name of a version"
MOST_WORKERS, MOST_IDS, LARGEST_RANK, MOST_OPEN_UNITS = 4_096, 16_384, 1 << 20, 10_000
"""Of one job: the highest `workers`; how many ids may ever have joined; the highest rank that Redis may name; and how
many units may be handed out before a version is committed. Scripts get these from here too."""
MOST_ITEMS, MOST_GROUP, MOST_TAKEN, MOST_BASES = 65_536, 256, 4_096, 1_000
"""Of a job with experience: the most items that may wait, and the most of one prompt; how many lots a learner takes at
once; and how many versions back an item may say that it was made on."""
MOST_SHARDS = 1_000
"""The most shards of a job. Scripts have this and the next one from here too."""
MOST_PIN = 1 << 18
"""The most characters of the pin, which names a version of all shards."""
MOST_TEXT = 1024
"""The most characters of a text, where no other bound is given."""
MOST_JSON = 64 << 20
"""The most characters of a text in JSON."""
LATEST_MS = 253_370_764_800_000
"""The year 9999: a program may give an entry any time, and calendars end there."""
_FILE_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.:=-]{1,255}", re.ASCII)
_is_word = WORD.fullmatch
_WHOLE = re.compile(r"-?[0-9]{1,16}", re.ASCII)
_DEEPEST = 8
_QUOTED = 60
_MISSING = object()


def refuse(where: str, wanted: str, value: object) -> NoReturn:
    """Raise CorruptData: `where` holds `value`, and not what is wanted."""
    if value is _MISSING:
        raise CorruptData(f"{where} is missing: another program, or another version of kvps, wrote there")
    if isinstance(value, str):
        shown = repr(value if len(value) <= _QUOTED else f"{value[:_QUOTED]}…")
    elif value is None or (isinstance(value, int | float) and abs(value) < 1e30):
        shown = str(value)
    else:
        shown = type(value).__name__  # the digits of a long number may be millions
    raise CorruptData(f"{where} must be {wanted}, not {shown}: another program, or another version of kvps, wrote it")


def whole(value: object, where: str, low: int = 0, high: int = LARGEST) -> int:
    """Return a whole number, which is stored as a number or as decimal digits."""
    number = value
    if (isinstance(value, str) and _WHOLE.fullmatch(value)) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
    if type(number) is not int or not low <= number <= high:
        refuse(where, f"a whole number from {low} to {high}", value)
    return number


def entry_ms(id: str, fields: Mapping[str, object]) -> int:
    """Return the server's time when an entry of the commit log or of the leases was written, in ms since 1970.

    It is a field: an id is no time where the server's clock was set back, as ids never go back. Entries of earlier
    versions of kvps have no other time than their id.
    """
    return whole(fields.get("at_ms", id.partition("-")[0]), f"the time of entry {id}", 0, LATEST_MS)


def number(value: object, where: str, finite: bool = True) -> float:
    """Return a number, which is stored as a number or as text. Without `finite`, NaN and Inf are numbers too."""
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        number = None
    if number is None or (finite and not math.isfinite(number)):
        refuse(where, "a finite number" if finite else "a number", value)
    return number


def text(value: object, where: str, most: int = MOST_TEXT) -> str:
    """Return printable text of at most `most` characters: nothing in it is obeyed by a terminal."""
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        refuse(where, f"printable text of at most {most} characters", value)
    return value


def matching(value: object, where: str, pattern: re.Pattern[str], wanted: str) -> str:
    """Return text that matches `pattern` as a whole; `wanted` says in words what that is."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        refuse(where, wanted, value)
    return value


def name(value: object, where: str) -> str:
    """Return the name of a job or a worker."""
    return matching(value, where, NAME, NAME_IN_WORDS)


def word(value: object, where: str) -> str:
    """Return a word, see `WORD`."""
    return matching(value, where, WORD, "1 to 128 letters, digits, dots and -")


def file_name(value: object, where: str) -> str:
    """Return the name of a file that lies in the directory it is joined to, and nowhere else."""
    return matching(value, where, _FILE_NAME, "the name of a file: 1 to 255 of A-Z, a-z, 0-9, _, -, =, dots and colons")


def whole_setting(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return a whole number that a user gives, Python's or NumPy's, as Python's, which does not overflow. Raises
    InvalidSetting."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else low - 1
    if number < low or (high is not None and number > high):
        upto = "" if high is None else f" to {high}"
        raise InvalidSetting(f"{name} must be a whole number from {low}{upto}, not {value!r}")
    return number


def names_like(pattern: str, names: Collection[str]) -> list[str]:
    """Return the names that match ``*``, ``?`` and ``[...]`` as in a shell; what is a name stands for this one alone.

    `names` is a mapping or a set, in which a name is found at once.
    """
    return [pattern] if pattern in names else fnmatch.filter(names, pattern)


def sequence(value: object, where: str, most: int) -> list[Any]:
    """Return a list of at most `most` items."""
    if not isinstance(value, list) or len(value) > most:
        refuse(where, f"a list of at most {most} items", value)
    return value


def from_json(value: object, where: str, most: int = MOST_JSON, deepest: int = _DEEPEST) -> Any:
    """Return what a JSON text of at most `most` characters says, if it nests at most `deepest` deep and is finite."""
    if not isinstance(value, str) or len(value) > most:
        refuse(where, f"JSON of at most {most} characters", value)
    try:
        decoded = _DECODER.decode(value)
    except (ValueError, RecursionError):
        refuse(where, "JSON", value)
    if _nests_deeper(decoded, deepest):
        refuse(where, f"JSON that nests at most {deepest} deep", value)
    return decoded


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _nests_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = [item for item in (value.values() if isinstance(value, dict) else value) if type(item) in (dict, list)]
    return levels == 0 or any(_nests_deeper(item, levels - 1) for item in inner)


class Fields:
    """The fields of a hash or of an object in JSON. `where` is what has them, for messages.

    Each method returns one field as the module's function of that name does, or its `default` if it is missing. A field
    that every round reads is accepted by one test here; only a field that fails it pays for the function and a message.
    """

    __slots__ = ("_values", "_where")

    def __init__(self, values: Any, where: str) -> None:
        """Raises CorruptData unless `values` is a mapping."""
        if type(values) is not dict and not isinstance(values, Mapping):
            refuse(where, "an object", values)
        self._values = values
        self._where = where

    @classmethod
    def of_json(cls, value: object, where: str, most: int = MOST_JSON, deepest: int = _DEEPEST) -> Fields:
        """Return the fields of the object that a JSON text says."""
        return cls(from_json(value, where, most, deepest), where)

    def __iter__(self) -> Any:
        return iter(self._values)

    def _place(self, field: str) -> str:
        return f"{self._where}: {field}"

    def whole(self, field: str, low: int = 0, high: int = LARGEST, default: object = _MISSING) -> int:
        value = self._values.get(field, default)
        return value if type(value) is int and low <= value <= high else whole(value, self._place(field), low, high)

    def number(self, field: str, default: object = _MISSING) -> float:
        return number(self._values.get(field, default), self._place(field))

    def text(self, field: str, most: int = MOST_TEXT, default: object = _MISSING) -> str:
        value = self._values.get(field, default)
        if type(value) is str and len(value) <= most and value.isprintable():
            return value
        return text(value, self._place(field), most)

    def name(self, field: str) -> str:
        return name(self._values.get(field, _MISSING), self._place(field))

    def word(self, field: str, default: object = _MISSING) -> str:
        value = self._values.get(field, default)
        return value if type(value) is str and _is_word(value) else word(value, self._place(field))

    def matching(self, field: str, pattern: re.Pattern[str], wanted: str) -> str:
        value = self._values.get(field, _MISSING)
        if type(value) is str and pattern.fullmatch(value):
            return value
        refuse(self._place(field), wanted, value)

    def one_of(self, field: str, choices: Sequence[str], default: object = _MISSING) -> str:
        value = self._values.get(field, default)
        if type(value) is str and value in choices:
            return value
        refuse(self._place(field), f"one of {', '.join(choices)}", value)

    def flag(self, field: str) -> bool:
        value = self._values.get(field, _MISSING)
        if type(value) is bool:
            return value
        refuse(self._place(field), "true or false", value)

    def sequence(self, field: str, most: int) -> list[Any]:
        return sequence(self._values.get(field, _MISSING), self._place(field), most)

    def fields(self, field: str) -> Fields:
        return Fields(self._values.get(field, _MISSING), self._place(field))

    def json(self, field: str) -> Any:
        """Return what a JSON text in this field says."""
        return from_json(self._values.get(field, _MISSING), self._place(field))

    def json_fields(self, field: str) -> Fields:
        """Return the fields of the object that a JSON text in this field says."""
        return Fields(self.json(field), self._place(field))

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as they are."""
        return dict(self._values)

    def scalars(self, most: int = 1 << 16) -> dict[str, Any]:
        """Return all fields as they are. Raises CorruptData if one is a list, an object, or text of over `most`
        characters."""
        for field, value in self._values.items():
            if isinstance(value, dict | list) or (isinstance(value, str) and len(value) > most):
                refuse(f"{self._where}: {text(field, f'a field of {self._where}')}", "a number or a short text", value)
        return dict(self._values)


def json_of(value: Any, separators: tuple[str, str] | None = None) -> str:
    """Return JSON as its standard has it: a number that is not finite is null."""
    try:
        return json.dumps(value, separators=separators, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(value), separators=separators, allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    return [_without_nan(each) for each in value] if isinstance(value, list | tuple) else value


def bytes_text(count: float) -> str:
    """Return a number of bytes for a message, as in "1.2 kB" or "34.5 GB"; 1 MB is a million bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.95 or unit == "TB":
            break
        count /= 1000
    return f"{max(0, count):,.{0 if unit == 'B' else 1}f} {unit}"
