"""The Lua scripts: their headers say what they do, a repeat gets the first answer, what is refused changes nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import numpy as np
import pytest
from helpers.lua_sources import Sources

import kvps
from kvps.errors import CorruptData, LeaseLost, UsageError, WorkerEvicted
from kvps.history.events import EventLog
from kvps.job import Job
from kvps.machine import launcher
from kvps.protocol.answers import InboxFull, PlanGone, ServerRestarted
from kvps.protocol.lua_scripts import compose
from kvps.protocol.plan import Plan
from kvps.protocol.rollout_scripts import RolloutScripts
from kvps.protocol.script_header import Header
from kvps.protocol.scripts import SCRIPTS, JobScripts
from kvps.store import Store

pytestmark = pytest.mark.contract

LUA = Sources("kvps.protocol")
_UNKNOWN = {"forget": ["OTHER"], "enter": ["BAD"], "put": ["BAD"]}  # answers that a caller of kvps never gets
ME = {"host": "here", "pid": 1, "start": "", "space": "", "device": "cpu"}


@pytest.fixture
def job(store: Store) -> Job:
    return store.create_job("job", {"x": np.zeros(4, np.float32)}, workers=2, shards=2, staleness=1)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_header_holds_against_the_body(name: str) -> None:
    """Each has the keys, arguments, includes and answers of the other."""
    text = LUA.texts[name]
    assert len(text.splitlines()) <= 100
    assert text.startswith(f"-- {name}: ")
    assert "  ".join(LUA.misfits(name)) == ""
    assert SCRIPTS[name].header.keys[-1].name in ("never", "never_in"), "see kvps/protocol/script_header.py"


def test_an_included_file_names_what_it_uses_and_is_used() -> None:
    for name, text in LUA.include.items():
        assert text.startswith(f"-- {name}: ")
        assert list(LUA.misused(text)) == [], name
        assert any(name in Header.parse(other).uses for other in LUA.texts.values()), name


@pytest.mark.parametrize(
    ("old", "new", "misfit"),
    [
        ("keys.version, unpack", "keys.versions, unpack", "key versions is not in the header"),
        ("rounds:zset turns", "rounds:zset wish(shard):string turns", "key wish is only in the header"),
        (" plan_id version", " plan_id version more", "argument more is never read"),
        (" plan_id version", " plan_id digits version", "argument digits hides an included function"),
        ("history digest\n", "history digests\n", "digest is declared nowhere"),
        ("'NOPLAN'", "'GONE'", "answer GONE is not in the header"),
        ("{NOPLAN}", "{GONE}", "answer NOPLAN is not in the header"),
        ("numbers pins rollouts", "numbers pins terms rollouts", "include terms is only in the header"),
        ("numbers pins rollouts", "pins rollouts", "include numbers is not in the header"),
        ("staged[i] then", "staged[1] then", "d[1] reads by place"),
        ("keys.plan, keys.ready", "KEYS[6], keys.ready", "KEYS reads by place"),
        ("--   digest:", "--   digests:", "digests is explained, and is no name"),
    ],
)
def test_a_header_that_does_not_fit_is_found(old: str, new: str, misfit: str) -> None:
    sources = Sources("kvps.protocol")
    assert old in sources.texts["ready"]
    sources.texts["ready"] = sources.texts["ready"].replace(old, new)
    assert misfit in list(sources.misfits("ready"))


def test_a_script_that_includes_what_is_not_there_is_not_loaded() -> None:
    with pytest.raises(KeyError, match="nothing"):
        compose("x", "-- x: do.\n-- USES nothing\nreturn 1\n", LUA.include)


@pytest.mark.parametrize("name", SCRIPTS)
def test_python_knows_every_answer(name: str) -> None:
    """Each code of a script is in the methods that run it, and each code in these methods is one of the script's."""
    methods = {
        f"{owner.__name__}.{method}": inspect.getsource(function)
        for owner in (JobScripts, RolloutScripts)
        for method, function in inspect.getmembers(owner, callable)
        if not method.startswith("__")
    }
    running = {method for method, source in methods.items() if f'"{name}"' in source}
    assert running, "no method runs it"
    called = [f"self.{each.partition('.')[2]}(" for each in running]
    running |= {method for method, source in methods.items() if any(call in source for call in called)}
    of_all = {"JobScripts._answered", "JobScripts._run", "RolloutScripts._run", "RolloutScripts._numbered"}
    known = {code for method in running - of_all for code in re.findall(r'"([A-Z]{2,})"', methods[method])}
    codes = SCRIPTS[name].header.codes - {c for m in of_all for c in re.findall(r'"([A-Z]{2,})"', methods[m])}
    assert known <= SCRIPTS[name].header.codes
    assert codes - known <= {"OK", *_UNKNOWN.get(name, ())}


