"""What a server of a cluster has lost of the present version is stored again; if nobody has it, the job goes back."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import numpy as np
import pytest
from helpers.clusters import running_cluster
from helpers.harness import aggregating, await_version, check_chain, log_entries
from helpers.waiting import eventually
from kvps_aggregator import Aggregator
from kvps_aggregator.failover import FailoverGuard

import kvps
from kvps.arrays.digest import weights_sha256
from kvps.connection.client import Client
from kvps.job import Job
from kvps.store import Store

pytestmark = pytest.mark.contract
ITEMS = 3_000


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with running_cluster(masters=3, replicas=0) as cluster:
        yield cluster.url


@pytest.fixture
def job(store: Store) -> Job:
    """A job at version 3: three rounds of ones."""
    settings = {"shards": 3, "workers": 1, "optimizer": kvps.SGD(lr=1.0, momentum=0.5), "lease_ms": 500}
    job = store.create_job("job", {"x": np.zeros(ITEMS, np.float32)}, **settings)
    with aggregating(job), job.join("w0") as session:
        for version in range(1, 4):
            session.pull()
            session.state = {"done": version}
            session.push({"x": np.ones(ITEMS, np.float32)})
            await_version(job, version)
    return job


def _lose(job: Job, names: tuple[str, ...], shard: int) -> int:
    """Delete a shard's keys of a version, as its server would have by a failover; return how many there were."""
    found = [key for key in job.access.client.scan(job.access.keys.slot(shard) + "*") if f":{names[shard]}" in key]
    job.access.client.unlink(found)
    return len(found)


def test_the_holder_stores_again_what_was_lost(job: Job) -> None:
    aggregator, state = Aggregator(job, Event()), job.state()
    aggregator.hold(at_once=True)
    before = job.snapshot()[1]["x"].copy()
    assert _lose(job, state.names, 1) == 3, "weights, momentum and the manifest"
    FailoverGuard(job).check(aggregator.held.shards.values())
    weights, slots, _ = job.access.reader.whole(state)
    assert np.array_equal(weights, before)
    assert sorted(slots) == ["momentum"]
    aggregator.release()


def _rounds_of_two(job: Job, loses: bool) -> str:
    """Train for 6 rounds on differences in int8; return the digest of what both workers hold at the end."""
    aggregator = Aggregator(job, Event())
    aggregator.hold(at_once=True)
    held = ["", ""]
    with job.join("w0") as first, job.join("w1") as second:
        for version in range(6):
            pulled = [session.pull()["x"] for session in (first, second)]
            held = [weights_sha256(view) for view in pulled]
            if loses and version:
                _lose(job, job.state().names, version % 3)
                FailoverGuard(job).check(aggregator.held.shards.values())
                job.access.reader.whole(job.state())  # with the view
            for session, view in zip((first, second), pulled, strict=True):
                session.push({"x": (view - session.rank) / 2})
            while job.state().version == version:
                aggregator.work()
    aggregator.release()
    assert held[0] == held[1]
    return held[0]


def test_what_workers_add_up_outlives_what_a_server_has_lost(store: Store) -> None:
    """The differences of the lost version are gone with it: a worker that missed them reads the whole view."""
    start = {"x": np.linspace(-3, 3, ITEMS, dtype=np.float32)}
    settings = {"shards": 3, "workers": 2, "weight_format": "int8", "lease_ms": 60_000, "worker_timeout_ms": 60_000}
    ends = {_rounds_of_two(store.create_job(f"loses-{loses}", start, **settings), loses) for loses in (False, True)}
    assert len(ends) == 1


def test_a_failover_of_one_server_asks_each_server_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        Client, "call", lambda self, *command, call=Client.call: asked.append(command[0]) or call(self, *command)
    )
    keys = [job.access.keys.slot(number) for number in range(60)]
    assert len(set(job.access.client.run_ids(keys))) == 3
    assert asked.count("INFO") <= 3


def test_without_its_holder_the_job_goes_back_one_version(job: Job) -> None:
    """The worker does the lost round again, and the weights are those of a run without a loss."""
    state = job.state()
    assert _lose(job, state.names, 2) == 3
    with aggregating(job):
        assert eventually(lambda: job.state().version == 2)
        with job.join("w0") as session:
            assert (session.round, session.state) == (2, {"done": 2})
            for version in range(3, 5):
                assert session.pull()["x"][0] == [0, -1, -2.5, -4.25][version - 1]
                session.push({"x": np.ones(ITEMS, np.float32)})
                await_version(job, version)
    assert np.array_equal(job.snapshot()[1]["x"], np.full(ITEMS, -6.125, np.float32))
    assert [fields["lost"] for _, fields in log_entries(job) if fields["kind"] == "recover"] == ["1"]
    check_chain(job)


def test_a_job_goes_back_with_its_view(store: Store) -> None:
    start = {"x": np.linspace(-3, 3, ITEMS, dtype=np.float32)}
    held: dict[str, list[str]] = {"whole": [], "loses": []}
    for name, digests in held.items():
        job = store.create_job(name, start, shards=3, workers=1, weight_format="int8", lease_ms=500)
        for rounds in (range(3), range(2 if name == "loses" else 3, 6)):
            with aggregating(job):
                assert eventually(lambda job=job, rounds=rounds: job.state().version == rounds[0])
                with job.join("w0") as session:
                    for version in rounds:
                        view = session.pull()["x"]
                        digests[version:] = [weights_sha256(view)]
                        session.push({"x": view / 2})
                        await_version(job, version + 1)
            if name == "loses" and not rounds[0]:
                assert _lose(job, job.state().names, 2) >= 3
    assert held["whole"] == held["loses"]


@pytest.mark.slow  # a cluster of its own for each case
@pytest.mark.parametrize(("replicas", "renames"), [(0, True), (1, True), (2, False)])
def test_dead_bytes_are_reused_only_where_each_replica_has_confirmed_the_next(replicas: int, renames: bool) -> None:
    """One of two could take over without them, and would have dead bytes under their names. A wait for a replica that
    is not there takes its whole time, so without one there are no waits: each shard finds out once, and the job once.
    """
    with running_cluster(masters=1, replicas=replicas) as cluster:
        assert eventually(lambda: all(len(cluster.slots(node)[0][3:]) == replicas for node in cluster.nodes))
        with kvps.connect(cluster.url) as store:
            job = store.create_job("job", {"x": np.zeros(600_000, np.float32)}, workers=1)
            with aggregating(job), job.join("w0") as session:
                for version in range(1, 6):
                    session.pull()
                    session.push({"x": np.ones(600_000, np.float32)})
                    await_version(job, version)
            assert np.unique(job.snapshot()[1]["x"]).size == 1
        commands = cluster.nodes[0].ask("INFO", "commandstats")
        assert any(name.startswith("cmdstat_rename") for name in commands) == renames
        waits = commands.get("cmdstat_wait", {}).get("calls", 0)
        assert waits >= 5 if replicas else waits <= 2


def test_what_is_whole_in_no_version_is_said_and_left(job: Job) -> None:
    state = job.state()
    before = tuple(job.access.client.call("HMGET", job.access.keys.version, *(f"before:{i}" for i in range(3))))
    _lose(job, state.names, 2)
    _lose(job, before, 0)
    aggregator = Aggregator(job, Event())
    with pytest.raises(kvps.CorruptData, match="version 3 of job 'job', shard 2"):
        aggregator.hold(at_once=True)
    aggregator.release()
    assert job.state().version == 3
