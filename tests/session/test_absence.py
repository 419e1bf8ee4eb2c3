"""What a worker says when it joins again and rounds were made without it."""

from __future__ import annotations

import pytest
from helpers.harness import aggregating, await_version, gradient, model

from kvps.job import Job
from kvps.session.session import Session
from kvps.store import Store


def _round(session: Session) -> None:
    session.push(gradient(session.pull(), session.rank, session.clock))


def _away(job: Job, other: Session, rounds: int) -> None:
    """Evict w1, and have the other worker make some rounds without it."""
    job.evict(job.state().members["w1"])
    for _ in range(rounds):
        _round(other)
    await_version(job, other.clock)


def test_a_worker_that_is_back_says_which_rounds_were_made_without_it(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    job = store.create_job("job", model(), workers=2)
    with aggregating(job), job.join("w0") as other:
        for rounds in (0, 1, 3, 0):
            session = job.join("w1")
            assert session.clock == job.state().clock["w1"]
            _round(session)
            _round(other)
            await_version(job, other.clock)
            _away(job, other, rounds)
        with job.join("w1") as session:
            assert (session.clock, session.round) == (4, 8)
    assert [line for line in caplog.messages if "is back" in line] == [
        "w1 is back: round 2 was done without it",
        "w1 is back: rounds 4 to 6 were done without it",
    ]


def test_a_worker_of_units_has_missed_nothing(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    job = store.create_job("job", model(), workers=2, units=8)
    with aggregating(job), job.join("w0") as other:
        session = job.join("w1")
        for each in (session, other):
            each.next_unit()
            _round(each)
        await_version(job, 1)
        job.evict(job.state().members["w1"])
        other.next_unit()
        _round(other)
        await_version(job, 2)
        job.join("w1").leave()
    assert "is back" not in caplog.text
