"""A job that is stopped, suspended or paused: all workers end with one round, and nothing acknowledged is left out."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.digits_job import digits_job, proved, run_workers, training
from helpers.harness import aggregating, await_version, next_lr
from helpers.waiting import eventually

import kvps
from kvps.history.events import EventLog
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.store import Store

pytestmark = pytest.mark.contract

PARAMS = {"x": np.zeros(4, np.float32)}
GRADIENT = {"x": np.ones(4, np.float32)}
PATIENT: dict[str, Any] = {"worker_timeout_ms": 60_000, "optimizer": kvps.SGD(lr=0.5)}
UNITS = {"units": 10_000}
MODES: dict[str, dict[str, Any]] = {
    "bsp": {"staleness": 0},
    "ssp": {"staleness": 2},
    "asp": {"staleness": -1},
    "quorum": {"staleness": 0, "quorum": 2},
    "drops": {"staleness": 0, "quorum": 2, "late": "drop"},
    "units": {"staleness": 0, **UNITS, "units_per_round": 4},
    "loose units": {"staleness": 0, **UNITS},
}
"""By versions end those with staleness 0; by their own rounds those with 2."""


def events(job: Job, *kinds: str) -> list[dict[str, Any]]:
    newest = EventLog(job.access.client, job.access.keys).newest(0)
    return [event.facts for event in newest if event.kind in kinds]


Acknowledged = set[tuple[str, str, int]]


def work(job: Job, worker: str, acknowledged: Acknowledged, began: threading.Event) -> tuple[int, bool]:
    """Work until the job says that it is over; return the session's last round, and whether it knew that it ends."""
    with job.join(worker) as session:
        while True:
            if job.config.units and session.next_unit() is None:
                break
            session.pull()
            try:
                sequence = session.accepted
                session.push(GRADIENT)
            except kvps.ContributionLate:
                continue
            if session.accepted > sequence:
                acknowledged.add((worker, session.incarnation, session.sequence))
            began.set()
    return session.round, session.stopping


@pytest.mark.parametrize("mode", MODES)
def test_all_workers_end_with_one_round_and_nothing_is_left_out(store: Store, mode: str) -> None:
    job = store.create_job("job", PARAMS, workers=3, **MODES[mode], **PATIENT)
    acknowledged: Acknowledged = set()
    began = threading.Event()
    with aggregating(job), ThreadPoolExecutor(3) as threads:
        ends = [threads.submit(work, job, f"w{i}", acknowledged, began) for i in range(3)]
        assert began.wait(60)
        await_version(job, 3)
        with ThreadPoolExecutor(2) as two:
            stops = [each.result() for each in [two.submit(job.stop, "low enough") for _ in range(2)]]
        rounds = {each.result()[0] for each in ends}
        assert all(each.result()[1] for each in ends)
        eventually(lambda: job.state().finished(job.config), 60)
    state = job.state()
    assert stops[0] == stops[1] == state.run
    assert (state.run.state, state.run.reason) == ("stopped", "low enough")
    assert len(events(job, "stop")) == 1
    committed = [(c.worker, c.incarnation, c.seq) for commit in job.log() for c in commit.plan.contributions]
    assert len(set(committed)) == len(committed)
    assert set(committed) == acknowledged
    assert not job.access.reader.inbox()
    if mode in ("bsp", "quorum", "drops", "units"):
        assert state.version == state.run.round
    if mode in ("bsp", "ssp", "loose units"):
        assert rounds == {state.run.round}


def test_a_stop_in_the_middle_of_a_round_lets_the_others_end_it(store: Store) -> None:
    job = store.create_job("job", PARAMS, workers=3, **PATIENT)
    sessions = [job.join(f"w{i}") for i in range(3)]
    with aggregating(job):
        for session in sessions:
            session.pull()
        sessions[0].push(GRADIENT)
        stopped = job.stop("enough")
        assert (stopped.round, stopped.by) == (1, "w2"), "the worker that this thread has joined as last"
        with pytest.raises(kvps.JobStopped, match="stopped by w2: enough"):
            sessions[0].pull()
        assert job.stop("again") == job.suspend("again") == job.pause() == stopped
        for session in sessions[1:]:
            assert session.push(GRADIENT) == 1
        for session in sessions[1:]:
            with pytest.raises(kvps.JobStopped):
                session.pull()
        for session in sessions:
            session.leave()
        assert job.await_finished()
        assert job.state().version == 1
        with job.join("late") as late:  # it is told so at once
            late.pull()
            pytest.fail("a worker of a stopped job begins a round")
        assert late.stopping


