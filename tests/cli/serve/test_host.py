"""`kvps host`: hosts come into a cluster and leave it while a job trains, and what is refused in one line."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from helpers.clusters import node_ports
from helpers.commands import KVPS, Started, kvps_run
from helpers.harness import await_version, check_chain, gradient, plain_loop
from helpers.servers import replicated_server
from helpers.waiting import command_lines_with, eventually

import kvps
from kvps.connection.slots import SLOTS, Address, slot_of
from kvps.job import Job
from kvps.machine.address import outward_address
from kvps.machine.paths import server_program
from kvps.server.cluster_members import Member, Members

pytestmark = pytest.mark.slow
WORKERS, RATE = 2, 0.05
READY = "workers: "
MODEL = {"w": np.linspace(-1, 1, 60_000, dtype=np.float32)}


class DataHosts:
    """A function that starts `kvps host` at the address of a number, and the cluster that they make."""

    def __init__(self, stack: ExitStack) -> None:
        self.port = node_ports(1)[0]
        self._stack = stack

    def at(self, number: int) -> str:
        return f"127.78.3.{number}:{self.port}"

    def address(self, number: int) -> Address:
        return Address(f"127.78.3.{number}", self.port)

    def url(self, number: int = 1) -> str:
        return f"redis://{self.at(number)}"

    def start(self, number: int, *options: str, ready: bool = True) -> Started:
        """Start the host of that number; all but the first join the first. Wait until it is a part of the cluster."""
        join = () if number == 1 or "--join" in options else ("--join", self.url())
        command = [*KVPS, "host", "--listen", self.at(number), *join, *options]
        host = Started(command, os.environ | {"PYTHONUNBUFFERED": "1"})
        self._stack.callback(host.clear_away)
        if ready:
            host.until(READY)
        return host

    def members(self, password: str | None = None, seed: int = 1) -> list[Member]:
        """Return all masters, each as it tells itself."""
        with Members(self.address(seed), password) as members:
            return members.masters()


@pytest.fixture
def hosts(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataHosts]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ExitStack() as stack:
        yield DataHosts(stack)


def _slots(hosts: DataHosts, seed: int = 1) -> list[int]:
    return sorted(len(member.slots) for member in hosts.members(seed=seed))


def _temporary(folder: Path) -> list[Path]:
    """The directories of nodes."""
    return list(folder.glob("kvps-host-*"))


# -- hosts come and go --------------------------------------------------------------------------------------------


def test_hosts_join_and_leave_while_a_bsp_job_trains(hosts: DataHosts, tmp_path: Path) -> None:
    """The weights are those of the plain loop, and nothing is left of a host that has left."""
    first = hosts.start(1)
    assert _temporary(tmp_path)
    with kvps.connect(hosts.url()) as store, ThreadPoolExecutor(WORKERS) as pool:
        job = store.create_job("spread", MODEL, workers=WORKERS, shards=3, optimizer=kvps.SGD(lr=RATE))
        with Training(job, pool) as training:
            await_version(job, 5)
            before = job.state().version
            second = hosts.start(2)
            assert _slots(hosts) == [SLOTS // 2] * 2
            third = hosts.start(3)
            assert _slots(hosts) == [5461, 5461, 5462]
            shards = [slot_of(job.access.keys.slot(shard)) for shard in range(3)]
            # Not one shard a host: a slot's bytes are those of an instant, with a gradient in them or without.
            assert sum(any(slot in member.slots for slot in shards) for member in hosts.members()) >= 2
            assert second.end(signal.SIGINT) == 130
            assert before < job.state().version < training.rounds, "the job has trained all the time"
            assert _slots(hosts) == [SLOTS // 2] * 2
            for seed in (1, 3):
                with Members(hosts.address(seed), None) as members:
                    assert len(members.all()) == 2, "the host that has left is forgotten"
        await_version(job, training.rounds)  # the last one is committed behind the last push
        check_chain(job)
        version, params = job.snapshot()
        want = plain_loop(MODEL, WORKERS, training.rounds, RATE)
        assert version == training.rounds
        assert all(np.array_equal(params[name], want[name]) for name in want)
    assert third.end(signal.SIGTERM) == 143
    assert _slots(hosts) == [SLOTS]
    assert first.end(signal.SIGTERM) == 143
    assert not command_lines_with(str(hosts.port))
    assert not _temporary(tmp_path)


class Training:
    """Workers that train as long as the block takes, and some rounds more. All do as many: `rounds`."""

    def __init__(self, job: Job, pool: ThreadPoolExecutor) -> None:
        self.rounds = 1_000_000
        self._job = job
        self._workers = [pool.submit(self._train, f"w{number}") for number in range(WORKERS)]

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.rounds = self._job.state().version + 20  # further than any worker is in BSP
        for worker in self._workers:
            worker.result()

    def _train(self, worker: str) -> None:
        """Do all rounds as one worker, which joins again when the job's own slot has moved."""
        while True:
            try:
                with self._job.join(worker) as session:
                    while session.round < self.rounds:
                        time.sleep(0.04)  # hosts take seconds to join
                        session.push(gradient(session.pull(), session.rank, session.round))
                    return
            except kvps.WorkerEvicted:
                continue