def test_a_repeated_join_is_one_incarnation(job: Job) -> None:
    first = job.access.scripts.join("w0", "abc", "", ME)
    assert job.access.scripts.join("w0", "abc", "", ME) == first
    with pytest.raises(kvps.WorkerAlive):
        job.access.scripts.join("w0", "other", "", ME)
    with pytest.raises(kvps.WorkerAlive):
        job.access.scripts.join("w0", "other", "1-wrong", ME)
    assert job.access.scripts.join("w0", "next", first.incarnation, ME).incarnation == "2-next"


def test_a_repeated_push_is_one_contribution(job: Job) -> None:
    me = job.access.scripts.join("w0", "abc", "", ME)
    push = ("w0", me.incarnation, 1, 0, 1, "0,0", job.state().history)
    assert job.access.scripts.ask("w0", me.incarnation, 1) is None
    first = job.access.scripts.push(*push)
    assert first == (1, 1, True)
    assert job.access.scripts.push(*push) == first
    assert job.access.scripts.ask("w0", me.incarnation, 1) == first
    assert job.access.client.call("XLEN", job.access.keys.inbox) == 1
    job.access.scripts.leave("w0", me.incarnation, False)
    assert job.access.scripts.push(*push) == first, "what was accepted stays acknowledged"
    with pytest.raises(WorkerEvicted):
        job.access.scripts.push("w0", me.incarnation, 2, 0, 1, "0,0", job.state().history)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"seq": 3}, kvps.WrongOrder),
        ({"seq": "0x1"}, kvps.WrongOrder),
        ({"base": 1}, kvps.WrongOrder),
        ({"base": "nan"}, kvps.WrongOrder),
        ({"weight": 2}, kvps.WrongOrder),
        ({"digest": '","'}, kvps.WrongOrder),
        ({"incarnation": "1-other"}, WorkerEvicted),
        ({"worker": "w9"}, WorkerEvicted),
        ({"history": "other"}, WorkerEvicted),
    ],
)
def test_push_is_fenced(job: Job, change: dict[str, object], error: type[Exception]) -> None:
    me = job.access.scripts.join("w0", "abc", "", ME)
    push: dict[str, object] = {"worker": "w0", "incarnation": me.incarnation, "seq": 1, "base": 0, "weight": 1}
    push |= {"digest": "0,0", "history": job.state().history} | change
    before = job.access.client.call("HGETALL", job.access.keys.workers)
    with pytest.raises(error):
        job.access.scripts.push(**push)  # type: ignore[arg-type]
    assert job.access.client.call("XLEN", job.access.keys.inbox) == 0
    assert job.access.client.call("HGETALL", job.access.keys.workers) == before


def test_the_inbox_is_bounded(job: Job) -> None:
    me = job.access.scripts.join("w0", "abc", "", ME)
    for seq in (1, 2):
        job.access.scripts.push("w0", me.incarnation, seq, 0, 1, "0,0", job.state().history)
    with pytest.raises(InboxFull):
        job.access.scripts.push("w0", me.incarnation, 3, 0, 1, "0,0", job.state().history)


def _planned(job: Job) -> tuple[Plan, list[str]]:
    """A job with an open plan, and the terms of its two shards."""
    for worker in ("w0", "w1"):
        me = job.access.scripts.join(worker, f"{worker}n", "", ME)
        job.access.scripts.push(worker, me.incarnation, 1, 0, 1, "0,0", job.state().history)
    plan = job.access.scripts.plan().plan
    assert plan is not None
    return plan, [job.access.scripts.acquire(shard, "holder", 10_000, f"n{shard}")[0] for shard in (0, 1)]


def test_no_plan_before_all_have_joined_once(job: Job) -> None:
    me = job.access.scripts.join("w0", "abc", "", ME)
    job.access.scripts.push("w0", me.incarnation, 1, 0, 1, "0,0", job.state().history)
    assert job.access.scripts.plan().waits_for_workers


def test_the_last_ready_flips_all_shards_once(job: Job) -> None:
    plan, terms = _planned(job)
    assert job.access.scripts.plan().plan == plan, "anyone may repeat it"
    assert not job.access.scripts.ready(0, terms[0], plan, "d0").flipped
    assert not job.access.scripts.ready(0, terms[0], plan, "d0").flipped
    assert job.state().version == 0
    assert job.access.scripts.ready(1, terms[1], plan, "d1").flipped
    after = job.state()
    assert not job.access.scripts.ready(1, terms[1], plan, "d1").flipped, "a repeat commits nothing"
    assert job.state() == after
    assert (after.version, after.clock) == (1, {"w0": 1, "w1": 1})
    assert after.names == (f"1.{terms[0]}", f"1.{terms[1]}")
    assert job.access.client.call("XLEN", job.access.keys.inbox) == 0
    assert [commit.follows(plan.head) for commit in job.log()] == [True]


