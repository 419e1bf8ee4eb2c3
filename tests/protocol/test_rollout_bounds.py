"""What the scripts of experience do with values that whoever may put items may write: it is soon done, and typed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from protocol.rollout_room import Room
from redis.exceptions import ResponseError

from kvps.parsing import MOST_BASES, MOST_ITEMS, MOST_TAKEN
from kvps.protocol.plan import Plan
from kvps.protocol.scripts import SCRIPTS
from kvps.store import Store

pytestmark = pytest.mark.contract

VALUES = ["a" * 1_000_000, "1 " * 30_000, str(2**53), str(2**53 - 1), "9" * 400, "-1", "nan", "inf", "0x10", "1e400"]
VALUES += ["x", "", '"}', "\n", "é"]
DAMAGED = [
    *VALUES,
    "[" * 50_000,
    "{}",
    "[]",
    "null",
    "1",
    '{"incarnation":"1-x","offered":NaN}',
    "1 1 " + "a " * 30_000,
]
DAMAGED += ['1 0 ","x":"', "1 1 a.1-x:1 " * 3_000, '{"incarnation":{},"offered":1e999,"last":-1,"items":"x","unit":[]}']
SCRIPTS_OF_ITEMS = ("enter", "quit", "prompt", "offer", "put", "claim", "take", "settle", "publish", "ready")
_SLOW_US = 300_000
MANY = 100_000


class Watched:
    """Sends calls of scripts, and sees that the server is soon done with each."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        raw.config_set("slowlog-log-slower-than", _SLOW_US)
        raw.slowlog_reset()

    def __call__(self, *words: Any) -> Any:
        """Return the answer, None for an error that says where in the script."""
        try:
            return self._raw.execute_command(*words)
        except ResponseError as error:
            if not re.search(r"user_script:\d+: |too many", str(error)):
                raise
            return None

    def check(self) -> None:
        assert self._raw.slowlog_len() == 0, str(self._raw.slowlog_get(1))[:2_000]


@pytest.fixture
def room(store: Store) -> Room:
    made = Room(store)
    made.group()
    made.group()
    made.put()
    assert made.take() == ["0"]
    assert made.offer() == "OK"
    return made


@pytest.mark.parametrize("script", SCRIPTS_OF_ITEMS[:8])
def test_whatever_a_caller_sends_the_script_is_soon_done(room: Room, raw: Any, script: str) -> None:
    call, header = Watched(raw), SCRIPTS[script].header
    for argument in [*header.arguments, *([header.rest] if header.rest else [])]:
        for value in VALUES:
            call(*room.sent(script, **{argument: [value] * 3 if argument == header.rest else value}))
    call.check()
    room.incarnations["a1"], room.seqs["a1"] = room.scripts.enter("a1", "b", {}), 0
    assert room.put("a1"), "it goes on"


FIELDS = {
    "actors": "a0",
    "items": "*",
    "lots": "0 1 2",
    "rollouts": "offers offered_bytes bytes orders number took full",
    "units": "next done 0 1 2",
}
"""Key -> its fields that are damaged; * for all."""


@pytest.mark.parametrize(("key", "field"), [(key, field) for key, fields in FIELDS.items() for field in fields.split()])
def test_a_damaged_field_stops_no_learner_and_no_other_actor(room: Room, raw: Any, key: str, field: str) -> None:
    """What is taken after it, what is put and what is published is written to the log as it can be read."""
    call, name = Watched(raw), getattr(room.job.access.keys, key)
    before = raw.dump(name)
    publishes = [room.sent("publish", nonce=f"n{n}") for n in range(len(DAMAGED))]
    enters = [room.sent("enter", actor="new", incarnation="", nonce=f"n{n}") for n in range(len(DAMAGED))]
    others = [room.sent("offer", seq=7), room.sent("put", seq=7, unit=2), room.sent("prompt"), room.sent("enter")]
    others.append(room.sent("take", number=room.number))
    for value, publish, enter in zip(DAMAGED, publishes, enters, strict=True):
        raw.restore(name, 0, before, replace=True)
        for each in raw.hkeys(name) if field == "*" else [field]:
            raw.hset(name, each, value)
        opened = call(*publish)
        if opened and opened[0] == b"OPEN":
            Plan.from_json(opened[2].decode())
        for each in (enter, *others):
            call(*each)
    call.check()
    raw.restore(name, 0, before, replace=True)
    room.job.rollouts.fates()


