"""`kvps.local`: a job whose aggregator and workers are threads of one process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import kvps_aggregator
import numpy as np
import pytest
from helpers.harness import check_chain, gradient, model, plain_loop, staleness_used
from helpers.waiting import eventually, processes_of

import kvps
from kvps.job import await_unit
from kvps.server import private_server
from kvps.store import Store

SGD = kvps.SGD(lr=0.05)


def _same(weights: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert weights.keys() == wanted.keys()
    for name, array in wanted.items():
        assert weights[name].tobytes() == array.tobytes(), name


def test_it_gives_the_plain_loops_weights_bit_for_bit_as_processes_do(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of processes are held against the same loop in test_run. In two parts: the second goes on."""
    with kvps.local(model(), workers=3, shards=2, optimizer=SGD) as job:
        _same(job.train(gradient, rounds=10), plain_loop(model(), 3, 10, 0.05))
        _same(job.train(gradient, rounds=10), plain_loop(model(), 3, 20, 0.05))
        assert check_chain(job) == 20
        assert private_server.running()
    assert private_server.running() is None


@pytest.mark.parametrize("staleness", [2, -1])
def test_in_the_other_modes_it_ends_and_keeps_the_bound(store: Store, staleness: int) -> None:
    with kvps.local(model(), url=store.url, workers=3, staleness=staleness, optimizer=SGD) as job:
        job.train(lambda params, rank, round_: (0.5, gradient(params, rank, round_)), rounds=12)
        assert job.state().clock == {"w0": 12, "w1": 12, "w2": 12}
        assert staleness < 0 or staleness_used(job, 3) <= staleness


def test_sessions_by_hand(store: Store) -> None:
    """As in the cells of a notebook: two workers in turns, on one thread."""
    job = kvps.local({"x": np.zeros(2, np.float32)}, url=store.url, workers=2, optimizer=kvps.SGD(lr=1.0))
    sessions = [job.join(), job.join()]
    for _ in range(2):
        params = [session.pull() for session in sessions]
        for session, seen in zip(sessions, params, strict=True):
            session.push({"x": seen["x"] + 1})
    for session in sessions:
        session.leave()
    assert job.await_finished()
    np.testing.assert_array_equal(job.snapshot()[1]["x"], [-1, -1])
    job.close()
    job.close()


@pytest.mark.parametrize("settings", [{}, {"min_workers": 3}])
def test_what_a_gradient_raises_is_raised_and_the_job_can_go_on(store: Store, settings: dict[str, int]) -> None:
    def unlucky(params: dict, rank: int, round_: int) -> dict:
        if (rank, round_) == (1, 5):
            raise RuntimeError("unlucky")
        return gradient(params, rank, round_)

    with kvps.local(model(), url=store.url, workers=3, optimizer=SGD, **settings) as job:
        with pytest.raises(RuntimeError, match="unlucky"):
            job.train(unlucky, rounds=10)
        assert not any(thread.name.startswith("kvps-w") for thread in threading.enumerate())
        job.train(gradient, rounds=10)
        assert job.state().clock["w1"] == 15
        check_chain(job)


def test_a_gradient_that_does_not_fit_is_said(store: Store) -> None:
    with kvps.local(model(), url=store.url, workers=2, optimizer=SGD) as job:
        with pytest.raises(kvps.LayoutMismatch, match="missing"):
            job.train(lambda params, rank, round_: {"W": params["W"]}, rounds=2)
        with pytest.raises(kvps.InvalidSetting, match="rounds"):
            job.train(gradient, rounds=0)


def test_an_aggregator_that_fails_is_heard(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers would wait for ever for what it does not commit."""

    def fail(job: kvps.Job, *, stop: threading.Event, **_: object) -> None:
        assert eventually(lambda: len(job.state().members) == 2)
        raise kvps.CorruptData("flipped bits")

    monkeypatch.setattr(kvps_aggregator, "serve", fail)
    job = kvps.local(model(), workers=2, optimizer=SGD)
    with pytest.raises(kvps.CorruptData, match="flipped"):
        job.train(gradient, rounds=5)
    with pytest.raises(kvps.CorruptData, match="flipped"):
        job.close()
    assert private_server.running() is None


def test_who_waits_for_a_unit_hears_that_the_aggregator_has_failed(store: Store) -> None:
    """The unit that was pushed is never committed, and no other is free."""
    pushed = threading.Event()

    def fail(job: kvps.Job, *, stop: threading.Event, **_: object) -> None:
        assert pushed.wait(90)
        raise kvps.CorruptData("flipped bits")

    job = kvps.local(model(), url=store.url, aggregator=fail, optimizer=SGD, staleness=-1, units=1)
    with job.join("w0") as session:
        assert session.next_unit() == 0
        session.push(gradient(session.pull(), 0, 0))
        assert session.next_unit() is None
    pushed.set()
    with pytest.raises(kvps.CorruptData, match="flipped"):
        await_unit(job)
    with pytest.raises(kvps.CorruptData, match="flipped"):
        job.close()


def test_bad_settings_leave_nothing(home: Path) -> None:
    for params, settings in [(model(), {"workers": 0}), (model(), {"optimiser": 1}), ({"x": np.zeros(2)}, {})]:
        with pytest.raises(kvps.UsageError):
            kvps.local(params, **settings)
        assert private_server.running() is None


def test_on_a_server_that_stays_the_job_is_removed(store: Store) -> None:
    with kvps.local(model(), url=store.url) as first, kvps.local(model(), url=store.url) as second:
        assert store.jobs() == [first.name, second.name] == ["local", "local-2"]
        second.train(gradient, rounds=2)
        store.remove_job(first.name)  # as by kvps rm
    assert store.jobs() == []
    assert [key for key in store.client.scan("kvps:*") if key != "kvps:preflight"] == []


PROGRAM = """
import signal
from helpers.paths import TESTS

import kvps
from helpers.harness import gradient, model

def endless(params, rank, round_):
    if (rank, round_) == (0, 5):
        print("there", flush=True)
    return gradient(params, rank, round_)

signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may have them ignore it
job = kvps.local(model(), workers=2)
job.train(endless, rounds={rounds})
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("rounds", "last"), [(10**6, ["KeyboardInterrupt"]), (6, [])])
def test_ctrl_c_ends_it_and_so_does_the_end_of_the_process(
    home: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, last: list[str]
) -> None:
    command = [sys.executable, "-c", PROGRAM.replace("{rounds}", str(rounds))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout.readline() == "there\n"
            if last:
                program.send_signal(signal.SIGINT)
            assert program.communicate(timeout=120)[1].splitlines()[-1:] == last
        finally:
            program.kill()
    assert eventually(lambda: processes_of(home) == []), processes_of(home)