def test_ready_is_fenced(job: Job) -> None:
    plan, terms = _planned(job)
    job.access.scripts.ready(1, terms[1], plan, "d1")
    with pytest.raises(CorruptData, match="twice"):
        job.access.scripts.ready(1, terms[1], plan, "other")
    with pytest.raises(LeaseLost):
        job.access.scripts.ready(0, terms[1], plan, "d0")
    for changed in ({"id": 99}, {"version": 2}, {"head": "x"}, {"history": "x"}):
        with pytest.raises(PlanGone):
            job.access.scripts.ready(0, terms[0], Plan(**(plan.__dict__ | changed)), "d0")
    # A successor of shard 1 has staged nothing yet: its predecessor's word does not count any more.
    job.access.scripts.renew(1, "holder", terms[1], 0)
    successor, *_ = job.access.scripts.acquire(1, "another", 10_000, "n9")
    assert not job.access.scripts.ready(0, terms[0], plan, "d0").flipped
    with pytest.raises(LeaseLost):
        job.access.scripts.ready(1, terms[1], plan, "d1")
    assert job.state().version == 0
    assert job.access.scripts.ready(1, successor, plan, "d1").flipped


@pytest.mark.parametrize("earlier", [False, True], ids=["now", "of an earlier version"])
def test_workers_that_divide_the_data_of_their_task_take_no_other(store: Store, earlier: bool) -> None:
    params = {"x": np.zeros(4, np.float32)}
    job = store.create_job("divided", params, workers=1, task="digits")
    assert store.client.call("HGET", job.access.keys.config, "fixed_workers") == "1"
    others = [store.create_job("script", params), store.create_job("units", params, task="digits", units=9)]
    for each in (job, *others):
        if earlier:
            store.client.call("HDEL", each.access.keys.config, "fixed_workers")
        each.access.scripts.join("w0", "a", "", ME)
    with pytest.raises(UsageError, match=r"job 'divided' has all its workers \(w0\): join as one of them"):
        job.access.scripts.join("w1", "b", "", ME)
    assert job.access.scripts.join("w0", "c", "*", ME).rank == 0
    assert [each.access.scripts.join("w1", "b", "", ME).rank for each in others] == [1, 1]


def test_a_job_is_adopted_once_and_its_dead_workers_keep_their_places(job: Job) -> None:
    scripts, before = job.access.scripts, job.config.metadata.launched_by
    mine, other = (launcher.this_process("kvps run", most) for most in (1, 2))
    joined = {worker: scripts.join(worker, "abc", "", ME).incarnation for worker in ("w0", "w1")}
    ended = {"w0": joined["w0"], "w1": "1-another"}
    assert scripts.adopt(before, mine, "kvps run", ended)
    assert scripts.adopt(before, mine, "kvps run", ended), "a repeat gets the same answer"
    assert not scripts.adopt(before, other, "kvps run", ended), "it has a launcher by now"
    members = job.state().members
    assert (members["w0"].awaited, members["w1"].active) == (True, True), "the second has joined again since"
    assert [event.facts for event in EventLog(job.access.client, job.access.keys).newest(1)] == [{"by": "kvps run"}]
    again = scripts.join("w0", "next", "", ME)
    assert not job.state().members["w0"].awaited

    job.suspend()
    scripts.leave("w0", again.incarnation, finished=False)
    scripts.leave("w1", joined["w1"], finished=True)
    assert job.state().on_leave == {"w0"}
    assert scripts.adopt(mine, other, "kvps run", {"w0": again.incarnation, "w1": joined["w1"]})
    assert {m.worker: (m.awaited, m.finished) for m in job.state().members.values()} == {
        "w0": (True, False),
        "w1": (False, True),
    }
    assert (job.access.reader.round_state().lowest, job.state().active) == (0, 0), "the others wait for it"