def test_a_host_that_was_killed_comes_back_with_its_slots(hosts: DataHosts, tmp_path: Path) -> None:
    hosts.start(1)
    second = hosts.start(2, "--data-dir", str(tmp_path / "data"))
    with kvps.connect(hosts.url()) as store:
        job = store.create_job("kept", MODEL, shards=2)
        [mine] = [member for member in hosts.members() if member.address == hosts.address(2)]
        second.process.kill()
        second.wait()
        assert eventually(lambda: not command_lines_with(hosts.at(2))), "node and aggregator end with it"
        again = hosts.start(2, "--data-dir", str(tmp_path / "data"))
        assert {member.id: member.slots for member in hosts.members()}[mine.id] == mine.slots
        assert job.snapshot()[0] == 0
        assert again.end() == 143
        assert _slots(hosts) == [SLOTS]
        assert job.snapshot()[0] == 0
    third = hosts.start(2, "--data-dir", str(tmp_path / "data"))
    assert _slots(hosts) == [SLOTS // 2] * 2, "a host that has left begins anew"
    assert third.end() == 143


@pytest.mark.timeout(900)  # each moves thousands of slots in its turn
def test_hosts_that_join_at_once_take_turns(hosts: DataHosts) -> None:
    hosts.start(1)
    joining = [hosts.start(number, ready=False) for number in (2, 3)]
    for host in joining:
        host.until(READY)
    assert _slots(hosts) == [5461, 5461, 5462]
    for host in joining:
        host.process.send_signal(signal.SIGTERM)
    assert [host.wait() for host in joining] == [143] * 2
    assert _slots(hosts) == [SLOTS]


def test_a_host_that_is_interrupted_while_it_takes_slots_gives_them_back(hosts: DataHosts) -> None:
    hosts.start(1)
    with kvps.connect(hosts.url()) as store:
        for number in range(3000):
            store.client.call("SET", f"key:{number}", "x" * 10_000)
        second = hosts.start(2, ready=False)
        second.until("takes its share")
        assert eventually(lambda: sum(bool(member.slots) for member in hosts.members()) == 2)
        assert second.end(signal.SIGINT) == 130
        assert _slots(hosts) == [SLOTS]
        [only] = hosts.members()
        assert not only.migrating
        assert not only.importing
        assert all(store.client.call("GET", f"key:{number}") for number in range(3000))


# -- the password -------------------------------------------------------------------------------------------------


def test_a_password_is_asked_for_and_is_in_no_process_list(
    hosts: DataHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    secret = 'quite"secret\\word#'
    file.touch(0o600)
    file.write_text(secret + "\n")
    server, seen = tmp_path / "server", tmp_path / "arguments"  # a server hides its arguments soon after it has begun
    server.write_text(f'#!/bin/sh\necho "$@" >> {seen}\nexec {server_program()} "$@"\n')
    server.chmod(0o700)
    monkeypatch.setenv("KVPS_SERVER", str(server))
    hosts.start(1, "--password-file", str(file))
    second = hosts.start(2, "--password-file", str(file))
    assert sorted(len(member.slots) for member in hosts.members(secret)) == [SLOTS // 2] * 2
    assert len(command_lines_with(str(hosts.port))) >= 4
    assert not command_lines_with("quite")
    assert seen.read_text() == "-\n-\n"
    environment = {"KVPS_REDIS_PASSWORD_FILE": str(file), "KVPS_REDIS_URL": hosts.url()}
    done = kvps_run("jobs", **environment)
    assert done.returncode == 0, done.stderr
    refused = kvps_run("host", "--join", hosts.url(), "--listen", hosts.at(3))
    assert refused.returncode == 1
    assert re.fullmatch(r"kvps: error: [^\n]*(NOAUTH|refuses the login|Authentication)[^\n]*\n", refused.stderr)
    second.process.send_signal(signal.SIGTERM)
    printed = second.process.communicate(timeout=120)[0]
    assert "quite" not in printed


# -- what is refused ----------------------------------------------------------------------------------------------


def _refused(*options: str, says: str) -> None:
    done = kvps_run("host", *options, KVPS_PATIENCE="3")
    assert done.returncode in (1, 2)
    assert re.fullmatch(rf"kvps: error: [^\n]*{says}[^\n]*\n", done.stderr), done.stderr
    assert not done.stdout


def test_what_is_wrong_is_said_in_one_line(hosts: DataHosts, tmp_path: Path) -> None:
    own = f"{outward_address()}:{hosts.port}"
    _refused(says="the first host needs --listen HOST:PORT")
    _refused("--listen", "0.0.0.0:6379", says="by which other hosts reach this one")
    _refused("--listen", "192.0.2.9:6379", "--password-file", str(_password(tmp_path)), says="nothing can listen at")
    _refused("--listen", own, says="is open to the network: give all hosts the same password")
    _refused("--join", f"redis://127.0.0.1:{hosts.port}", says="no Redis server answers at")
    _refused("--join", "redis+sentinel://a,b/c", says="--join wants redis://HOST:PORT of a node")
    _refused("--join", "redis://no-such-host.invalid:1", says="the host no-such-host.invalid is unknown")
    assert not _temporary(tmp_path)


def _password(folder: Path) -> Path:
    file = folder / "password"
    file.touch(0o600)
    file.write_text("secret\n")
    return file


def test_a_server_of_its_own_is_no_cluster() -> None:
    with replicated_server(replicas=0) as server:
        _refused("--join", server.url, says="is a server of its own and no node of a cluster")


def test_a_port_in_use_and_a_node_that_is_away(hosts: DataHosts) -> None:
    first = hosts.start(1)
    second = hosts.start(2)
    _refused("--join", hosts.url(), "--listen", hosts.at(2), says="the port 10,000 above: address already in use")
    second.process.kill()
    second.wait()
    assert eventually(lambda: not command_lines_with(hosts.at(2)))
    _refused("--join", hosts.url(), "--listen", hosts.at(3), says=r"(no answer from|the node at) \S*127\.78\.3\.2")
    first.process.send_signal(signal.SIGTERM)
    printed, _ = first.process.communicate(timeout=120)
    assert re.search(
        r"^kvps: error: the node at \S+ ends, and could not give its slots back: .*$", printed, re.MULTILINE
    )
    assert first.process.returncode == 1
