"""The proof of the log: what was trained is proved in every mode, and whatever was tampered with is caught."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.digits_job import ROUNDS, WORKERS, digits_job, proved, run_workers, task_gradient, training
from helpers.harness import log_entries
from helpers.internals import fall_silent
from kvps_aggregator import Aggregator, AggregatorOptions, serve
from kvps_aggregator.verify.recording import Recorder
from kvps_cli.prove.verify import proof_of

import kvps
from kvps.arrays.digest import weights_sha256
from kvps.history.commit_log import keep
from kvps.history.log_stream import LogStream
from kvps.optim.schedules import InverseSquareRootLR, LinearLR, SequentialLR, TableLR
from kvps.protocol.job_state import chained, first_head
from kvps.protocol.plan import Contribution
from kvps.store import Store

GROUPED = kvps.AdamW(
    lr=SequentialLR([LinearLR(0.0, 0.02, over=3), InverseSquareRootLR(0.02, over=3)], milestones=[3]),
    groups=(kvps.ParameterGroup("b*", weight_decay=0.0, lr=TableLR([0.01, 0.02, 0.003], every=4)),),
)

DELAYED = kvps.DelayedNesterov(
    lr=0.05, every=3, c=0.1, groups=(kvps.ParameterGroup("b*", every=2, c=0.0, lr=TableLR([0.1, 0.02], every=2)),)
)

# -- what is proved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("staleness", "shards", "settings"),
    [
        (0, 1, {"optimizer": kvps.SGD(0.1, momentum=0.9, nesterov=True)}),
        (0, 2, {"optimizer": kvps.Adam(kvps.schedules.CosineAnnealingLR(0.01, over=10))}),
        (1, 2, {"optimizer": kvps.NAdam(0.01), "reduction": "sum"}),
        (-1, 1, {"optimizer": kvps.Adagrad(kvps.schedules.StepLR(0.1, every=4))}),
        (-1, 2, {"optimizer": DELAYED, "reduction": "sum"}),
        (1, 1, {"optimizer": GROUPED}),
    ],
)
def test_every_mode_can_be_recomputed(
    store: Store, tmp_path: Path, staleness: int, shards: int, settings: dict[str, Any]
) -> None:
    """In SSP and ASP with a contribution that is surely computed on an old version. The record says the same."""
    job = digits_job(store, staleness=staleness, shards=shards, **settings)

    def late() -> None:
        with job.join("w2") as session:
            grads = task_gradient(job, session)
            while (state := job.state()).version < 3 - 2 * (staleness > 0):
                job.access.reader.await_change(state)
            assert proved(job).replayed, "also while it goes on"
            session.push(grads)

    run_workers(job, *training(job, "w0", "w1"), late if staleness else training(job, "w2")[0], record=tmp_path)
    lags = {commit.version - c.base for commit in job.log() for c in commit.plan.contributions}
    assert lags == {1} if staleness == 0 else max(lags) > 1
    recomputed, recorded = proved(job), proved(job, tmp_path)
    assert (recomputed.by, recorded.by) == ("recomputed", "recorded")
    weights = np.concatenate([array.reshape(-1) for array in job.snapshot()[1].values()])
    assert recomputed.weights_sha256 == recorded.weights_sha256 == weights_sha256(weights)


def test_rejected_evicted_and_come_back(store: Store, tmp_path: Path) -> None:
    job = digits_job(store, shards=2)
    sessions = [job.join(f"w{i}") for i in range(WORKERS)]
    for session in sessions:
        session.push(task_gradient(job, session))
    store.client.call("SETRANGE", job.access.keys.gradient(1, "w0", sessions[0].incarnation, 1, 0), 0, "bad!")
    sessions[1].leave(finished=False)
    for silent in (sessions[0], sessions[2]):
        fall_silent(silent)
    job.access.scripts.evict()  # the first look of one who was away evicts nobody
    store.client.call("ZADD", job.access.keys.heartbeat, 0, "w0", 0, "w2")
    assert sorted(job.access.scripts.evict().workers) == ["w0", "w2"]
    run_workers(job, *training(job, "w0", "w1", "w2"), record=tmp_path)
    first = next(iter(job.log())).plan
    assert [len(first.contributions), len(first.rejected)] == [2, 1]
    assert {c.incarnation[0] for commit in job.log() for c in commit.plan.contributions} == {"1", "2"}
    assert proved(job).by == "recomputed"
    assert proved(job, tmp_path).by == "recorded"


@pytest.mark.parametrize("staleness", [0, -1])
def test_a_loop_of_ones_own_is_replayed_from_its_record(store: Store, tmp_path: Path, staleness: int) -> None:
    """With gradients that hold NaN, all of a round's too, and a first version whose every contribution was damaged."""
    params = {"W": np.ones((7, 3), np.float32), "b": np.zeros(3, np.float32)}
    settings = {"workers": 2, "shards": 2, "nonfinite": "skip", "optimizer": kvps.SGD(0.1, momentum=0.9)}
    job = store.create_job("mine", params, staleness=staleness, **settings)

    def worker(number: int) -> None:
        with job.join(f"w{number}") as session:
            for round_ in range(session.round, 12):
                rng = np.random.default_rng((number, round_))
                bad = round_ == 5 or round_ % 4 == number
                session.push({n: np.float32(np.nan) * v if bad else _noisy(v, rng) for n, v in session.pull().items()})

    sessions = [job.join(f"w{number}") for number in range(2)]
    for session in sessions:
        session.push({name: _noisy(value, np.random.default_rng(9)) for name, value in session.pull().items()})
        store.client.call("SETRANGE", job.access.keys.gradient(0, session.worker, session.incarnation, 1, 0), 0, "bad!")
        session.leave(finished=False)
    aggregator = Aggregator(job, threading.Event(), options=AggregatorOptions(record=tmp_path))
    while job.state().version == 0:
        aggregator.hold(at_once=True)
        aggregator.work()
    aggregator.release()
    run_workers(job, lambda: worker(0), lambda: worker(1), record=tmp_path)
    plans = [commit.plan for commit in job.log()]
    assert not plans[0].contributions
    assert {c.weight for plan in plans for c in plan.contributions} == {0, 1}
    assert proved(job, tmp_path).by == "recorded"
    assert proved(job).by == "", "without a record the chain alone, and that the weights are the last commit's"


