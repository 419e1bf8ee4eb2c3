"""Jobs over several hosts: links that go down and come up, hosts that are lost, slow links, clocks that differ.

The hosts are the kernel's namespaces; see `kvps_bench.hosts`. Where they may not be made, these tests are skipped.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import plain_worker
from helpers.commands import Started
from helpers.digits_job import digits_job, proved
from helpers.harness import check_chain, staleness_used
from helpers.hosts import Hosts, network
from helpers.waiting import eventually
from kvps_bench.hosts import LEAST_BURST
from kvps_cli.prove.fault_injection import judge
from kvps_workers import load_task
from kvps_workers.rounds import Rounds

from kvps.job import Job

pytestmark = pytest.mark.slow  # each starts whole commands

EPOCHS = 30
_SHORT = {"worker_timeout_ms": 1500, "lease_ms": 1000, "transport": "redis", "epochs": EPOCHS}
_A_DAY_LATER = ("unshare", "--time", "--monotonic", "86400", "--boottime", "86400", "--fork")


@pytest.fixture(autouse=True)
def patience_of_10_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is cut off for good need not be waited for for a minute."""
    monkeypatch.setenv("KVPS_PATIENCE", "10")


def worker(hosts: Hosts, host: int, name: str, acks: Path, through: tuple[str, ...] = ()) -> Started:
    return hosts.start(
        host, "worker", "--job", "digits", "--id", name, "--slow", "3x", "--acks", str(acks / name), through=through
    )


def ended(*started: Started) -> list[int]:
    return [each.wait() for each in started]


def check(job: Job, acks: Path, *evicted: str) -> None:
    """Assert that every worker came to its last round, that the log's replay has these weights, and that each
    acknowledged contribution counted once. Who was `evicted` missed the rounds that the others did meanwhile."""
    rounds = Rounds(load_task("digits"), job.config, 0, np).total
    members = job.state().members
    assert {member.round for member in members.values()} == {rounds}
    assert {name for name in members if job.state().clock[name] < rounds} == set(evicted)
    check_chain(job)
    proved(job)
    said = judge(sorted(acks.iterdir()), job)
    assert (said.lost, said.twice) == (0, 0)
    assert sum(job.state().clock.values()) - len(evicted) <= said.acknowledged  # a push whose answer was lost may count


def test_a_link_that_is_down_for_longer_than_the_timeout_loses_nothing(tmp_path: Path) -> None:
    """Server and aggregator on one host, three workers on others; one worker's clocks run a day ahead of all others."""
    with network(4) as hosts, hosts.serve(0, "0.0.0.0:6400") as store:
        assert f"@{hosts[0].address}:6400" in hosts.url
        job = digits_job(store, **_SHORT)
        aggregator = hosts.start(0, "aggregator", "start", "--job", "digits")
        others = [worker(hosts, 1, "w0", tmp_path), worker(hosts, 2, "w1", tmp_path, _A_DAY_LATER)]
        cut_off = worker(hosts, 3, "w2", tmp_path)
        assert eventually(lambda: job.state().version >= 20)
        hosts[3].link_down()
        assert eventually(lambda: not job.state().members["w2"].active)
        there = job.state().version
        assert eventually(lambda: job.state().version >= there + 10), "the others do not wait for it any more"
        hosts[3].link_up()
        assert ended(*others, cut_off, aggregator) == [0, 0, 0, 0]
        check(job, tmp_path, "w2")


def test_a_worker_that_is_cut_off_for_good_says_so_and_another_goes_on(tmp_path: Path) -> None:
    with network(3) as hosts, hosts.serve(0, "0.0.0.0:6400") as store:
        job = digits_job(store, **_SHORT, workers=2)
        aggregator = hosts.start(0, "aggregator", "start", "--job", "digits")
        other, cut_off = worker(hosts, 1, "w0", tmp_path), worker(hosts, 2, "w1", tmp_path)
        assert eventually(lambda: job.state().version >= 20)
        hosts[2].link_down()
        assert "no answer from redis://" in cut_off.until("kvps: error:")
        assert cut_off.wait() == 1
        again = worker(hosts, 0, "w1", tmp_path)
        assert ended(other, again, aggregator) == [0, 0, 0]
        check(job, tmp_path, "w1")


@pytest.mark.parametrize("how", ["killed", "cut off", "cut off for a while"])
def test_the_run_goes_on_when_the_aggregators_host_is_lost(how: str, tmp_path: Path) -> None:
    """Server, aggregator, standby and one worker on a host each; the other worker beside the standby."""
    with network(4) as hosts, hosts.serve(0, "0.0.0.0:6400") as store:
        job = digits_job(store, **_SHORT, workers=2)
        lost = hosts.start(1, "aggregator", "start", "--job", "digits")
        assert eventually(lambda: any(job.access.reader.holders()))
        assert job.access.reader.holders()[0].startswith(f"{hosts[1].name}:")
        standby = hosts.start(2, "aggregator", "start", "--job", "digits")
        workers = [worker(hosts, 2, "w0", tmp_path), worker(hosts, 3, "w1", tmp_path)]
        assert eventually(lambda: job.state().version >= 20)
        if how == "killed":
            hosts[1].kill()
        else:
            hosts[1].link_down()
        assert eventually(lambda: job.access.reader.holders()[0].startswith(f"{hosts[2].name}:"))
        if how == "cut off for a while":
            hosts[1].link_up()
        assert ended(*workers, standby) == [0, 0, 0]
        assert lost.wait() == {"killed": -9, "cut off": 1, "cut off for a while": 0}[how]
        check(job, tmp_path)


def test_the_bound_holds_for_a_worker_behind_a_slow_link() -> None:
    """1 MB each way takes the slow worker 0.8 s a round; the fast one is ahead by the bound, and never by more."""
    bound, rounds = 2, 6
    with network(3, 1e9) as hosts, hosts.serve(0, "0.0.0.0:6400") as store:
        hosts[2].hold_rate(20e6)
        settings = {"staleness": bound, "workers": 2, "transport": "redis"}
        job = store.create_job("slow", {"W": np.zeros(250_000, np.float32)}, **settings)
        aggregator = hosts.start(0, "aggregator", "start", "--job", "slow")
        began = time.monotonic()
        work = [sys.executable, plain_worker.__file__, "slow"]
        workers = [hosts.popen(1 + rank, *work, f"w{rank}", str(rounds), "0") for rank in range(2)]
        assert ended(*workers, aggregator) == [0, 0, 0]
        held_back = 1e6 - LEAST_BURST  # bytes of each transfer, at the least
        assert time.monotonic() - began > rounds * 2 * held_back / 2.5e6, "the link let more through than its rate"
        assert job.state().clock == {"w0": rounds, "w1": rounds}
        check_chain(job)
        assert staleness_used(job, 2) == bound
