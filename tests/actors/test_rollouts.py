"""Experience from actors to a learner, item by item: what is taken, trained on, rejected, given back or too old."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.harness import check_chain, log_entries
from helpers.rollouts import (
    JOB,
    VALUE,
    actor,
    bytes_of_items,
    fates,
    ids_of,
    kinds,
    learner,
    model,
    put,
)
from helpers.waiting import eventually

import kvps
from kvps.errors import InvalidSetting, ItemsRefused, JobStopped, LeaseLost, WrongOrder
from kvps.store import Store

pytestmark = pytest.mark.contract


def _item(seed: int, nbytes: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, 50_000, (3, seed + 1)),
        "logits": rng.normal(size=(2, 5)).astype(ml_dtypes.bfloat16),
        "scale": np.float32(rng.normal()).reshape(()),
        "none": np.zeros((0, 4), np.int8),
        "mask": rng.random(7) < 0.5,
        "frames": rng.integers(0, 256, nbytes, dtype=np.uint8),
        "reward": float(rng.normal()),
        "steps": -seed,
        "text": "für alle: 好" * seed,
        "state": bytes(rng.integers(0, 256, seed, dtype=np.uint8)),
    }


def _same(one: Any, other: Any) -> bool:
    def bits(value: Any) -> Any:
        return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    return list(one) == list(other) and all(bits(one[name]) == bits(value) for name, value in other.items())


@pytest.mark.parametrize("shards", [1, 3])
def test_an_item_comes_as_it_was_put_and_has_one_fate(store: Store, shards: int) -> None:
    """Also one of several chunks."""
    with learner(store, shards) as policy, actor(store, "a0") as watch:
        given = [_item(seed, 5_000_000 if seed == 2 else 10) for seed in range(4)]
        ids = [watch.rollouts.put(item, version=0) for item in given]
        items = policy.rollouts.take(4)
        assert ids_of(items) == ids
        for item, value in zip(items, given, strict=True):
            assert _same(item.data, value)
            assert not item.data["tokens"].flags.writeable
            assert (item.version, item.spans, item.unit, item.actor) == (0, ((0, 0),), None, "a0")
            assert item.id.startswith("a0.")
        assert policy.publish(model(1), trained=items, loss=0.5) == 1
    assert {id: (each.fate, each.version) for id, each in fates(store).items()} == dict.fromkeys(ids, ("trained", 1))
    [commit] = policy.job.log()
    assert [each.id for each in commit.plan.trained] == ids
    assert check_chain(policy.job) == 1


def test_an_item_made_across_an_update_names_both_versions(store: Store) -> None:
    with learner(store, max_staleness=1) as policy, actor(store) as watch:
        policy.publish(model(1))
        watch.update()
        watch.rollouts.put(VALUE, version=[(0, 0), (120, 1)])
        [item] = policy.rollouts.take(1)
        assert (item.version, item.spans) == (0, ((0, 0), (120, 1)))
        policy.rollouts.give_back()
        policy.publish(model(2))
        assert policy.rollouts.take(1, wait=0) == [], "its oldest version counts"
        assert kinds(store) == ["stale"]


def test_items_are_taken_in_the_order_that_is_asked_for(store: Store) -> None:
    with learner(store) as policy, actor(store) as watch:
        ids = put(watch, 8)
        assert ids_of(policy.rollouts.take(2)) == ids[:2]
        assert ids_of(policy.rollouts.take(2, order="newest")) == [ids[7], ids[6]]
        policy.rollouts.give_back()
        assert ids_of(policy.rollouts.take(2, order="oldest")) == ids[:2], "given back where they were"
        policy.rollouts.give_back()
        drawn = set()
        for _ in range(20):
            drawn.add(tuple(ids_of(policy.rollouts.take(2, order="random"))))
            policy.rollouts.give_back()
        assert len(drawn) > 3
        with pytest.raises(InvalidSetting, match="order must be"):
            policy.rollouts.take(2, order="best")


def test_whole_groups_are_taken_and_the_end_is_an_empty_list(store: Store) -> None:
    with learner(store, prompts=3, epochs=2, group=2) as policy, actor(store) as watch:
        seen = []
        for expected in ([0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]):
            put(watch, 4)
            items = policy.rollouts.take(groups=2)
            seen.append([item.unit for item in items])
            assert seen[-1] == expected
            policy.publish(model(policy.version + 1), trained=items)
        assert policy.rollouts.take(groups=2) == []
        assert watch.next_unit() is None
        now = policy.job.rollouts.now()
        assert (now.trained, now.closed, now.handed_out, now.waiting, now.taken, now.nbytes) == (12, 6, 6, 0, 0, 0)


def test_a_take_waits_until_as_many_are_there_or_its_time_is_over(store: Store) -> None:
    with learner(store) as policy, actor(store) as watch, ThreadPoolExecutor(1) as pool:
        assert policy.rollouts.take(2, wait=0) == []
        [first] = put(watch)
        assert ids_of(policy.rollouts.take(2, wait=0.05)) == [first]
        policy.rollouts.give_back()
        taking = pool.submit(policy.rollouts.take, 2)
        time.sleep(0.1)
        assert not taking.done()
        [second] = put(watch)
        assert ids_of(taking.result(60)) == [first, second]


def test_fewer_are_taken_where_no_more_can_come(store: Store) -> None:
    with learner(store, capacity=4) as policy, actor(store) as watch, ThreadPoolExecutor(1) as pool:
        put(watch, 4)
        held = policy.rollouts.take(2)
        putting = pool.submit(put, watch)
        assert len(policy.rollouts.take(3)) == 2, "no room is left for a third"
        assert policy.rollouts.take(1) == [], "all are this learner's"
        policy.publish(model(1), trained=held)
        putting.result(60)
        assert len(policy.rollouts.take(1)) == 1
        [more] = put(watch)
        assert policy.rollouts.take(3, wait=0)[0].id == more, "there is room for two others, and no time to wait"
    store.remove_job(JOB)
    with learner(store, prompts=3) as policy, actor(store) as watch:
        put(watch, 3)
        first, second = policy.rollouts.take(groups=2), policy.rollouts.take(groups=2)
        assert [item.unit for item in first + second] == [0, 1, 2], "no prompt is left for a fourth"
        assert policy.rollouts.take(groups=1) == []
        policy.publish(model(1), trained=first)
        policy.rollouts.reject(second, "enough")
        assert policy.rollouts.take(groups=1) == []


def test_what_is_rejected_has_its_fate_with_a_reason(store: Store) -> None:
    with learner(store, prompts=2, group=2) as policy, actor(store) as watch:
        ids = put(watch, 4)
        items = policy.rollouts.take(groups=2)
        policy.rollouts.reject(items[:2], "no reward")
        for again in (policy.rollouts.reject, lambda given, _: policy.rollouts.give_back(given)):
            with pytest.raises(InvalidSetting, match="not taken by this learner"):
                again(items[:2], "again")
        for bad in ("", "two\nlines", "x" * 201, None):
            with pytest.raises(InvalidSetting, match="reason must be"):
                policy.rollouts.reject(items[2:], bad)  # type: ignore[arg-type]
        policy.publish(model(1), trained=ids_of(items[2:]))
        assert watch.next_unit() is None
        found = fates(store)
        assert [(found[id].fate, found[id].version, found[id].reason, found[id].unit) for id in ids] == [
            ("rejected", 0, "no reward", 0),
            ("rejected", 0, "no reward", 0),
            ("trained", 1, "", 1),
            ("trained", 1, "", 1),
        ]


def test_what_is_given_back_is_taken_again(store: Store) -> None:
    with learner(store, prompts=2, group=2) as policy, actor(store) as watch:
        put(watch, 4)
        items = policy.rollouts.take(groups=2)
        policy.rollouts.give_back(items[2:])
        assert kinds(store) == ["taken"] * 2 + ["waiting"] * 2
        policy.rollouts.give_back()
        assert policy.rollouts.taken == []
        again = policy.rollouts.take(groups=2)
        assert ids_of(again) == ids_of(items)
        assert all(_same(one.data, other.data) for one, other in zip(items, again, strict=True))


@pytest.mark.parametrize("stale", ["again", "drop"])
def test_what_is_too_old_is_dropped_at_a_take(store: Store, stale: str) -> None:
    with learner(store, prompts=2, group=2, max_staleness=1, stale=stale) as policy, actor(store) as watch:
        old = put(watch, 2)
        policy.publish(model(1))
        assert policy.rollouts.take(groups=1), "one version is allowed"
        policy.rollouts.give_back()
        policy.publish(model(2))
        watch.update()
        young = put(watch, 2)
        items = policy.rollouts.take(groups=2, wait=0)
        assert ids_of(items) == young
        found = fates(store)
        assert [(found[id].fate, found[id].version, found[id].reason) for id in old] == [("stale", 2, stale)] * 2
        policy.publish(model(3), trained=items)
        watch.update()
        if stale == "again":
            assert watch.next_unit() == 0
            put(watch, 2)
            items = policy.rollouts.take(groups=2)
            assert [item.unit for item in items] == [0, 0]
            policy.publish(model(4), trained=items)
        assert watch.next_unit() is None
        assert policy.rollouts.take(groups=1) == []


def test_a_version_is_not_trained_on_what_has_become_too_old(store: Store) -> None:
    with learner(store, max_staleness=0) as policy, actor(store) as watch:
        [old] = put(watch)
        [first] = policy.rollouts.take(1)
        policy.publish(model(1))
        watch.update()
        [young] = put(watch)
        [second] = policy.rollouts.take(1)
        with pytest.raises(ItemsRefused, match="too old") as raised:
            policy.publish(model(2), trained=[first, second])
        assert "\n" not in str(raised.value)
        assert policy.job.state().version == 1
        assert kinds(store) == ["waiting"] * 2
        items = policy.rollouts.take(2, wait=0)
        assert ids_of(items) == [young]
        assert policy.publish(model(2), trained=items) == 2
        assert {id: each.fate for id, each in fates(store).items()} == {old: "stale", young: "trained"}


def test_each_misuse_of_items_is_one_line_and_changes_nothing(store: Store) -> None:
    with learner(store, prompts=4, group=2, capacity=8) as policy, actor(store) as watch:
        put(watch, 4)
        items = policy.rollouts.take(groups=2)
        before = policy.job.rollouts.now()._replace(actors=[])
        for trained, text in (
            (items[:1], "of prompt 0 some items are missing"),
            (items[:2] + items[:1], "named twice"),
            (["a0.1-x:1"], "not taken by this learner"),
            (["x\n" * 500], "not taken by this learner"),
        ):
            with pytest.raises(InvalidSetting, match=text) as raised:
                policy.publish(model(1), trained=trained)
            assert len(str(raised.value).splitlines()) == 1
        for asked, text in (
            ({}, "give one"),
            ({"n": 2, "groups": 1}, "give one"),
            ({"n": 3}, "take a multiple"),
            ({"groups": 0}, "groups"),
            ({"groups": 5}, "no more than 8"),
        ):
            with pytest.raises(InvalidSetting, match=text):
                policy.rollouts.take(**asked)
        with pytest.raises(kvps.LayoutMismatch):
            policy.publish({"x": np.zeros(1, np.float32)}, trained=items)
        assert policy.job.rollouts.now()._replace(actors=[]) == before
        policy.publish(model(1), trained=items)
        with pytest.raises(InvalidSetting, match="not taken by this learner"):
            policy.publish(model(2), trained=items)
        assert policy.version == policy.job.state().version == 1
    with pytest.raises(WrongOrder, match="closed"):
        policy.rollouts.take(groups=1)


def test_the_next_learner_gets_what_the_one_before_had_taken(store: Store) -> None:
    first = learner(store)
    watch = actor(store)
    ids = put(watch, 4)
    items = first.rollouts.take(2)
    first.close()
    assert kinds(store) == ["waiting"] * 4
    second = learner(store)
    assert ids_of(second.rollouts.take(3)) == ids[:3]
    third = learner(store, takeover=True)
    for call in (
        lambda: second.publish(model(1), trained=ids[:3]),
        lambda: second.rollouts.reject(ids[:3], "late"),
        second.rollouts.give_back,
        lambda: second.rollouts.take(1, wait=0),
    ):
        with pytest.raises(LeaseLost):
            call()
    assert ids_of(third.rollouts.take(4)) == ids
    third.publish(model(1), trained=ids)
    second.close()
    third.close()
    watch.close()
    assert all(_same(item.data, VALUE) for item in items)
    assert {each.fate for each in fates(store).values()} == {"trained"}


def test_items_of_a_publish_beside_the_next_step(store: Store) -> None:
    with learner(store, capacity=3) as policy, actor(store) as watch, ThreadPoolExecutor(1) as pool:
        ids = put(watch, 3)
        first = policy.rollouts.take(1)
        policy.job.pause()
        policy.publish(model(1), trained=first, wait=False)
        second = policy.rollouts.take(1)
        assert ids_of(second) == ids[1:2], "a publish that is under way holds up no take"
        with pytest.raises(InvalidSetting, match="in a publish that is under way"):
            policy.rollouts.reject(first, "late")
        policy.rollouts.give_back()
        assert sorted(kinds(store)) == ["taken", "waiting", "waiting"]
        assert len(policy.rollouts.take(2)) == 2
        more = pool.submit(policy.rollouts.take, 1)
        time.sleep(0.1)
        assert not more.done(), "all are taken, and the publish will make room"
        policy.job.resume()
        [fourth] = put(watch)
        assert ids_of(more.result(60)) == [fourth]
        assert policy.version == 1


def test_the_items_of_a_publish_that_fails_are_given_back(store: Store) -> None:
    with learner(store) as policy, actor(store) as watch:
        ids = put(watch, 2)
        items = policy.rollouts.take(2)
        policy.publish(model(1), trained=items, wait=False)
        assert policy.wait() == 1
        more = put(watch, 2)
        items = policy.rollouts.take(2)
        policy.job.stop("enough")
        policy.publish(model(2), trained=items, wait=False)
        with pytest.raises(JobStopped):
            policy.wait()
        assert {id: each.fate for id, each in fates(store).items()} == dict.fromkeys(ids, "trained") | dict.fromkeys(
            more, "waiting"
        )
        assert policy.rollouts.taken == []


def test_bytes_are_deleted_soon(store: Store) -> None:
    """Those of items that have had their fate, and those that an actor left which was killed."""
    with learner(store, shards=2) as policy, actor(store) as watch:
        keys = policy.job.access.keys
        for number in (1, 2):  # of an incarnation that is gone
            store.client.call("SET", f"{keys.item(f'dead.1-ab:{number}', 2)[1]}0", b"bytes")
        put(watch, 6)
        items = policy.rollouts.take(5)
        assert len(bytes_of_items(store)) == 8
        policy.rollouts.reject(items[:1], "bad")
        policy.publish(model(1), trained=items[1:])
        policy.publish(model(2))
        [left] = policy.rollouts.take(1)
        assert eventually(lambda: len(bytes_of_items(store)) == 1), bytes_of_items(store)
        policy.publish(model(3), trained=[left])
    assert bytes_of_items(store) == []


def test_an_item_whose_bytes_are_damaged_is_rejected(store: Store) -> None:
    with learner(store) as policy, actor(store) as watch:
        ids = put(watch, 3)
        keys = policy.job.access.keys
        store.client.call("SETRANGE", f"{keys.item(ids[0], 1)[1]}0", 3, "damage")
        store.client.call("UNLINK", f"{keys.item(ids[1], 1)[1]}0")
        assert ids_of(policy.rollouts.take(3)) == ids[2:]
        found = fates(store)
        assert [found[id].fate for id in ids] == ["rejected", "rejected", "taken"]
        assert found[ids[0]].reason.startswith("damaged: ")


def test_a_log_entry_of_fates_is_bounded(store: Store) -> None:
    with learner(store, max_staleness=0) as policy, actor(store) as watch:
        put(watch, 501)
        policy.publish(model(1))
        assert policy.rollouts.take(1, wait=0) == []
        entries = [f["items"].count(",") + 1 for _, f in log_entries(policy.job) if f["kind"] == "stale"]
        assert entries == [500, 1]
        assert kinds(store) == ["stale"] * 501


def test_a_learner_that_stops_between_a_take_and_a_publish_leaves_nothing_taken(store: Store) -> None:
    def fail() -> None:
        with learner(store) as policy, actor(store) as watch:
            put(watch, 2)
            policy.rollouts.take(2)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert kinds(store) == ["waiting"] * 2
    with learner(store) as policy, actor(store) as watch:
        beside = threading.Thread(target=put, args=(watch,))
        beside.start()
        assert len(policy.rollouts.take(3)) == 3
        beside.join(60)
