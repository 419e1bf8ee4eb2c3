"""The manifest of a shard's version, which its holder stages last. Pure."""

from __future__ import annotations

from kvps.arrays.number_ranges import counts_in
from kvps.parsing import Fields, sequence, whole
from kvps.protocol.bounds import MOST_DIFFERENCES


def digests_in(manifest: object) -> dict[str, str]:
    """Return the digests that the manifest of a version has: array -> digest. Raises CorruptData."""
    digests = Fields.of_json(manifest, "a manifest").fields("digests")
    return {what: digests.word(what) for what in digests}


def skipped_in(manifest: object, version: int, parameters: int) -> dict[int, int]:
    """Return in how many of the versions each parameter was left out: number in the layout -> count; without those that
    never were, or whose optimizer does not count its steps. Raises CorruptData."""
    fields = Fields.of_json(manifest, "a manifest")
    return counts_in(fields.fields("skipped"), version, parameters) if "skipped" in fields else {}


def differences_in(manifest: object) -> list[int]:
    """Return how many bytes each lossless difference has that leads to this version, oldest first. Raises
    CorruptData."""
    told = Fields.of_json(manifest, "a manifest").as_dict().get("differences", [])
    return [whole(size, "a difference's bytes", 0) for size in sequence(told, "differences", MOST_DIFFERENCES)]
