"""What each role can do with its password: to its own job, to other jobs, to what all jobs share, and to the server.

`python -m hostile.roles` has each role try every command of the server on every kind of key, and compares what it was
let do with the table in docs/security.md. Then the role puts hostile values wherever it may: by each command into each
key, into each field of its job, into each argument of each script. Behind each of them, honest processes use that job
as far as it can be used, and two others make their next versions, with the right bits: a worker trains one, and a
learner publishes the other.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import redis
from helpers.arrays import assert_same_bits
from helpers.harness import aggregating, gradient, model
from helpers.paths import ROOT
from helpers.servers import running_server

import kvps
from hostile.calls import LONG_MS, LONGEST_MS, Call, SlowCalls
from hostile.reach import COLUMNS, PATIENCE_S, Reach, is_refused, kind_of, reach, user_of
from hostile.readers import EXPERIENCE, QUEUE, READERS, hurry
from hostile.scene import JOB, GaveUp, HurriedClient, Scene, published, scene
from hostile.values import LONG
from kvps.errors import KvpsError
from kvps.protocol import acl
from kvps.protocol.scripts import SCRIPTS

OTHER, POLICY = "other", "policy"
PAGE = ROOT / "docs/security.md"
VALUES = {"long": LONG, "huge": [str(2**53 - 1), str(2**53), "1000000000"], "negative": ["-1"], "wrong": ["x", ""]}
_LR = 0.05
_USES = ("state", "holders and others", "session of w0", "session of any", "aggregator", "report", "versions", "waits")
_USES_OF_A_LEARNERS = ("state", "holders and others", "watch", "publisher", "report", "versions", "verify", "live view")
_USES_OF_A_LEARNERS += ("experience", "learner of experience", "actor")
_SHOWN = 120
_MANY_TASKS = 1_000  # a script of the queue reads all of them. Who may put them there may load scripts, too
_MANY_ARGUMENTS = 10_000  # a script takes as long as its caller sends much

Words = Sequence[Any]
"""A command as it is sent."""


class Trial(NamedTuple):
    """What a role sends at once, and whether its job is used then. `what` says it in words."""

    what: str
    commands: Sequence[Words]
    uses: Sequence[str] = ()


class Stopped(AssertionError):
    """A role has done what no role may do."""


class Place:
    """A job of the hostile, and two others, one whose worker and aggregator are honest and one of an honest learner, on
    one server."""

    def __init__(self, url: str, folder: Path, name: str, stack: ExitStack) -> None:
        self.scene: Scene = stack.enter_context(scene(name, url, folder))
        self.raw = self.scene.raw
        self.scene.stays = (f"kvps:{{{OTHER}".encode(), f"kvps:{{{POLICY}".encode(), b"kvps:memory")
        store = stack.enter_context(kvps.connect(url))
        self.policy = stack.enter_context(store.publisher(POLICY, published(0)))
        self._watch = stack.enter_context(store.watch(POLICY))
        self.other = store.create_job(OTHER, model(), optimizer=kvps.SGD(lr=_LR))
        stack.enter_context(aggregating(self.other))
        self._session = stack.enter_context(self.other.join("w0"))
        self._weights = model()
        for script in SCRIPTS.values():
            self.raw.script_load(script.text)
        self.slow = SlowCalls(self.raw)

    def goes_on(self) -> None:
        """Make the next version of the other jobs. Raises AssertionError unless their bits are right."""
        policy = published(self.policy.version % 100)
        assert self._watch.update() == self.policy.publish(policy) - 1
        assert self._watch.update() == self.policy.version
        assert_same_bits(self._watch.arrays, policy)
        grads = gradient(self._weights, 0, self._session.round)
        self._weights = {name: value - np.float32(_LR) * grads[name] for name, value in self._weights.items()}
        self._session.push(gradient(self._session.pull(), 0, self._session.round))
        assert_same_bits(dict(self._session.pull()), self._weights)

    def use(self, names: Sequence[str]) -> None:
        """Use the hostile's job as honest processes do. What they refuse, they refuse in one line."""
        client = self.scene.store.client
        assert isinstance(client, HurriedClient)
        for name in names:
            client.begin()
            with suppress(KvpsError, GaveUp):
                READERS[name].run(self.scene, self.scene.opened)

    def judge(self, user: Any, trial: Trial) -> list[Call]:
        """Run a trial, and return the slow calls of scripts. Raises Stopped. A machine that stalls does so once."""
        for _ in range(2):
            calls = self._run(user, trial)
            if (longest := max(calls, default=Call())).ms <= LONGEST_MS:
                return calls
        raise Stopped(f"{trial.what}: a call took the server {longest}")

    def _run(self, user: Any, trial: Trial) -> list[Call]:
        """Run a trial, and make everything as it was before. Return the slow calls of scripts. Raises Stopped."""
        pipe = user.pipeline(transaction=False)
        for words in trial.commands:
            pipe.execute_command(*words)
        try:
            if not all(map(is_refused, pipe.execute(raise_on_error=False))):
                self.use(trial.uses)
            self.goes_on()
        except redis.exceptions.TimeoutError:
            raise Stopped(f"{trial.what}: the server did not answer for {PATIENCE_S:g} s") from None
        except Exception as error:
            raise Stopped(f"{trial.what}: {type(error).__name__}: {error}") from error
        self.scene.restore()
        return self.slow.all()


