"""Mutants: kvps with one check taken out. The harness must catch each of them, or it proves nothing.

A mutant is applied in a child alone. Every edit must really change the text, so that a rewritten script does not turn
a control into a test of nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kvps_aggregator.shard.fetch import BadContribution, ContributionFetch
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvps.connection import client
from kvps.connection.replicas import Copies
from kvps.protocol import scripts
from kvps.protocol.lua_scripts import compose, read_sources
from kvps.protocol.scripts import JobScripts
from kvps.transport import access
from kvps.transport.shared_memory import WritableSegment

_LUA = resources.files("kvps.protocol") / "lua"
_TEXTS, _INCLUDE = read_sources(_LUA), read_sources(_LUA / "include")


def _write(name: str, text: str) -> None:
    """Replace the text of a script, or add one."""
    _TEXTS[name] = text
    scripts.SCRIPTS[name] = compose(name, text, _INCLUDE)


@dataclass(frozen=True)
class Mutant:
    """One mutant. `edits` are (script, old text, new text); `patch` changes Python."""

    says: str
    family: str
    edits: tuple[tuple[str, str, str], ...] = ()
    patch: Callable[[], None] | None = None

    def apply(self) -> None:
        """Apply the mutant to this process."""
        for name, old, new in self.edits:
            assert _TEXTS[name].count(old) == 1, f"{name}.lua must hold exactly once: {old}"
            _write(name, _TEXTS[name].replace(old, new))
        if self.patch:
            self.patch()


def _no_digest() -> None:
    """Make holders apply the bytes that they read, whatever the digest."""
    real = ContributionFetch.check

    def check(self: ContributionFetch, *arguments: Any) -> None:
        with suppress(BadContribution):
            real(self, *arguments)

    ContributionFetch.check = check  # type: ignore[method-assign]


def _split_commit() -> None:
    """Split the commit in two calls: clocks, inbox, plan; then version, head, names, log. A kill may fall between."""
    text = _TEXTS["ready"]
    logged, rest = text.index("local new_head = "), text.index("  local changes = ")
    begins, ends = (text.index(words) for words in ("local function flip()\n", "end\nlocal flipped, why"))
    answer = text[text.index("return { 'FLIPPED'") : text.index(" end\nredis.call('XDEL'")]
    reads = text[: text.index("local mine = ")]
    for old, new in (
        (" history digest\n", " history digest text parts up_to\n"),
        (
            "redis.call('HMGET', keys.plan,\n  'id', 'version', 'head', 'through', 'ids', 'term', 'lots')",
            "{ plan_id, version, head }",
        ),
    ):
        assert reads.count(old) == 1, f"ready.lua must hold exactly once: {old}"
        reads = reads.replace(old, new)
    first = text[:logged] + text[begins:rest].removeprefix("local function flip()\n")
    _write("ready", f"{first}return {{ 'HALF', text, parts, digits(furthest_now) }}\n")
    _write(
        "second",
        f"{reads}local plan, lowest, given_back, furthest_now = cjson.decode(text), '', {{}}, tonumber(up_to)\n"
        "local counted = whole(contributions or '0')\n"
        "local closes, bound, rounds, max_pending = read_rule('max_pending')\n"
        "local numbers, fields, staged = {}, {}, {}\n"
        "for part in parts:gmatch('[^,]+') do\n"
        "  local i = #staged + 1\n"
        "  numbers[i], fields[i], staged[i] = digits(i - 1), 'shard:' .. digits(i - 1), part\n"
        "end\n"
        f"local names = redis.call('HMGET', keys.version, unpack(fields))\n"
        f"{text[logged:begins]}{text[rest:ends]}{answer}\n",
    )
    real = scripts.evaluate

    def evaluate(call: Any, known: Any, command: Any, load: Any = None) -> list[Any]:
        reply = real(call, known, command, load)
        if reply[0] != "HALF":
            return reply
        return real(call, known, (command[0], known["second"].sha, *command[2:], *reply[1:]), load)

    scripts.evaluate = evaluate  # type: ignore[attr-defined]


def _blind_retries() -> None:
    """Make the client repeat what it sent, as redis-py does by default, without asking first what was accepted."""
    JobScripts.ask = lambda self, worker, incarnation, seq: None  # type: ignore[method-assign]
    real = client.connection_settings
    client.connection_settings = lambda url: real(url) | {"retry": Retry(NoBackoff(), 3)}  # type: ignore[assignment]


def _no_lock() -> None:
    """Let segments be reused while they are read."""

    def renamed(self: WritableSegment, name: str) -> bool:
        with suppress(FileNotFoundError):
            os.rename(os.path.join(self._folder, self.name), os.path.join(self._folder, name))
            self.name = name
            return True
        return False

    WritableSegment.renamed = renamed  # type: ignore[method-assign]


def _one_replica() -> None:
    """Take what one replica has for safe, whichever may be promoted."""
    access.all_of = lambda replicas: Copies(1)  # type: ignore[attr-defined]


_REPEAT = ("push", "if seq and seq == entry.accepted and seq > 0 then", "if false then")
_SEQUENCE = ("push", "if seq ~= entry.accepted + 1 then return { 'SEQUENCE', entry.accepted } end", "")

MUTANTS = {
    "term": Mutant(
        "a commit under a term that a newer one has replaced",
        "sleepers",
        (("ready", "if present_term ~= term then return { 'TERM', present_term } end", ""),),
    ),
    "head": Mutant(
        "a head that leaves out the head before it",
        "damage",
        (("ready", "redis.sha1hex(head .. ", "redis.sha1hex("),),
    ),
    "dedupe": Mutant("a repeated push that counts again", "replies", (_REPEAT, _SEQUENCE)),
    "digest": Mutant("contributions applied whatever their digest", "damage", patch=_no_digest),
    "incarnation": Mutant(
        "a push by an incarnation that was replaced",
        "impostors",
        (
            (
                "push",
                "if not entry or entry.incarnation ~= incarnation then",
                "if not entry then",
            ),
        ),
    ),
    "unit": Mutant(
        "a committed unit is handed out again, once",
        "kills",
        (
            (
                "ready",
                "if #done > 0 then",
                "if #done > 0 and tonumber(redis.call('HGET', keys.units, 'done') or '0') >= 5 "
                "and redis.call('HSETNX', keys.units, 'again', done[1]) == 1 then\n"
                "  free_unit(done[1])\n"
                "  redis.call('HINCRBY', keys.units, 'done', #done - 1)\n"
                "elseif #done > 0 then",
            ),
        ),
    ),
    "inbox": Mutant(
        "the contributions of a dead worker are dropped",
        "kills",
        (
            (
                "join",
                "local freed = entry and drop_unit(worker, entry)",
                "local freed = redis.call('DEL', (keys.commits:gsub('commits$', 'inbox'))) > 1",
            ),
        ),
    ),
    "split": Mutant("a commit in two calls", "kills", patch=_split_commit),
    "lock": Mutant("memory that is reused while it is read", "memory", patch=_no_lock),
    "replicas": Mutant("an acknowledgement that one of two replicas has confirmed", "replicas", patch=_one_replica),
    "retries": Mutant("blind retries of a push, each of which counts", "replies", (_REPEAT, _SEQUENCE), _blind_retries),
}
