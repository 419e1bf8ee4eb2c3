"""Slots that move under a client: each call finds its keys, and is done once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.clusters import Cluster, ClusterNode, cluster_node, node_ports, running_cluster
from helpers.harness import aggregating, await_version, check_chain, model, plain_loop, work_on

import kvps
from kvps.arrays.digest import Buffers, view
from kvps.connection.cluster import ClusterClient
from kvps.connection.slots import Address, slot_of
from kvps.server.cluster_members import Members
from kvps.server.slots_mover import SlotsMover

KEYS = ["{moved}:a", "{moved}:b"]
OTHER = "elsewhere"


def _value(number: int) -> np.ndarray:
    return np.full(300_000, number, np.float32)


def _items(number: int) -> list[tuple[str, Buffers]]:
    return [(key, [view(_value(number))]) for key in [*KEYS, OTHER]]


def _read(client: ClusterClient, keys: list[str]) -> list[set[float]]:
    found = [np.zeros_like(_value(0)) for _ in keys]
    client.get([(key, view(array)) for key, array in zip(keys, found, strict=True)])
    return [set(map(float, np.unique(array))) for array in found]


def _got_one_by_one(client: ClusterClient) -> None:
    found = [np.zeros_like(_value(0)) for _ in range(3)]
    pairs = zip([*KEYS, OTHER], map(view, found), strict=True)
    for number, _ in enumerate(client.getting(list(pairs))):
        assert (found[number] == 1).all(), number


def _put_without_waiting(client: ClusterClient) -> None:
    with client.putting() as put:
        for key, value in _items(2):
            put(key, value)


def _put_once(client: ClusterClient) -> None:
    stored: list[str] = []
    client.put_once(_items(2), stored.append)
    assert sorted(stored) == sorted([*KEYS, OTHER])


def _reads(client: ClusterClient) -> None:
    assert client.call("STRLEN", KEYS[0]) == 1_200_000
    assert client.together([("STRLEN", key) for key in KEYS]) == [1_200_000] * 2
    assert client.each([("STRLEN", key) for key in [OTHER, *KEYS]]) == [1_200_000] * 3
    assert client.gather([("EXISTS", *KEYS), ("EXISTS", OTHER)]) == [2, 1]


CALLS: dict[str, tuple[int, Callable[[ClusterClient], Any]]] = {
    "commands": (1, _reads),
    "get": (1, lambda client: _read(client, [*KEYS, OTHER])),
    "getting": (1, _got_one_by_one),
    "put": (2, lambda client: client.put(_items(2))),
    "putting": (2, _put_without_waiting),
    "put_once": (2, _put_once),
}
"""Each with the number that all arrays hold after it."""


@pytest.fixture
def apart(cluster: Cluster, client: ClusterClient) -> Iterator[tuple[int, ClusterNode]]:
    """The slot of KEYS, and a master that does not have it; OTHER is on a third."""
    slot = slot_of(KEYS[0])
    client.put(_items(1))
    target = next(n for n in cluster.masters if n not in (cluster.master_of(KEYS[0]), cluster.master_of(OTHER)))
    yield slot, target
    client.unlink([*KEYS, OTHER])


@pytest.mark.parametrize("call", CALLS)
def test_a_slot_that_was_moved_is_found(
    cluster: Cluster, client: ClusterClient, apart: tuple[int, ClusterNode], call: str
) -> None:
    """MOVED: the client has an old map."""
    after, run = CALLS[call]
    cluster.migrate(*apart)
    run(client)
    assert _read(client, [*KEYS, OTHER]) == [{after}] * 3
    assert client._arrays.nodes.master(KEYS[0]).port == apart[1].port, "the map was asked anew"


@pytest.fixture
def nameless(cluster: Cluster) -> Iterator[None]:
    """Nodes that are to announce their names, and have none: they say "?"."""
    if not cluster.nodes[0].ask("CONFIG GET", "cluster-preferred-endpoint-type"):
        pytest.skip("this server announces addresses alone")
    for kind in ("hostname", "ip"):
        for node in cluster.nodes:
            node.ask("CONFIG SET", "cluster-preferred-endpoint-type", kind)
        if kind == "hostname":
            yield


@pytest.mark.parametrize("call", ["commands", "getting", "putting"])
def test_nodes_without_a_name_are_reached_at_their_addresses(
    nameless: None, cluster: Cluster, client: ClusterClient, apart: tuple[int, ClusterNode], call: str
) -> None:
    after, run = CALLS[call]
    cluster.migrate(*apart)
    run(client)
    with cluster.migrating(slot_of(KEYS[0]), cluster.other_than(apart[1])):
        assert _read(client, [*KEYS, OTHER]) == [{after}] * 3


@pytest.mark.parametrize("call", ["get", "getting", "put", "putting", "put_once"])
def test_keys_on_both_sides_of_a_move_are_found(
    cluster: Cluster, client: ClusterClient, apart: tuple[int, ClusterNode], call: str
) -> None:
    """ASK: half of the keys have moved."""
    after, run = CALLS[call]
    with cluster.migrating(*apart, KEYS[1]):
        run(client)
        assert client.call("EXISTS", KEYS[0]) == client.call("EXISTS", KEYS[1]) == 1
        assert _read(client, [*KEYS, OTHER]) == [{after}] * 3
    assert _read(client, [*KEYS, OTHER]) == [{after}] * 3


def test_a_new_key_goes_to_where_its_slot_goes(
    cluster: Cluster, client: ClusterClient, apart: tuple[int, ClusterNode]
) -> None:
    with cluster.migrating(*apart):
        client.put([("{moved}:new", [view(_value(7))])])
        assert apart[1].ask("CLUSTER", "COUNTKEYSINSLOT", apart[0]) == 1
        assert _read(client, ["{moved}:new"]) == [{7}]
    assert _read(client, ["{moved}:new"]) == [{7}]
    client.unlink(["{moved}:new"])


def _begun(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    return thread, answers


def test_what_needs_keys_of_both_sides_waits(
    cluster: Cluster, client: ClusterClient, apart: tuple[int, ClusterNode]
) -> None:
    """TRYAGAIN: a server has some of the keys, and answers nothing about them before the others are there."""
    with cluster.migrating(*apart, KEYS[1]):
        thread, answers = _begun(lambda: client.call("EXISTS", *KEYS))
        thread.join(0.3)
        assert not answers
    thread.join()
    assert answers == [2]


_COUNTS = "redis.call('INCR', KEYS[1]) redis.call('DEL', KEYS[2]) return redis.call('SET', KEYS[2], 'new')"


@pytest.mark.parametrize("names_a_key_that_never_exists", [True, False])
def test_a_script_that_names_a_key_that_never_exists_does_not_end_in_the_middle(
    cluster: Cluster, client: ClusterClient, apart: tuple[int, ClusterNode], names_a_key_that_never_exists: bool
) -> None:
    """Without it, a server that is giving its slot away runs the script, and refuses to make a deleted key anew."""
    client.unlink(KEYS)
    sha = client.call("SCRIPT LOAD", _COUNTS)
    keys = [*KEYS, *["{moved}:never"] * names_a_key_that_never_exists]
    client.call("SET", KEYS[0], 0)
    client.call("SET", KEYS[1], "old")
    impatient = client.twin(0.5)
    with cluster.migrating(*apart):
        with pytest.raises(kvps.ServerError):
            impatient.call("EVALSHA", sha, len(keys), *keys)
        begun = client.call("GET", KEYS[0]) != "0"
    impatient.close()
    assert begun != names_a_key_that_never_exists
    if names_a_key_that_never_exists:
        assert client.call("EVALSHA", sha, len(keys), *keys) == "OK"
        assert client.together([("GET", key) for key in KEYS]) == ["1", "new"]


@pytest.mark.slow
def test_scripts_of_a_job_wait_until_their_slot_has_moved(cluster: Cluster, client: ClusterClient) -> None:
    """No gradient is lost and none counts twice while the control's slot goes from master to master."""
    rounds = 40
    job = kvps.Store(client).create_job("moves", model(), optimizer=kvps.SGD(lr=0.05))
    control = [job.access.keys.inbox, job.access.keys.clock, job.access.keys.pushed, job.access.keys.commits]
    slot = slot_of(job.access.keys.version)
    with aggregating(job), ThreadPoolExecutor(1) as threads:
        working = threads.submit(work_on, job, "w0", rounds)
        for move in range(4):
            await_version(job, 8 * move)
            moved = [key for key in control[:move] if client.call("EXISTS", key)]
            with cluster.migrating(slot, cluster.other_than(cluster.master_of(job.access.keys.version)), *moved):
                before = client.call("HGET", job.access.keys.version, "version")
                time.sleep(0.1)
                assert client.call("HGET", job.access.keys.version, "version") == before, "nothing is done halfway"
        assert working.result()[-1] == rounds
        await_version(job, rounds)
    assert check_chain(job) == rounds
    expected = plain_loop(model(), 1, rounds, 0.05)
    assert {name: value.tobytes() for name, value in job.snapshot()[1].items()} == {
        name: value.tobytes() for name, value in expected.items()
    }
    kvps.Store(client).remove_job("moves")


