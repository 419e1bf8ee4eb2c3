"""What all replicas of a server must have before it is acknowledged with durability replicated. `chaos.replicas` has
whole failovers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.servers import Replicated, replicated_server
from helpers.waiting import eventually

import kvps
from kvps.connection import replicas
from kvps.connection.client import Client
from kvps.connection.replicas import Attached, all_of
from kvps.store import Store

TINY = {"x": np.zeros(3, np.float32)}
WRITES = {
    "bytes": lambda client: client.put([("a", [memoryview(b"a")])]),
    "a script": lambda client: client.call_safely(None, "SET", "a", "a"),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[Replicated]:
    with replicated_server() as found:
        yield found


@pytest.fixture
def client(servers: Replicated) -> Iterator[Client]:
    with Client(servers.url) as found:
        yield found


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_master_that_was_replaced_acknowledges_nothing(
    servers: Replicated, client: Client, write: Callable[[Client], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its replicas was promoted. Nobody has told it yet, and the other confirms what it writes."""
    promoted, safe = servers.replicas[0], client.replicating(all_of(2))
    write(safe)
    promoted.ask("REPLICAOF", "NO", "ONE")
    monkeypatch.setattr(replicas, "_REPLICA_MS", 200)
    with pytest.raises(
        kvps.ServerLost, match=r"^[01] of 2 replicas .* \(at redis://\S+, for 0\.1 s\): start the one [^\n]*$"
    ):
        write(client.twin(patience_s=0.1).replicating(all_of(2)))
    monkeypatch.undo()
    promoted.ask("REPLICAOF", "127.0.0.1", servers.master.port)
    write(safe)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_replica_that_the_job_does_not_count_on_stops_it(client: Client, write: Callable[[Client], object]) -> None:
    with pytest.raises(
        kvps.ServerLost, match=r"^a server has 2 replicas, and the job was created for 1 .*: detach what"
    ):
        write(client.twin(patience_s=0.1).replicating(all_of(1)))


def test_a_wait_goes_on_when_its_master_becomes_a_replica(servers: Replicated, client: Client) -> None:
    master, heir = servers.master, servers.replicas[0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, {"stream": "0"}, 20_000)
        assert eventually(lambda: _blocked(servers))
        heir.ask("REPLICAOF", "NO", "ONE")
        master.ask("REPLICAOF", "127.0.0.1", heir.port)
        heir.ask("XADD", "stream", "*", "field", 1)
        assert list(waiting.result()) == ["stream"]
    master.ask("REPLICAOF", "NO", "ONE")
    heir.ask("REPLICAOF", "127.0.0.1", master.port)
    assert eventually(servers.in_step)


def _blocked(servers: Replicated) -> bool:
    return bool(servers.master.ask("INFO", "clients")["blocked_clients"])


def test_a_job_counts_on_the_replicas_that_it_finds(servers: Replicated, client: Client) -> None:
    store = Store(client)
    job = store.create_job("job", TINY, durability="replicated", transport="redis")
    assert job.config.durability == "replicated:2"
    assert client.call("HGET", job.access.keys.config, "durability") == "replicated:2"
    with pytest.raises(kvps.ServerUnfit, match=r"^durability replicated:3: each server at \S+ has 2 replicas$"):
        store.create_job("other", TINY, durability="replicated:3", transport="redis")
    with replicated_server(replicas=1) as fewer, Store(Client(fewer.url)) as elsewhere:
        assert elsewhere.restore_job(job.checkpoint()).config.durability == "replicated:1"
    store.remove_job("job")


@pytest.mark.parametrize(
    ("attached", "why"),
    [
        (Attached(2, 2), ""),
        (Attached(0, 0), "one server has none: add a replica"),
        (Attached(0, 2), "one server has none: add a replica"),
        (Attached(1, 2), "servers have from 1 to 2: give each master as many"),
        (
            Attached(1, 1, 1),
            "1 known replica cannot be reached, and may take over later: start it, or have it forgotten",
        ),
    ],
)
def test_what_cannot_be_promised_is_said(attached: Attached, why: str) -> None:
    assert ": ".join(filter(None, attached.why_not_all())).startswith(why)
    assert bool(attached.why_not_all()[0]) == bool(why)
