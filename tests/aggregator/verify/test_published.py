"""The proof of a job that a learner publishes: its chain, its weights, and the differences that are kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, gradient, log_entries, model, work
from helpers.waiting import awaited_job
from kvps_cli.prove.verify import proof_of

import kvps
from kvps.job import Job
from kvps.protocol.job_state import chained
from kvps.store import Store

pytestmark = pytest.mark.contract


def _weights(version: int, items: int = 3_000) -> dict[str, np.ndarray]:
    """Return a model of which each version changes some items."""
    flat = np.random.default_rng(0).normal(size=items).astype(np.float16)
    for each in range(version):
        flat[each % 7 :: 101] += np.float16(0.5)
    return {"w": flat, "steps": np.array(version, np.int64)}


def _published(store: Store, shards: int = 2) -> Job:
    """Publish 4 versions, then take over and publish 3 more."""
    first = store.publisher("policy", _weights(0), shards=shards)
    for version in range(1, 5):
        first.publish(_weights(version), loss=1 / version)
    second = store.publisher("policy", _weights(0), takeover=True)
    first.close()
    for version in range(5, 8):
        second.publish(_weights(version))
    second.close()
    return store.job("policy")


@pytest.mark.parametrize("shards", [1, 3])
def test_the_chain_the_weights_and_each_difference_are_proved(store: Store, shards: int) -> None:
    job = _published(store, shards)
    state, proof = proof_of(job)
    assert proof.differs == ""
    assert (proof.commits, proof.head, proof.learners, proof.by) == (7, state.head, 2, "")
    assert proof.differences == 3, "a learner keeps none of an earlier one"
    assert proof.contributions == proof.replayed == 0
    with store.publisher("policy", _weights(0)) as policy:
        policy.publish(_weights(8))
    assert proof_of(job)[1].differs == ""
    assert proof_of(job)[1].learners == 3


def test_a_job_without_a_version_and_one_with_its_first(store: Store) -> None:
    with store.publisher("policy", _weights(0)) as policy:
        _, proof = proof_of(policy.job)
        assert (proof.differs, proof.commits, proof.learners, proof.differences) == ("", 0, 0, 0)
        policy.publish(_weights(1))
        _, proof = proof_of(policy.job)
        assert (proof.differs, proof.commits, proof.learners, proof.differences) == ("", 1, 1, 1)


def test_it_is_proved_while_its_learner_publishes(store: Store) -> None:
    """Versions and differences that the learner deletes meanwhile are no fault."""
    stop = threading.Event()

    def publish() -> None:
        with store.publisher("policy", _weights(0), shards=2) as policy:
            while not stop.is_set():
                policy.publish(_weights(policy.version + 1))

    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(publish)
        try:
            job, most = awaited_job(store, "policy", 3), 0
            for _ in range(20):
                state, proof = proof_of(job)
                assert (proof.differs, proof.commits) == ("", state.version)
                most = max(most, proof.differences)
        finally:
            stop.set()
        publishing.result()
    assert most > 1
    assert proof_of(job)[1].differs == ""


def test_a_record_is_of_contributions(store: Store, tmp_path: Path) -> None:
    with pytest.raises(kvps.InvalidSetting, match="--record: a learner publishes job 'policy'"):
        proof_of(_published(store), tmp_path)


# -- what is caught ------------------------------------------------------------------------------------------------


def _rewritten(job: Job, tamper: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the plans of a log, and make the chain anew. The job's head is that of the new one."""
    keys, call = job.access.keys, job.access.client.call
    entries, head = [dict(fields) for _, fields in log_entries(job)], job.state().begin.head
    commits = [fields for fields in entries if fields["kind"] == "commit"]
    plans = [json.loads(fields["plan"]) for fields in commits]
    tamper(plans)
    for fields, plan in zip(commits, plans, strict=True):
        fields["plan"] = json.dumps(plan | {"head": head}, separators=(",", ":"))
        fields["head"] = head = chained(head, fields["plan"], tuple(fields["shards"].split(",")))
    call("DEL", keys.commits)
    for fields in entries:
        call("XADD", keys.commits, "*", *chain(*fields.items()))
    call("HSET", keys.version, "head", head)


_CONTRIBUTION = "w0 1-a 1 1 4 1 - 0123456789abcdef,0123456789abcdef"
FORGERIES: list[tuple[Callable[[list[dict[str, Any]]], object], str]] = [
    (lambda plans: None, ""),
    (lambda plans: plans[4]["contributions"].append(_CONTRIBUTION), "commit 5: it holds contributions, and a learner"),
    (lambda plans: plans[4]["rejected"].append(_CONTRIBUTION), "commit 5: it holds contributions, and a learner"),
    (lambda plans: plans[4].pop("by"), "commit 5: it does not say who published it"),
    (lambda plans: plans[4].update(divisor=2), "commit 5: its divisor is 2"),
    (lambda plans: plans[4].update(progress=1), "commit 5: its progress is 1"),
    (lambda plans: plans[4].update(lr=0.1), "commit 5: its learning rate is 0.1, and the job has none"),
    (lambda plans: plans[4].update(version=6), "commit 5: its plan is for version 6"),
    (lambda plans: plans[4].update(loss=float("nan")), "commit 5 cannot be read from its log entry"),
    (lambda plans: plans[6].update(by=plans[0]["by"]), "had replaced before"),
]