def _noisy(value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (0.1 * value + rng.normal(size=value.shape)).astype(np.float32)


def test_each_stretch_of_a_log_is_proved_with_its_own_settings(store: Store, tmp_path: Path) -> None:
    """More epochs, and another number of workers, by which a schedule counts."""
    rate = kvps.schedules.StepLR(0.1, every=4)
    units = {"units": 30, "units_per_epoch": 15, "epochs": 2, "workers": 2, "staleness": -1}
    job = digits_job(store, optimizer=kvps.SGD(rate), **units)
    run_workers(job, *training(job, "w0", "w1"))
    found = job.checkpoint()
    keep(LogStream(job.access), tmp_path, job.state(), found.version)
    more = replace(found, config=replace(found.config, workers=3, epochs=4, units=60))
    again = store.restore_job(more, "again", before=found.config)
    run_workers(again, *training(again, "w0", "w1", "w2"))
    state, proof = proof_of(again, checkpoints=tmp_path)
    assert (state.units_done, proof.since, proof.differs, proof.replayed) == (60, 0, "", state.version)
    (restored,) = [fields for _, fields in log_entries(again) if fields["kind"] == "restore"]
    assert json.loads(restored["settings"]) == {"workers": ["2", "3"], "epochs": ["2", "4"], "units": ["30", "60"]}
    unsaid = store.restore_job(more, "unsaid")
    run_workers(unsaid, *training(unsaid, "w0", "w1", "w2"))
    assert "make other weights" in proof_of(unsaid, checkpoints=tmp_path)[1].differs, "the entry tells it"


def test_a_job_without_a_commit(store: Store, tmp_path: Path) -> None:
    job = digits_job(store)
    assert proved(job).weights_version == 0
    assert "initial.*.f32 is missing" in proof_of(job, tmp_path)[1].differs


# -- what is caught ------------------------------------------------------------------------------------------------

FORGED = "0123456789abcdef"


def _digest(entry: dict[str, str]) -> None:
    plan = json.loads(entry["plan"])
    plan["contributions"][1] = Contribution.from_text(plan["contributions"][1])._replace(digest=FORGED).text
    entry["plan"] = json.dumps(plan, separators=(",", ":"))


def _weights(entry: dict[str, str]) -> None:
    entry["shards"] = entry["shards"][:-4] + "0bad"


def test_what_a_replay_alone_sees_is_caught_though_the_chain_was_made_anew(store: Store) -> None:
    """`test_forged` has what the chain shows."""
    job = digits_job(store)
    run_workers(job, *training(job, "w0", "w1", "w2"))
    assert proved(job).commits == ROUNDS
    entries, key = job.access.client.call("XRANGE", job.access.keys.commits, "-", "+"), job.access.keys.commits
    for tamper, words in (
        (_weights, "commit 5: its contributions make other weights of shard 0 than those logged"),
        (_digest, "gives another gradient here. It or its data has changed"),
    ):
        log, head = [dict(fields) for _, fields in entries if fields["kind"] == "commit"], first_head(job.id)
        tamper(log[4])
        job.access.client.call("DEL", key)
        for entry in log:
            entry["plan"] = json.dumps(json.loads(entry["plan"]) | {"head": head}, separators=(",", ":"))
            entry["head"] = head = chained(head, entry["plan"], tuple(entry["shards"].split(",")))
            job.access.client.call("XADD", key, "*", *chain(*entry.items()))
        job.access.client.call("HSET", job.access.keys.version, "head", head)
        proof = proof_of(job)[1]
        assert words in proof.differs, (words, proof)
        assert (proof.commits, proof.replayed) == (ROUNDS, 4)


def test_weights_and_seed_that_were_tampered_with_are_caught(store: Store) -> None:
    job = digits_job(store, shards=2)
    run_workers(job, *training(job, "w0", "w1", "w2"))
    store.client.call("DEL", job.access.keys.made_with)
    store.client.call("HSET", job.access.keys.config, "seed", 1)
    assert proof_of(store.job("digits"))[1].differs.startswith("commit 1: contribution 1 of w0")
    store.client.call("SETRANGE", job.access.keys.weights(1, job.state().names[1], 0), 7, "\x01")
    proof = proof_of(job)[1]
    assert proof.differs == "version 15: the weights of shard 1 in Redis are not those that were committed"
    assert (proof.commits, proof.replayed) == (ROUNDS, ROUNDS)


def test_code_that_only_the_log_names_is_not_imported(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may write there, and would choose what a replay imports from its directory."""
    (tmp_path / "chosen.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    job = digits_job(store)
    forged = {"kind": "restore", "version": 0, "settings": json.dumps({"reduction": ["mean", "chosen:code"]})}
    job.access.client.call("XADD", job.access.keys.commits, "*", *chain(*forged.items()))
    run_workers(job, *training(job, "w0", "w1", "w2"))
    differs = proof_of(job)[1].differs
    assert "the log names the code 'chosen:code', and the job does not: kvps imports none of it" in differs


def test_a_damaged_record_is_caught_and_the_file_named(store: Store, tmp_path: Path) -> None:
    job = digits_job(store, shards=2)
    run_workers(job, *training(job, "w0", "w1", "w2"), record=tmp_path)
    folder = tmp_path / f"digits.{job.state().id}" / "shard1"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")], "nothing is left aside"
    fifth = next(
        c for commit in job.log() if commit.version == 5 for c in commit.plan.contributions if c.worker == "w1"
    )
    file, initial = folder / f"w1.{fifth.incarnation}.5.g", next(folder.glob("initial.*"))
    for path, at, done in [(file, "commit 5: contribution 5 of w1", 4), (initial, "version 0", 0)]:
        whole = path.read_bytes()
        for damaged in (b"\x01" + whole[1:], whole[:-4], b""):
            path.write_bytes(damaged)
            proof = proof_of(job, tmp_path)[1]
            assert proof.differs.startswith(at)
            assert f"{path} is damaged" in proof.differs
            assert (proof.commits, proof.replayed) == (ROUNDS, done)
        path.unlink()
        differs = proof_of(job, tmp_path)[1].differs
        assert differs.startswith(at.partition(":")[0])
        assert f"{path if done else folder / 'initial.*.f32'} is missing" in differs
        path.write_bytes(whole)
    assert proved(job, tmp_path).by == "recorded"


def test_what_cannot_be_kept_is_not_committed(store: Store, tmp_path: Path) -> None:
    job = store.create_job("job", {"x": np.zeros(2, np.float32)})
    folder = tmp_path / f"job.{job.state().id}" / "shard0"
    with job.join("w0") as session:
        in_the_way = folder / f"w0.{session.incarnation}.1.g"
        in_the_way.mkdir(parents=True)
        session.push(session.pull())
        with pytest.raises(kvps.KvpsError, match=rf"could not keep {in_the_way}: Is a directory"):
            serve(job, record=tmp_path)
        assert job.state().version == 0
        assert not [path for path in folder.iterdir() if path.name.startswith(".")], "nothing is left aside"
    in_the_way.rmdir()
    serve(job, record=tmp_path)
    assert proved(job, tmp_path).replayed == 1


def test_no_name_leads_a_record_out_of_its_directory(tmp_path: Path) -> None:
    inside = tmp_path / "records"
    inside.mkdir()
    for job, id in (("../job", "0" * 8), ("job", "/../../0")):
        with pytest.raises(kvps.CorruptData, match="the name of a recorded file"):
            Recorder(inside, job, id, 0)
    recorder = Recorder(inside, "job", "0" * 8, 0)
    with pytest.raises(kvps.CorruptData, match="the name of a recorded file"):
        recorder.extend(Contribution("../../../w", "1-a", 1, 1, 0, 1, "-"), np.zeros(8, np.uint8))
    assert [path.name for path in tmp_path.rglob("*")] == ["records"]