# -- what is tried ------------------------------------------------------------------------------------------------


def by_command(found: Reach, random: Random) -> Iterator[Trial]:
    """Each writing command on all keys that the role may change, with values of each kind."""
    keys = [key for area, kinds in found.kinds.items() for kind in found.changes[area] for key in kinds[kind]]
    for command in found.commands:
        for kind, values in VALUES.items():
            if command.writes:
                yield Trial(f"{command.name}, {kind}", [command.on(key, random.choice(values)) for key in keys])


def by_place(place: Place, found: Reach, random: Random, members: int) -> Iterator[Trial]:
    """Each key of the job, and of the queue, with a value of each kind in one of its fields, as another type, and with
    many members."""
    changes = set().union(*found.changes.values())
    absent = {key.encode() for keys in found.kinds["mine"].values() for key in keys} - place.scene.content.keys()
    for key, (type_, value) in {**place.scene.content, **dict.fromkeys(sorted(absent), ("string", b""))}.items():
        if (kind := kind_of(key.decode())) not in changes and not (kind.startswith("rq:") and found.changes["queue"]):
            continue
        jobs = _USES_OF_A_LEARNERS if place.scene.held else _USES
        known = [name for name in READERS if READERS[name].of == QUEUE] if kind.startswith("rq:") else jobs
        uses = random.sample(known, 3)
        for name, values in VALUES.items():
            written = _written(key, type_, value, random, random.choice(values).encode())
            yield Trial(f"{name} in {key.decode()}", [written], uses)
        for other in {"string", "hash", "stream", "zset", "set"} - {type_}:
            yield Trial(f"{key.decode()} as {other}", [("DEL", key), *_many(other, key, 1)], uses)
        many = min(members, _MANY_TASKS) if kind.startswith("rq:") else members
        yield Trial(f"{many:,} in {key.decode()}", _many(type_, key, many), uses)


def _written(key: bytes, type_: str, held: Any, random: Random, value: bytes) -> Words:
    match type_:
        case "hash":
            return "HSET", key, random.choice(list(held)), value
        case "stream":
            fields = dict(held[-1][1]) if held else {b"x": b"y"}
            fields[random.choice(list(fields))] = value
            return "XADD", key, "*", *(part for pair in fields.items() for part in pair)
        case "zset":
            is_score = value.lstrip(b"-").isdigit() and len(value) < 20
            return "ZADD", key, *((value, random.choice(held)[0]) if is_score else (1, value))
        case "set":
            return "SADD", key, value
        case "list":
            return "RPUSH", key, value
    return "SET", key, value


def _many(type_: str, key: bytes, members: int) -> list[Words]:
    """Return commands that add so many members, a thousand each; of a string it is the length."""
    if type_ == "string":
        return [("SET", key, "x" * members)]
    begin, twice = {
        "hash": (("HSET", key), True),
        "stream": (("XADD", key, "*"), True),
        "zset": (("ZADD", key), True),
        "set": (("SADD", key), False),
        "list": (("RPUSH", key), False),
    }[type_]
    parts = (range(first, min(first + 1_000, members)) for first in range(0, members, 1_000))
    return [(*begin, *((n for n in part for _ in range(2)) if twice else part)) for part in parts]


def by_argument(place: Place) -> Iterator[Trial]:
    """Each script that is loaded, also those of other roles, with a value of each kind in each argument; and on the
    keys of another job."""
    job, other, policy = place.scene.opened(), place.other.access.keys, place.policy.job.access.keys
    keys, honest = job.access.keys, _honest(place)
    for name, script in SCRIPTS.items():
        honest |= {key.name: [keys.sync] for key in script.header.keys if key.given}
        whole = list(script.command(keys, honest))
        first = 3 + whole[2]
        to_others = (
            script.command(other, honest),
            script.command(policy, honest),
            script.command(keys, {**honest, "version_key": other.version}),
        )
        sent: list[Words] = [whole, *to_others]
        for at, argument in enumerate((*script.header.arguments, script.header.rest), first):
            if argument:
                sent += [[*whole[:at], value, *whole[at + 1 :]] for values in VALUES.values() for value in values]
        if script.header.rest:
            sent.append([*whole, *["1"] * _MANY_ARGUMENTS])
        yield Trial(f"{name}.lua", sent, ("state",))


