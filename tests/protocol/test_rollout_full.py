"""Experience on a server whose memory is full: what frees memory passes, what needs it waits, and nothing is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import redis
from helpers.rollouts import actor, fates, ids_of, learner, model, put
from helpers.servers import fill_memory, running_server
from helpers.waiting import eventually
from protocol.rollout_room import Room

import kvps

FULL = ("--maxmemory", "48mb", "--maxmemory-policy", "noeviction")


def test_each_script_passes_on_a_full_server() -> None:
    """All but the bytes of an item and of a version: a version frees what its items had."""
    with running_server(*FULL) as url, kvps.connect(url) as store, redis.Redis.from_url(url) as other:
        room = Room(store, stale="drop", capacity=64, prompts=20)
        accepted = {fate: room.group() for fate in ("stale",)}
        for _ in range(2):
            room.commit()
        accepted |= {fate: room.group() for fate in ("rejected", "trained", "waiting")}
        room.prompt()
        commands = {
            "take": room.sent("take", number=2, most=2),
            "settle": room.sent("settle", number=3, lots=["1"]),
            "publish": room.sent("publish", trained=["2"]),
            "ready": room.sent("ready", plan_id=3),
            "offer": room.sent("offer", seq=9),
            "put": room.sent("put", seq=9, unit=4),
            "prompt": room.sent("prompt", actor="a1", incarnation=room.incarnations["a1"]),
            "quit": room.sent("quit", actor="a1", incarnation=room.incarnations["a1"]),
            "enter": room.sent("enter", actor="a2", incarnation="", nonce="n"),
            "claim": room.sent("claim", number=4, lots=[]),
        }
        fill_memory(other)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            other.set("more", "x" * 1_000)
        answers: dict[str, Any] = {name: other.execute_command(*command) for name, command in commands.items()}
        other.delete("ballast")
        assert {name: answer[0] for name, answer in answers.items() if answer[0] != b"OK"} == {
            "publish": b"OPEN",
            "ready": b"FLIPPED",
        }
        accepted["waiting"].append(answers["put"][1].decode())
        found = {fate.id: fate.fate for fate in room.job.rollouts.fates()}
        assert found == {id: fate for fate, ids in accepted.items() for id in ids}
        assert [item.id for commit in room.job.log() for item in commit.plan.trained] == accepted["trained"]


def test_a_put_and_a_publish_wait_until_a_full_server_has_room() -> None:
    value = {"n": np.arange(50_000)}
    with ExitStack() as stack:
        url = stack.enter_context(running_server(*FULL))
        store, other = stack.enter_context(kvps.connect(url)), stack.enter_context(redis.Redis.from_url(url))
        with learner(store, capacity=64) as policy, actor(store, "a0") as watch, ThreadPoolExecutor(1) as thread:
            first = put(watch, 4, value)
            policy.rollouts.take(1, wait=0)
            fill_memory(other)
            putting = thread.submit(put, watch, 1, value)
            keys = policy.job.access.keys
            assert eventually(lambda: other.hget(keys.rollouts, "offers") == b"1")
            taken = policy.rollouts.take(3, wait=0)
            policy.rollouts.reject(taken[:1], "of no use")
            policy.publish({"w": np.ones(100, np.float32)}, trained=taken[1:], wait=False)
            assert not putting.done()
            other.delete("ballast")
            (last,) = putting.result(timeout=60)
            assert policy.wait() == 1
            (item,) = policy.rollouts.take(1, wait=60)
            assert (item.id, item.data["n"].tobytes()) == (last, value["n"].tobytes())
            assert ids_of(taken) == first[1:]
            assert {id: fate.fate for id, fate in fates(store).items()} == dict(
                zip([*first, last], ["taken", "rejected", "trained", "trained", "taken"], strict=True)
            )
            watch.load(mine := model())
            assert watch.version == 1
            assert mine["w"].tobytes() == np.ones(100, np.float32).tobytes()
