"""What a worker says when it waits long."""

from __future__ import annotations

import logging
import re
import threading

import pytest
from helpers.harness import gradient, model
from helpers.waiting import eventually
from kvps_workers.wait_reporter import WaitReporter

import kvps
from kvps.store import Store


def test_a_worker_that_waits_in_a_round_of_units_names_the_unit_and_who_has_it(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvps.worker")
    settings = {"units": 2, "units_per_round": 2, "backup_after": 0, "worker_timeout_ms": 60_000}
    job = store.create_job("j", model(), workers=2, **settings)
    taken = threading.Event()

    def be_slow() -> None:
        with kvps.connect(store.url) as own, own.job("j").join("w1") as session:
            assert session.next_unit() == 0
            session.pull()
            taken.set()
            assert eventually(lambda: bool(caplog.messages))
            session.leave(finished=False)

    slow = threading.Thread(target=be_slow)
    slow.start()
    with job.join("w0") as session, WaitReporter(job, session) as reporter:
        assert taken.wait(60)
        assert session.next_unit() == 1
        session.push(gradient(session.pull(), 0, 1))
        with reporter.waiting():
            assert session.next_unit() == 0, "once w1 has left"
        session.leave(finished=False)
    slow.join(60)
    (said,) = caplog.messages  # once, not every second
    assert re.fullmatch(r"job j: w0 waits: its round waits for unit 0, which w1 has had for \d+ s", said)