def test_a_lease_is_one_holders_until_it_gives_it_up(job: Job) -> None:
    term, *_ = job.access.scripts.acquire(0, "a", 10_000, "n1")
    assert job.access.scripts.acquire(0, "a", 10_000, "n1") == (term, "", 0), "a repeat gets the same term"
    assert job.access.scripts.acquire(0, "b", 10_000, "n2") == ("", "a", 0)
    assert job.access.scripts.renew(0, "a", term, 10_000)
    assert not job.access.scripts.renew(0, "b", "other", 10_000)
    job.access.client.call("DEL", job.access.keys.lease(0))
    assert job.access.scripts.renew(0, "a", term, 10_000), "it had only expired"
    assert job.access.scripts.renew(0, "a", term, 0)
    other, *_ = job.access.scripts.acquire(0, "b", 10_000, "n3")
    assert other not in ("", term)
    assert not job.access.scripts.renew(0, "a", term, 10_000)


def test_only_the_owner_deletes(job: Job) -> None:
    old, new, key = "h-1-a", "h-2-b", job.access.keys.weights(0, "x", 0)
    [run_id] = job.access.client.run_ids([key])  # on a cluster, the shard's node may be another than the control's
    job.access.client.call("SET", key, "bytes")
    job.access.scripts.own(0, old)
    job.access.scripts.own(0, new)
    job.access.scripts.own(0, new)
    with pytest.raises(LeaseLost):
        job.access.scripts.own(0, old)
    with pytest.raises(LeaseLost):
        job.access.scripts.free(0, old, run_id, [key])
    with pytest.raises(ServerRestarted):
        job.access.scripts.free(0, new, "another life", [key])
    assert job.access.client.call("EXISTS", key) == 1
    coming, after = (job.access.keys.weights(0, name, 0) for name in ("y", "z"))
    job.access.client.call("SET", coming, "newer")
    for term, life, error in ((old, run_id, LeaseLost), (new, "another life", ServerRestarted)):
        with pytest.raises(error):
            job.access.scripts.free(0, term, life, [], [(key, after)])
    job.access.scripts.free(0, new, run_id, [], [(key, coming), (after, key)])
    assert job.access.client.call("GET", coming) == "newer", "what has the new name already is newer"
    assert job.access.client.call("EXISTS", key, after) == 0
    job.access.scripts.free(0, new, run_id, [], [(coming, after)])
    assert job.access.client.call("GET", after) == "newer"
    job.access.scripts.free(0, new, run_id, [after])
    assert job.access.client.call("EXISTS", after) == 0


_ALL = {
    "string": ("GET",),
    "hash": ("HGETALL",),
    "set": ("SMEMBERS",),
    "zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    "stream": ("XRANGE", "-", "+"),
}


def _content(store: Store) -> dict[str, object]:
    """All that the server has. DUMP would not do: it gives a hash in the order in which it is kept at that moment."""
    content = {}
    for key in sorted(store.client.scan("*")):
        command, *arguments = _ALL[store.client.call("TYPE", key)]
        content[key] = store.client.call(command, key, *arguments)
    return content


@pytest.mark.parametrize("script", [name for name in SCRIPTS if SCRIPTS[name].header.reads])
def test_a_key_that_is_not_looked_at_before_is_read_before_all_writes(store: Store, job: Job, script: str) -> None:
    """For each, a call that would write, with the key of another type: the script says so, and nothing has changed."""
    plan, terms = _planned(job)
    client, keys, scripts, header = job.access.client, job.access.keys, job.access.scripts, SCRIPTS[script].header
    history, digest = job.state().history, "0,0"
    scripts.ready(0, terms[0], plan, "d0")
    calls: dict[str, Callable[[], object]] = {
        "push": lambda: scripts.push("w0", "1-w0n", 2, 0, 1, digest, history),
        "plan": scripts.plan,
        "ready": lambda: scripts.ready(1, terms[1], plan, "d1"),
    }
    if script == "plan":
        client.call("DEL", keys.plan)
    unused = {"push": {"rounds"}}.get(script, set())  # the rounds are for a worker that has missed some
    for key in [each for each in header.keys if each.name in header.reads - unused]:
        name = getattr(keys, key.name)(1) if key.of else getattr(keys, key.name)
        kept = client.call("DUMP", name)
        other = ("HSET", name, "mine", 1) if key.type != "hash" else ("SET", name, "mine")
        client.call("DEL", name)
        client.call(*other)
        before = _content(store)
        is_, want = ("string", "a hash") if key.type == "hash" else ("hash", f"a {key.type}")
        with pytest.raises(CorruptData, match=f"key {re.escape(name)} is a {is_}, not {want}"):
            calls[script]()
        assert _content(store) == before, name
        client.call("DEL", name)
        if kept:
            client.call("RESTORE", name, 0, kept)