def _honest(place: Place) -> dict[str, Any]:
    """Return arguments of scripts, by their names, as an honest process would give them."""
    job = place.scene.opened()
    state, keys = job.state(), job.access.keys
    member = state.members.get("w0")
    given: dict[str, Any] = dict.fromkeys((name for s in SCRIPTS.values() for name in s.header.arguments), "")
    given |= {script.header.rest: ["1", "2"] for script in SCRIPTS.values() if script.header.rest}
    given |= {
        "job": keys.id,
        "worker": "w0",
        "incarnation": member.incarnation if member else "1-x",
        "history": state.history,
    }
    given |= {"shard": 0, "shards": 1, "term": job.access.reader.terms()[0], "dead": "w0", "deletions": 0}
    given |= {
        "seq": member.accepted + 1 if member else 1,
        "base": state.version,
        "weight": 1,
        "digests": "0" * 16,
        "version": 1,
    }
    given |= {"version_key": keys.version, "ms": 1000, "lease_ms": 1000, "what": "pause"}
    given |= {"head": state.head, "by": "host:1:2:x", "loss": 0.5, "nonce": "nonce"}
    if entry := place.raw.hget(keys.actors, "a0"):  # an actor that has offered an item, and a lot that is taken
        given |= {"actor": "a0", "incarnation": json.loads(entry)["incarnation"], "seq": 10, "process": "{}"}
        given |= {"unit": 4, "name": state.names[0], "nbytes": 1_000, "chunks": 1, "digest": "d", "form": "form"}
        given |= {"number": 6, "most": 1, "least": 1, "order": "oldest", "lots": ["2"], "trained": ["2"]}
    return given


# -- the table ----------------------------------------------------------------------------------------------------


def table(rows: dict[str, Reach]) -> list[str]:
    """Return the lines of the table of roles. A long cell stands there once."""
    lines, seen = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"], dict[str, str]()
    for role, found in rows.items():
        cells = found.row(role)
        lines.append(f"| {' | '.join(f'as a `{seen[c]}`' if c in seen else c for c in cells)} |")
        seen |= {cell: role for cell in cells if len(cell) > _SHOWN}
    return lines


def tried(role: str, place: Place, random: Random, share: float, members: int) -> tuple[Reach, int, list[Call]]:
    """Have a role try everything, or of hostile values a share. Return what it reaches, how many trials there were, and
    the slow calls. Raises Stopped."""
    trials, calls = 0, list[Call]()
    with user_of(place.scene.url, place.raw, role, acl.rules(role, JOB)) as user:
        found = reach(place.raw, user, place.scene.opened().access.keys, place.other.access.keys)
        place.scene.restore()
        place.goes_on()
        place.slow.all()  # that was not of this role
        chosen = (each for each in by_place(place, found, random, members) if random.random() < share)
        for trial in chain(by_command(found, random), chosen, by_argument(place)):
            calls += place.judge(user, trial)
            trials += 1
    return found, trials, calls


def main() -> int:
    """Return 1 if a role has done what the page does not say."""
    parser = argparse.ArgumentParser(prog="hostile.roles", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--share", type=float, default=1.0, help="of the hostile values, chosen by chance")
    parser.add_argument("--members", type=int, default=1_000_000, help="of a collection that has many")
    parser.add_argument("--role", choices=acl.ROLES, action="append", help="try these roles, and compare no table")
    asked = parser.parse_args()
    hurry()
    logging.disable()  # what is logged about damaged jobs
    rows: dict[str, Reach] = {}
    with running_server() as url, tempfile.TemporaryDirectory() as folder:
        for role in asked.role or acl.ROLES:
            began = time.monotonic()
            with ExitStack() as stack:
                name = QUEUE if acl.ROLES[role].queues else EXPERIENCE if role in ("actor", "learner") else "units"
                place = Place(url, Path(folder) / "files", name, stack)
                try:
                    rows[role], trials, calls = tried(
                        role, place, Random(f"{asked.seed}/{role}"), asked.share, asked.members
                    )
                except Stopped as error:
                    print(f"seed {asked.seed}: {role}: {error}", flush=True)
                    with suppress(redis.RedisError):
                        place.raw.shutdown(nosave=True)
                    os._exit(1)  # the honest would wait long for a server that is stopped
            long = sum(call.ms > LONG_MS for call in calls)
            print(
                f"{role:10} {trials:5} trials in {time.monotonic() - began:4.0f} s; {long} calls over {LONG_MS} ms; "
                f"the longest {max(calls, default=Call())}",
                flush=True,
            )
    lines = table(rows)
    print("\n".join(["", *lines]))
    if asked.role or "\n".join(lines) in PAGE.read_text():
        return 0
    print(f"\n{PAGE.relative_to(ROOT)} has another table")
    return 1


if __name__ == "__main__":
    sys.exit(main())