@pytest.mark.parametrize("mode", ["bsp", "ssp", "quorum", "units", "loose units"])
def test_a_job_restored_from_between_a_stop_and_its_last_round_ends_with_that_round(
    store: Store, tmp_path: Path, mode: str
) -> None:
    job = store.create_job("job", PARAMS, workers=2, **MODES[mode], **PATIENT)
    sessions = [job.join(f"w{i}") for i in range(2)]
    for session in sessions if mode != "quorum" else sessions[:1]:
        if job.config.units:
            session.next_unit()
        session.pull()
    sessions[0].push(GRADIENT)
    stopped = job.stop("enough")
    made = job.checkpoint()
    assert not made.finished
    made.write(tmp_path / "c.safetensors")
    again = store.restore_job(kvps.Checkpoint.load(tmp_path / "c.safetensors"), "again")
    assert again.state().run == stopped
    assert [facts["reason"] for facts in events(again, "stop")] == ["enough"]
    assert not again.state().finished(again.config)
    with aggregating(again), ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(work, again, f"w{i}", set(), threading.Event()) for i in range(2)]
        assert all(each.result()[1] for each in ends), "each knows that it ends"
        eventually(lambda: again.state().finished(again.config), 60)
    if mode != "ssp":
        assert again.state().version == stopped.round == 1
    assert again.checkpoint().finished
    if job.config.units:
        assert again.state().units_done == (4 if mode == "units" else 2)
    else:
        assert {m.round for m in again.state().members.values()} == {1}


def test_what_is_pushed_behind_the_last_round_does_not_count(store: Store) -> None:
    job = store.create_job("job", PARAMS, workers=2, **PATIENT)
    first, second = job.join("w0"), job.join("w1")
    with aggregating(job):
        for session in (first, second):
            session.pull()
            session.push(GRADIENT)
        for session in (first, second):
            session.pull()  # both compute the second round, and nobody has pushed it
        assert job.stop().round == 1
        for session in (first, second):
            with pytest.raises(kvps.JobStopped):
                session.push(GRADIENT)
            session.leave()
        assert job.await_finished()
    assert job.state().version == 1
    assert job.state().clock == {"w0": 1, "w1": 1}


@pytest.mark.parametrize("units", [{}, {**UNITS, "units_per_round": 2}], ids=["rounds", "units"])
def test_a_suspended_job_goes_on_where_it_was(store: Store, units: dict[str, Any]) -> None:
    job = store.create_job("job", PARAMS, workers=2, min_workers=2, **units, **PATIENT)

    def rounds(worker: str, wanted: int) -> int:
        with job.join(worker) as session:
            while session.clock < wanted:
                if units:
                    session.next_unit()
                session.pull()
                session.push(GRADIENT)
                if worker == "w0" and session.clock == 3:
                    job.suspend("moved")
            return session.clock
        pytest.fail("a suspended loop ends by its error")

    with aggregating(job), ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(rounds, f"w{i}", 1_000_000) for i in range(2)]:
            with pytest.raises(kvps.JobSuspended, match="suspended by w0: moved") as ended:
                each.result()
            assert ended.value.code == 75
        eventually(lambda: job.state().settled, 60)
        state = job.state()
        assert state.version == state.run.round
        assert not state.finished(job.config)
        assert not job.await_finished()
        assert not any(member.finished for member in state.members.values())
        assert job.resume("here again").state == "running"
        wanted = max(state.clock.values()) + 2
        assert [each.result() for each in [threads.submit(rounds, f"w{i}", wanted) for i in range(2)]] == [wanted] * 2
    assert [facts["reason"] for facts in events(job, "suspend", "resume")] == ["moved", "here again"]


@pytest.mark.parametrize("staleness", [0, -1])
def test_a_paused_job_commits_nothing_until_it_goes_on(store: Store, staleness: int) -> None:
    job = store.create_job("job", PARAMS, workers=1, staleness=staleness, **PATIENT)
    with aggregating(job), job.join() as session:
        session.pull()
        session.push(GRADIENT)
        await_version(job, 1)
        paused = job.pause("look at it")
        assert (paused.state, paused.round, job.pause()) == ("paused", None, paused)
        for _ in range(1 if staleness == 0 else 2):
            session.pull()
            session.push(GRADIENT)
        assert job.access.scripts.plan().plan is None
        assert (len(job.access.reader.inbox()), job.state().version) == (1 if staleness == 0 else 2, 1)
        assert not session.stopping
        job.resume()
        eventually(lambda: not job.access.reader.inbox(), 60)
        assert job.stop().round == (2 if staleness == 0 else 0), "a stop ends a pause, too"
    assert job.state().finished(job.config)


