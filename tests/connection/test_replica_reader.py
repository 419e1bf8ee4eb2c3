"""Snapshots read from replicas: always the right bytes, from where they are, whatever becomes of a replica."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from helpers.certificates import authority_file, issued
from helpers.clusters import Cluster, ClusterNode, running_cluster
from helpers.harness import aggregating
from helpers.sentinels import watched_servers
from helpers.servers import Replicated, ServerProcess, replicated_server, running_server
from helpers.waiting import eventually
from kvps_cli.serve.acl import url_for

import kvps
from kvps.connection.client import Client
from kvps.connection.replica_reader import ReplicaReader, SlotItems
from kvps.job import Job
from kvps.protocol import acl
from kvps.protocol.keys import following
from kvps.session.session import Session

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime")]  # no copy of a version is there before
ITEMS = 1_500_000  # of a model whose dead keys are renamed to the next ones
ROUNDS = 12
MOST = 0.6  # of the bytes, on a machine so busy that a replica is late now and then


def gets(*servers: ServerProcess | ClusterNode) -> int:
    """Return how many GETs these servers have answered."""
    return sum(server.ask("INFO", "commandstats").get("cmdstat_get", {}).get("calls", 0) for server in servers)


@pytest.fixture
def servers() -> Iterator[Replicated]:
    with replicated_server() as found:
        yield found


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(masters=3, replicas=3) as found:
        yield found


class Training:
    """A job whose weights all equal its version, and its one worker."""

    def __init__(self, session: Session, reader: Job) -> None:
        self.session = session
        self.reader = reader
        self._gradients = {"x": np.full(ITEMS, -1, np.float32)}

    def round(self) -> None:
        """Have one more version committed."""
        self.session.push(self._gradients)
        self.session.pull()

    def check(self) -> int:
        """Assert that a snapshot is the newest version, and whole. Return it."""
        version, weights = self.reader.snapshot()
        assert version == self.session.version
        assert (weights["x"] == version).all()
        return version


@contextmanager
def training(url: str, reader_url: str = "", shards: int = 1, **options: Any) -> Iterator[Training]:
    with kvps.connect(url) as store, kvps.connect(reader_url or url, **options) as readers:
        params = {"x": np.zeros(ITEMS, np.float32)}
        job = store.create_job("read", params, optimizer=kvps.SGD(lr=1.0), workers=1, shards=shards, transport="redis")
        with aggregating(job), job.join("w0") as session:
            session.pull()
            yield Training(session, readers.job("read"))


def share(found: Training, replicas: list[Any]) -> float:
    """Return which part of the chunks of ROUNDS snapshots these replicas have sent. (A master's GETs tell less: its
    scripts have GETs too.)"""
    sent = 0
    for _ in range(ROUNDS):
        found.round()
        before = gets(*replicas)
        found.check()
        sent += gets(*replicas) - before
    return sent / (ROUNDS * sum(map(len, found.reader.layout.chunks)))


# -- who sends the bytes ------------------------------------------------------------------------------------------


def test_replicas_of_a_server_send_the_bytes(servers: Replicated) -> None:
    with training(servers.url, read_replicas=True) as found:
        assert share(found, servers.replicas) >= MOST


def test_without_the_option_the_master_sends_them(servers: Replicated) -> None:
    with training(servers.url) as found:
        assert share(found, servers.replicas) == 0
        assert share(found, [servers.master]) >= 1


def test_replicas_of_a_cluster_send_the_bytes_to_a_reader_under_its_role(cluster: Cluster) -> None:
    with kvps.connect(cluster.url) as store:
        reset, *rules = acl.rules("reader", "read")
        store.client.call("ACL SETUSER", "me", reset, ">pw", *rules)
    replicas = [cluster.replica_of(master) for master in cluster.masters]
    with training(cluster.url, url_for(cluster.url, "me", "pw"), shards=3, read_replicas=True) as found:
        assert share(found, replicas) >= MOST


def test_a_replica_behind_sentinels_is_reached_with_the_login_and_over_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = (*issued(tmp_path, "127.0.0.1"), authority_file(tmp_path))
    monkeypatch.setenv("KVPS_TLS_CA", str(files[2]))
    with watched_servers(password="pw", certificate=files) as watched:
        url = watched.url.replace("redis", "rediss", 1)
        with training(url, read_replicas=True) as found:
            assert share(found, watched.servers[1:]) >= MOST


# -- a replica that cannot be read --------------------------------------------------------------------------------


def stopped(server: Any) -> None:
    server.process.send_signal(signal.SIGSTOP)


def killed(server: Any) -> None:
    server.kill()


def frozen(server: Any) -> None:
    """It keeps what it has, and follows nobody."""
    server.ask("REPLICAOF", "NO", "ONE")


def emptied(server: Any) -> None:
    frozen(server)
    server.ask("FLUSHALL")


@pytest.mark.parametrize("fails", [stopped, killed, frozen, emptied])
def test_a_replica_that_fails_costs_no_snapshot(
    servers: Replicated, fails: Callable[[Any], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvps.connection.replica_reader._ANSWER_S", 3.0)  # far more than a read takes by itself
    monkeypatch.setattr("kvps.connection.replica_reader._PASSED_OVER_S", 600.0)
    with training(servers.url, read_replicas=True) as found, caplog.at_level(logging.DEBUG, "kvps.replicas"):
        for _ in range(3):
            found.round()
            found.check()
        for replica in servers.replicas:
            fails(replica)
        for _ in range(ROUNDS):
            found.round()
            found.check()
    lines = [record.getMessage() for record in caplog.records if record.name == "kvps.replicas"]
    assert 1 <= len(lines) <= len(servers.replicas), "a replica that is known to have failed is asked again"
    assert all("is not read for 600 s at a time" in line and "\n" not in line for line in lines)


def test_a_replica_that_comes_back_is_read_again(servers: Replicated, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ("_PASSED_OVER_S", "_KNOWN_S"):
        monkeypatch.setattr(f"kvps.connection.replica_reader.{seconds}", 0.2)
    with training(servers.url, read_replicas=True) as found:
        found.check()
        for replica in servers.replicas:
            replica.kill()
        found.round()
        found.check()
        for replica in servers.replicas:
            replica.start()
        assert eventually(servers.in_step)
        before = gets(*servers.replicas)

        def read_again() -> bool:
            found.round()
            found.check()
            return gets(*servers.replicas) > before

        assert eventually(read_again)


def test_a_replica_and_a_master_of_a_cluster_die(cluster: Cluster) -> None:
    with training(cluster.url, shards=3, read_replicas=True) as found:
        found.round()
        found.check()
        of_job = cluster.master_of("kvps:{read}:version")  # if that dies, the worker has to join again
        master, other = (node for node in cluster.masters if node is not of_job)
        cluster.replica_of(other).kill()
        found.round()
        found.check()
        heir = cluster.replica_of(master)
        master.kill()
        assert eventually(lambda: heir.is_master)
        for _ in range(3):
            found.round()
            found.check()


# -- a replica that lags ------------------------------------------------------------------------------------------


@pytest.fixture
def late() -> Iterator[tuple[ReplicaReader, Client, redis.Redis, redis.Redis]]:
    """A reader, its client, the master, and its replica: that has other bytes under `new`, and follows nobody."""
    with replicated_server(replicas=1) as servers, Client(servers.url) as client:
        (follower,) = servers.replicas
        with redis.Redis(port=servers.master.port) as master, redis.Redis(port=follower.port) as replica:
            master.set("new", b"dead")
            master.set("m:old", b"1")
            assert master.wait(1, 10_000) == 1
            reader = ReplicaReader(client)
            target = bytearray(4)
            assert reader.read([SlotItems("m:old", [("new", memoryview(target))])]) == []
            assert target == b"dead"
            replica.replicaof("NO", "ONE")
            yield reader, client, master, replica
            reader.close()


def test_bytes_without_their_mark_are_left_to_the_master(late: tuple[ReplicaReader, Any, Any, Any]) -> None:
    reader, _, master, _ = late
    master.set("new", b"next")
    master.set("m:new", b"1")
    items = [("new", memoryview(bytearray(4)))]
    assert reader.read([SlotItems("m:new", items)]) == items


def test_dead_bytes_under_the_names_of_the_next_version_are_not_read(servers: Replicated) -> None:
    with training(servers.url, read_replicas=True) as found:
        for _ in range(8):  # then the oldest versions are dead
            found.round()
            found.check()
        name = following(found.reader.state().names[0])
        renamed = found.reader.access.keys.weights(0, name, 0)
        assert eventually(lambda: all(replica.ask("EXISTS", renamed) for replica in servers.replicas))
        for replica in servers.replicas:
            frozen(replica)
        found.round()
        assert found.reader.state().names == (name,)
        found.check()


def test_a_mark_that_comes_soon_is_awaited(late: tuple[ReplicaReader, Any, Any, redis.Redis]) -> None:
    reader, _, _, replica = late
    target = bytearray(4)
    with replica.pipeline() as pipe:
        pipe.set("new", b"next").set("m:new", b"1").execute()
    assert reader.read([SlotItems("m:new", [("new", memoryview(target))])]) == []
    assert target == b"next"


def test_another_history_meanwhile_does_not_count(late: tuple[ReplicaReader, Any, Any, redis.Redis]) -> None:
    reader, _, _, replica = late
    replica.set("m:new", b"1")
    items = [("new", memoryview(bytearray(4))), ("m:old", memoryview(bytearray(1)))]

    def promoted() -> None:
        replica.replicaof("127.0.0.1", 1)
        replica.replicaof("NO", "ONE")

    assert reader.read([SlotItems("m:new", items)], promoted) == items


# -- bad input ----------------------------------------------------------------------------------------------------


def test_the_private_server_has_no_replicas() -> None:
    with pytest.raises(kvps.InvalidSetting, match=r"^read_replicas is for a server with replicas: [^\n]*$"):
        kvps.connect(read_replicas=True)


def test_a_unix_socket_is_refused() -> None:
    with (
        running_server() as url,
        pytest.raises(kvps.InvalidSetting, match=r"^read_replicas is for servers reached over TCP, [^\n]*$"),
    ):
        kvps.connect(url, read_replicas=True)
