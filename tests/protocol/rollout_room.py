"""A published job with actors whose scripts a test calls itself, and all that the job has under its control keys."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

import kvps
from kvps.job import Job
from kvps.protocol.plan import Plan
from kvps.protocol.rollout_scripts import NewItem, RolloutScripts
from kvps.protocol.scripts import SCRIPTS, Said
from kvps.store import Store

MODEL = {"x": np.zeros(8, np.float32)}
BY = "host:1:2:abc"
ME = {"host": "here", "pid": 1}


class Room:
    """A job with two actors and a learner that calls the scripts itself. Its prompts have two items each."""

    def __init__(self, store: Store, **settings: Any) -> None:
        asked: dict[str, Any] = {"max_staleness": 1, "capacity": 8, "prompts": 6, "group": 2} | settings
        store.publisher("job", MODEL, rollouts=kvps.Rollouts(**asked)).close()
        self.job: Job = store.job("job")
        self.call = self.job.access.client.call
        self.term = self.job.access.scripts.acquire(0, "me", 600_000, "n0").term
        self.scripts = RolloutScripts(self.job.access.scripts, "job")
        self.scripts.claim(self.term, 1, [])
        self.number = 1
        self.incarnations = {actor: self.scripts.enter(actor, f"n{actor}", ME) for actor in ("a0", "a1")}
        self.seqs = dict.fromkeys(self.incarnations, 0)

    @property
    def name(self) -> str:
        """The staged name of the newest version."""
        return self.job.state().names[0]

    def prompt(self, actor: str = "a0") -> int | None:
        return self.scripts.prompt(actor, self.incarnations[actor]).unit

    def offer(self, actor: str = "a0", nbytes: int = 100) -> str:
        self.seqs[actor] += 1
        return self.scripts.offer(actor, self.incarnations[actor], self.seqs[actor], nbytes)

    def item(self, actor: str = "a0", unit: int | None = 0, **changed: Any) -> NewItem:
        """Return the item of the last offer."""
        state = self.job.state()
        item = NewItem(self.seqs[actor], unit, state.version, state.names[0], 100, 1, "d", "form")
        return item._replace(**changed)

    def put(self, actor: str = "a0") -> str:
        """Have an item of an actor's prompt accepted, and return its id."""
        unit = self.prompt(actor)
        assert self.offer(actor) == "OK"
        return self.scripts.put(actor, self.incarnations[actor], self.item(actor, unit))

    def group(self, actor: str = "a0") -> list[str]:
        """Have both items of a prompt accepted."""
        return [self.put(actor), self.put(actor)]

    def take(self, lots: int = 1) -> list[str]:
        self.number += 1
        return self.scripts.take(self.term, self.number, lots, 1, "oldest").lots

    def settle(self, reason: str, *lots: str) -> bool:
        self.number += 1
        return self.scripts.settle(self.term, self.number, reason, lots)

    def publish(self, *lots: str, nonce: str = "") -> Plan:
        state = self.job.state()
        plan = self.job.access.scripts.publish(self.term, state, BY, Said(None, nonce or f"n{state.version}", lots))
        assert plan
        return plan

    def commit(self, *lots: str) -> Plan:
        plan = self.publish(*lots)
        assert self.job.access.scripts.ready(0, self.term, plan, "d").flipped
        return plan

    def sent(self, script: str, **changed: object) -> list[Any]:
        """Return a call as it would go on, with some arguments changed."""
        state, keys = self.job.state(), self.job.access.keys
        item = self.item()._asdict()
        values: dict[str, Any] = {
            **item,
            "actor": "a0",
            "incarnation": self.incarnations["a0"],
            "process": json.dumps(ME),
        }
        values |= {"shard": 0, "shards": 1, "nonce": "n", "job": keys.id}
        values |= {"term": self.term, "number": self.number + 1}
        values |= {"most": 1, "least": 1, "order": "oldest", "reason": "bad", "lots": ["0"], "trained": ["0"]}
        values |= {"version": state.version + 1, "head": state.head, "by": BY, "loss": 0.5, "history": state.history}
        values |= {"plan_id": state.version + 1, "digest": "d"}
        return list(SCRIPTS[script].command(keys, values | changed))

    def reply(self, script: str, **changed: object) -> Any:
        return self.call(*self.sent(script, **changed))

    def digest(self) -> dict[str, Any]:
        """Return all that the job has under its control keys; but not when actors gave their last signs of life."""
        return {key: self._read(key) for key in self.job.access.keys.all_control([], 1)}

    def _read(self, key: str) -> Any:
        match self.call("TYPE", key):
            case "hash":
                return self.call("HGETALL", key)
            case "stream":
                return self.call("XRANGE", key, "-", "+")
            case "zset":
                times = key == self.job.access.keys.actor_beats
                return sorted(self.call("ZRANGE", key, 0, -1, *([] if times else ["WITHSCORES"])))
            case "string":
                return self.call("GET", key)
        return None