FALLING = kvps.schedules.StepLR(0.5, every=2, factor=0.5)
BIAS = kvps.ParameterGroup("b", lr=0.1)


def test_a_rate_that_is_set_takes_the_place_of_lr_and_schedule(store: Store) -> None:
    """The weights are those of an oracle in NumPy, in a job that is restored too; each plan says the rate."""
    params = {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}
    gradient = {name: np.full_like(array, 1) for name, array in params.items()}
    job = store.create_job("job", params, optimizer=kvps.SGD(lr=FALLING, groups=(BIAS,)), worker_timeout_ms=60_000)
    expected = dict(params)

    def train(job: Job, rounds: int, own: float | None) -> None:
        with aggregating(job), job.join("w0") as session:
            for _ in range(rounds):
                session.pull()
                a = FALLING.at(session.clock) if own is None else own
                b = 0.1 if own is None else own * (0.1 / 0.5)
                for name, lr in (("a", a), ("b", b)):
                    expected[name] = expected[name] - np.float32(lr) * gradient[name]
                assert next_lr(job) == a
                session.push(gradient)
            await_version(job, session.round)
            session.leave(finished=False)

    train(job, 3, None)
    job.set_lr(0.3, "a plateau")
    job.set_lr(0.3, "again")
    train(job, 2, 0.3)
    job.pause()
    again = store.restore_job(job.checkpoint(), "again")
    assert again.state().run.state == "running", "a checkpoint is neither stopped nor paused"
    train(again, 2, 0.3)
    again.set_lr(0)
    train(again, 1, 0.0)
    again.set_lr(None)
    train(again, 2, None)
    for name, array in again.snapshot()[1].items():
        np.testing.assert_array_equal(array, expected[name])
    assert [commit.plan.lr for each in (job, again) for commit in each.log()] == [None] * 3 + [0.3] * 4 + [0.0] + [
        None
    ] * 2
    assert [facts["lr"] for facts in events(job, "set")] == [0.3]
    assert [facts["lr"] for facts in events(again, "set")] == [0.0, None]


def test_a_run_whose_rate_was_set_is_computed_again_to_the_same_bits(store: Store) -> None:
    job = digits_job(store, optimizer=kvps.AdamW(lr=kvps.schedules.CosineAnnealingLR(0.01, over=10)), staleness=1)

    def sets() -> None:
        await_version(job, 4)
        job.set_lr(0.1 + 0.2)

    run_workers(job, *training(job, "w0", "w1", "w2"), sets)
    assert {commit.plan.lr for commit in job.log()} == {None, 0.1 + 0.2}
    assert proved(job).replayed == job.state().version


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf"), True, "0.1"])
def test_a_rate_that_is_none_is_refused(store: Store, lr: Any) -> None:
    job = store.create_job("job", PARAMS, **PATIENT)
    with pytest.raises(kvps.InvalidSetting, match="lr must be a finite number from 0"):
        job.set_lr(lr)
    assert not events(job, "set")


def test_an_error_of_that_kind_ends_a_script_quietly_and_no_handler_swallows_it() -> None:
    for kind, code in ((kvps.JobStopped, 0), (kvps.JobSuspended, 75)):
        assert not issubclass(kind, Exception)
        program = f"import kvps\ntry: raise kvps.{kind.__name__}('over')\nexcept Exception: print('swallowed')"
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


def test_training_began_with_the_first_join_whatever_was_asked_before(store: Store) -> None:
    job = store.create_job("job", PARAMS, **PATIENT)
    job.set_lr(0.1)
    job.pause()
    assert LogStream(job.access).training_began() is None
    time.sleep(0.005)
    job.join("w0")
    first = next(each for each in EventLog(job.access.client, job.access.keys).newest(0) if each.kind == "join")
    assert LogStream(job.access).training_began() == first.at_ms / 1000


def test_a_reason_is_one_line_and_not_a_long_one(store: Store) -> None:
    job = store.create_job("job", PARAMS, **PATIENT)
    assert job.pause("two\nlines\x1b[1m").reason == "two lines\\x1b[1m"
    with pytest.raises(kvps.InvalidSetting, match="at most 300 characters"):
        job.stop("x" * 301)
