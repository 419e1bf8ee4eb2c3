"""Versions that a reader evaluates beside the workers, the figures that it reports, and the best version."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.arrays import assert_same_bits
from helpers.harness import aggregating, await_version, check_chain, gradient, log_entries, model, plain_loop
from kvps_aggregator.checkpoints import KeptLog
from kvps_cli.serve.acl import url_for
from safetensors import safe_open
from safetensors.numpy import load_file

import kvps
from kvps.errors import NotPermitted
from kvps.evaluator import Evaluator, Orders
from kvps.history.best import best_file, best_of
from kvps.history.checkpoint_directory import listed
from kvps.history.evaluations import Evaluation, Wanted
from kvps.history.events import EventLog
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.protocol import acl
from kvps.session.session import Session
from kvps.store import Store


def reported(job: Job) -> list[int]:
    """Return the versions that are reported, in order."""
    return [
        event.facts["version"]
        for event in EventLog(job.access.client, job.access.keys).newest(0)
        if event.kind == "evaluate"
    ]


def push(job: Job, session: Session, rounds: int) -> None:
    """Make so many versions, each of one round."""
    for _ in range(rounds):
        session.push(gradient(session.pull(), 0, session.round))
    await_version(job, session.round)


def test_nobody_waits_for_an_evaluation_and_the_newest_version_wins(store: Store, transport: str) -> None:
    """Seven versions are made while the third is evaluated. The tenth is next, and at last the last one."""
    job = store.create_job("j", model(), optimizer=kvps.SGD(lr=0.05), transport=transport)
    versions = job.versions(every=3)
    with aggregating(job):
        with job.join("w0") as session:
            push(job, session, 3)
            version, weights = next(versions)
            push(job, session, 7)
            assert version == 3
            assert_same_bits(weights, plain_loop(model(), 1, 3, 0.05))
            assert next(versions)[0] == 10
            push(job, session, 1)
        assert [version for version, _ in versions] == [11], "11 is no third one, and the last"
    assert list(job.versions(every=3, after=11)) == [], "nothing is evaluated twice"


def test_a_job_that_all_have_left_for_good_has_no_more_versions(store: Store) -> None:
    job = store.create_job("j", model(), worker_timeout_ms=1_000)
    with aggregating(job):
        with job.join("w0") as session:
            push(job, session, 2)
            session.leave(finished=False)
        assert [version for version, _ in job.versions(every=10)] == [2]


def test_a_report_is_among_the_events_and_the_newest(store: Store) -> None:
    job = store.create_job("j", model())
    assert job.evaluation() is None
    with aggregating(job), job.join("w0") as session:
        push(job, session, 2)
        figures = {"loss": np.float32(0.5), "top-5": math.nan, "far": -math.inf, "n": 3}
        told = job.report(2, figures, by="me")
        assert job.report(1, {"loss": 0.25}).by.rpartition(":")[2].isdecimal()
        assert (told.version, told.figures["loss"], told.by) == (2, 0.5, "me")
        with pytest.raises(kvps.UsageError, match="job 'j' has no version 3 yet: its newest is 2"):
            job.report(3, figures)
    newest = job.evaluation()
    assert (newest.version, newest.figures) == (1, {"loss": 0.25})
    logged = [e for e in EventLog(job.access.client, job.access.keys).newest(0) if e.kind == "evaluate"]
    assert [(e.facts["version"], list(e.facts["figures"])) for e in logged] == [(2, [*figures]), (1, ["loss"])]
    assert repr(logged[0].facts["figures"]) == "{'loss': 0.5, 'top-5': nan, 'far': -inf, 'n': 3.0}"
    assert logged[0].at_ms == told.at_ms
    assert check_chain(job) == 2, "a replay has nothing to do with it"


def test_a_repeated_report_is_one_entry(store: Store) -> None:
    """A call whose reply was lost is made again."""
    job = store.create_job("j", model())
    first = job.access.scripts.report(0, "{}", "me", "abc")
    assert job.access.scripts.report(0, "{}", "me", "abc") == first
    assert reported(job) == [0]


def test_evaluations_are_bounded_and_not_in_the_log(store: Store) -> None:
    """So who only evaluates needs no right to write the log."""
    job = store.create_job("j", model())
    entry = "'*', 'at_ms', 1, 'version', 0, 'figures', '{}', 'by', i"
    fill = f"for i = 1, 10500 do redis.call('XADD', KEYS[1], {entry}) end"
    store.client.call("EVAL", fill, 1, job.access.keys.evaluations)
    job.report(0, {"loss": 0.5})
    assert 10_000 <= store.client.call("XLEN", job.access.keys.evaluations) < 10_200
    assert reported(job)[-1] == 0
    assert [fields["kind"] for _, fields in log_entries(job)] == ["create"]


def test_the_last_commit_is_found_behind_many_evaluations(store: Store) -> None:
    job = store.create_job("j", model())
    with aggregating(job):
        with job.join("w0") as session:
            push(job, session, 2)
        took = LogStream(job.access).training_seconds()
        for _ in range(9):
            job.report(2, {"loss": 0.5})
    assert LogStream(job.access).training_seconds() == took > 0


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({}, "1 to 32 names and numbers, not 0 of them"),
        ({f"f{i}": 1.0 for i in range(33)}, "1 to 32 names and numbers, not 33 of them"),
        ([("loss", 1.0)], "figures must be a dict"),
        (0.5, "figures must be a dict"),
        ({"loss": "0.5"}, "figure 'loss' must be one number, not '0.5'"),
        ({"loss": True}, "figure 'loss' must be one number, not True"),
        ({"loss": np.zeros(2)}, "figure 'loss' must be one number, not array"),
        ({"loss": None}, "figure 'loss' must be one number, not None"),
        ({"loss": 10**400}, "figure 'loss' must be one number, not 1000"),
        ({"top 5": 1.0}, "the name of a figure 'top 5' is not allowed"),
        ({"=1+1": 1.0}, "the name of a figure '=1.1' is not allowed"),
        ({5: 1.0}, "the name of a figure 5 is not allowed"),
        ({"x" * 65: 1.0}, "the name of a figure 'xx"),
    ],
)
def test_figures_that_are_none(store: Store, figures: Any, words: str) -> None:
    job = store.create_job("j", model())
    with pytest.raises(kvps.UsageError, match=words) as error:
        job.report(0, figures)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250
    assert [fields["kind"] for _, fields in log_entries(job)] == ["create"]


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_what_is_no_number_of_versions(store: Store, bad: Any) -> None:
    with pytest.raises(kvps.InvalidSetting, match="every must be a whole number from 1, not "):
        store.create_job("j", model()).versions(every=bad)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"figures": "[]"},
        {"figures": '{"a b":1}'},
        {"figures": '{"a":"x"}'},
        {"figures": '{"a":[1]}'},
        {"figures": json.dumps({f"f{i}": 1 for i in range(33)})},
        {"version": "-1"},
        {"by": "\x1b[2J"},
        {"at_ms": "9" * 16},
    ],
)
def test_an_evaluation_that_another_program_wrote_is_refused(fields: dict[str, str]) -> None:
    good = {"version": "1", "figures": '{"loss":"nan"}', "by": "me", "at_ms": "5"}
    assert str(Evaluation.stored(good)) == "version 1: loss nan"
    with pytest.raises(kvps.CorruptData):
        Evaluation.stored(good | fields if fields else {})


def test_the_best_version_is_kept_and_loads_anywhere(store: Store, tmp_path: Path) -> None:
    """Also by an evaluator that was started again in between; and no command takes the file for a checkpoint."""
    job = store.create_job("j", model(), optimizer=kvps.SGD(lr=0.05))
    losses = {1: 0.5, 2: math.nan, 3: 0.25, 4: 0.25, 5: 0.75}
    made: dict[int, dict[str, np.ndarray]] = {}
    orders = Orders(1, "loss", str(tmp_path))
    with aggregating(job), job.join("w0") as session:
        for each in ([1, 2, 3], [4, 5]):
            evaluator = Evaluator(job, orders)
            versions = evaluator.versions()
            for number in each:
                push(job, session, 1)
                version, made[number] = next(versions)
                evaluator.report(version, {"loss": losses[number], "n": number})
                with pytest.raises(kvps.WrongOrder, match="version 0 is not the one"):
                    evaluator.report(0, {"loss": 0.0})
        push(job, session, 1)
        with pytest.raises(kvps.InvalidSetting, match="that of 'loss', which the evaluation does not have: it has acc"):
            evaluator.report(next(versions)[0], {"accuracy": 1.0})
    path = best_file(tmp_path, "j", job.id)
    assert_same_bits(load_file(path), made[3])
    with safe_open(path, "numpy") as file:
        facts = file.metadata()
    assert (facts["version"], facts["best"], json.loads(facts["figures"])) == ("3", "loss:min", {"loss": 0.25, "n": 3})
    assert len(facts["digest"]) == 32
    assert set(facts["digest"]) != {"0"}
    assert list(listed(tmp_path)) == []
    (path.parent / f".{path.name}.0a1b2c3d").write_bytes(b"half")  # as a killed evaluator leaves it
    Evaluator(job, orders)
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing is left beside it"
    path.write_bytes(b"no tensors")
    with pytest.raises(kvps.UsageError, match="is no best version that kvps has kept"):
        best_of(path)


def version_in(path: Path) -> int | None:
    best = best_of(path)
    return best and best.version


def test_the_best_version_is_kept_before_it_is_reported(store: Store, tmp_path: Path) -> None:
    """A server that takes no report stands for an evaluator that is killed before its own. The next evaluator reports
    what is kept, once."""
    job = store.create_job("j", model(), optimizer=kvps.SGD(lr=0.05))
    orders = Orders(1, "loss", str(tmp_path))
    store.client.call("ACL SETUSER", "looks", "reset", ">looks", *acl.rules("reader", "j")[1:])
    try:
        with aggregating(job), job.join("w0") as session, kvps.connect(url_for(store.url, "looks", "looks")) as looks:
            evaluator = Evaluator(looks.job("j"), orders)
            push(job, session, 1)
            version, weights = next(evaluator.versions())
            with pytest.raises(NotPermitted):
                evaluator.report(version, {"loss": 0.25})
            path = best_file(tmp_path, "j", job.id)
            assert version_in(path) == 1
            assert_same_bits(load_file(path), weights)
            assert job.evaluation() is None
            push(job, session, 1)
            for _ in range(2):
                assert next(Evaluator(job, orders).versions())[0] == 2
    finally:
        store.client.call("ACL DELUSER", "looks")
    newest = job.evaluation()
    assert (newest.version, newest.figures, newest.by) == (1, {"loss": 0.25}, "evaluator")
    assert reported(job) == [1]


def test_a_restored_job_goes_on_from_the_best_version_up_to_its_checkpoint(store: Store, tmp_path: Path) -> None:
    """Here version 1. Another run's best, version 3, was made behind the checkpoint, and is not its own."""
    job = store.create_job("j", model(), optimizer=kvps.SGD(lr=0.05))
    orders = Orders(1, "loss", str(tmp_path))
    with aggregating(job), job.join("w0") as session:
        evaluator = Evaluator(job, orders)
        versions = evaluator.versions()
        for loss in (0.25, 0.5):
            push(job, session, 1)
            evaluator.report(next(versions)[0], {"loss": loss})
        checkpoint = job.checkpoint()
        best = best_file(tmp_path, "j", job.id)
        for name, expected in (("again", 1), ("later", None)):
            restored = store.restore_job(checkpoint, name)
            other = Evaluator(restored, orders)
            path = best_file(tmp_path, name, restored.id)
            assert version_in(path) == expected
            if expected:
                assert_same_bits(load_file(path), load_file(best))
                with aggregating(restored), restored.join("w0") as again:
                    push(restored, again, 1)
                    other.report(next(other.versions())[0], {"loss": 0.375})
                assert version_in(path) == 1
            push(job, session, 1)
            evaluator.report(next(versions)[0], {"loss": 0.125})
    assert not list(best.parent.glob(".*")), "nothing is left beside them"


