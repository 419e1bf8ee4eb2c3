"""A cluster's client: what is refused in one line, what goes on after a node has died, and where shards fall."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
from helpers.clusters import Cluster
from helpers.harness import aggregating, gradient, large_model, work
from helpers.waiting import eventually
from kvps_workers.queue.queue import CPU, TaskQueue

import kvps
from kvps.arrays.digest import weights_sha256
from kvps.connection.cluster import ClusterClient
from kvps.protocol.keys import JobKeys
from kvps.protocol.scripts import JobScripts
from kvps.store import Store

pytestmark = pytest.mark.contract

TINY = {"x": np.zeros(3, np.float32)}


# -- what does not work on a cluster ------------------------------------------------------------------------------


def test_a_cluster_is_not_reached_through_a_socket(cluster: Cluster) -> None:
    with pytest.raises(kvps.InvalidSetting, match=r"^a cluster is reached over TCP [^\n]*$"):
        kvps.connect(f"unix://{cluster.nodes[0].folder}/s")


def test_a_cluster_has_one_database(cluster: Cluster) -> None:
    with pytest.raises(kvps.KvpsError, match=r"^redis://127\.0\.0\.1:\d+/1 does not let kvps look at it: [^\n]*$"):
        kvps.connect(f"{cluster.url}/1")


def test_the_queue_needs_a_single_server(cluster: Cluster) -> None:
    with pytest.raises(
        kvps.ServerUnfit, match=r"is a node of a cluster, and RQ's queues need a single server: [^\n]*$"
    ):
        TaskQueue(cluster.url, CPU)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"transport": "shm"}, "transport shm needs a server of its own on this host, and this is a cluster: leave it"),
        ({"durability": "replicated"}, "waits for all replicas of each server. At .* one server has none: add a"),
    ],
)
def test_a_setting_that_this_cluster_has_not(client: ClusterClient, setting: dict[str, str], said: str) -> None:
    store = Store(client)
    with pytest.raises(kvps.KvpsError, match=said) as refused:
        store.create_job("refused", TINY, **setting)
    assert "\n" not in str(refused.value)
    assert not [key for key in client.scan("*") if "refused" in key]


# -- where things are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3, 5, 8])
def test_the_shards_of_a_job_fall_evenly_on_the_masters(cluster: Cluster, client: ClusterClient, shards: int) -> None:
    for number in range(5):
        keys = JobKeys(f"job-{number}", Store(client)._spread_id(f"job-{number}", shards))
        held = Counter(cluster.master_of(keys.slot(shard)) for shard in range(shards))
        assert max(held.values()) - min([held[node] for node in cluster.masters]) <= 1


@pytest.mark.slow
def test_a_cluster_and_one_server_make_the_same_weights(store: Store, client: ClusterClient) -> None:
    ends = set()
    for place in (store, Store(client)):
        job = place.create_job("digest", large_model(), workers=2, shards=3, optimizer=kvps.AdamW())
        with aggregating(job):
            work(job, 6, lambda s, params, round_: gradient(params, s.rank, round_), 2)
            assert job.await_finished()
        ends.add(weights_sha256(job.checkpoint().weights))
        place.remove_job("digest")
    assert len(ends) == 1


def test_streams_of_several_masters_are_waited_for(client: ClusterClient) -> None:
    streams = {f"{{{name}}}:stream": "0" for name in "abcdef"}
    assert client.wait(streams, timeout_ms=200) == {}
    timer = threading.Timer(0.1, lambda: client.call("XADD", "{d}:stream", "*", "field", "1"))
    timer.start()
    assert list(client.wait(streams, timeout_ms=20_000)) == ["{d}:stream"]
    timer.join()
    client.unlink(list(streams))


# -- scripts, and nodes that are away -----------------------------------------------------------------------------


def test_a_node_that_has_lost_its_scripts_gets_them_again(cluster: Cluster, client: ClusterClient) -> None:
    """NOSCRIPT is one node's own: a slot that has moved, or a restart."""
    job = Store(client).create_job("scripts", TINY)
    for node in cluster.masters:
        node.ask("SCRIPT", "FLUSH")
        with job.join("w0") as session:
            session.pull()
            session.leave(finished=False)
        JobScripts(client.call, job.access.keys, 1).own(0, "1")
    Store(client).remove_job("scripts")


@pytest.mark.slow
def test_a_dead_master_without_a_replica_is_said_in_one_line(cluster: Cluster, client: ClusterClient) -> None:
    victim = cluster.masters[-1]
    key = next(f"key:{number}" for number in range(100) if cluster.master_of(f"key:{number}") is victim)
    client.call("SET", key, "there")
    victim.kill()
    try:
        with client.twin(0.5) as impatient, pytest.raises(kvps.KvpsError) as said:
            impatient.call("GET", key)
        assert "\n" not in str(said.value)
        assert cluster.url in str(said.value)
    finally:
        victim.start()
    assert eventually(lambda: cluster.is_whole(replicas=False))
    assert client.call("GET", key) is None, "this server keeps nothing"
    client.put([(key, [memoryview(b"again")])])


def test_a_user_is_made_on_every_node(cluster: Cluster, client: ClusterClient) -> None:
    client.call("ACL SETUSER", "kvps-everywhere", "on")
    assert all(node.ask("ACL", "DELUSER", "kvps-everywhere") == 1 for node in cluster.nodes)
