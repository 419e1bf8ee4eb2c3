"""The scripts of experience: a repeat gets the first answer, and a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from protocol.rollout_room import ME, Room

import kvps
from kvps.errors import InvalidSetting, ItemsRefused, LeaseLost, WrongOrder
from kvps.store import Store

pytestmark = pytest.mark.contract

Changes = dict[tuple[str, str], tuple[Callable[[Any], Any], dict[str, Any]]]
"""Script and answer -> what is changed before, and in the call."""
ROLLOUTS = ("enter", "quit", "prompt", "offer", "put", "claim", "take", "settle")


@pytest.fixture
def room(store: Store) -> Room:
    return Room(store)


# -- what is refused ----------------------------------------------------------------------------------------------


def _taken(room: Room) -> None:
    """Prompt 0 is taken, prompt 1 waits, an item of prompt 2 is there, another is offered."""
    room.group()
    room.group()
    room.put()
    assert room.take() == ["0"]
    assert room.offer() == "OK"


def _set(key: str, field: str, value: str) -> Callable[[Room], None]:
    return lambda room: room.call("HSET", getattr(room.job.access.keys, key), field, value)


def _no_experience(room: Room) -> None:
    room.call("HDEL", room.job.access.keys.config, "rollouts")


def _removed(room: Room) -> None:
    room.call("DEL", room.job.access.keys.version)


def _wrong_type(key: str) -> Callable[[Room], None]:
    def change(room: Room) -> None:
        name = getattr(room.job.access.keys, key)
        room.call("DEL", name)
        room.call("SET", name, "x")

    return change


def _nothing(room: Room) -> None:
    pass


def _stopped(room: Room) -> None:
    room.job.stop("enough")


def _stopped_and_empty(room: Room) -> None:
    room.job.stop("enough")
    room.settle("", "0")
    while lots := room.take():
        room.settle("bad", *lots)


def _planned(room: Room) -> None:
    room.publish("0")


def _full(room: Room) -> None:
    """The first refusal wakes the learner."""
    assert room.offer(nbytes=1 << 40) == "FULL"


def _closed(room: Room) -> None:
    room.put()


def _too_old(room: Room) -> None:
    for _ in range(2):
        room.commit()


OF_ACTORS: Changes = {
    ("enter", "MANY"): (
        lambda room: room.call("HSET", room.job.access.keys.actors, *(w for n in range(20_000) for w in (n, "{}"))),
        {"actor": "new", "incarnation": ""},
    ),
    ("enter", "BAD"): (_nothing, {"actor": "a b", "incarnation": ""}),
    ("prompt", "STOPPED"): (_stopped, {"actor": "a1", "incarnation": None}),
    ("offer", "CLOSED"): (_closed, {"seq": 20}),
    ("offer", "PAST"): (_nothing, {"seq": 5}),
    ("offer", "FULL"): (_full, {"seq": 20, "nbytes": 1 << 40}),
    ("put", "OFFER"): (_nothing, {"nbytes": 101, "unit": 2}),
    ("put", "BASE"): (_nothing, {"unit": 2, "name": "0.another"}),
    ("put", "FORM"): (_nothing, {"unit": 2, "form": "another"}),
    ("put", "BAD"): (_nothing, {"unit": 2, "digest": "a b"}),
}
OF_LEARNER: Changes = {
    ("claim", "PAST"): (_nothing, {"number": 1}),
    ("take", "PAST"): (_nothing, {"number": 1}),
    ("take", "STOPPED"): (_stopped_and_empty, {"number": 9}),
    ("settle", "PAST"): (_nothing, {"number": 1}),
    ("settle", "TAKEN"): (_nothing, {"lots": ["0", "1"]}),
    ("settle", "PLANNED"): (_planned, {}),
    ("publish", "TAKEN"): (_nothing, {"trained": ["0", "1"]}),
    ("publish", "STALE"): (_too_old, {}),
    **{(script, "TERM"): (_nothing, {"term": "other"}) for script in ("claim", "take", "settle", "publish", "ready")},
}
OF_ALL: Changes = {
    **{(script, "EVICTED"): (_nothing, {"incarnation": "9-x"}) for script in ("enter", "prompt", "offer", "put")},
    **{
        (script, "NONE"): (_no_experience, {})
        for script in ("enter", "prompt", "offer", "put", "claim", "take", "settle", "publish")
    },
    **{(script, "NOJOB"): (_removed, {}) for script in ROLLOUTS},
    **{(script, "ANOTHER"): (_set("version", "id", "abcd1234"), {}) for script in ROLLOUTS},
    **{(script, "RESTARTED"): (_set("version", "run_id", "0" * 40), {}) for script in ROLLOUTS},
    **{
        (script, f"WRONGTYPE {key}"): (_wrong_type(key), {})
        for script, keys in {
            "enter": "actors actor_beats taken_units",
            "quit": "actors rollouts units",
            "prompt": "actors free_units units",
            "offer": "items lots waiting_lots taken_lots",
            "put": "items lots bases lot_bases taken_units news",
            "claim": "bases taken_lots lots units free_units",
            "take": "lots items lot_bases waiting_lots taken_lots",
            "settle": "plan lots items units",
            "publish": "taken_lots lots items rollouts",
        }.items()
        for key in keys.split()
    },
}
REFUSALS = OF_ACTORS | OF_LEARNER | OF_ALL


@pytest.mark.parametrize(("script", "answer"), REFUSALS)
def test_a_refusal_changes_nothing(room: Room, script: str, answer: str) -> None:
    change, values = REFUSALS[script, answer]
    _taken(room)
    given = {"unit": 2, **values}
    if script == "prompt" and answer == "STOPPED":
        given["incarnation"] = room.incarnations["a1"]
    if answer == "STALE":
        change(room)
    command = room.sent(script, **given)
    if answer != "STALE":
        change(room)
    before = room.digest()
    assert room.call(*command)[0] == answer.split()[0]
    assert room.digest() == before


@pytest.mark.parametrize("script", ["claim", "take", "settle", "publish", "ready"])
def test_a_learner_that_was_replaced_changes_nothing(room: Room, script: str) -> None:
    _taken(room)
    plan = room.publish("0")
    command = room.sent(script, plan_id=plan.id)
    room.job.access.scripts.renew(0, "me", room.term, 0)
    room.job.access.scripts.acquire(0, "another", 60_000, "m")
    before = room.digest()
    assert room.call(*command)[0] == "TERM"
    assert room.digest() == before


# -- repeats ------------------------------------------------------------------------------------------------------


def _unchanged(room: Room, calls: Callable[[], Any]) -> Any:
    """Return what a call returns, which changes nothing."""
    before = room.digest()
    answer = calls()
    assert room.digest() == before
    return answer


def test_a_repeat_of_an_actor_gets_the_first_answer(room: Room) -> None:
    scripts, mine = room.scripts, room.incarnations["a0"]
    assert _unchanged(room, lambda: scripts.enter("a0", "na0", ME)) == mine
    assert room.prompt() == 0
    assert _unchanged(room, room.prompt) == 0
    assert room.offer() == "OK"
    assert _unchanged(room, lambda: scripts.offer("a0", mine, 1, 100)) == "OK"
    id = scripts.put("a0", mine, room.item())
    assert _unchanged(room, lambda: scripts.put("a0", mine, room.item())) == id == f"a0.{mine}:1"
    assert _unchanged(room, lambda: scripts.put("a0", mine, room.item(form="another", nbytes=7))) == id
    assert _unchanged(room, lambda: scripts.offer("a0", mine, 1, 100)) == "PAST", "a late copy reserves no room"
    scripts.quit("a0", mine)
    _unchanged(room, lambda: scripts.quit("a0", mine))


def test_a_late_copy_of_an_offer_or_an_entry_is_of_no_effect(room: Room) -> None:
    mine = room.incarnations["a0"]
    room.prompt()
    assert [room.offer(), room.offer()] == ["OK", "OK"], "the second in place of the first"
    assert room.call("HMGET", room.job.access.keys.rollouts, "offers", "offered_bytes") == ["1", "100"]
    assert _unchanged(room, lambda: room.scripts.offer("a0", mine, 1, 100)) == "PAST"
    assert room.scripts.enter("a0", "another", ME) != mine
    assert room.call("HMGET", room.job.access.keys.rollouts, "offers", "offered_bytes") == ["0", "0"]
    with pytest.raises(kvps.WorkerEvicted):
        _unchanged(room, lambda: room.scripts.put("a0", mine, room.item()))
    _unchanged(room, lambda: room.scripts.quit("a0", mine))


def test_a_put_that_comes_too_late_gives_its_room_back_and_no_more(room: Room) -> None:
    mine, keys = room.incarnations["a0"], room.job.access.keys
    room.prompt()
    room.offer()
    before = room.digest()
    assert room.scripts.put("a0", mine, room.item(unit=1)) == "", "another prompt"
    changed = {key for key, value in room.digest().items() if value != before[key]}
    assert changed == {keys.rollouts, keys.actors}
    assert room.call("HGET", keys.rollouts, "offers") == "0"
    assert _unchanged(room, lambda: room.prompt()) == 0, "the prompt is still its own"
    with pytest.raises(WrongOrder, match="no room reserved"):
        _unchanged(room, lambda: room.scripts.put("a0", mine, room.item()))


def test_a_repeat_of_the_learner_gets_the_first_answer(room: Room) -> None:
    scripts, term = room.scripts, room.term
    room.group()
    room.group()
    assert _unchanged(room, lambda: scripts.claim(term, 1, [])) == []
    assert room.take(2) == ["0", "1"]
    assert _unchanged(room, lambda: scripts.take(term, room.number, 2, 1, "oldest").lots) == ["0", "1"]
    with pytest.raises(LeaseLost):
        _unchanged(room, lambda: scripts.claim(term, 1, []))
    assert room.settle("bad", "0")
    assert _unchanged(room, lambda: scripts.settle(term, room.number, "bad", ["0"])) is True
    with pytest.raises(LeaseLost):
        _unchanged(room, lambda: scripts.take(term, room.number - 1, 2, 1, "oldest"))
    plan = room.publish("1")
    assert _unchanged(room, lambda: room.publish("1")) == plan
    assert room.job.access.scripts.ready(0, term, plan, "d").flipped
    assert not _unchanged(room, lambda: room.job.access.scripts.ready(0, term, plan, "d").flipped)
    assert [item.id for item in plan.trained] == [f"a0.{room.incarnations['a0']}:{n}" for n in (3, 4)]


def test_nothing_to_take_uses_no_number_and_changes_nothing_the_second_time(room: Room) -> None:
    room.put()
    room.take()
    assert _unchanged(room, lambda: room.scripts.take(room.term, room.number, 1, 1, "oldest").why) == "waits"


def test_what_is_named_twice_has_one_fate(room: Room) -> None:
    room.group()
    assert room.take() == ["0"]
    with pytest.raises(ItemsRefused):
        _unchanged(room, lambda: room.publish("0", "0"))
    assert room.settle("bad", "0", "0")
    numbers = room.call("HMGET", room.job.access.keys.rollouts, "rejected", "bytes")
    assert [*numbers, room.call("HGET", room.job.access.keys.units, "done")] == ["2", "0", "1"]


def test_an_item_of_another_form_says_which_one_the_others_have(room: Room) -> None:
    room.put()
    room.offer()
    with pytest.raises(InvalidSetting, match=r"^form$"):
        _unchanged(room, lambda: room.scripts.put("a0", room.incarnations["a0"], room.item(form="another")))
