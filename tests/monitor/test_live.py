"""A look at a job agrees with what Redis holds, and says what each worker does and whom it waits for."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.harness import aggregating, await_version, gradient, model
from helpers.internals import fall_silent
from helpers.waiting import eventually
from kvps_monitor import rates
from kvps_monitor.job_now import ALL_LEFT, LACKS_WORKERS, OTHERS, JobNow, Waits
from kvps_monitor.jobs import summary
from kvps_monitor.live import JobWatch
from kvps_monitor.metrics.job_reader import JobReader
from kvps_monitor.top import rows
from kvps_monitor.views import JobView, WorkerView

from kvps.config import JobConfig, Metadata
from kvps.job import Job
from kvps.machine import launcher, process
from kvps.session.session import Session
from kvps.store import Store


def states(view: JobView) -> dict[str, str]:
    return {w.worker: w.state for w in view.workers}


def worker(watch: JobWatch, name: str) -> WorkerView:
    return next(w for w in watch.look().workers if w.worker == name)


def becomes(watch: JobWatch, name: str, **wanted: object) -> bool:
    """Wait until a worker has these values: on a busy machine it may be silent for a moment."""
    return eventually(lambda: vars(worker(watch, name)).items() >= wanted.items())


def rates_in(view: JobView) -> list[float | None]:
    shard = view.shards[0]
    of_workers = [rate for w in view.workers for rate in (w.rounds_per_s, w.pulled_per_s, w.pushed_per_s)]
    return [view.commits_per_s, shard.received_per_s, shard.stored_per_s, *of_workers]


def step(session: Session, number: int = 0) -> None:
    session.push(gradient(session.pull(), session.rank, number), loss=1 / (number + 1))


def test_it_agrees_with_redis(store: Store) -> None:
    job = store.create_job("j", model(), workers=2, shards=2, staleness=1)
    call, keys = job.access.client.call, job.access.keys
    with aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
        for number in range(4):
            step(w0, number)
            step(w1, number)
        assert eventually(lambda: sum(job.state().clock.values()) == 8)
        view = JobWatch(job).look()
        assert view.version == int(call("HGET", keys.version, "version"))
        assert view.head == call("HGET", keys.version, "head")
        assert {w.worker: w.clock for w in view.workers} == {w: int(n) for w, n in call("HGETALL", keys.clock).items()}
        assert [s.holder for s in view.shards] == [call("GET", keys.lease(n)) for n in (0, 1)]
        assert [s.term for s in view.shards] == [1, 1]
        assert view.backlog == call("XLEN", keys.inbox) == 0
        assert (view.state, view.mode, view.contributions) == ("runs", "SSP(1)", 8)
        assert [w.losses[-1] for w in view.workers] == [(3, pytest.approx(1 / 3, rel=1e-5))] * 2
        assert json.loads(json.dumps(view.as_json()))["workers"][0]["worker"] == "w0"
    view = JobWatch(job).look()
    assert (view.state, states(view)) == ("finished", {"w0": "finished", "w1": "finished"})


def test_whom_a_worker_waits_for(store: Store) -> None:
    job = store.create_job("j", model(), workers=3, worker_timeout_ms=60_000)
    watch = JobWatch(job)
    w0, w1 = job.join("w0"), job.join("w1")
    step(w0)
    assert becomes(watch, "w0", waits_for=["workers that have not joined"])
    w2 = job.join("w2")
    assert becomes(watch, "w0", state="waiting", waits_for=["w1", "w2"], ahead=0)
    assert becomes(watch, "w1", state="computing", behind=0)
    step(w1)
    assert becomes(watch, "w0", waits_for=["w2"])
    step(w2)
    assert all(becomes(watch, name, waits_for=["the aggregator"]) for name in ("w0", "w1", "w2"))
    with aggregating(job):
        await_version(job, 1)
    assert eventually(lambda: set(states(watch.look()).values()) == {"computing"})
    for session in (w0, w1, w2):
        session.leave(finished=False)
    assert set(states(watch.look()).values()) == {"left"}


def test_in_ssp_it_waits_for_those_beyond_the_bound_alone(store: Store) -> None:
    job = store.create_job("j", model(), workers=3, staleness=2, worker_timeout_ms=60_000)
    watch = JobWatch(job)
    sessions = [job.join(f"w{rank}") for rank in range(3)]
    with aggregating(job):
        for rounds, session in zip((3, 1, 0), sessions, strict=True):
            for _ in range(rounds):
                step(session)
        assert eventually(lambda: job.state().clock == {"w0": 3, "w1": 1, "w2": 0})
        assert becomes(watch, "w0", waits_for=["w2"]), "w1 is two rounds behind, as many as the bound allows"
        assert (worker(watch, "w0").ahead, worker(watch, "w2").behind) == (2, 2), "as many as the bound allows"
        assert becomes(watch, "w1", state="computing")
        for session in sessions:
            session.leave()


def test_a_job_that_stands_still_is_stalled_and_has_no_rates(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = store.create_job("j", model(), workers=2, worker_timeout_ms=60_000)
    watch, reader = JobWatch(job), JobReader(job, threading.Lock())
    with aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
        for number in range(4):
            step(w0, number)
            step(w1, number)
        assert eventually(lambda: watch.look().commits_per_s)
        assert eventually(lambda: JobNow.read(job, job.state()).state == "runs")
        fall_silent(w1)
        ten_seconds_ago = round(1000 * job.access.server.seconds()) - 10_000
        job.access.client.call("ZADD", job.access.keys.heartbeat, ten_seconds_ago, "w1")
        assert eventually(lambda: watch.look().state == "runs"), "w0 computes"
        step(w0)
        monkeypatch.setattr(rates, "WINDOW_S", 0.1)
        assert eventually(lambda: set(rates_in(watch.look())) == {0})
        view = watch.look()
        assert view.workers[0].round_ms
        assert view.workers[1].state == "silent"
        reader.read(lambda: None)
        assert reader.now
        states = (view.state, reader.now.state, summary(job, job.state())["state"])
        assert (states, view.waits_for) == (("stalled",) * 3, ["w1"])
        line = rows.header(view, 80)[0]
        assert line.plain.startswith("j  stalled: waits for w1  BSP")
        assert "bold red" in {span.style for span in line.spans}


@pytest.mark.parametrize(
    ("settings", "cases"),
    [
        ({}, [("w0", "w2", ""), ("w0 w1", "w2", "w2"), ("w0 w1", "w0 w2", "w2"), ("", "w0 w1 w2", "w0 w1 w2")]),
        ({"quorum": 2}, [("w0", "w2", ""), ("w0 w1", "w2", ""), ("w0", "w1 w2", "w1 w2"), ("w0 w1", "w1 w2", "")]),
        ({"staleness": -1}, [("w0 w1", "w2", ""), ("", "w0 w1 w2", "w0 w1 w2")]),
    ],
    ids=["BSP", "quorum", "ASP"],
)
def test_a_job_is_stalled_only_if_nobody_else_can_move(
    store: Store, settings: dict[str, int], cases: list[tuple[str, str, str]]
) -> None:
    """Which workers have pushed, which are silent, and for which the job then waits."""
    for number, (pushed, silent, waits_for) in enumerate(cases):
        job = store.create_job(f"j{number}", model(), workers=3, **settings)
        for name in ("w0", "w1", "w2"):
            job.access.scripts.join(name, "n", "", {"host": "h", "pid": 1, "device": "cpu"})
        for name in pushed.split():
            incarnation = job.state().members[name].incarnation
            job.access.scripts.push(name, incarnation, 1, 0, 1, "-", job.state().history)
        waits = Waits(job.state(), job.config)
        assert waits.stalled_by(silent.split()) == waits_for.split(), (pushed, silent)


def _train(job: Job, rank: int, seconds: float) -> None:
    with job.join(f"w{rank}") as session:
        for number in range(20):
            params = session.pull()
            time.sleep(seconds)
            session.push(gradient(params, rank, number))


@pytest.mark.slow
def test_rates_and_shares_are_those_of_the_traces(store: Store) -> None:
    job = store.create_job("j", model(), workers=2, worker_timeout_ms=60_000)
    watch = JobWatch(job)
    with aggregating(job):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_train, [job, job], [0, 1], [0.002, 0.02]))
        # The last commit, and the aggregator's account of it, come after the last push.
        assert eventually(lambda: len(JobWatch(job).look().gradient_norms) == 20)
    view = watch.look()
    quick, slow = view.workers
    for w in view.workers:
        assert w.round_ms is not None
        assert sum(w.shares.values()) == pytest.approx(1)
        assert len(w.losses) == 0
    assert quick.shares["wait"] > slow.shares["wait"]
    assert slow.shares["compute"] > quick.shares["compute"]
    assert len(view.gradient_norms) == 20
    assert all(math.isfinite(norm) and norm > 0 for _, norm in view.gradient_norms)
    assert set(view.shards[0].phases) == {"fetch", "reduce", "step", "store", "commit"}


def test_workers_that_have_left_are_ahead_of_nobody_and_move_nothing(store: Store) -> None:
    job = store.create_job("j", model(), workers=2)
    with aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
        watch = JobWatch(job)
        for number in range(3):
            step(w0, number)
            step(w1, number)
        await_version(job, 3)
        w0.leave(finished=False)
        assert worker(watch, "w1").pushed_per_s > 0
        gone = worker(watch, "w0")
        assert (gone.state, gone.pushed) == ("left", 3)
        assert (gone.ahead, gone.rounds_per_s, gone.pulled_per_s, gone.pushed_per_s) == (0, 0, 0, 0)
    assert [w.ahead for w in watch.look().workers] == [0, 0], "of a finished job too"


def test_units_give_a_time_left(store: Store) -> None:
    job = store.create_job("j", model(), units=40)
    watch = JobWatch(job)
    with aggregating(job), job.join("w0") as session:
        for number in range(10):
            assert session.next_unit() == number
            step(session)
        await_version(job, 10)
        view = watch.look()
        assert (view.units, view.units_done) == (40, 10)
        assert view.eta_s is not None
        assert view.workers[0].rounds_per_s is not None
        assert view.eta_s == pytest.approx(30 / view.workers[0].rounds_per_s)
        session.leave(finished=False)


def test_in_rounds_of_units_a_worker_waits_for_the_unit_that_is_out_and_nobody_is_behind(store: Store) -> None:
    settings = {"units": 6, "units_per_round": 3, "backup_after": 2.0, "worker_timeout_ms": 60_000}
    job = store.create_job("j", model(), workers=2, **settings)
    watch = JobWatch(job)
    with aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
        assert [w0.next_unit(), w1.next_unit()] == [0, 1]
        params = w1.pull()
        step(w0)
        free = worker(watch, "w0")
        assert (free.waits_for, free.behind) == ([], 0), "unit 2 is free"
        assert w0.next_unit() == 2
        step(w0)
        assert becomes(watch, "w0", state="waiting", waits_for=["w1"])
        view = watch.look()
        assert [(w.ahead, w.behind) for w in view.workers] == [(0, 0), (0, 0)]
        assert (view.units_text, view.backups) == ("units 0 of 6 (0%)  round 1 of 2", 0)
        assert w0.next_unit() == 1, "a backup task, because it is out for twice as long as the others were"
        step(w0)
        await_version(job, 1)
        w1.push(gradient(params, 1, 0))
        assert watch.look().units_text == "units 3 of 6 (50%)  round 2 of 2  1 backup task"
        found = {event.kind: event.facts for event in watch.look().events}
        assert found["backup"].items() >= {"worker": "w0", "of": "w1", "unit": 1}.items()
        assert found["duplicate"] == {"worker": "w1", "unit": 1}
        for session in (w0, w1):
            session.leave(finished=False)


def test_the_first_version_alone_waits_for_all_workers_where_rounds_are_of_units(store: Store) -> None:
    job = store.create_job("j", model(), workers=2, units=2, units_per_round=1, worker_timeout_ms=60_000)
    watch = JobWatch(job)
    with aggregating(job), job.join("w0") as w0:
        assert w0.next_unit() == 0
        step(w0)
        assert (watch.look().state, worker(watch, "w0").waits_for) == (LACKS_WORKERS, [OTHERS])
        with job.join("w1"):
            await_version(job, 1)
        assert watch.look().state != LACKS_WORKERS
        w0.leave(finished=False)


def test_staleness_is_that_of_the_last_committed_contribution(store: Store) -> None:
    job = store.create_job("j", model(), workers=2, staleness=-1, worker_timeout_ms=60_000)
    watch = JobWatch(job)
    with aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
        old = w1.pull()
        for number in range(5):
            step(w0, number)
            await_version(job, number + 1)
        w1.push({name: np.ones_like(array) for name, array in old.items()})
        await_version(job, 6)
        assert [(w.worker, w.staleness) for w in watch.look().workers] == [("w0", 0), ("w1", 5)]


def test_workers_that_ended_with_their_launcher_are_not_at_work(store: Store) -> None:
    """Nobody is left to evict them: a run that was killed was `2 of 2` at work for minutes."""
    says = "import json; from kvps.machine import process; print(json.dumps(process.identity()))"
    dead = json.loads(subprocess.run([sys.executable, "-c", says], capture_output=True, check=True).stdout)
    run = {"command": "kvps run", **{name: dead[name] for name in ("host", "pid", "start", "space")}}
    for launched_by, lives in ((json.dumps(run), False), (launcher.this_process("kvps run"), True)):
        config = JobConfig(workers=1, metadata=Metadata(launched_by=launched_by))
        job = store.create_job("lives" if lives else "dead", model(), config=config)
        job.access.scripts.join("w0", "n", "", dead)
        now = JobNow.read(job, job.state())
        assert (now.state == ALL_LEFT, now.ended) == ((not lives), set() if lives else {"w0"})
        assert summary(job, job.state())["active"] == lives
    job = store.create_job("here", model(), config=JobConfig(workers=1, metadata=Metadata(launched_by=json.dumps(run))))
    job.access.scripts.join("w0", "n", "", process.identity())
    assert JobNow.read(job, job.state()).ended == set(), "this process lives"
