"""What a scrape says is what Redis holds: counted once each, on real servers with real workers."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from helpers.faults import halted_server
from helpers.harness import aggregating, await_version, gradient, model
from helpers.internals import abandon
from helpers.scrapes import Scrape, exporting
from helpers.servers import private_directory, running_server
from helpers.waiting import eventually
from kvps_monitor.job_now import JOB_WORDS
from kvps_monitor.metrics.totals import STALENESS

import kvps
from kvps.errors import ContributionLate
from kvps.job import Job
from kvps.protocol.phases import WORKER_PHASES
from kvps.session.session import Session
from kvps.store import Store

pytestmark = pytest.mark.slow  # each serves and scrapes jobs that train


def step(session: Session, number: int = 0) -> None:
    session.push(gradient(session.pull(), session.rank, number), loss=1 / (number + 1))


def train(job: Job, workers: int, rounds: int, slow: Callable[[int], float] = lambda rank: 0.0) -> None:
    """Do rounds on threads; a worker of a rank waits so many seconds in each."""
    together = threading.Barrier(workers)

    def work(rank: int) -> None:
        with job.join(f"w{rank}") as session:
            together.wait(120)
            for number in range(rounds):
                params = session.pull()
                threading.Event().wait(slow(rank))
                session.push(gradient(params, rank, number), loss=1 / (number + 1))

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))


def logged_staleness(job: Job) -> dict[str, Counter[int]]:
    """Return how often each worker's committed contributions had each staleness, by the commit log alone."""
    found: dict[str, Counter[int]] = {}
    for commit in job.log():
        for c in commit.plan.contributions:
            found.setdefault(c.worker, Counter())[commit.version - 1 - c.base] += 1
    return found


def check_staleness(scrape: Scrape, job: Job) -> None:
    """Assert that the histogram has each committed contribution once, in its bucket."""
    for worker, values in logged_staleness(job).items():
        labels = {"job": job.name, "worker": worker}
        for bound in (*STALENESS, math.inf):
            le = "+Inf" if bound == math.inf else str(float(bound))
            count = sum(number for staleness, number in values.items() if staleness <= bound)
            assert scrape.value("kvps_staleness_versions_bucket", le=le, **labels) == count, (worker, le)
        assert scrape.value("kvps_staleness_versions_sum", **labels) == sum(s * n for s, n in values.items())
        assert scrape.value("kvps_staleness_versions_count", **labels) == sum(values.values())


def check_traces(scrape: Scrape, job: Job) -> None:
    """Assert that seconds and bytes are the sums of the traces in Redis."""
    for worker in job.state().members:
        entries = [fields for _, fields in job.access.client.call("XRANGE", job.access.keys.trace(worker), "-", "+")]
        labels = {"job": job.name, "worker": worker}
        assert scrape.value("kvps_worker_iterations_total", **labels) == len(entries)
        for phase in WORKER_PHASES:
            seconds = sum(float(fields[f"{phase}_ms"]) for fields in entries) / 1000
            assert scrape.value("kvps_worker_phase_seconds_total", phase=phase, **labels) == pytest.approx(seconds)
        for way in ("pulled", "pushed"):
            moved = sum(int(fields[way]) for fields in entries)
            assert moved > 0
            assert scrape.value(f"kvps_worker_{way}_bytes_total", **labels) == moved


def test_rounds_staleness_seconds_and_bytes_are_those_of_redis(store: Store) -> None:
    job = store.create_job("j", model(), workers=3, shards=2, staleness=-1, worker_timeout_ms=60_000)
    with aggregating(job), exporting(store) as exported:
        train(job, 3, 30, lambda rank: 0.03 if rank == 2 else 0.002)
        assert eventually(lambda: sum(job.state().clock.values()) == 90)
        traced = sum(job.access.client.call("XLEN", job.access.keys.trace(worker)) for worker in job.state().clock)
        whole = {"kvps_contributions_total": 90, "kvps_staleness_versions_count": 90, "kvps_leaves_total": 3}
        scrape = exported.until(**whole, kvps_worker_iterations_total=traced)
    assert scrape.series("kvps_contributions_total", job="j") == job.state().clock
    check_staleness(scrape, job)
    assert scrape.value("kvps_staleness_versions_sum", job="j", worker="w2"), "a slow worker is stale in ASP"
    check_traces(scrape, job)
    assert scrape.value("kvps_versions_total", job="j") == job.state().version
    assert scrape.value("kvps_log_versions_missed_total", job="j") == 0
    assert scrape.series("kvps_joins_total", job="j") == {"w0": 1, "w1": 1, "w2": 1}
    assert scrape.series("kvps_leaves_total", job="j") == {"w0": 1, "w1": 1, "w2": 1}
    assert scrape.series("kvps_loss", job="j") == {w: pytest.approx(1 / 30, rel=1e-4) for w in ("w0", "w1", "w2")}
    with exporting(store) as late:  # counts what Redis has, from the first scrape on: it waits for the first reading
        again = late.scrape()
    for name in ("contributions_total", "joins_total", "staleness_versions_sum", "worker_iterations_total"):
        assert again.series(f"kvps_{name}") == scrape.series(f"kvps_{name}")
    rest = set(JOB_WORDS) - {"finished"}
    assert again.series("kvps_job_state", job="j") == {"finished": 1} | dict.fromkeys(rest, 0)


