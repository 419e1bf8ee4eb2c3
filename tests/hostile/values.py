"""Values that no honest process writes, and changes of honest ones. Pure: all chance comes from the given `Random`."""

from __future__ import annotations

import json
from random import Random
from typing import Any

NUMBERS = ["nan", "NaN", "inf", "-inf", "Infinity", "1e400", "-1e400", "-1", "-0", "0", "1", "1.5", "1e3", "0x10", "+1"]
NUMBERS += ["\u0661", "007", "true", "None"]
NUMBERS += [" 1", "1\n", "", str(2**31), str(2**53 - 1), str(2**53), str(2**63), str(-(2**63)), str(2**64), "9" * 400]
NUMBERS += ["9" * 5000, "4097", "1000001", "0.0000001", "1_000", "true", "None"]
JSON_TEXTS = ["[]", "{}", "null", "true", '"x"', "0", "[0]", '{"": 0}', "NaN", "[NaN]", "1e999", "{", '"', "[" * 50_000]
JSON_TEXTS += ['{"a":' * 9 + "1" + "}" * 9, '"\\ud800"', '{"a": 1, "a": 2}', "9" * 5000, "[" + "0," * 999 + "0]"]
TEXTS = ["x" * 100_000, "\x1b[2J\x1b]0;x\x07", "\r\nOK\r\n", "\x00", "a\x00b", "\u202e", "\u2028", "é", "%s%n{0}", "-"]
_PIECES = ("1", "1 ", "1:", "1-1,", "a", "a ", "a:1 ", "w0 computes, ", ", ", "-")
LONG = [piece * (60_000 // len(piece)) for piece in _PIECES]
"""Texts in which a pattern may search again from each place."""
BYTES = [b"\xff\xfe", b"\xed\xa0\x80", b"\x80", b"\xf4\x90\x80\x80", b"\x93NUMPY", b"\x80\x04\x95", b"\x00" * 64]
PATHS = ["../../x", "/etc/passwd", "..", ".", "a/b", "*", "?", "[a-z]*", "{x}", "}:{", "kvps:jobs", "~", "C:\\x"]
NAMES = ["neighbour", "w0", "w1", "w9", "0", "1", "0-0", "1-0", "0.0", "1.1-0-00000000", "active", "left", "free"]
PARSED: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    1.5,
    2**31,
    2**53,
    2**64,
    10**400,
    1e308,
    [],
    {},
    "",
    "x",
    [[]],
    {"": []},
]
PARSED += ["\x1b[2J", "\ud800", "../../x", "x" * 100_000, float("nan"), float("inf"), [0] * 1000, "nan", "1", "-1"]
PARSED += [[[[[[[[[[0]]]]]]]]], {"a": {"b": {"c": {}}}}]

_CLASSES = {
    "number": [text.encode() for text in NUMBERS],
    "json": [text.encode() for text in JSON_TEXTS],
    "text": [text.encode() for text in TEXTS],
    "long text": [text.encode() for text in LONG],
    "bytes": BYTES,
    "path": [text.encode() for text in PATHS],
    "name": [text.encode() for text in NAMES],
}


def hostile(random: Random) -> tuple[str, bytes]:
    """Return a kind of value, and a value of it."""
    kind = random.choice(list(_CLASSES))
    return kind, random.choice(_CLASSES[kind])


def changed(random: Random, value: bytes, others: list[bytes]) -> tuple[str, bytes]:
    """Return how a value was changed, and what it became. `others` are values that stand elsewhere in the job."""
    ways = [_replaced, _replaced, _flipped, _cut, _swapped]
    if value[:1] in (b"{", b"["):
        ways += [_edited] * 6
    if b" " in value[:200] or b"," in value[:200]:
        ways += [_reworded] * 4
    return random.choice(ways)(random, value, others)


def _replaced(random: Random, value: bytes, others: list[bytes]) -> tuple[str, bytes]:
    return hostile(random)


def _flipped(random: Random, value: bytes, others: list[bytes]) -> tuple[str, bytes]:
    if not value:
        return hostile(random)
    out = bytearray(value)
    for _ in range(random.choice((1, 1, 8))):
        out[random.randrange(len(out))] ^= 1 << random.randrange(8)
    return "bits", bytes(out)


def _cut(random: Random, value: bytes, others: list[bytes]) -> tuple[str, bytes]:
    at = random.randrange(len(value) + 1)
    return "length", random.choice((value[:at], value[at:], value + value, value + b"\x00"))


def _swapped(random: Random, value: bytes, others: list[bytes]) -> tuple[str, bytes]:
    return ("swap", random.choice(others)) if others else hostile(random)


def _reworded(random: Random, value: bytes, others: list[bytes]) -> tuple[str, bytes]:
    mark = b" " if b" " in value else b","
    words = value.split(mark)
    at = random.randrange(len(words))
    match random.randrange(4):
        case 0:
            del words[at]
        case 1:
            words.insert(at, words[random.randrange(len(words))])
        case _:
            words[at] = hostile(random)[1]
    return "word", mark.join(words)


def _edited(random: Random, value: bytes, others: list[bytes]) -> tuple[str, bytes]:
    """Change something inside of a JSON text."""
    try:
        found = json.loads(value)
    except ValueError:
        return hostile(random)
    places = list(_places(found))
    if not places:
        return hostile(random)
    inside, at = random.choice(places)
    match random.randrange(6):
        case 0:
            del inside[at]
        case 1 if isinstance(inside, list):
            inside.append(inside[at])
        case 1:
            inside[random.choice(NAMES + PATHS)] = inside[at]
        case 2 if isinstance(inside[at], str):
            inside[at] = changed(random, inside[at].encode(), others)[1].decode(errors="replace")
        case 3:
            inside[at] = hostile(random)[1].decode(errors="replace")
        case _:
            inside[at] = random.choice(PARSED)
    return "json field", json.dumps(found).encode()


def _places(found: Any) -> Any:
    """Yield (container, key or position) of everything inside."""
    for at, inner in list(
        found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    ):
        yield found, at
        if isinstance(inner, dict | list):
            yield from _places(inner)
