"""A job whose learner trains on experience, the same each time: two actors, five prompts, every fate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import kvps
from kvps.actors.publisher import Publisher
from kvps.store import Store

SETTINGS = kvps.Rollouts(prompts=5, group=2, max_staleness=1, capacity=32, stale="drop")


def weights(number: float) -> dict[str, np.ndarray]:
    return {"x": np.full(3, number, np.float32)}


def put(actor: kvps.Watch, items: int) -> int:
    """Have an actor answer its prompt with so many items, made on the version that it has; return the prompt."""
    unit = actor.next_unit(0)
    assert unit is not None
    for number in range(items):
        assert actor.rollouts.put({"reward": float(number)}, version=actor.version, unit=unit)
    return unit


@contextmanager
def experienced(store: Store, name: str = "job") -> Iterator[tuple[Publisher, kvps.Watch, kvps.Watch]]:
    """Yield a learner at version 3, and two actors. Prompt 0 was trained on, 1 rejected, 2 dropped; 3 is taken, and of
    4 there is one item."""
    with store.publisher(name, weights(0), rollouts=SETTINGS) as policy:
        policy.rollouts.take(groups=1, wait=0)
        with store.watch(name, actor="quick") as quick, store.watch(name, actor="slow") as slow:
            quick.update()
            slow.update()
            assert [put(quick, 2), put(quick, 2)] == [0, 1]
            policy.publish(weights(1), trained=policy.rollouts.take(groups=1), loss=0.5)
            policy.rollouts.reject(policy.rollouts.take(groups=1), "no advantage")
            assert put(slow, 2) == 2
            for number in (2, 3):
                policy.publish(weights(number), loss=1 / number)
            quick.update()
            assert put(quick, 2) == 3
            assert len(policy.rollouts.take(groups=1)) == 2
            assert put(quick, 1) == 4
            yield policy, quick, slow
