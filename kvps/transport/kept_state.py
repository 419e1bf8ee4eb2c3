"""Stores and reads the state that a learner has kept with a version."""

from __future__ import annotations

from typing import Any

from kvps.arrays.digest import Buffers, digest_of
from kvps.arrays.items import KEPT, decode
from kvps.arrays.layout import CHUNK_BYTES
from kvps.connection.sockets import ChunkGone
from kvps.errors import CorruptData
from kvps.parsing import Fields
from kvps.protocol.keys import JobKeys
from kvps.transport.access import JobAccess


def kept_items(keys: JobKeys, name: str, state: bytes) -> tuple[list[tuple[str, Buffers]], dict[str, Any]]:
    """Return the keys and values of a state that is kept with the version of this staged name, and what the manifest
    of shard 0 says of it; nothing for b""."""
    memory = memoryview(state)
    starts = range(0, len(state), CHUNK_BYTES)
    stored = keys.kept_state(name, len(state))
    items: list[tuple[str, Buffers]] = [
        (key, [memory[at : at + CHUNK_BYTES]]) for key, at in zip(stored, starts, strict=True)
    ]
    return items, {"state": {"bytes": len(state), "digest": digest_of([memory])}} if state else {}


def state_bytes(access: JobAccess, name: str) -> bytes:
    """Return the state of the version of this staged name as bytes, b"" if none was kept. Raises ChunkGone,
    CorruptData."""
    text = access.client.call("GET", access.keys.manifest(0, name))
    if not text or "state" not in (f := Fields.of_json(text, "a manifest")):
        return b""
    about = f.fields("state")
    data = bytearray(about.whole("bytes", high=KEPT.nbytes))
    memory = memoryview(data)
    starts = range(0, len(data), CHUNK_BYTES)
    keys = access.keys.kept_state(name, len(data))
    access.client.get([(key, memory[at : at + CHUNK_BYTES]) for key, at in zip(keys, starts, strict=True)])
    if digest_of([memory]) != about.word("digest"):
        raise CorruptData(f"the state of version {name.partition('.')[0]} has other bytes than when it was kept")
    return bytes(data)


def kept_state(access: JobAccess, name: str) -> dict[str, Any]:
    """Return the state of the version of this staged name, {} if none was kept. Raises CorruptData."""
    try:
        data = state_bytes(access, name)
    except ChunkGone:
        raise CorruptData(f"the state of version {name.partition('.')[0]} is gone from Redis") from None
    return decode(data, KEPT)[0] if data else {}
