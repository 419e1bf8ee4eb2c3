"""The proof of experience: each item has one fate, each prompt one end, and what breaks a rule is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from helpers.experience import SETTINGS, experienced, weights
from helpers.harness import log_entries
from kvps_aggregator.verify.chain import Unproved
from kvps_aggregator.verify.fates import Experience, Fates
from kvps_cli.prove.verify import proof_of

import kvps
from kvps.job import Job
from kvps.protocol.job_state import chained
from kvps.store import Store

Entry = dict[str, str]
AGAIN, NONE = replace(SETTINGS, stale="again"), kvps.Rollouts(max_staleness=1)


def item(number: int, unit: int | None, base: int) -> str:
    return f"a.1-x:{number} {'-' if unit is None else unit} {base}"


def commit(version: int, *trained: str) -> Entry:
    """A commit of which only that is true which the proof of experience looks at."""
    plan = {"id": 1, "version": version, "head": "h", "history": "h", "divisor": 1, "progress": 0, "by": "me"}
    plan |= {"contributions": [], "rejected": [], "trained": list(trained)}
    return {"kind": "commit", "version": str(version), "head": "h", "plan": json.dumps(plan), "shards": "1-1 0"}


def stale(version: int, *items: str, then: str = "drop") -> Entry:
    return {"kind": "stale", "version": str(version), "items": ",".join(items), "then": then}


def rejected(version: int, *items: str) -> Entry:
    return {"kind": "rejected", "version": str(version), "items": ",".join(items), "reason": "x"}


def found(entries: Iterable[Entry], settings: kvps.Rollouts = SETTINGS) -> Fates:
    fates = Fates(settings)
    for entry in entries:
        fates.add(entry)
    fates.end()
    return fates


def pair(unit: int, base: int, first: int = 0) -> list[str]:
    """The items of one prompt."""
    return [item(first or 2 * unit + 1, unit, base), item((first or 2 * unit + 1) + 1, unit, base)]


SOUND: list[Entry] = [
    {"kind": "create", "version": "0"},
    commit(1, *pair(0, 0)),
    rejected(1, *pair(1, 0)),
    commit(2, *pair(2, 0)),
    stale(2, *pair(3, 0)),
    commit(3),
]


def test_a_sound_log_is_counted() -> None:
    fates = found(SOUND)
    assert fates.counts == {"trained": 4, "stale": 2, "rejected": 2}
    assert set(fates.ended) == {0, 1, 2, 3}


def test_what_is_sound_in_other_settings() -> None:
    """A prompt is handed out again; a long list is in two entries; an item was lost with its version."""
    again = [stale(2, *pair(0, 0), then="again"), commit(3, *pair(0, 2, first=20))]
    assert set(found([commit(1), commit(2), *again], AGAIN).ended) == {0}
    assert found([commit(1), rejected(1, pair(0, 0)[0]), rejected(1, pair(0, 0)[1])]).counts["rejected"] == 2
    for kind in ("recover", "restore"):
        lost = [commit(1), commit(2, *pair(0, 0)), {"kind": kind, "version": "1"}, commit(2, *pair(0, 0))]
        assert found(lost).counts["trained"] == 2
    alone = [commit(1, item(1, None, 0)), stale(2, item(2, None, 0))]
    assert found([alone[0], commit(2), alone[1]], NONE).counts == {"trained": 1, "stale": 1, "rejected": 0}


FAULTS: list[tuple[list[Entry], kvps.Rollouts, str]] = [
    (
        [*SOUND, commit(4, *pair(0, 3))],
        SETTINGS,
        "item a.1-x:1, which was trained on in version 4: it was trained on in",
    ),
    ([*SOUND, rejected(3, *pair(0, 3))], SETTINGS, "it was trained on in version 1 before"),
    ([*SOUND, commit(4, *pair(1, 3))], SETTINGS, "it was rejected after version 1 before"),
    ([*SOUND, commit(4, *pair(3, 3))], SETTINGS, "it was stale after version 2 before"),
    ([commit(1, *pair(0, 0), pair(0, 0)[0])], SETTINGS, "it was trained on in version 1 before"),
    ([*SOUND, commit(4, *pair(0, 3, 20))], SETTINGS, "its prompt was trained on in version 1 before"),
    ([*SOUND, rejected(3, *pair(1, 3, 20))], SETTINGS, "its prompt was rejected after version 1 before"),
    ([*SOUND, commit(4, *pair(3, 3, 20))], SETTINGS, "its prompt was stale after version 2 before"),
    ([commit(1, pair(0, 0)[0])], SETTINGS, "prompt 0, which was trained on in version 1: it has 1 item, not 2"),
    ([commit(1, *pair(0, 0), *pair(0, 0, 9))], SETTINGS, "it has 4 items, not 2"),
    ([commit(1), rejected(1, pair(0, 0)[0])], SETTINGS, "prompt 0, which was rejected after version 1: it has 1 item"),
    ([commit(1, *pair(5, 0))], SETTINGS, "it is of prompt 5, and the job has 5"),
    ([commit(1, item(1, None, 0))], SETTINGS, "it is of prompt None, and the job has 5"),
    ([commit(1, item(1, 0, 0))], NONE, "it is of prompt 0, and the job has 0"),
    ([commit(1, *pair(0, 1))], SETTINGS, "it was made on version 1, which did not exist yet"),
    ([commit(1), commit(2), commit(3, *pair(0, 0))], SETTINGS, "made on version 0, and none before 1 may be"),
    (
        [commit(1), stale(1, *pair(0, 0))],
        SETTINGS,
        "prompt 0, which was stale after version 1: it was made on version 0",
    ),
    ([commit(1), commit(2), stale(2, item(1, None, 1))], NONE, "item a.1-x:1, which was stale after version 2"),
    ([commit(1), commit(2), stale(2, *pair(0, 0))], replace(SETTINGS, max_staleness=None), "which is not too old"),
    ([commit(1), commit(2), stale(1, *pair(0, 0))], SETTINGS, "its entry says version 1, after commit 2"),
    ([commit(1), commit(2), stale(2, *pair(0, 0), then="again")], SETTINGS, "its prompt must end"),
    ([commit(1), commit(2), stale(2, *pair(0, 0))], AGAIN, "its prompt must be handed out again"),
]


@pytest.mark.parametrize(("entries", "settings", "words"), FAULTS)
def test_each_fault_is_named(entries: list[Entry], settings: kvps.Rollouts, words: str) -> None:
    with pytest.raises(Unproved) as caught:
        found(entries, settings)
    assert words in str(caught.value)


# -- a job ------------------------------------------------------------------------------------------------------------


@pytest.mark.contract
def test_a_job_at_work_and_when_it_is_over(store: Store) -> None:
    with experienced(store) as (policy, quick, _):
        proof = proof_of(policy.job)[1]
        assert (proof.differs, proof.experience) == ("", Experience(2, 2, 2, waiting=3, ended=3, prompts=5))
        quick.rollouts.put({"reward": 1.0}, version=3)
        taken = [each.id for each in policy.job.rollouts.fates() if each.fate == "taken"]
        policy.publish(weights(4), trained=taken)
    proof = proof_of(store.job("job"))[1]
    assert proof.differs == ""
    assert str(proof.experience) == (
        "10 items, none with two fates: 4 trained, 2 stale, 2 rejected, 2 waiting; 4 of 5 prompts ended"
    )


def _without(job: Job, kind: str) -> None:
    entries = [fields for _, fields in log_entries(job) if fields["kind"] != kind]
    job.access.client.call("DEL", job.access.keys.commits)
    for fields in entries:
        job.access.client.call("XADD", job.access.keys.commits, "*", *chain(*fields.items()))


def _untrained(job: Job) -> None:
    """Make the chain anew, of plans that are trained on nothing."""
    k, head = job.access.keys, job.state().begin.head
    entries = [dict(fields) for _, fields in log_entries(job)]
    for fields in entries:
        if fields["kind"] == "commit":
            plan = json.loads(fields["plan"]) | {"head": head}
            plan.pop("trained", None)
            fields["plan"] = json.dumps(plan)
            fields["head"] = head = chained(head, fields["plan"], tuple(fields["shards"].split(",")))
    job.access.client.call("DEL", k.commits)
    for fields in entries:
        job.access.client.call("XADD", k.commits, "*", *chain(*fields.items()))
    job.access.client.call("HSET", k.version, "head", head)


def _back_again(job: Job) -> None:
    fates: Any = job.rollouts.fates()
    job.access.client.call("HSET", job.access.keys.items, fates[0].id, "0 1 1 x 0")


@pytest.mark.contract
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda job: _without(job, "stale"), "the job has counted 2 items stale, and the log has 0"),
        (lambda job: _without(job, "rejected"), "the job has counted 2 items rejected, and the log has 0"),
        (_untrained, "the job has counted 2 items trained, and the log has 0"),
        (_back_again, "was trained on in version 1, and the job has it still"),
        (
            lambda job: job.access.client.call("HINCRBY", job.access.keys.units, "done", 1),
            "the job has counted 4 prompts that ended, and the log has 3",
        ),
    ],
)
def test_a_job_and_its_log_that_differ(store: Store, fault: Callable[[Job], object], words: str) -> None:
    with experienced(store) as (policy, *_):
        fault(policy.job)
        assert words in proof_of(policy.job)[1].differs
