"""What the user of a role reaches on a real server: each command that the server knows, on each kind of key, is tried.

Only the rules are asked: "x" stands for all arguments that are no keys, so most of what is let through fails then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis
from kvps_cli.serve.acl import url_for

from kvps.protocol.keys import JOBS, MEMORY, JobKeys

COLUMNS = ("role", "its own job", "other jobs", "list of jobs", "queue", "server")
CONNECTING = {
    *("asking", "client|setname", "cluster|slots", "discard", "exec", "multi", "ping", "readonly", "select", "time")
}
"""What each client of a server sends. It concerns its own connection, and is not tried: MULTI would queue the rest."""
PATIENCE_S = 30.0  # of a hostile client, which waits for one answer
_OF_OTHERS = {"kvps:preflight", "secret"}  # keys of no job
_AREAS = ("mine", "others", "list", "queue")
_ANY_KEY = "return redis.call(unpack(ARGV))"
_REFUSED = re.compile("[Nn]o permission|not allowed|executing the script can't")

Keys = Mapping[str, Sequence[str]]
"""Kind of key -> keys of that kind."""


class Command(NamedTuple):
    """A command as the server describes it. `first` and `last` are the places of its keys; 0 if it has none."""

    name: str
    arity: int
    writes: bool
    first: int
    last: int

    def on(self, key: str, value: str | bytes = "x") -> list[str | bytes]:
        """Return the command with this key, and this value for all else."""
        if self.name == "xread":
            return ["XREAD", "STREAMS", key, value]
        words: list[str | bytes] = [*self.name.split("|")]
        words += [value] * (abs(self.arity) - len(words))
        if self.first:
            last = self.last if self.last > 0 else len(words) + self.last
            words[self.first : last + 1] = [key] * (last + 1 - self.first)
        return words


def commands_of(raw: Any) -> list[Command]:
    """Return all commands of a server whose use it restricts, and in place of a command with subcommands these."""
    raw.response_callbacks.pop("COMMAND", None)
    found: list[Command] = []

    def add(entries: Iterable[Any]) -> None:
        for name, arity, flags, first, last, _, _, *more in entries:
            if len(more) == 3 and more[2]:
                add(more[2])
            elif b"no_auth" not in flags:
                found.append(Command(name.decode(), arity, b"write" in flags, first or 2 * (name == b"xread"), last))

    add(raw.execute_command("COMMAND"))
    return found


def keys_of(keys: JobKeys) -> Keys:
    """Return keys of a job, of all kinds."""
    found = [*keys.all_control(["w0"], 1), keys.removed, keys.host(0), keys.never, keys.owner(0), keys.never_in(0)]
    found += [keys.weights(0, "0.x", 0), keys.pulled(0, "0.x", 0), keys.state(0, "m", "0.x", 0)]
    found += [keys.manifest(0, "0.x"), keys.reserve(0, 0), keys.gradient(0, "w0", "1-x", 1, 0)]
    found += [keys.residual(0, "w0", "1-x", 1, 0), keys.item("a.1-x:1", 1)[1] + "0"]
    kinds: dict[str, list[str]] = {}
    for key in found:
        kinds.setdefault(kind_of(key), []).append(key)
    return kinds


def kind_of(key: str) -> str:
    """Return the kind of a job's key: with / before it if it is in a shard's slot, with : behind it if there may be
    several such keys. Of another key, return the key."""
    of, found, what = key.partition("}:")
    return "/" * of.endswith("/") + re.sub(r"[.:].*", ":", what) if found else key


class Reach(NamedTuple):
    """What a user reaches: of each area the kinds of keys that it reads and changes, and which commands it may send.

    kinds      the keys of each area: "mine", "others", "list", "queue"
    reads      area -> kinds
    changes    area -> kinds
    commands   those with keys
    server     the names of those without
    """

    kinds: Mapping[str, Keys]
    reads: Mapping[str, set[str]]
    changes: Mapping[str, set[str]]
    commands: Sequence[Command]
    server: Sequence[str]

    def row(self, role: str) -> list[str]:
        """Return the role's row of a table in Markdown."""
        areas = [_told(self.kinds[area], self.reads[area], self.changes[area]) for area in _AREAS]
        server = ", ".join(f"`{name.replace('|', ' ').upper()}`" for name in sorted(self.server))
        return [f"`{role}`", *areas, server]


@contextmanager
def user_of(url: str, raw: Any, name: str, rules: Sequence[str]) -> Iterator[Any]:
    """A client of a new user with these rules, which returns replies as they are."""
    raw.execute_command("ACL", "SETUSER", name, *rules, f">{name}")
    settings: dict[str, Any] = {"protocol": 2, "retry": None, "socket_timeout": PATIENCE_S}
    with redis.Redis.from_url(url_for(url, name, name), **settings) as client:
        client.response_callbacks.clear()
        yield client
    raw.execute_command("ACL", "DELUSER", name)


def reach(raw: Any, user: Any, mine: JobKeys, other: JobKeys) -> Reach:
    """Try what `user`, a client of a role in the job of `mine`, may do. `raw` is the administrator's."""
    kinds: dict[str, Keys] = {
        "mine": keys_of(mine),
        "others": {**keys_of(other), **{key: [key] for key in _OF_OTHERS}},
        "list": {key: [key] for key in (JOBS, MEMORY)},
        "queue": {key: [key] for key in ("rq:queue:kvps", "rq:job:x", "rq:queues", "rq:x")},
    }
    tried = [command for command in commands_of(raw) if command.name not in CONNECTING]
    may = [each for each, is_let in zip(tried, _let(user, [c.on(mine.pin) for c in tried]), strict=True) if is_let]
    keyed = [command for command in may if command.first]
    sha = raw.script_load(_ANY_KEY)
    reads: dict[str, set[str]] = {area: set() for area in kinds}
    changes: dict[str, set[str]] = {area: set() for area in kinds}
    for area, found in kinds.items():
        cells = [(kind, key, command) for kind, keys in found.items() for key in keys for command in keyed]
        sent = [command.on(key) for _, key, command in cells]
        in_script = _let(user, [["EVALSHA", sha, 0, *words] for words in sent])
        for (kind, _, command), *ways in zip(cells, _let(user, sent), in_script, strict=True):
            if any(ways):
                (changes if command.writes else reads)[area].add(kind)
    return Reach(kinds, reads, changes, keyed, [command.name for command in may if not command.first])


def _let(user: Any, commands: Sequence[Sequence[Any]]) -> list[bool]:
    """Return for each command whether the rules let it through. Some administration is refused before the rules are
    looked at."""
    pipe = user.pipeline(transaction=False)
    for command in commands:
        pipe.execute_command(*command)
    return [not is_refused(reply) for reply in pipe.execute(raise_on_error=False)]


def is_refused(reply: Any) -> bool:
    """Whether a reply is the refusal of what its user may not do."""
    return isinstance(reply, redis.exceptions.ResponseError) and bool(_REFUSED.search(str(reply)))


def _told(kinds: Keys, reads: set[str], changes: set[str]) -> str:
    if changes == set(kinds) == reads:
        return "everything"
    said = [f"{verb} {_named(set(kinds), some)}" for verb, some in (("reads", reads), ("changes", changes)) if some]
    return "; ".join(said) or "nothing"


def _named(kinds: set[str], some: set[str]) -> str:
    """Return the names of some kinds, or of the others if these are fewer."""
    if some == kinds:
        return "all"
    others = kinds - some
    begin, named = ("all but ", others) if len(others) < len(some) else ("", some)
    return begin + ", ".join(f"`{kind}`" for kind in sorted(named))