def test_a_command_is_refused_by_a_move_that_does_not_end(
    cluster: Cluster, client: ClusterClient, apart: tuple[int, ClusterNode]
) -> None:
    said = r"^redis://127\.0\.0\.1:\d+ is still moving a slot [^\n]*$"
    moving = cluster.migrating(*apart, KEYS[1])
    with client.twin(0.3) as impatient, moving, pytest.raises(kvps.ServerError, match=said):
        impatient.call("EXISTS", *KEYS)


def test_a_cluster_without_slots_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_PATIENCE", "0.2")
    refused = pytest.raises(kvps.ServerError, match="answers: no node knows who serves a slot")
    with cluster_node(tmp_path, *node_ports(1)) as alone, ClusterClient(alone.url) as client, refused:
        client.preflight()


def test_a_client_that_was_closed_connects_to_no_other_node(cluster: Cluster) -> None:
    """Its heartbeat's thread may be about to follow a failover then."""
    with ClusterClient(cluster.url) as client:
        client.call("GET", OTHER)
        client.close()
        for number in range(20):
            with pytest.raises(kvps.ServerLost, match="was closed here"):
                client.call("GET", f"key:{number}")


# -- nodes that come and go ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nodes_are_added_and_removed_under_a_client() -> None:
    """It began with the address of a node that serves no slot any more, and that knows no other node."""
    stays_master = ("--cluster-allow-replica-migration", "no")  # also without slots
    with running_cluster(*stays_master, masters=4, replicas=0) as cluster, ClusterClient(cluster.url, 20) as client:
        job = kvps.Store(client).create_job("grows", {"x": np.zeros(3, np.float32)}, shards=3)
        first, *others = cluster.nodes
        with Members(Address("127.0.0.1", first.port), None) as members, members.turn() as keep:
            SlotsMover(members, keep).rebalance([node.id for node in others])
            members.forget([first.id])
        first.ask("CLUSTER", "RESET", "HARD")
        client._arrays.nodes.forget_map()
        assert job.snapshot()[0] == 0
        assert job.state().version == 0