@pytest.mark.parametrize(("tamper", "words"), FORGERIES)
def test_each_forged_plan_is_named_though_the_chain_was_made_anew(
    store: Store, tamper: Callable[[list[dict[str, Any]]], object], words: str
) -> None:
    job = _published(store)
    _rewritten(job, tamper)
    differs = proof_of(job)[1].differs
    assert words in differs if words else differs == ""


def test_an_entry_that_was_changed_breaks_the_chain(store: Store) -> None:
    job = _published(store)
    entries, keys = list(log_entries(job)), job.access.keys
    store.client.call("DEL", keys.commits)
    for _, fields in entries:
        changed = fields | {"plan": fields["plan"].replace('"loss":0.5', '"loss":0.1')} if "plan" in fields else fields
        store.client.call("XADD", keys.commits, "*", *chain(*changed.items()))
    assert "commit 2: the chain is broken" in proof_of(job)[1].differs


def test_who_makes_the_versions_does_not_change(store: Store) -> None:
    """A restore in the log that says so would have its plans checked by the other rules."""
    for publishes, words in ((True, "workers, or else a learner"), (False, "commit 1: it says that a learner")):
        job = _published(store)
        if publishes:
            entries, key = list(log_entries(job)), job.access.keys.commits
            store.client.call("DEL", key)
            says = {"kind": "restore", "version": "0", "settings": json.dumps({"publishes": ["1", "0"]})}
            for fields in (entries[0][1], says, *(fields for _, fields in entries[1:])):
                store.client.call("XADD", key, "*", *chain(*fields.items()))
        else:
            for key in (job.access.keys.config, job.access.keys.made_with):
                store.client.call("HSET", key, "publishes", 0)
            job = store.job("policy")
        assert words in proof_of(job)[1].differs
        store.remove_job("policy")


def test_a_job_of_workers_has_no_version_of_a_learner(store: Store) -> None:
    job = store.create_job("trained", model(), workers=2)
    with aggregating(job):
        work(job, 3, lambda session, params, round_: gradient(params, session.rank, round_), 2)
        job.await_finished()
    for says in ({"by": "host:1:2:3"}, {"loss": 0.5}):
        _rewritten(job, lambda plans, says=says: plans[1].update(says))
        assert "commit 2: it says that a learner published it" in proof_of(job)[1].differs
        _rewritten(job, lambda plans, says=says: [plans[1].pop(name) for name in says])
        assert proof_of(job)[1].differs == ""


def test_weights_that_were_changed_are_found(store: Store) -> None:
    """Those of the newest version, and those of an earlier one that is still there."""
    for version in (7, 5):
        job = _published(store)
        names = {6: job.access.reader.round_state().before[1], 7: job.state().names[1]}
        name = names[7].replace("7.", f"{version}.", 1)
        assert store.client.call("SETRANGE", job.access.keys.weights(1, name, 0), 9, "changed")
        words = f"version {version}: the weights of shard 1 in Redis are not those that were committed"
        assert proof_of(job)[1].differs == words
        store.remove_job("policy")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("changed", "makes other weights than those that were committed"),
        ("of another version", "makes other weights than those that were committed"),
        ("cut", "the difference to version 6 of shard 0: "),
        ("gone", ""),
    ],
)
def test_a_difference_that_was_changed_is_found(store: Store, fault: str, words: str) -> None:
    job = _published(store)
    keys, call = job.access.keys, store.client.call
    last = job.state().names[0]
    name, before = (last.replace("7.", f"{version}.", 1) for version in (6, 5))
    key = keys.pulled(0, name, 0)
    size = call("STRLEN", key)
    if fault == "changed":
        call("SETRANGE", key, size - 2, b"\x7f")
    elif fault == "of another version":
        text = json.loads(call("GET", keys.manifest(0, last)))
        call("COPY", keys.pulled(0, before, 0), key, "REPLACE")
        text["differences"][1] = call("STRLEN", key)
        call("SET", keys.manifest(0, last), json.dumps(text))
    elif fault == "cut":
        text = json.loads(call("GET", keys.manifest(0, last)))
        call("SETRANGE", key, size, "more")
        text["differences"][1] += 4
        call("SET", keys.manifest(0, last), json.dumps(text))
    else:
        call("UNLINK", key)
    proof = proof_of(job)[1]
    assert words in proof.differs
    if not words:
        assert (proof.differs, proof.differences) == ("", 2), "the others are followed all the same"


def test_a_manifest_that_says_too_much_is_refused(store: Store) -> None:
    job = _published(store)
    key = job.access.keys.manifest(0, job.state().names[0])
    for said in ([1 << 40], [1] * 257, "many", [-1]):
        text = json.loads(store.client.call("GET", key)) | {"differences": said}
        store.client.call("SET", key, json.dumps(text))
        assert "differen" in proof_of(job)[1].differs


def test_an_entry_that_names_too_few_shards_breaks_the_chain(store: Store) -> None:
    job = _published(store)
    keys, call = job.access.keys, store.client.call
    id, fields = call("XREVRANGE", keys.commits, "+", "-", "COUNT", 1)[0]
    call("XDEL", keys.commits, id)
    call("XADD", keys.commits, f"{id.partition('-')[0]}-999", *chain.from_iterable((fields | {"shards": "x"}).items()))
    assert "commit 7: the chain is broken" in proof_of(job)[1].differs
