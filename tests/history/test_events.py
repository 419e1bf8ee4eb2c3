"""`EventLog.unread`: each event once, however many there are, also across a lost server."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain

import pytest
from helpers.harness import aggregating, await_version, gradient, log_entries, model
from helpers.internals import grow_with_each_read
from helpers.servers import private_directory, running_server

import kvps
from kvps.history.events import Event, EventLog
from kvps.job import Job
from kvps.store import Store


def by_time(events: list[Event]) -> list[str]:
    return sorted(map(repr, events))


def rounds(job: Job, number: int) -> None:
    with aggregating(job), job.join("w0") as session:
        first = job.state().version
        for done in range(number):
            session.push(gradient(session.pull(), 0, done))
        await_version(job, first + number)
        session.leave(finished=False)


@pytest.mark.contract
@pytest.mark.parametrize("most", [1, 3, 1_000])
def test_it_reads_on_page_by_page(store: Store, most: int) -> None:
    job = store.create_job("j", model())
    log, seen = EventLog(job.access.client, job.access.keys), []
    for _ in range(2):
        rounds(job, 4)
        for page in log.unread(most):
            assert len(page) <= 2 * most, "a page of each of two streams"
            seen += page
        assert by_time(seen) == by_time(EventLog(job.access.client, job.access.keys).newest(0))
    assert [e.facts["version"] for e in seen if e.kind == "commit"] == list(range(1, 9))


def test_a_call_that_fails_has_read_nothing() -> None:
    with private_directory() as folder, ExitStack() as first, ExitStack() as later:
        files = ["--dir", str(folder), "--appendonly", "yes", "--appendfsync", "always"]
        path = str(folder / "socket")
        store = later.enter_context(kvps.connect(first.enter_context(running_server(*files, socket=path))))
        job = store.create_job("j", model())
        rounds(job, 2)
        log = EventLog(later.enter_context(store.client.twin(0.1)), job.access.keys)
        seen = list(chain.from_iterable(log.unread()))
        rounds(job, 2)
        first.close()
        with pytest.raises(kvps.ServerError):
            list(log.unread())
        first.enter_context(running_server(*files, socket=path))
        seen += chain.from_iterable(log.unread())
        assert [e.facts["version"] for e in seen if e.kind == "commit"] == [1, 2, 3, 4]
        assert by_time(seen) == by_time(EventLog(job.access.client, job.access.keys).newest(0))


def test_a_log_that_grows_with_each_read_of_it_has_an_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that commits faster than a reader reads: the reader once waited for an empty page."""
    job = store.create_job("j", model())
    rounds(job, 2)
    grow_with_each_read(monkeypatch, job)
    log = EventLog(job.access.client, job.access.keys)
    before = len(list(log.unread()))
    assert before == 1
    assert len(EventLog(job.access.client, job.access.keys).newest(0)) > 2
    assert len(list(log_entries(job))) > 3


def test_nothing_is_before_the_first_id_of_all(store: Store) -> None:
    job = store.create_job("j", model())
    assert EventLog(job.access.client, job.access.keys).before("0-0", 5) == []
    assert EventLog(job.access.client, job.access.keys).before("0-1", 5) == []


def test_what_became_of_experience_is_told_in_numbers(store: Store) -> None:
    job = store.create_job("j", model())
    for fields in (
        {"kind": "stale", "version": "3", "items": "a.1-x:1 - 0,a.1-x:2 - 1", "then": "drop"},
        {"kind": "rejected", "version": "3", "items": "a.1-x:3 7 2", "reason": "no reward"},
        {"kind": "gone", "actor": "a", "incarnation": "1-x", "reason": "no sign of life for 10.0 s"},
    ):
        store.client.call("XADD", job.access.keys.commits, "*", *chain(*fields.items()))
    log = EventLog(store.client, job.access.keys)
    assert [(each.kind, each.facts) for each in log.newest(3)] == [
        ("stale", {"version": 3, "items": 2, "then": "drop"}),
        ("rejected", {"version": 3, "items": 1, "reason": "no reward"}),
        ("gone", {"actor": "a", "reason": "no sign of life for 10.0 s"}),
    ]
    for items in ("", "a.1-x:3 7", "a.1-x:3 7 2," * 3):
        damaged = {"kind": "rejected", "version": "3", "items": items, "reason": "x"}
        store.client.call("XADD", job.access.keys.commits, "*", *chain(*damaged.items()))
        with pytest.raises(kvps.CorruptData, match="an item of experience"):
            log.newest(1)
