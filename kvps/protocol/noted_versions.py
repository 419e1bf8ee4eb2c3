"""Versions that scripts have noted beside the newest one: what Redis was given, and what a slow reader has pinned."""

from __future__ import annotations

from typing import NamedTuple

from kvps.parsing import MOST_PIN, STAGED_NAME, Fields


class Mirrored(NamedTuple):
    """The version that Redis was last given, in a job over shared memory, and its staged name."""

    version: int
    name: str

    @classmethod
    def of(cls, text: str) -> Mirrored:
        """Parse the record that `mirror.lua` keeps."""
        record = Fields.of_json(text, "the mirror's record")
        return cls(record.whole("version"), record.matching("name", *STAGED_NAME))


class Pin(NamedTuple):
    """A version whose bytes are kept for a slow reader, and the staged name of each shard."""

    version: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, text: object, shards: int) -> Pin:
        """Parse the text that `pin.lua` keeps of a job with so many shards. Raises CorruptData."""
        pin = Fields.of_json(text, "the pin", MOST_PIN)
        names = pin.fields("names")
        return cls(pin.whole("version"), tuple(names.matching(str(i), *STAGED_NAME) for i in range(shards)))
