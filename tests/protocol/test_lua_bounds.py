"""What a script does with values that a worker may write: its time does not explode, whatever stands there."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from helpers.harness import abandoned, aggregating, await_version, gradient, log_entries, model
from helpers.lua_sources import Sources, bare
from helpers.units import ZERO

from kvps.errors import ServerError
from kvps.parsing import LARGEST_RANK, MOST_IDS, MOST_PIN
from kvps.store import Store

LUA = Sources("kvps.protocol")
FILES = {**LUA.texts, **{f"include/{name}": text for name, text in LUA.include.items()}}
_PATTERN = re.compile(r":(?:g?match|find|gsub)\('((?:[^'\\]|\\.)*)'(?!, \d+, true)")
_CLASSES = {
    "d": string.digits,
    "s": string.whitespace,
    "a": string.ascii_letters,
    "l": string.ascii_lowercase,
    "u": string.ascii_uppercase,
    "w": string.ascii_letters + string.digits,
    "x": string.hexdigits,
}
_ALL = frozenset(map(chr, range(256)))


# -- patterns and loops, as they are written ----------------------------------------------------------------------


class Item(NamedTuple):
    """One item of a Lua pattern: the characters that it takes, and how often: "" once, or + * - ?"""

    takes: frozenset[str]
    often: str

    @property
    def many(self) -> bool:
        return self.often in ("+", "*", "-")


def _class(text: str) -> frozenset[str]:
    """Return what %x stands for."""
    found = frozenset(_CLASSES[text.lower()]) if text.lower() in _CLASSES else frozenset(text)
    return _ALL - found if text.isupper() and text.lower() in _CLASSES else found


def _items(pattern: str) -> Iterator[Item]:
    """Read a pattern without its anchors; captures are left out."""
    for one in re.finditer(r"(?:%(.)|\[(\^?)((?:%.|[^\]])+)\]|([^()]))([+*?-]?)|[()]", pattern):
        escaped, inverse, of_set, plain, often = one.groups()
        if escaped is not None:
            takes = _class(escaped)
        elif of_set is not None:
            takes = frozenset[str]()
            for part in re.finditer(r"%(.)|(.)-(.)|(.)", of_set):
                if part[1]:
                    takes |= _class(part[1])
                elif part[2]:
                    takes |= frozenset(map(chr, range(ord(part[2]), ord(part[3]) + 1)))
                else:
                    takes |= {part[4]}
            takes = _ALL - takes if inverse else takes
        elif plain is not None:
            takes = _ALL if plain == "." else frozenset(plain)
        else:
            continue
        yield Item(takes, often or "")


def is_linear(pattern: str) -> bool:
    """Return whether the time of a pattern grows with its text, and not with the square of it.

    Lua tries each place of the text in turn, and at each place each length of what is repeated. So a pattern begins at
    one place only, or with a character that no repeated item takes; and behind each repeated item but the last comes a
    character that the item does not take.
    """
    anchored, ends = pattern.startswith("^"), pattern.endswith("$")
    items = list(_items(pattern.removeprefix("^").removesuffix("$")))
    many = [i for i, item in enumerate(items) if item.many]
    if not many:
        return True
    first = items[0]
    alone = len(items) == 1 and not ends
    begins = not first.often and not any(first.takes & items[i].takes for i in many)
    if not (anchored or alone or begins):
        return False
    return all(not items[i + 1].often and not items[i].takes & items[i + 1].takes for i in many[:-1])


@pytest.mark.parametrize(
    ("pattern", "linear"),
    [
        ("^(%S+) (%d+)$", True),
        ("%S+", True),
        (",%d+%-%d+", True),
        ("%-(%w+)$", True),
        ("^ ?(%S+) (%a+)$", True),
        ("^%S+ (.*)$", True),
        ("^[%w_.=-]+$", True),
        ("(%w+)$", False),
        ("([^%s,]+) (%a+)", False),
        ("^(%d+)[^:]*:(%d+)", False),
        ("^.*(%d+)$", False),
    ],
)
def test_which_patterns_are_linear(pattern: str, linear: bool) -> None:
    assert is_linear(pattern) is linear


def test_no_pattern_of_a_script_takes_the_square_of_its_text() -> None:
    patterns = [(name, found) for name, text in FILES.items() for found in _PATTERN.findall(text)]
    assert len(patterns) > 30
    assert [(name, pattern) for name, pattern in patterns if not is_linear(pattern)] == []


def test_no_script_counts_up_to_what_its_caller_sends() -> None:
    """A reader stopped the server with the number of shards that it gave `pin`."""
    ends = [(name, end) for name, text in FILES.items() for end in re.findall(r"\bfor \w+ = [^,]+, (.+?) do\b", text)]
    assert len(ends) > 10
    bounded = re.compile(r"#[\w.]+(, \d+)?|math\.min\(.*\b\d{4,5}\b.*\)( - 1)?|bounded\(.*\) - 1|earlier")
    assert [(name, end) for name, end in ends if not bounded.fullmatch(end)] == []


def test_no_script_loops_until_something_is_so() -> None:
    """But `rollback`, which deletes the entries that it has seen."""
    loops = {name for name, text in FILES.items() if re.search(r"\b(while|repeat)\b", bare(text))}
    assert loops == {"rollback"}


# -- values that a worker wrote -----------------------------------------------------------------------------------


def _calls(raw: Any, *commands: str) -> int:
    """Return how often the server has run these commands since the last `config_resetstat`."""
    stats = raw.info("commandstats")
    return sum(stats[f"cmdstat_{name}"]["calls"] for name in commands if f"cmdstat_{name}" in stats)


@pytest.mark.parametrize("free_rank", [str(2**53), str(2**53 - 1), "1e300", "inf", "x", str(LARGEST_RANK)])
def test_a_rank_that_no_number_reaches_stops_only_its_job(store: Store, raw: Any, free_rank: str) -> None:
    mine, other = (store.create_job(name, model(), workers=2) for name in ("mine", "other"))
    mine.join("w0").leave()
    keys = mine.access.keys
    raw.hset(keys.version, "free_rank", free_rank)
    raw.hset(keys.ranks, free_rank, "w0")
    before = raw.hgetall(keys.workers)
    with pytest.raises(ServerError, match=r"join\.lua:\d+: ranks of the job"):
        mine.join("x")
    assert raw.hgetall(keys.workers) == before, "nothing was written"
    other.join("w0").leave()


def test_many_ranks_are_looked_at_so_often_and_not_more(store: Store, raw: Any) -> None:
    job = store.create_job("job", model(), workers=2)
    job.join("w0").leave()
    raw.hset(job.access.keys.ranks, mapping={str(rank): "w0" for rank in range(MOST_IDS + 10)})
    raw.config_resetstat()
    with pytest.raises(ServerError, match="no rank is free"):
        job.join("x")
    assert MOST_IDS <= _calls(raw, "hexists") <= MOST_IDS + 10


@pytest.mark.parametrize("free_id", [str(2**53), "1e300", "x", "5"])
def test_an_id_that_no_number_reaches_is_looked_for_among_all_workers(store: Store, raw: Any, free_id: str) -> None:
    job = store.create_job("job", model(), workers=2)
    raw.hset(job.access.keys.version, "free_id", free_id)
    raw.hset(job.access.keys.workers, f"w{free_id}", "{}")
    assert job.access.scripts.reserve() == ""


def test_more_workers_than_a_job_may_have_are_not_counted_up_to(store: Store, raw: Any) -> None:
    job = store.create_job("job", model(), workers=2)
    raw.hset(job.access.keys.workers, mapping={f"w{number}": "{}" for number in range(2 * MOST_IDS)})
    raw.hset(job.access.keys.config, "workers", str(10 * MOST_IDS))
    raw.config_resetstat()
    assert job.access.scripts.reserve() == ""
    assert _calls(raw, "hexists") <= MOST_IDS + 10


def _microseconds_of_leave(store: Store, raw: Any, length: int) -> int:
    """Return how long the server works on a `leave` where the worker has put so long a text into its unit."""
    job = store.create_job(f"job-{length}", ZERO, workers=2, units=8)
    session = job.join("w0")
    unit = session.next_unit()
    raw.hset(job.access.keys.units, str(unit), "a" * length)
    raw.config_resetstat()
    session.leave()
    return int(raw.info("commandstats")["cmdstat_evalsha"]["usec"])


def test_the_time_of_leaving_grows_with_the_text_of_a_unit(store: Store, raw: Any) -> None:
    """A quadratic time would be 2,500 times as long, and this test take a minute."""
    short, long = (_microseconds_of_leave(store, raw, length) for length in (2_000, 100_000))
    assert long < 200 * max(short, 5_000)


def test_a_long_pin_is_not_sent_with_every_answer(store: Store, raw: Any) -> None:
    job = store.create_job("job", model(), workers=1)
    raw.set(job.access.keys.pin, "x" * 20_000_000, px=600_000)
    with aggregating(job), job.join("w0") as session:
        session.push(gradient(session.pull(), 0, 0))
        await_version(job, 1)
        before = raw.info("stats")["total_net_output_bytes"]
        assert len(job.access.scripts.plan().pin) <= MOST_PIN + 1
        assert raw.info("stats")["total_net_output_bytes"] - before < 2_000_000
    assert '"version":1' in job.access.scripts.pin(1), "a reader puts another in its place"


def _microseconds_of_commit(store: Store, raw: Any, text: str) -> int:
    """Return how long the server works on a commit where the worker has put this in place of its states."""
    job = store.create_job(f"job-{len(text)}", model(), workers=1, staleness=-1)
    with job.join("w0") as session:
        params = session.pull()
        session.state["n"] = 1
        session.push(gradient(params, 0, 0))
        raw.hset(job.access.keys.states, mapping={"w0": text, "before:w0": text})
        raw.config_resetstat()
        with aggregating(job):
            await_version(job, 1)
        return int(raw.info("commandstats")["cmdstat_evalsha"]["usec"])


@pytest.mark.parametrize("piece", ["1", "1 ", ":", "1:"])
def test_the_time_of_a_commit_grows_with_what_a_worker_put_for_its_state(store: Store, raw: Any, piece: str) -> None:
    """In the square it took 10 s, 1,000 times as long as all the rest."""
    short, long = (_microseconds_of_commit(store, raw, piece * length) for length in (30, 30_000))
    assert long < 200 * max(short, 5_000)


# -- streams that take no entry -----------------------------------------------------------------------------------

_HIGHEST = "18446744073709551615-18446744073709551615"


def test_a_version_is_not_made_without_its_entry_in_the_log(store: Store, raw: Any) -> None:
    job = store.create_job("job", model(), workers=1)
    keys = job.access.keys
    with job.join("w0") as session, abandoned(job) as aggregator:
        session.push(gradient(session.pull(), 0, 0))
        raw.xadd(keys.commits, {"kind": "x"}, _HIGHEST)
        before = {key: raw.hgetall(key) for key in (keys.version, keys.clock, keys.workers)}
        for _ in range(2):
            with pytest.raises(ServerError, match="exhausted the last possible ID"):
                aggregator.work()
        after = {key: raw.hgetall(key) for key in before}
        assert after[keys.version].pop(b"plan_id") == b"1"
        assert before[keys.version].pop(b"plan_id") == b"0"
        assert after == before
        raw.delete(keys.commits)
        aggregator.work()
    assert (job.state().version, job.state().clock) == (1, {"w0": 1})


def test_a_damaged_clock_leaves_no_entry_in_the_log(store: Store, raw: Any) -> None:
    job = store.create_job("job", model(), workers=1)
    keys = job.access.keys
    with job.join("w0") as session, abandoned(job) as aggregator:
        session.push(gradient(session.pull(), 0, 0))
        before = raw.xlen(keys.commits)
        raw.hset(keys.clock, "w0", "x")
        for _ in range(3):
            with pytest.raises(ServerError, match=r"rounds\.lua:\d+"):
                aggregator.work()
        assert raw.xlen(keys.commits) == before
        raw.hset(keys.clock, "w0", "0")
        aggregator.work()
    assert [int(f["version"]) for _, f in log_entries(job) if f["kind"] == "commit"] == [1]


def test_a_worker_that_nobody_can_wake_looks_again(store: Store, raw: Any) -> None:
    job = store.create_job("job", model(), workers=1)
    raw.xadd(job.access.keys.turns, {"lowest": "0"}, _HIGHEST)
    with aggregating(job), job.join("w0") as session:
        for _ in range(2):
            session.push(gradient(session.pull(), 0, 0))
        await_version(job, 2)


# -- collections that a worker filled -----------------------------------------------------------------------------


FULL = 100_000


def _fill(raw: Any, key: str, kind: str) -> None:
    """Put many members into a key, as a worker may."""
    for first in range(0, FULL, 5_000):
        members = [f"x{number}" for number in range(first, first + 5_000)]
        if kind == "hash":
            raw.hset(key, mapping=dict.fromkeys(members, '{"state":"active"}'))
        else:
            raw.zadd(key, dict.fromkeys(members, 0))


@pytest.mark.slow
def test_more_ids_than_may_join_are_not_looked_at(store: Store, raw: Any) -> None:
    job = store.create_job("job", ZERO, workers=2)
    _fill(raw, job.access.keys.workers, "hash")
    raw.config_resetstat()
    for refused in (lambda: job.join("another"), lambda: job.access.scripts.recover("another", "history", 0)):
        with pytest.raises(ServerError, match="workers of the job: too many have ever joined"):
            refused()
    assert _calls(raw, "hset", "hgetall") == 0


@pytest.mark.slow
def test_as_many_silent_workers_as_may_join_are_evicted_at_once_and_not_more(store: Store, raw: Any) -> None:
    job = store.create_job("job", ZERO, workers=2, worker_timeout_ms=60_000)
    _fill(raw, job.access.keys.heartbeat, "zset")
    for command in ("zadd", "zrem"):  # the first look is after a long time, and gives all of them a new start
        raw.config_resetstat()
        job.access.scripts.evict("", "")
        assert MOST_IDS <= _calls(raw, command) <= MOST_IDS + 10
