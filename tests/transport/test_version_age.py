"""How old a version is: by the server's clock, whatever stands in the log behind its commit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, await_version
from helpers.waiting import eventually

import kvps
from kvps.history.events import EventLog
from kvps.job import Job
from kvps.store import Store
from kvps.transport.version_age import version_age_s

X = {"x": np.zeros(4, np.float32)}


def made(store: Store, rounds: int, **settings: Any) -> Job:
    job = store.create_job("job", X, **{"workers": 1} | settings)
    with aggregating(job), job.join("w0") as session:
        for _ in range(rounds):
            session.pull()
            session.push(X)
        await_version(job, rounds)
    return job


def now_ms(job: Job) -> int:
    seconds, microseconds = job.access.client.call("TIME")
    return 1000 * int(seconds) + int(microseconds) // 1000


def committed_ms(job: Job, version: int) -> int:
    found = [id for id, fields in job.entries() if fields["kind"] == "commit" and fields["version"] == str(version)]
    return int(found[0].partition("-")[0])


def check_age(job: Job, version: int, since_ms: int) -> None:
    """Assert that the age is right at an instant between two looks at the server's clock."""
    before = now_ms(job)
    age_ms = round(1000 * version_age_s(job.access, version))
    assert before - since_ms <= age_ms <= now_ms(job) - since_ms


def test_it_is_the_time_since_the_commit(store: Store, transport: str) -> None:
    job = made(store, 3, transport=transport)
    for version in (3, 2, 1):
        check_age(job, version, committed_ms(job, version))
    with job.join("w0") as session:
        session.pull()
        before = now_ms(job)
        age_ms = round(1000 * session.version_age_s())
        assert before - committed_ms(job, 3) <= age_ms <= now_ms(job) - committed_ms(job, 3)


def test_many_joins_and_leaves_behind_the_commit_are_passed_over(store: Store) -> None:
    job = made(store, 1, workers=1)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(lambda n=n: job.join(f"x{n}").leave(finished=False)) for n in range(60)]:
            done.result()
    check_age(job, 1, committed_ms(job, 1))


def test_a_version_that_no_commit_made_is_new(store: Store) -> None:
    """The workers of version 0, and of a restored job, begin when they come."""
    job = store.create_job("job", X)
    assert version_age_s(job.access, 0) == 0
    with job.join("w0"):
        assert version_age_s(job.access, 0) == 0
    job = made(store, 2) if store.remove_job("job") is None else job
    restored = store.restore_job(job.checkpoint(), "restored")
    assert version_age_s(restored.access, 2) == 0


def test_after_a_clock_that_was_set_back_it_goes_by_the_time_of_the_commit(store: Store, raw: Any) -> None:
    """Ids in the log never go back, so the id of the newest commit lies in the future for as long as that was."""
    job = store.create_job("job", X, workers=1)
    log = job.access.keys.commits
    raw.xdel(log, raw.xadd(log, {"a": "b"}, id=f"{now_ms(job) + 3_600_000}-0"))
    before = now_ms(job)
    with aggregating(job), job.join("w0") as session:
        session.push(session.pull())
        await_version(job, 1)
    assert eventually(lambda: version_age_s(job.access, 1) > 0)
    assert version_age_s(job.access, 1) <= (now_ms(job) - before) / 1000
    events = EventLog(job.access.client, job.access.keys).newest(0)
    assert {event.kind for event in events} == {"create", "join", "commit", "leave", "take", "release"}
    assert all(before - 60_000 < event.at_ms <= now_ms(job) for event in events)
    for version, at in ((2, {"at_ms": now_ms(job) + 3_600_000}), (3, {})):  # the second as earlier versions logged it
        raw.xadd(job.access.keys.commits, {"kind": "commit", "version": version} | at)
        assert version_age_s(job.access, version) == 0, "a time in the future is now"


def test_a_damaged_log_is_one_line(store: Store, raw: Any) -> None:
    job = made(store, 1)
    raw.xadd(job.access.keys.commits, {"kind": "commit", "version": "nonsense"})
    with pytest.raises(kvps.CorruptData, match=r"an entry of the log: version must be a whole number") as caught:
        version_age_s(job.access, 1)
    assert "\n" not in str(caught.value)
