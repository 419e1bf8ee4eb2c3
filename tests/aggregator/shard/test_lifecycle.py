"""When dead bytes are freed on a cluster, where what names them is on another server than they are."""

from __future__ import annotations

import pytest
from helpers.clusters import Cluster, running_cluster
from helpers.harness import aggregating, model, work_on
from helpers.waiting import eventually

import kvps
from kvps.connection.cluster import open_client
from kvps.store import Store

ROUNDS = 20


def _waits(cluster: Cluster) -> int:
    """Return how often the nodes were asked to wait for a replica."""
    return sum(node.ask("INFO", "commandstats").get("cmdstat_wait", {}).get("calls", 0) for node in cluster.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [0, 3])
def test_a_shard_waits_for_a_replica_in_each_round_only_where_there_is_one(replicas: int) -> None:
    """A wait for a replica that is not there takes its whole time, in each round of each shard."""
    with running_cluster(replicas=replicas) as cluster, Store(open_client(cluster.url)) as store:
        job = store.create_job("job", model(), shards=3, optimizer=kvps.SGD(lr=0.1))
        with aggregating(job):
            work_on(job, "w0", ROUNDS)
            assert eventually(lambda: job.state().version == ROUNDS)
            waits = _waits(cluster)
    if replicas:
        assert waits >= ROUNDS
    else:
        assert waits <= 2 * 3, "each shard finds out once, and the job once"