def test_a_worker_that_has_missed_rounds_reads_them_before_it_writes(store: Store) -> None:
    job = store.create_job("quorum", {"x": np.zeros(4, np.float32)}, workers=2, quorum=1)
    scripts, client, rounds, history = (
        job.access.scripts,
        job.access.client,
        job.access.keys.rounds,
        job.state().history,
    )
    for worker in ("w0", "w1"):
        scripts.join(worker, f"{worker}n", "", ME)
    scripts.push("w0", "1-w0n", 1, 0, 1, "0", history)
    plan = scripts.plan().plan
    assert plan
    scripts.ready(0, scripts.acquire(0, "holder", 10_000, "n")[0], plan, "d")
    kept = client.call("DUMP", rounds)
    client.call("DEL", rounds)
    client.call("SET", rounds, "mine")
    before = _content(store)
    with pytest.raises(CorruptData, match="is a string, not a zset"):
        scripts.push("w1", "1-w1n", 1, 1, 1, "0", history)
    assert _content(store) == before
    client.call("DEL", rounds)
    client.call("RESTORE", rounds, 0, kept)
    scripts.push("w1", "1-w1n", 1, 1, 1, "0", history)
    assert job.state().members["w1"].round == 1


@pytest.mark.parametrize("kind", ["clock", "states"], ids=["always there", "seldom there"])
def test_a_key_of_another_type_is_named_before_anything_is_written(job: Job, kind: str) -> None:
    plan, terms = _planned(job)
    job.access.scripts.ready(0, terms[0], plan, "d0")
    key = getattr(job.access.keys, kind)
    job.access.client.call("DEL", key)
    job.access.client.call("SET", key, "mine")
    before = job.access.client.call("HGETALL", job.access.keys.version)
    with pytest.raises(CorruptData, match=f"key {re.escape(key)} is a string, not a hash"):
        job.access.scripts.ready(1, terms[1], plan, "d1")
    assert job.access.client.call("HGETALL", job.access.keys.version) == before


@pytest.mark.parametrize("kind", ["lease", "term"])
def test_also_one_of_a_list_of_keys_is_named_before_anything_is_written(job: Job, kind: str) -> None:
    plan, (term, _) = _planned(job)
    scripts, client, key = job.access.scripts, job.access.client, getattr(job.access.keys, kind)(1)
    scripts.ready(0, term, plan, "d0")
    client.call("DEL", key)
    client.call("HSET", key, "mine", "1")
    for call in (
        lambda: scripts.recover("another run of the server", "abcd1234", 0),
        lambda: scripts.rollback(term, "abcd1234", "", record="{}"),
    ):
        with pytest.raises(CorruptData, match=f"key {re.escape(key)} is a hash, not a string"):
            call()
        assert client.call("HLEN", job.access.keys.ready) == 1


def test_the_silent_are_evicted_and_what_they_pushed_still_commits(store: Store) -> None:
    params = {"x": np.zeros(1, np.float32)}
    job = store.create_job("job", params, workers=2, worker_timeout_ms=1000)
    for worker in ("w0", "w1"):
        job.access.scripts.join(worker, f"{worker}n", "", ME)
    job.access.scripts.push("w0", "1-w0n", 1, 0, 1, "0", job.state().history)
    assert job.access.scripts.evict().workers == [], "the first look only begins to watch"
    for _ in range(30):
        job.access.client.wait({job.access.keys.inbox: "$"}, 100)
        job.access.scripts.heartbeat("w1", "1-w1n")
        out = job.access.scripts.evict().workers
        if out:
            break
    assert out == ["w0"]
    [facts] = [e.facts for e in EventLog(job.access.client, job.access.keys).newest(0) if e.kind == "evict"]
    assert re.fullmatch(r"no sign of life for \d+\.\d s", facts["reason"])
    members = job.state().members
    assert (members["w0"].state, members["w1"].state) == ("draining", "active")
    with pytest.raises(WorkerEvicted):
        job.access.scripts.heartbeat("w0", "1-w0n")
    assert job.access.scripts.plan().plan is None, "w1's round is not there yet"
    job.access.scripts.leave("w1", "1-w1n", False)
    plan = job.access.scripts.plan().plan
    assert plan is not None
    assert [c.worker for c in plan.contributions] == ["w0"]


def test_who_looks_after_a_long_absence_evicts_nobody(store: Store) -> None:
    """A pause of Redis, or of the network, makes every worker look silent."""
    job = store.create_job("job", {"x": np.zeros(1, np.float32)}, worker_timeout_ms=100)
    job.access.scripts.join("w0", "abc", "", ME)
    job.access.scripts.evict()
    job.access.client.wait({job.access.keys.inbox: "$"}, 300)
    assert job.access.scripts.evict().workers == []
    assert job.state().members["w0"].state == "active"
