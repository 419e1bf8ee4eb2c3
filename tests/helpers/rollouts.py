"""A published job that takes experience, with its learner and its actors in the process of the test."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvps
from kvps.actors.taking import Item
from kvps.history.rollouts import ItemFate
from kvps.store import Store

JOB = "policy"
VALUE = {"n": np.arange(3)}
"""An item of no meaning."""


def model(value: float = 0) -> dict[str, np.ndarray]:
    return {"w": np.full(100, value, np.float32)}


def learner(store: Store, shards: int = 1, takeover: bool = False, **settings: Any) -> kvps.Publisher:
    """Return the publisher of the job; it is made with these settings of `kvps.Rollouts` if it is not there."""
    rollouts = kvps.Rollouts(**settings) if settings or not takeover else None
    return store.publisher(JOB, model(), shards=shards, rollouts=rollouts, wait=0, takeover=takeover)


def actor(store: Store, name: str = "") -> kvps.Watch:
    """Return the watch of an actor which has the newest version."""
    watch = store.watch(JOB, actor=name)
    watch.update()
    return watch


def put(watch: kvps.Watch, count: int = 1, value: Any = None) -> list[str]:
    """Put items on the version that the actor has, each for the prompt that it gets, if there are prompts; return their
    ids."""
    ids = []
    for _ in range(count):
        if watch.rollouts.settings.prompts:
            assert watch.next_unit(wait=60) is not None
        id = watch.rollouts.put(value or VALUE, version=watch.version)
        assert id
        ids.append(id)
    return ids


def ids_of(items: list[Item]) -> list[str]:
    return [item.id for item in items]


def fates(store: Store) -> dict[str, ItemFate]:
    """Return the fate of each item."""
    found = store.job(JOB).rollouts.fates()
    assert len({each.id for each in found}) == len(found)
    return {each.id: each for each in found}


def kinds(store: Store) -> list[str]:
    """Return what became of each item, in the order of their fates."""
    return [each.fate for each in store.job(JOB).rollouts.fates()]


def silence(store: Store, name: str) -> None:
    """Have the server believe that it has heard nothing of an actor for long. Somebody must just have looked, or all
    actors get a new start."""
    assert store.client.call("ZADD", store.job(JOB).access.keys.actor_beats, "XX", "CH", 1, name) == 1


def bytes_of_items(store: Store) -> list[str]:
    """Return the names of the keys that have items' bytes."""
    keys = store.job(JOB).access.keys
    return sorted(key for key in store.client.scan(keys.all_bytes) if ":x:" in key)