def test_shards_have_the_times_and_bytes_of_their_traces(store: Store) -> None:
    job = store.create_job("j", model(), shards=2)
    with aggregating(job), exporting(store) as exported, job.join("w0") as session:
        for number in range(8):
            step(session, number)
        await_version(job, 8)
        job.report(7, {"loss": 0.25, "far": math.inf})
        wanted = {"kvps_shard_phase_seconds_count": 2 * 5 * 8, "kvps_shard_held": 2, "kvps_evaluation_version": 7}
        scrape = exported.until(**wanted)
        assert scrape.value("kvps_evaluation", job="j", figure="loss") == 0.25
        assert scrape.value("kvps_evaluation", job="j", figure="far") == math.inf
        traces = [job.access.client.call("XRANGE", job.access.keys.shard_trace(shard), "-", "+") for shard in (0, 1)]
        for shard, entries in enumerate(traces):
            labels = {"job": "j", "shard": str(shard)}
            for phase in ("fetch", "reduce", "step", "store", "commit"):
                seconds = sum(float(fields[f"{phase}_ms"]) for _, fields in entries) / 1000
                found = scrape.value("kvps_shard_phase_seconds_sum", phase=phase, **labels)
                assert found == pytest.approx(seconds)
                buckets = scrape.series("kvps_shard_phase_seconds_bucket", phase=phase, **labels)
                assert list(buckets.values()) == sorted(buckets.values())
                assert buckets["+Inf"] == 8
            for way in ("received", "stored"):
                moved = sum(int(fields[way]) for _, fields in entries)
                assert scrape.value(f"kvps_shard_{way}_bytes_total", **labels) == moved > 0
            assert scrape.value("kvps_lease_takes_total", **labels) == 1
        squares = sum(float(entries[-1][1]["square_sum"]) for entries in traces)
        assert scrape.value("kvps_gradient_norm", job="j") == pytest.approx(math.sqrt(squares))


def test_what_happens_to_a_worker_is_counted_once(store: Store) -> None:
    job = store.create_job("j", model(), workers=4, reject_norm=5.0, worker_timeout_ms=60_000)
    with aggregating(job), exporting(store) as exported:
        sessions = [job.join(f"w{rank}") for rank in range(4)]
        for number in range(3):
            for session in sessions:
                size = 1000 if number == 1 and session.rank == 3 else 1
                session.push({name: np.full_like(value, size) for name, value in session.pull().items()})
            await_version(job, number + 1)
        counts = exported.until(kvps_rejected_contributions_total=1, kvps_contributions_total=11, kvps_worker_active=4)
        assert counts.series("kvps_rejected_contributions_total")["j w3"] == 1
        assert set(counts.series("kvps_evictions_total").values()) == {0}
        job.evict(job.state().members["w3"])
        abandon(sessions.pop())
        scrape = exported.until(kvps_evictions_total=1, kvps_worker_active=3)
        assert scrape.series("kvps_evictions_total")["j w3"] == 1
        assert scrape.series("kvps_worker_active", job="j") == {"w0": 1, "w1": 1, "w2": 1, "w3": 0}
        assert scrape.series("kvps_worker_heartbeat_age_seconds", job="j").keys() == {"w0", "w1", "w2"}
        for session in sessions:
            session.leave()
        exported.until(kvps_evictions_total=1, kvps_leaves_total=3)


