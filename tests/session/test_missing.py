"""Gradients that are left out of a push, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.digits_job import proved, run_workers
from helpers.harness import aggregating, await_version

import kvps
from kvps.history.events import Event, EventLog
from kvps.optim import SGD, Adam, AdamW, ParameterGroup
from kvps.store import Store

PARAMS = {name: np.ones(3, np.float32) for name in "abc"}
ONES = {name: np.ones(3, np.float32) for name in "abc"}


def test_a_name_may_be_left_out_of_a_push_and_the_log_says_which(store: Store, tmp_path: Path) -> None:
    job = store.create_job("job", PARAMS, missing="skip", optimizer=SGD(lr=0.1, momentum=0.9), workers=2)
    with aggregating(job, record=tmp_path), job.join("w0") as w0, job.join("w1") as w1:
        for each, names in ((w0, "abc"), (w1, "abc"), (w0, "a"), (w1, "ab")):
            each.pull()
            each.push({name: ONES[name] for name in names})
        w0.pull(), w1.pull()
        w0.put("c", 0 * ONES["c"])  # a gradient of zeros is not a missing one: momentum goes on
        w0.push({})
        w1.push(ONES)
        await_version(job, 3)
    weights = job.snapshot()[1]
    np.testing.assert_allclose(weights["b"][0], 1 - 0.1 - 0.1 * (0.9 + 0.5) - 0.1 * (0.9 * 1.4 + 0.5), rtol=1e-6)
    np.testing.assert_allclose(weights["c"][0], 1 - 0.1 - 0.1 * (0.9 + 0.5), rtol=1e-6)
    commits = [event for event in events(job) if event.kind == "commit"]
    lacks = [[c.get("lacks", "") for c in event.facts["contributions"]] for event in commits]
    assert lacks == [["", ""], ["1-2", "2"], ["0-1", ""]]
    assert proved(job, tmp_path).replayed == 3


def test_a_name_that_is_left_out_is_refused_elsewhere(store: Store) -> None:
    job = store.create_job("job", PARAMS)
    assert job.config.missing == "zeros"
    with job.join("w0") as session:
        session.pull()
        with pytest.raises(kvps.LayoutMismatch, match="gradients do not fit the job: missing c"):
            session.push({"a": ONES["a"], "b": ONES["b"]})
        session.leave(finished=False)
    skips = store.create_job("skips", PARAMS, missing="skip")
    with skips.join("w0") as session:
        session.pull()
        for grads, said in (({}, "missing a, b, c"), ({"a": ONES["a"], "d": ONES["a"]}, "unknown d")):
            with pytest.raises(kvps.LayoutMismatch, match=f"gradients do not fit the job: {said}"):
                session.push(grads)
        session.leave(finished=False)


def test_what_a_format_left_out_waits_for_a_gradient(store: Store, tmp_path: Path) -> None:
    """Of `b`, topk sends nothing with the first gradient. The second one has none of it, so nothing of `b` is sent,
    though it is the largest by far, and the third one brings both."""
    params = {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)}
    job = store.create_job("job", params, missing="skip", optimizer=SGD(lr=1.0), gradient_format="topk:0.5")
    with aggregating(job, record=tmp_path), job.join("w0") as session:
        for version, grads in enumerate(({"a": 3.0, "b": 2.0}, {"a": 1.0}, {"a": 0.5, "b": 1.0}), 1):
            session.pull()
            session.push({name: np.full(1, value, np.float32) for name, value in grads.items()})
            await_version(job, version)
    assert {name: array.tolist() for name, array in job.snapshot()[1].items()} == {"a": [-4.0], "b": [-3.0]}
    assert proved(job, tmp_path).replayed == 3


@pytest.mark.parametrize("lacks", ["3", "0-2", "1,0", "2-1"])
def test_a_contribution_that_lacks_what_it_must_have_is_rejected(store: Store, lacks: str) -> None:
    """Of a program that is not kvps: all parameters, those that the job does not have, and lists that are none."""
    job = store.create_job("job", PARAMS, missing="skip", optimizer=Adam(lr=0.1))
    with aggregating(job), job.join("w0") as session:
        pushed(session, job, lacks)
        await_version(job, 1)
        session.leave(finished=False)
    assert [event.facts["reason"] for event in events(job) if event.kind == "reject"] == [
        "it lacks parameters that must be there, or that the job does not have"
    ]
    np.testing.assert_array_equal(job.snapshot()[1]["a"], PARAMS["a"])


@pytest.mark.parametrize(
    "settings",
    [
        {"staleness": 2, "optimizer": AdamW(lr=0.1, clip_norm=1.0), "shards": 2},
        {"staleness": -1, "optimizer": Adam(lr=0.1), "gradient_format": "int8"},
        {"quorum": 1, "optimizer": SGD(lr=0.1, momentum=0.9, groups=(ParameterGroup("b", lr=0.01),)), "shards": 3},
        {"parts": {"x": "a", "y": ["b", "c"]}, "staleness": 1, "optimizer": SGD(lr=0.1, momentum=0.9)},
    ],
    ids=["ssp-clipped", "asp-int8", "quorum-groups", "parts"],
)
def test_whatever_is_missing_when_a_replay_has_the_same_bits(
    store: Store, tmp_path: Path, settings: dict[str, Any]
) -> None:
    job = store.create_job("job", PARAMS, missing="skip", workers=2, **settings)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        with job.join(f"w{number}") as session:
            for round_ in range(12):
                session.pull()
                part = ("", "y")[round_ % 2] if "parts" in settings else ""
                names = [name for name in ("abc", "bc")[part != ""] if rng.random() < 0.5]
                grads = {name: rng.normal(size=3).astype(np.float32) for name in names or ["c"]}
                session.push(grads, part=part)

    run_workers(job, partial(work, 0), partial(work, 1), record=tmp_path)
    assert proved(job, tmp_path).replayed == job.state().version


def events(job: kvps.Job) -> list[Event]:
    return EventLog(job.access.client, job.access.keys).newest(0)


def pushed(session: kvps.Session, job: kvps.Job, lacks: str) -> None:
    """Have a contribution of no bytes accepted that says it lacks these."""
    state = job.state()
    incarnation = state.members["w0"].incarnation
    job.access.scripts.push("w0", incarnation, 1, 0, 1, "0" * 32, state.history, lacks=lacks)


@pytest.mark.parametrize("lacks", ["1 2", "a", "1,", "-1", "1--2", "12345678", "x" * 70_000])
def test_what_cannot_be_a_list_of_parameters_is_refused_by_the_script(store: Store, lacks: str) -> None:
    job = store.create_job("job", PARAMS, missing="skip")
    with job.join("w0") as session:
        with pytest.raises(kvps.WrongOrder, match="BAD"):
            pushed(session, job, lacks)
        session.leave(finished=False)
    assert not job.access.reader.inbox()