def test_a_job_inherits_the_best_version_however_late_its_evaluator_starts(store: Store, tmp_path: Path) -> None:
    """Here behind two restores, the first of which no evaluator saw, and when the beginning of the log is in a file."""
    job = store.create_job("j", model(), optimizer=kvps.SGD(lr=0.05))
    orders = Orders(1, "loss", str(tmp_path))
    with aggregating(job), job.join("w0") as session:
        evaluator = Evaluator(job, orders)
        push(job, session, 1)
        evaluator.report(next(evaluator.versions())[0], {"loss": 0.25})
        checkpoint = job.checkpoint()
    for name in ("second", "third"):
        restored = store.restore_job(checkpoint, name)
        with aggregating(restored, log=KeptLog(1, tmp_path)), restored.join("w0") as again:
            push(restored, again, 3)
            checkpoint = restored.checkpoint()
        assert next(iter(LogStream(restored.access).page("0-0")))[1]["kind"] != "restore"
    late = Evaluator(restored, orders)
    path = best_file(tmp_path, "third", restored.id)
    assert version_in(path) == 1
    assert_same_bits(load_file(path), load_file(best_file(tmp_path, "j", job.id)))
    assert next(late.versions())[0] == 7
    assert restored.evaluation() is None, "the report of version 1 is another job's"


@pytest.mark.parametrize(("text", "more"), [("loss", False), ("loss:min", False), ("accuracy:max", True)])
def test_which_figure_says_what_is_best(text: str, more: bool) -> None:
    wanted = Wanted.parse(text)
    assert wanted.more is more
    assert wanted.better(2.0, 1.0) is more
    assert wanted.better(1.0, 2.0) is not more
    assert not wanted.better(1.0, 1.0)
    assert wanted.better(1.0, None)
    assert not wanted.better(math.nan, None)


@pytest.mark.parametrize("text", ["", ":max", "loss:best", "loss:max:min", "a b", "loss "])
def test_what_names_no_figure(text: str) -> None:
    with pytest.raises(kvps.InvalidSetting, match=r"as in loss or accuracy:max, not "):
        Wanted.parse(text)