@pytest.mark.parametrize("order", ["oldest", "newest", "random"])
def test_a_lot_that_somebody_else_has_put_there_is_not_taken_for_items(room: Room, raw: Any, order: str) -> None:
    keys = room.job.access.keys
    for key in (keys.waiting_lots, keys.lot_bases):
        raw.zadd(key, {"x": 0, "y z": 1, "99": 2, "": -1})
    raw.hset(keys.lots, "99", "damaged")
    took = [room.scripts.take(room.term, n, 9, 1, order).lots for n in range(3, 6)]
    assert [lot for lots in took for lot in lots if lot != "99"] == ["1"]


def _many(raw: Any, key: str, kind: str, prefix: str, value: str) -> None:
    for first in range(0, MANY, 5_000):
        members = [f"{prefix}{number}" for number in range(first, first + 5_000)]
        raw.hset(key, mapping=dict.fromkeys(members, value)) if kind == "hash" else raw.zadd(
            key, dict.fromkeys(members, 0)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "command", "fills", "most"),
    [
        ("offer", "hget", {"actors": ("hash", "x", "{}")}, 100),
        ("claim", "hdel", {"bases": ("hash", "x", "")}, MOST_BASES),
        ("claim", "zrem", {"taken_lots": ("zset", "1", "")}, 2 * MOST_ITEMS),
        ("take", "zrem", {"lot_bases": ("zset", "1", ""), "waiting_lots": ("zset", "1", "")}, 4 * MOST_TAKEN),
    ],
)
def test_more_members_than_a_job_may_have_are_not_all_looked_at(
    room: Room, raw: Any, script: str, command: str, fills: dict[str, tuple[str, str, str]], most: int
) -> None:
    for key, (kind, prefix, value) in fills.items():
        _many(raw, getattr(room.job.access.keys, key), kind, prefix, value)
    for _ in range(2):
        room.commit()
    raw.config_resetstat()
    assert room.reply(script, seq=9, nbytes=1 << 40, most=10 * MANY, lots=[])
    stats = raw.info("commandstats")
    assert stats.get(f"cmdstat_{command}", {"calls": 0})["calls"] <= most


@pytest.mark.slow
def test_so_many_stale_lots_are_dropped_in_one_call_and_the_next_ones_go_on(store: Store, raw: Any) -> None:
    room = Room(store, capacity=MOST_ITEMS, prompts=0, group=1, max_staleness=0)
    keys, ids = room.job.access.keys, [f"a0.1-x:{n}" for n in range(2 * MOST_TAKEN + 1)]
    raw.hset(keys.items, mapping=dict.fromkeys(ids, "0 1 1 d -"))
    raw.hset(keys.lots, mapping={id: f"{n} 0 {id}" for n, id in enumerate(ids)})
    for key in (keys.lot_bases, keys.waiting_lots):
        raw.zadd(key, dict.fromkeys(ids, 0))
    room.commit()
    asked: Callable[[], str] = lambda: room.scripts.take(room.term, 2, 1, 1, "oldest").why  # noqa: E731
    assert [asked() for _ in range(3)] == ["more", "more", "waits"]
    assert raw.hget(keys.rollouts, "stale") == str(len(ids)).encode()
    assert {fate.fate for fate in room.job.rollouts.fates()} == {"stale"}
    assert raw.hlen(keys.items) == 0
