"""Aggregators on a cluster: each takes the shards of the node near it, and stands in for one that is missing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from helpers.clusters import Cluster, ClusterNode, running_cluster
from helpers.harness import abandoned, aggregating, check_chain, gradient, model, plain_loop
from helpers.internals import held_by
from helpers.waiting import eventually
from kvps_aggregator import serve
from kvps_aggregator.held_shards import AggregatorOptions
from kvps_aggregator.job_watcher import JobWatcher
from kvps_aggregator.nearness import Near

import kvps
from kvps.connection.cluster import open_client
from kvps.connection.slots import slot_of
from kvps.errors import InvalidSetting
from kvps.job import Job
from kvps.store import Store

SHARDS = 3
LR = 0.05


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(masters=3, replicas=0) as found:
        yield found


@pytest.fixture
def job(cluster: Cluster) -> Iterator[Job]:
    """A job with a shard on each node."""
    with Store(open_client(cluster.url)) as store:
        made = store.create_job("job", model(), shards=SHARDS, optimizer=kvps.SGD(lr=LR), lease_ms=1000)
        yield made
        store.remove_job("job")


def near(*nodes: ClusterNode) -> Near:
    return Near([f"127.0.0.1:{node.port}" for node in nodes])


def shard_of(cluster: Cluster, job: Job, node: ClusterNode) -> int:
    (number,) = [n for n in range(SHARDS) if cluster.master_of(job.access.keys.slot(n)) is node]
    return number


@contextmanager
def training(job: Job) -> Iterator[None]:
    """A worker does rounds inside the block. Behind it, nothing is lost, and the weights are what they must be."""
    stop = threading.Event()

    def work() -> None:
        with job.join("w0") as session:
            while not stop.is_set():
                session.push(gradient(session.pull(), 0, session.round))
            session.pull()

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            yield
        finally:
            stop.set()
    working.result()
    rounds = job.state().clock["w0"]
    assert check_chain(job) == rounds > 3
    for name, array in plain_loop(model(), 1, rounds, LR).items():
        np.testing.assert_array_equal(job.snapshot()[1][name], array)


def goes_on(job: Job) -> bool:
    before = job.state().version
    return eventually(lambda: job.state().version > before + 3)


@pytest.mark.slow
def test_each_shard_is_held_by_the_aggregator_near_its_node(cluster: Cluster, job: Job) -> None:
    """The first one is alone for a while: it serves all shards, and gives up those that others are nearer to."""
    own = [{shard_of(cluster, job, node)} for node in cluster.nodes]
    with ExitStack() as stack:
        first = stack.enter_context(aggregating(job, near=near(cluster.nodes[0])))
        stack.enter_context(training(job))
        assert eventually(lambda: held_by(first))
        assert held_by(first) == own[0], "those near it at once, and others after a lease time"
        assert eventually(lambda: held_by(first) == {0, 1, 2})
        with ExitStack() as others:
            found = [first]
            for node in cluster.nodes[1:]:
                found.append(others.enter_context(aggregating(job, near=near(node))))
            assert eventually(lambda: [held_by(each) for each in found] == own)
            assert goes_on(job)
        assert eventually(lambda: held_by(first) == {0, 1, 2}), "they have ended"
        assert goes_on(job)


@pytest.mark.slow  # it waits for leases to end
def test_shards_of_a_killed_aggregator_are_taken_by_another_and_given_back(cluster: Cluster, job: Job) -> None:
    away, here = cluster.nodes[:2], cluster.nodes[2]
    own = shard_of(cluster, job, here)
    with aggregating(job, near=near(*away)) as other:
        with abandoned(job, near(here)) as killed:
            assert held_by(killed) == {own}
            assert eventually(lambda: held_by(other) == {0, 1, 2} - {own})
        with training(job):
            assert eventually(lambda: held_by(other) == {0, 1, 2})
            assert goes_on(job)
            with aggregating(job, near=near(here)) as back:
                assert eventually(lambda: (held_by(back), held_by(other)) == ({own}, {0, 1, 2} - {own}))
                assert goes_on(job)


@pytest.mark.slow
def test_when_slots_move_their_shards_go_to_the_aggregator_near_the_new_node(cluster: Cluster, job: Job) -> None:
    source, target = cluster.nodes[0], cluster.nodes[1]
    moved, stays = shard_of(cluster, job, source), shard_of(cluster, job, target)
    with ExitStack() as stack:
        one = stack.enter_context(aggregating(job, near=near(source, cluster.nodes[2])))
        two = stack.enter_context(aggregating(job, near=near(target)))
        stack.enter_context(training(job))
        assert eventually(lambda: (held_by(one), held_by(two)) == ({0, 1, 2} - {stays}, {stays}))
        cluster.migrate(slot_of(job.access.keys.slot(moved)), target)
        assert eventually(lambda: (held_by(one), held_by(two)) == ({0, 1, 2} - {stays, moved}, {stays, moved}))
        assert goes_on(job)
        cluster.migrate(slot_of(job.access.keys.slot(moved)), source)  # for the next test


@pytest.mark.slow
def test_two_aggregators_near_one_node_do_not_take_turns(cluster: Cluster, job: Job) -> None:
    with aggregating(job, near=near(*cluster.nodes)) as holder:
        assert eventually(lambda: held_by(holder) == {0, 1, 2})
        terms = job.access.reader.terms()
        with aggregating(job, near=Near(["auto"])) as standby:
            assert eventually(lambda: job.access.client.call("GET", job.access.keys.wish(0))), "it waits for the shards"
            assert not eventually(lambda: held_by(standby), 1.0)
        assert job.access.reader.terms() == terms


@pytest.mark.parametrize("text", ["here", "10.0.0.5:", ":6400", "10.0.0.5:0", "a b:6400", "10.0.0.5:66000", ""])
def test_text_that_is_no_node_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="--near wants HOST:PORT of a node, or auto, not"):
        Near([text])


def test_without_a_cluster_nothing_is_near(store: Store) -> None:
    with pytest.raises(InvalidSetting, match="--near is for a cluster: this server has the bytes of all shards"):
        serve(store.create_job("job", model()), near=Near(["auto"]))
    with pytest.raises(InvalidSetting, match="--near is for a cluster: this server has the bytes of all shards"):
        JobWatcher(store, print, print, AggregatorOptions(near=Near(["auto"])))


def test_a_node_that_no_slot_names_is_only_a_warning(cluster: Cluster, job: Job, caplog: Any) -> None:
    """It may be down now, and its aggregator is a standby meanwhile."""
    Near(["127.0.0.1:1"]).check(job.access.client)
    assert "no node of the cluster is near now" in caplog.text
    assert Near(["127.0.0.1:1"]).shards(job) == set()