def test_late_contributions_are_counted(store: Store) -> None:
    job = store.create_job("j", model(), workers=2, quorum=1, late="drop", worker_timeout_ms=60_000)
    with aggregating(job), exporting(store) as exported, job.join("w0") as w0, job.join("w1") as w1:
        params = w1.pull()
        step(w0)
        await_version(job, 1)
        with pytest.raises(ContributionLate):
            w1.push(gradient(params, 1, 0))
        scrape = exported.until(kvps_late_contributions_total=1, kvps_contributions_total=1)
        assert scrape.series("kvps_late_contributions_total", job="j") == {"w0": 0, "w1": 1}


def test_jobs_come_and_go(store: Store) -> None:
    with exporting(store) as exported:
        scrape = exported.scrape()
        assert (scrape.value("kvps_up"), scrape.jobs()) == (1, set())
        jobs = [store.create_job(name, model()) for name in ("a", "b")]
        for job, rounds in zip(jobs, (2, 3), strict=True):
            with aggregating(job), job.join("w0") as session:
                for number in range(rounds):
                    step(session, number)
                await_version(job, rounds)
        assert exported.until(kvps_contributions_total=5).series("kvps_contributions_total") == {"a w0": 2, "b w0": 3}
        store.remove_job("a")
        assert eventually(lambda: exported.scrape().jobs() == {"b"})
        again = store.create_job("a", model())
        scrape = exported.until(kvps_contributions_total=3, kvps_versions_total=3, kvps_workers_expected=2)
        assert scrape.series("kvps_job_info", job="a").keys() == {f"{again.id} BSP {again.config.optimizer}  redis"}
        assert exported.said == []
        with exporting(store, "b") as only:
            assert only.scrape().jobs() == {"b"}


@pytest.mark.parametrize(
    ("key", "harm"),
    [
        ("commits", lambda call, key: call("XADD", key, "*", "kind", "\x1b[2J")),
        ("workers", lambda call, key: call("HSET", key, 'w"}\n# HELP', "{}")),
        ("config", lambda call, key: call("HSET", key, "workers", "NaN")),
    ],
    ids=["log", "worker", "config"],
)
def test_a_damaged_job_is_said_once_and_the_others_are_served(store: Store, key: str, harm: Any) -> None:
    store.create_job("good", model())
    harm(store.client.call, getattr(store.create_job("bad", model()).access.keys, key))
    store.client.call("SADD", "kvps:jobs", '../"}\n')  # a name that no job has
    with exporting(store) as exported:
        scrape = exported.until(kvps_jobs_unreadable=2)
        assert (scrape.jobs(), scrape.value("kvps_up")) == ({"good"}, 1)
        tries = [scrape.value("kvps_reading_seconds")]
        assert eventually(lambda: tries.append(exported.scrape().value("kvps_reading_seconds")) or len(set(tries)) > 4)
        assert len(exported.said) == 2, exported.said
        assert all(line.isprintable() for line in exported.said)
        assert any("bad" in line for line in exported.said)


def test_a_server_that_is_lost_and_comes_back() -> None:
    with private_directory() as folder, ExitStack() as first, ExitStack() as later:
        files = ["--dir", str(folder), "--appendonly", "yes", "--appendfsync", "always"]
        path = str(folder / "socket")
        url = first.enter_context(running_server(*files, socket=path))
        store = later.enter_context(kvps.connect(url))
        exported = later.enter_context(exporting(store))
        job = store.create_job("j", model())
        with aggregating(job), job.join("w0") as session:
            for number in range(4):
                step(session, number)
            await_version(job, 4)
        exported.until(kvps_up=1, kvps_contributions_total=4, kvps_leaves_total=1)
        first.close()
        assert exported.until(kvps_up=0).names() == {"kvps_up"}
        first.enter_context(running_server(*files, socket=path))
        exported.until(kvps_up=1, kvps_contributions_total=4, kvps_staleness_versions_count=4, kvps_leaves_total=1)
        with aggregating(job), job.join("w0") as session:
            for number in range(4, 6):
                step(session, number)
            await_version(job, 6)
        scrape = exported.until(kvps_contributions_total=6, kvps_leaves_total=2, kvps_staleness_versions_count=6)
        check_staleness(scrape, job)
        assert len(exported.said) == 1, exported.said


def test_a_server_that_hangs_is_not_up_and_a_scrape_is_answered_all_the_same() -> None:
    with running_server() as url, kvps.connect(url) as store, exporting(store) as exported:
        store.create_job("j", model())
        exported.until(kvps_up=1, kvps_workers_expected=1)
        with halted_server(store.client):
            assert exported.until(kvps_up=0).names() == {"kvps_up"}
        exported.until(kvps_up=1, kvps_workers_expected=1)
