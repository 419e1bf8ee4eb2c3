"""The hash tags of shards: they fall evenly on the masters of a cluster."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvps.connection.slots import SLOTS, slot_of
from kvps.protocol.keys import JobKeys

_random = random.Random(14)
IDS = [f"{_random.getrandbits(32):08x}" for _ in range(500)]


def _unevenness(id: str, masters: int, shards: int) -> int:
    """Return how many more shards one of the masters has than another; each has an equal share of the slots."""
    keys = JobKeys("job", id)
    held = Counter(slot_of(keys.slot(shard)) * masters // SLOTS for shard in range(shards))
    return max(held.values()) - min(held[master] for master in range(masters))


@pytest.mark.parametrize("masters", [2, 4, 8])
def test_with_any_id_a_shard_for_each_master_is_on_each_master(masters: int) -> None:
    assert not any(_unevenness(id, masters, masters) for id in IDS)


@pytest.mark.parametrize(("masters", "shards"), [(3, 3), (3, 6), (5, 5), (6, 6), (6, 12), (7, 7), (10, 10), (16, 16)])
def test_with_some_ids_shards_fall_evenly(masters: int, shards: int) -> None:
    assert any(_unevenness(id, masters, shards) == 0 for id in IDS)
