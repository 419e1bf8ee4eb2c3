"""Mutations: what a hostile writer does to the keys or the files of a job. Pure but for `contents`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import xxhash

from hostile.values import changed, hostile

Content = Mapping[bytes, tuple[str, Any]]
"""Key -> its type and what it holds."""


@dataclass(frozen=True)
class Mutation:
    """A change of one key by `commands`, or of the file `path` to `data`. `kind` says of what kind."""

    kind: str
    key: bytes
    commands: tuple[tuple[Any, ...], ...] = ()
    data: bytes = b""

    def __str__(self) -> str:
        shown = [[part if len(str(part)) < 120 else f"{str(part)[:120]}…" for part in each] for each in self.commands]
        return f"{self.kind} of {self.key!r}: {shown or self.data[:200]!r}"


def mutation_of(random: Random, content: Content, absent: list[bytes]) -> Mutation:
    """Return a mutation of one of the keys in `content`, or of one that is `absent` and that a job may have."""
    control = [key for key in content if b"/" not in key]
    bulk = [key for key in content if b"/" in key]
    chance = random.random()
    if chance < 0.08 and absent:
        return _made(random, random.choice(absent), content)
    key = random.choice(bulk if chance < 0.2 and bulk else control)
    type_, value = content[key]
    chance = random.random()
    if chance < 0.04:
        return Mutation("key deleted", key, (("DEL", key),))
    if chance < 0.09:
        made = _made(random, key, content)
        return Mutation(made.kind, key, (("DEL", key), *made.commands))
    if chance < 0.12:
        return Mutation("key swapped", key, (("COPY", random.choice(list(content)), key, "REPLACE"),))
    kind, commands = _CHANGES[type_](random, key, value)
    return Mutation(f"{type_}: {kind}", key, tuple(commands))


def _made(random: Random, key: bytes, content: Content) -> Mutation:
    value = hostile(random)[1]
    command: tuple[Any, ...] = random.choice(
        [
            ("SET", key, value),
            ("SET", key, random.choice([v for kind, v in content.values() if kind == "string"])),
            ("HSET", key, value, value),
            ("RPUSH", key, value),
            ("SADD", key, value),
            ("ZADD", key, "inf", value),
            ("XADD", key, "*", value, value),
        ]
    )
    return Mutation(f"key made: {command[0]}", key, (command,))


def _string(random: Random, key: bytes, value: bytes) -> tuple[str, list[tuple[Any, ...]]]:
    kind, new = changed(random, value, [])
    return kind, [("SET", key, new)]


def _hash(random: Random, key: bytes, value: dict[bytes, bytes]) -> tuple[str, list[tuple[Any, ...]]]:
    field = random.choice(list(value))
    match random.randrange(8):
        case 0:
            return "field deleted", [("HDEL", key, field)]
        case 1:
            kind, new = hostile(random)
            return f"field added ({kind})", [("HSET", key, new, value[field])]
        case 2:
            other = random.choice(list(value))
            return "fields swapped", [("HSET", key, field, value[other], other, value[field])]
        case _:
            kind, new = changed(random, value[field], list(value.values()))
            return kind, [("HSET", key, field, new)]


def _stream(random: Random, key: bytes, value: list[Any]) -> tuple[str, list[tuple[Any, ...]]]:
    if not value:
        return "entry added", [("XADD", key, "*", *random.choices([hostile(random)[1]], k=2))]
    at = random.randrange(len(value))
    id, fields = value[at]
    fields = dict(fields)
    field = random.choice(list(fields))
    match random.randrange(6):
        case 0:
            return "entry deleted", [("XDEL", key, id)]
        case 1:
            return "entry added", [("XADD", key, f"{2**63}-{2**63}", *_flat(fields))]
        case 2:
            del fields[field]
            fields = fields or {b"x": b"y"}
            kind = "field deleted"
        case 3:
            kind, fields[hostile(random)[1]] = "field added", fields[field]
        case _:
            kind, fields[field] = changed(random, fields[field], list(fields.values()))
    entries = [*value[:at], (id, fields), *value[at + 1 :]]
    return f"entry, {kind}", [("DEL", key), *(("XADD", key, i, *_flat(f)) for i, f in entries)]


def _zset(random: Random, key: bytes, value: list[Any]) -> tuple[str, list[tuple[Any, ...]]]:
    member, score = random.choice(value)
    scores = ["inf", "-inf", "-1", "0", "1.5", "1e300", "1e-300", str(2**53), str(2**63)]
    match random.randrange(4):
        case 0:
            return "member deleted", [("ZREM", key, member)]
        case 1:
            kind, new = hostile(random)
            return f"member added ({kind})", [("ZADD", key, score, new)]
        case 2:
            kind, new = changed(random, member, [m for m, _ in value])
            return f"member ({kind})", [("ZREM", key, member), ("ZADD", key, score, new)]
        case _:
            return "score", [("ZADD", key, random.choice(scores), member)]


def _set(random: Random, key: bytes, value: list[bytes]) -> tuple[str, list[tuple[Any, ...]]]:
    kind, new = hostile(random)
    gone = [("SREM", key, random.choice(value))] if random.random() < 0.3 else []
    return f"member added ({kind})", [*gone, ("SADD", key, new)]


def _list(random: Random, key: bytes, value: list[bytes]) -> tuple[str, list[tuple[Any, ...]]]:
    at = random.randrange(len(value))
    kind, new = changed(random, value[at], value)
    return kind, [random.choice([("LSET", key, at, new), ("LPUSH", key, new), ("RPUSH", key, new)])]


_CHANGES: Mapping[str, Callable[..., tuple[str, list[tuple[Any, ...]]]]] = {
    "string": _string,
    "hash": _hash,
    "stream": _stream,
    "zset": _zset,
    "set": _set,
    "list": _list,
}


def _flat(fields: Mapping[bytes, bytes]) -> list[bytes]:
    return [part for pair in fields.items() for part in pair]


def file_mutation_of(random: Random, files: Mapping[str, bytes]) -> Mutation:
    """Return a mutation of one of the files, by somebody who knows how its digest is made."""
    name = random.choice(list(files))
    data = files[name]
    if name.endswith(".jsonl"):
        lines = data.splitlines()
        at = random.randrange(len(lines))
        kind, lines[at] = changed(random, lines[at], lines)
        return Mutation(f"log file: {kind}", name.encode(), data=b"\n".join(lines) + b"\n")
    if random.random() < 0.2:
        kind, data = changed(random, data, [])
        return Mutation(f"checkpoint: {kind}", name.encode(), data=data)
    size = int.from_bytes(data[:8], "little")
    header, arrays = json.loads(data[8 : 8 + size]), data[8 + size :]
    fields = header["__metadata__"] if random.random() < 0.85 else header
    field = random.choice([field for field in fields if field not in ("digest", "__metadata__")])
    if random.random() < 0.1:
        kind = "field deleted"
        del fields[field]
    else:
        text = fields[field] if isinstance(fields[field], str) else json.dumps(fields[field])
        kind, new = changed(random, text.encode(), [str(value).encode() for value in fields.values()])
        shown = new.decode(errors="replace")
        fields[field] = shown if isinstance(fields[field], str) else _parsed(shown)
    return Mutation(f"checkpoint: {kind}", name.encode(), data=_with_digest(header, arrays))


def _with_digest(header: dict[str, Any], arrays: bytes) -> bytes:
    header["__metadata__"]["digest"] = "0" * 32
    text = json.dumps(header, separators=(",", ":")).encode()
    data = len(text).to_bytes(8, "little") + text + arrays
    return data.replace(b'"digest":"' + b"0" * 32, b'"digest":"' + xxhash.xxh3_128_hexdigest(data).encode(), 1)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
