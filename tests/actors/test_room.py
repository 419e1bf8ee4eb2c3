"""When an actor is told to begin an item, and when to wait."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from helpers.waiting import eventually

import kvps
from kvps.actors.taking import Item
from kvps.store import Store

pytestmark = pytest.mark.contract

WEIGHTS = {"w": np.zeros(3, np.float32)}
FRESH = kvps.Rollouts(max_staleness=0, capacity=8)


def _put_until(asked: Future[list[Item]], actor: kvps.Watch) -> list[Item]:
    """Put an item whenever there is room, until the learner has what it has asked for; return that."""

    def done() -> bool:
        if actor.rollouts.room():
            actor.rollouts.put({"n": 1}, version=actor.version)
        return asked.done()

    assert eventually(done)
    return asked.result()


def test_an_actor_may_fill_the_first_batch(store: Store) -> None:
    """It was taken for one of a single item, and learner and actor waited for each other."""
    with (
        ThreadPoolExecutor(1) as pool,
        store.publisher("policy", WEIGHTS, rollouts=FRESH) as policy,
        store.watch("policy") as actor,
    ):
        actor.update()
        items = _put_until(pool.submit(policy.rollouts.take, 4, wait=60), actor)
        assert len(items) == 4
        assert not actor.rollouts.room(), "what is begun now goes into the version after the next"
        policy.publish(WEIGHTS, trained=items)
        assert not actor.rollouts.room(), "it has not the newest version"
        actor.update()
        assert actor.rollouts.room()


def test_a_learner_that_keeps_some_items_gets_more_for_the_same_version(store: Store) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        store.publisher("policy", WEIGHTS, rollouts=FRESH) as policy,
        store.watch("policy") as actor,
    ):
        actor.update()
        *kept, dull = _put_until(pool.submit(policy.rollouts.take, 3, wait=60), actor)
        policy.rollouts.reject([dull], "no advantage")
        more = _put_until(pool.submit(policy.rollouts.take, 3, wait=60), actor)
        assert policy.publish(WEIGHTS, trained=[*kept, *more]) == 1
        assert policy.job.rollouts.now().trained == 5


def test_room_is_waited_for(store: Store) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        store.publisher("policy", WEIGHTS, rollouts=kvps.Rollouts(capacity=1)) as policy,
        store.watch("policy") as actor,
    ):
        actor.update()
        actor.rollouts.put({"n": 1}, version=0)
        assert not actor.rollouts.room(wait=0.01)
        waiting = pool.submit(actor.rollouts.room, wait=60)
        policy.publish(WEIGHTS, trained=policy.rollouts.take(1))
        assert waiting.result(60)


def test_what_is_taken_beside_a_publish_is_fresh_enough_for_the_next_one(store: Store) -> None:
    """It was judged by the version that is committed, and the next publish was refused."""
    with store.publisher("policy", WEIGHTS, rollouts=FRESH) as policy, store.watch("policy") as actor:
        for version in range(1, 6):
            actor.update()
            for n in range(4):
                actor.rollouts.put({"n": n}, version=actor.version)
            assert policy.publish(WEIGHTS, trained=policy.rollouts.take(2, wait=0), wait=False) == version
        assert policy.wait() == 5
