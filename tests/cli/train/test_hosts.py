"""`kvps run --hosts N`: the same line on each of several hosts trains one job. The hosts are commands on one machine:
what they know of each other is in Redis alone."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.arrays import assert_same_bits
from helpers.commands import Started, kvps_run, refused
from helpers.harness import check_chain, model, plain_loop
from helpers.waiting import awaited_job, eventually
from kvps_cli.train.hosts import Line, placed

import kvps
from kvps.protocol.keys import JobKeys

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]  # each starts whole commands

ROUNDS = 120
FOLD_ROUNDS = 10
SCRIPT = f"""
import pathlib, time
import kvps
from helpers.harness import gradient, model

with kvps.from_env() as worker:
    job = worker.create_job(model(), optimizer=kvps.SGD(lr=0.05), min_workers=4)
    with job.join(worker.id) as session:
        while session.clock < {ROUNDS}:
            params = session.pull()
            if not pathlib.Path("hurry").exists():
                time.sleep(0.25)  # all rounds take longer than until a silent host has lost its place
            session.push(gradient(params, session.rank, session.clock))
print("done", worker.rank, worker.workers, flush=True)
"""

FOLDS = f"""
import pathlib, time
import kvps
from helpers.harness import gradient, model

for fold in range(2):
    with kvps.from_env() as worker:
        job = worker.create_job(model(fold), optimizer=kvps.SGD(lr=0.05), units=4 * {FOLD_ROUNDS}, units_per_round=4)
        with job.join(worker.id) as session:
            while (unit := session.next_unit()) is not None:
                params = session.pull()
                if fold and not pathlib.Path("hurry").exists():
                    time.sleep(0.1)
                session.push(gradient(params, unit % 4, unit // 4))
"""


@pytest.fixture(autouse=True)
def here(home: Path, tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "folds.py").write_text(FOLDS)
    return tmp_path


@pytest.fixture
def host(start: Any, lasting: kvps.Store) -> Callable[..., Started]:
    """A function that gives the line of the run on one more host."""
    return lambda *options, **others: start(*line(lasting, *options, **others))


def line(
    store: kvps.Store, *options: str, hosts: str = "2", workers: str = "4", name: str = "two", script: str = "train.py"
) -> list[str]:
    run = ["run", "-w", workers, "--hosts", hosts, "--job", name, "--redis", store.url]
    return [*run, *options, "--", sys.executable, script]


def await_versions(store: kvps.Store, more: int, name: str = "two") -> None:
    job = awaited_job(store, name)
    version = job.state().version
    assert eventually(lambda: job.state().version >= version + more)


def check(store: kvps.Store) -> None:
    """Each worker has done each of its rounds once, and none was done without the others."""
    job = store.job("two")
    assert job.state().clock == {f"w{rank}": ROUNDS for rank in range(4)}
    assert_same_bits(job.snapshot()[1], plain_loop(model(), 4, ROUNDS, 0.05))


def test_two_hosts_train_one_job_and_what_does_not_belong_to_it_is_refused_in_one_line(
    lasting: kvps.Store, here: Path, host: Callable[..., Started]
) -> None:
    first = host()
    assert "this is host 1 of 2, with w0, w1" in first.until("host 2 of 2 is not there yet: give the same line there")
    for other in (line(lasting, workers="6"), line(lasting, hosts="3")):
        assert "runs it with -w 4 --hosts 2: give the same line" in kvps_run(*other).stderr.splitlines()[-1]
    assert "runs it with another command or setting:" in kvps_run(*line(lasting, "--staleness", "2")).stderr
    second = host()
    assert "this is host 2 of 2, with w2, w3" in second.until("this is host")
    await_versions(lasting, 3)
    third = kvps_run(*line(lasting))
    assert third.returncode == 2
    assert re.search(
        r"^kvps: error: job two: all its 2 hosts are there: kvps run \(.*\), kvps run \(", third.stderr, re.M
    )
    (here / "hurry").touch()
    for running, ranks in ((second, "23"), (first, "01")):
        assert set(re.findall(r"^w(\d): done \1 4$", running.output(), re.M)) == set(ranks)
    check(lasting)
    assert "kvps: error: job 'two' exists: go on with it" in kvps_run(*line(lasting)).stderr


def test_a_host_that_is_killed_takes_its_place_again_and_any_host_stops_the_run_for_all(
    lasting: kvps.Store, here: Path, host: Callable[..., Started]
) -> None:
    """The first host, which began the run, and the other; then both resume it, in the other order."""
    hosts = list[Started]()
    for number in (0, 1):
        hosts.append(host("--resume"))
        assert f"this is host {number + 1} of 2" in hosts[number].until("this is host")
    for number in (0, 1):
        await_versions(lasting, 4)
        hosts[number].process.kill()
        hosts[number].wait()
        hosts[number] = host("--resume")
        assert f"this is host {number + 1} of 2" in hosts[number].until("this is host")
    await_versions(lasting, 4)
    hosts[1].process.send_signal(signal.SIGSTOP)  # it is silent, and its place is given to another
    other = host("--resume")
    other.until("waits until w2, w3 of the host that was here have ended")
    hosts[1].process.send_signal(signal.SIGCONT)
    assert "kvps: error: job two: this host was silent, and kvps run (process " in hosts[1].output(2)
    other.until("this is host 2 of 2")
    hosts[1] = other
    await_versions(lasting, 4)
    hosts[1].process.send_signal(signal.SIGTERM)
    for each in hosts:
        assert "can be resumed: the same command goes on" in each.output(os.EX_TEMPFAIL)
    (here / "hurry").touch()
    hosts = [host("--resume"), host("--resume")]
    printed = [each.output() for each in hosts]
    assert sum("job two: goes on at version" in text for text in printed) == 1
    check(lasting)
    assert "nothing is left to train" in kvps_run(*line(lasting, "--resume")).stderr


def test_jobs_of_units_one_after_another_have_the_bits_of_one_worker_though_a_host_is_killed(
    lasting: kvps.Store, here: Path, host: Callable[..., Started]
) -> None:
    hosts = [host("--resume", workers="2", script="folds.py") for _ in range(2)]
    await_versions(lasting, 2, "two.2")
    hosts[1].process.kill()
    hosts[1].wait()
    hosts[1] = host("--resume", workers="2", script="folds.py")
    (here / "hurry").touch()
    for each in hosts:
        each.output()
    for fold, name in enumerate(("two", "two.2")):
        job = lasting.job(name)
        assert_same_bits(job.snapshot()[1], plain_loop(model(fold), 4, FOLD_ROUNDS, 0.05))
        assert sum(job.state().clock.values()) == 4 * FOLD_ROUNDS
        assert check_chain(job) == FOLD_ROUNDS


def test_hosts_that_were_killed_a_moment_ago_are_waited_for(lasting: kvps.Store) -> None:
    """They gave a sign right before, so that their places are as fresh as those of hosts that live."""
    both = Line.of(4, 2, "the same line")
    note = json.dumps({"by": "one that is gone", "nonce": "1", "launched_by": "", "id": ""} | both._asdict())
    lasting.client.each([("SET", JobKeys("two").host(number), note, "EX", 6) for number in range(2)])
    with placed(lasting, "two", both, 4, lambda launched_by: "0123abcd") as place:
        assert place.number == 0


@pytest.mark.parametrize("written", ["x", '{"by": "me", "nonce": "1", "workers": 4}'])
def test_a_place_that_no_kvps_run_has_written_is_refused_in_one_line(lasting: kvps.Store, written: str) -> None:
    lasting.client.call("SET", JobKeys("two").host(0), written, "EX", 600)
    done = kvps_run(*line(lasting))
    assert done.returncode == 1
    assert re.match(r"kvps: error: the place of a host.* another version of kvps", done.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "2"], "--hosts needs a server that all hosts reach, and a private one is for this host alone"),
        (["--hosts", "2", "--redis", "redis://h", "-w", "2:3"], "-w 2:3 is for one host: leave --hosts out"),
        (
            ["--hosts", "5", "--redis", "redis://h", "-w", "4"],
            "--hosts 5 and -w 4: each host must have a copy at least",
        ),
    ],
)
def test_what_cannot_run_on_several_hosts_is_refused_in_one_line(options: list[str], words: str) -> None:
    assert refused("run", *options, "--", "true").startswith(words)
