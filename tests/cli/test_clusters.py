"""Commands on a cluster: each does there what it does on one server."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.clusters import Cluster, running_cluster
from helpers.commands import TINY, Started, kvps_run
from helpers.digits_job import digits_job, proved
from helpers.harness import await_version
from helpers.waiting import eventually

import kvps
from kvps.connection.slots import slot_of
from kvps.machine.paths import server_program
from kvps.protocol.acl import ROLES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three masters and a replica of each."""
    with running_cluster() as found:
        yield found


@pytest.fixture
def at(cluster: Cluster, home: Path) -> Callable[..., str]:
    """A function that runs a command on the cluster, and returns what it prints."""

    def run(*arguments: str) -> str:
        done = kvps_run(*arguments, KVPS_REDIS_URL=cluster.url)
        assert done.returncode == 0, done.stderr + done.stdout
        assert "Traceback" not in done.stderr
        return done.stdout

    return run


def _sha256(report: str) -> str:
    return str(json.loads(Path(report).read_text())["weights_sha256"])


def test_a_whole_life_of_a_job_with_the_weights_of_one_server(at: Callable[..., str]) -> None:
    at("up", "digits", *TINY, "--shards", "3", "--job", "life", "--report", "cluster.json")
    one = kvps_run("up", "digits", *TINY, "--shards", "3", "--job", "life", "--report", "one.json")
    assert one.returncode == 0, one.stderr
    assert _sha256("cluster.json") == _sha256("one.json")
    assert "life" in at("jobs")
    assert "life" in at("status", "life")
    assert f"sha256 {_sha256('cluster.json')}: in Redis as made by the replay" in at("verify", "life")
    at("checkpoint", "save", "life", "--to", "life.safetensors")
    at("checkpoint", "restore", "life.safetensors", "--job", "again")
    assert "again" in at("jobs")
    for name in ("life", "again"):
        at("rm", name, "--yes")
    assert "life" not in at("jobs")


def test_an_acl_user_of_each_role_is_made_on_every_node(cluster: Cluster, at: Callable[..., str]) -> None:
    for role in ROLES:
        name, _, word = at("acl", "mine", "--role", role, "--apply").strip().partition("=")
        assert name == "export KVPS_REDIS_URL"
        with kvps.connect(*shlex.split(word)) as store:
            assert store.client.is_cluster
    for node in cluster.nodes:
        assert {f"kvps-mine-{role}" for role in ROLES} <= set(node.ask("ACL", "USERS")), "a replica may be promoted"
        node.ask("ACL", "DELUSER", *(f"kvps-mine-{role}" for role in ROLES))


def test_a_replica_that_is_away_is_missed_before_a_job_counts_on_it(cluster: Cluster, at: Callable[..., str]) -> None:
    replica = cluster.replica_of(cluster.masters[0])
    create = ("create", "digits", "--job", "safe", "--durability", "replicated")
    replica.kill()
    assert re.search(r"advice\s+replicas\s+1 known replica cannot be reached", at("doctor"))
    refused = kvps_run(*create, KVPS_REDIS_URL=cluster.url)
    assert (
        "1 known replica cannot be reached, and may take over later: start it, or have it forgotten" in refused.stderr
    )
    replica.start()
    assert eventually(cluster.is_whole)
    at(*create)
    at("rm", "safe", "--yes")


@pytest.mark.skipif("valkey" not in server_program(), reason="only Valkey 9 moves a slot at one instant")
def test_slots_that_valkey_moves_at_one_instant_cost_no_contribution(start: Callable[..., Started]) -> None:
    with running_cluster(masters=3, replicas=0) as cluster, kvps.connect(cluster.url) as store:
        job = digits_job(store, workers=2, shards=3, epochs=4, worker_timeout_ms=60_000)
        parts = [start("aggregator", "start", "--job", job.name, "--redis", cluster.url)]
        parts += [start("worker", "--job", job.name, "--redis", cluster.url) for _ in range(2)]
        for move in range(4):
            key = job.access.keys.version if move % 2 else job.access.keys.slot(move % 3)
            await_version(job, 10 * move)
            source = cluster.master_of(key)
            slot, target = slot_of(key), cluster.other_than(source)
            source.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.id)
            assert eventually(lambda k=key, s=source: cluster.master_of(k) is not s), move
        assert [part.wait() for part in parts[1:]] == [0, 0]
        assert job.await_finished()
        parts[0].end()  # before its servers end: it would wait for them
        assert proved(job).by == "recomputed"
