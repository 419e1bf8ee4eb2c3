"""`publish.lua`: a repeat gets the first answer, a refusal changes nothing, and no value of a caller keeps it busy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from redis.exceptions import ResponseError

from kvps.errors import CorruptData, JobNotFound, LeaseLost, UsageError
from kvps.job import Job
from kvps.protocol.answers import PlanGone, RunOver, ServerRestarted
from kvps.protocol.job_state import State
from kvps.protocol.plan import Plan
from kvps.protocol.scripts import SCRIPTS, Said
from kvps.store import Store

pytestmark = pytest.mark.contract

BY = "host:1:2:abc"
MODEL = {"x": np.zeros(8, np.float32)}
LONG = "a" * 1_000_000
VALUES = [LONG, "1 " * 30_000, str(2**53), str(2**53 - 1), "9" * 400, "-1", "nan", "inf", "0x10", "1e400", "x", ""]
VALUES += ['"}', "\n", "é"]


class Learner:
    """A learner that holds all shards of a job, and calls the scripts itself."""

    def __init__(self, store: Store, shards: int = 2) -> None:
        store.publisher("job", MODEL, shards=shards).close()
        self.job: Job = store.job("job")
        self.terms = [self.scripts.acquire(shard, "me", 60_000, f"n{shard}").term for shard in range(shards)]

    @property
    def scripts(self) -> Any:
        return self.job.access.scripts

    @property
    def state(self) -> State:
        return self.job.state()

    def publish(self, nonce: str = "n", loss: float | None = 0.5, by: str = BY) -> Plan | None:
        """Open the next plan, or say that it is there."""
        plan: Plan | None = self.scripts.publish(self.terms[0], self.state, by, Said(loss, nonce))
        return plan

    def commit(self) -> Plan:
        """Commit the next version."""
        plan = self.publish()
        assert plan
        for shard, term in enumerate(self.terms):
            self.scripts.ready(shard, term, plan, f"d{plan.version}")
        return plan

    def sent(self, **changed: object) -> list[Any]:
        """Return the call as it is sent, with some arguments changed."""
        values: dict[str, Any] = {"version": self.state.version + 1, "head": self.state.head, "by": BY, "loss": 0.5}
        values |= {
            "history": self.state.history,
            "nonce": "n",
            "job": self.job.access.keys.id,
            "term": self.terms[0],
            "trained": [],
        }
        return list(SCRIPTS["publish"].command(self.job.access.keys, {"shard": 0, **values, **changed}))


@pytest.fixture
def learner(store: Store) -> Learner:
    return Learner(store)


def _all(learner: Learner) -> dict[str, Any]:
    """Return all that the script may write, and the log."""
    call, keys = learner.job.access.client.call, learner.job.access.keys
    hashes = {key: call("HGETALL", key) for key in (keys.version, keys.plan, keys.ready, keys.config)}
    return {**hashes, keys.commits: call("XRANGE", keys.commits, "-", "+")}


def test_the_plan_says_who_published_and_flips_as_any_other(learner: Learner) -> None:
    plan = learner.publish()
    assert plan
    assert (plan.version, plan.contributions, plan.rejected, plan.divisor, plan.progress) == (1, (), (), 1, 0)
    assert (plan.by, plan.loss, plan.lr) == (BY, 0.5, None)
    assert not learner.scripts.ready(0, learner.terms[0], plan, "d").flipped
    assert learner.state.version == 0
    assert learner.scripts.ready(1, learner.terms[1], plan, "d").flipped
    assert learner.state.version == 1
    assert [(commit.plan.by, commit.plan.loss) for commit in learner.job.log()] == [(BY, 0.5)]
    without = learner.publish(loss=None)
    assert without
    assert without.loss is None


def test_a_repeat_gets_the_first_answer(learner: Learner) -> None:
    plan, state = learner.publish(), learner.state
    before = _all(learner)
    assert learner.publish() == plan
    assert _all(learner) == before
    learner.commit()
    before = _all(learner)
    assert learner.scripts.publish(learner.terms[0], state, BY, Said(0.5, "n")) is None, "the job has that version"
    assert learner.scripts.publish(learner.terms[0], state, BY, Said(0.5, "another")) is None
    assert _all(learner) == before


def test_another_call_replaces_the_plan_and_what_was_staged_for_it(learner: Learner) -> None:
    plan = learner.publish("n", 0.25)
    learner.scripts.ready(1, learner.terms[1], plan, "of the first")
    other = learner.publish("m", 0.5)
    assert plan
    assert other
    assert other.id > plan.id
    assert learner.job.access.client.call("EXISTS", learner.job.access.keys.ready) == 0
    for shard, term in enumerate(learner.terms):
        with pytest.raises(PlanGone):
            learner.scripts.ready(shard, term, plan, "of the first")
    assert not learner.scripts.ready(0, learner.terms[0], other, "d").flipped
    assert learner.scripts.ready(1, learner.terms[1], other, "d").flipped
    assert [commit.plan.loss for commit in learner.job.log()] == [0.5]


def test_an_aggregator_that_looks_opens_no_plan_and_sees_the_open_one(learner: Learner) -> None:
    assert learner.scripts.plan().plan is None
    plan = learner.publish()
    assert learner.scripts.plan().plan == plan


def _deposed(learner: Learner) -> None:
    learner.scripts.renew(0, "me", learner.terms[0], 0)
    learner.scripts.acquire(0, "another", 60_000, "m")


def _restarted(learner: Learner) -> None:
    learner.job.access.client.call("HSET", learner.job.access.keys.version, "run_id", "0" * 40)


def _made_anew(learner: Learner) -> None:
    learner.job.access.client.call("HSET", learner.job.access.keys.version, "id", "abcd1234")


def _trained(learner: Learner) -> None:
    learner.job.access.client.call("HDEL", learner.job.access.keys.config, "publishes")


def _removed(learner: Learner) -> None:
    learner.job.access.client.call("DEL", learner.job.access.keys.version)


def _wrong_type(learner: Learner) -> None:
    learner.job.access.client.call("DEL", learner.job.access.keys.plan)
    learner.job.access.client.call("SET", learner.job.access.keys.plan, "x")


REFUSALS: dict[str, tuple[Callable[[Learner], Any], type[Exception], str]] = {
    "TERM": (_deposed, LeaseLost, "shard 0"),
    "STOPPED": (lambda learner: learner.job.stop("enough"), RunOver, "^stopped: enough$"),
    "paused": (lambda learner: learner.job.pause(), RunOver, "^paused$"),
    "suspended": (lambda learner: learner.job.suspend(), RunOver, "^suspended$"),
    "TRAINED": (_trained, UsageError, "trained by its workers"),
    "NOJOB": (_removed, JobNotFound, "no job"),
    "ANOTHER": (_made_anew, JobNotFound, "another one has its name"),
    "RESTARTED": (_restarted, ServerRestarted, "^$"),
    "WRONGTYPE": (_wrong_type, CorruptData, "is a string, not a hash"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_changes_nothing(learner: Learner, name: str) -> None:
    """The plan that another call has opened, and what is staged for it, are there as before."""
    change, error, said = REFUSALS[name]
    learner.commit()
    state, call = learner.state, learner.job.access.client.call
    plan = learner.publish("earlier")
    learner.scripts.ready(1, learner.terms[1], plan, "d")
    change(learner)
    keys = [key for key in learner.job.access.keys.all_control([], 2) if call("TYPE", key) in ("hash", "stream")]
    read = {key: call("HGETALL", key) if call("TYPE", key) == "hash" else call("XLEN", key) for key in keys}
    with pytest.raises(error, match=said):
        learner.scripts.publish(learner.terms[0], state, BY, Said(0.5, "n"))
    assert read == {key: call("HGETALL", key) if call("TYPE", key) == "hash" else call("XLEN", key) for key in keys}


@pytest.mark.parametrize(
    ("changed", "answer"),
    [
        ({"head": "0" * 40}, "HEAD"),
        ({"version": 3}, "HEAD"),
        ({"version": 2**53 - 1}, "HEAD"),
        ({"version": 1}, "MADE"),
        ({"version": 0}, "MADE"),
        ({"history": "abcd1234-2"}, "HISTORY"),
        ({"history": ""}, "HISTORY"),
        ({"term": ""}, "TERM"),
        ({"term": "other"}, "TERM"),
        ({"job": "abcd1234"}, "ANOTHER"),
        *(({"by": by}, "BY") for by in ("", "a b", '","x":"', "a" * 301, "é", "a\n", "\x1b[2J")),
    ],
)
def test_what_does_not_fit_is_refused(learner: Learner, changed: dict[str, object], answer: str) -> None:
    learner.commit()
    learner.publish("earlier")
    before = _all(learner)
    reply = learner.job.access.client.call(*learner.sent(**changed))
    assert reply[0] == answer
    assert _all(learner) == before


def test_a_name_that_is_no_word_is_an_error_of_one_line(learner: Learner) -> None:
    with pytest.raises(UsageError, match="a learner's name") as caught:
        learner.publish(by="\x1b[2J" * 100)
    assert str(caught.value).isprintable()


def test_who_begins_before_a_new_history_looks_again(learner: Learner) -> None:
    state = learner.state
    learner.job.access.client.call("HSET", learner.job.access.keys.version, "run_id", "0" * 40)
    learner.scripts.recover(learner.job.access.server.run_id(), "abcd1234-2", 0)
    with pytest.raises(PlanGone):
        learner.scripts.publish(learner.terms[0], state, BY, Said(None, "n"))
    with pytest.raises(LeaseLost):
        learner.publish()


def test_a_job_of_workers_takes_no_version_of_a_learner(store: Store) -> None:
    job = store.create_job("job", MODEL)
    term = job.access.scripts.acquire(0, "me", 60_000, "n").term
    before = job.access.client.call("HGETALL", job.access.keys.version)
    with pytest.raises(UsageError, match="job 'job' is trained by its workers: no learner publishes it"):
        job.access.scripts.publish(term, job.state(), BY, Said(None, "n"))
    assert job.access.client.call("HGETALL", job.access.keys.version) == before


@pytest.mark.parametrize("argument", SCRIPTS["publish"].header.arguments)
def test_whatever_a_caller_sends_the_script_is_soon_done_and_what_it_opens_can_be_read(
    store: Store, raw: Any, argument: str
) -> None:
    learner = Learner(store)
    learner.commit()
    head, log = learner.state.head, raw.xlen(learner.job.access.keys.commits)
    raw.config_set("slowlog-log-slower-than", 100_000)
    raw.slowlog_reset()
    opened, refused = 0, list[str]()
    for value in VALUES:
        try:
            reply = raw.execute_command(*learner.sent(**{argument: value}))
        except ResponseError as error:  # the server says where, as for any damaged number
            refused.append(str(error))
            continue
        if reply[0] == b"OPEN":
            plan = Plan.from_json(reply[2].decode())
            assert (plan.version, plan.head, plan.contributions) == (2, head, ())
            opened += 1
        assert len(str(reply)) < 2 * len(LONG)
    assert [each for each in refused if not re.search(r"user_script:\d+: ", each)] == []
    assert raw.slowlog_len() == 0, raw.slowlog_get(1)
    assert (learner.state.version, learner.state.head) == (1, head)
    assert raw.xlen(learner.job.access.keys.commits) == log
    assert opened == {"nonce": len(VALUES)}.get(argument, opened)
    assert learner.commit().version == 2
