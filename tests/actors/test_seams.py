"""Learners, watchers and servers are killed, replaced and cut off: no acknowledged version is lost, and no watcher ever
has bits that no committed version has."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from helpers.clusters import running_cluster
from helpers.harness import log_entries
from helpers.learners import Child, Judge, Said, digest, watching, weights
from helpers.sentinels import watched_servers
from helpers.servers import ServerProcess, fill_memory, running_server
from helpers.waiting import awaited_job, eventually

import kvps
from kvps.errors import JobNotFound, KvpsError, LeaseLost, WrongOrder
from kvps.store import Store

pytestmark = pytest.mark.contract

JOB = "policy"
IN_FILES = ("--appendonly", "yes", "--appendfsync", "always")
few_or_many = pytest.mark.parametrize("kills", [6, pytest.param(120, marks=pytest.mark.slow)])


@contextmanager
def killed_at_the_end(child: Child) -> Iterator[Child]:
    try:
        yield child
    finally:
        child.kill()


# -- processes -----------------------------------------------------------------------------------------------------


@few_or_many
@pytest.mark.parametrize("shards", [1, 3])
def test_learners_are_killed_at_any_point_of_a_publish(store: Store, kills: int, shards: int) -> None:
    """The next one takes over, and every fifth waits until the lease of the dead one is over."""
    chance, judge, kills = random.Random(shards), Judge(), kills // 2
    store.publisher(JOB, weights(0, 0), shards=shards).close()
    seen: list[list[Said]] = []
    with watching(store, JOB) as watch, killed_at_the_end(Child("watch", store.url, JOB)) as other:
        for number in range(1, kills + 1):
            waits = kills > 10 and number % 5 == 0
            child = Child("learn", store.url, JOB, number, shards, *([] if waits else ["--takeover"]))
            if number % 4:
                assert eventually(lambda child=child: len(child.said) > 1 or child.process.poll() is not None)
                assert child.process.poll() is None, child.end()
            time.sleep(chance.uniform(0, 0.15))
            child.kill()
            judge.add(child.said)
        seen += [watch.said, other.said]
    versions = judge.check(store.job(JOB), seen)
    assert versions - len(judge.acknowledged) <= kills, "each kill hides at most one version from its learner"
    assert len(judge.acknowledged) > kills
    assert len(watch.said) > kills // 2


@few_or_many
def test_watchers_are_killed_and_started_again(store: Store, kills: int) -> None:
    chance, seen, judge = random.Random(2), list[list[Said]](), Judge()
    with killed_at_the_end(Child("learn", store.url, JOB, 1, 2)) as learner:
        awaited_job(store, JOB, 1)
        for _ in range(kills):
            child = Child("watch", store.url, JOB)
            assert eventually(lambda child=child: bool(child.said) or child.process.poll() is not None)
            time.sleep(chance.uniform(0, 0.1))
            child.kill()
            seen.append(child.said)
    judge.add(learner.said)
    judge.check(store.job(JOB), seen)
    assert all(seen)


@few_or_many
def test_two_learners_take_over_from_each_other_in_turns(store: Store, kills: int) -> None:
    """Neither knows when. The one that was replaced commits nothing more, whatever it was doing."""
    judge, refused = Judge(), 0
    store.publisher(JOB, weights(0, 0), shards=2).close()
    with watching(store, JOB) as watch:
        policy = store.publisher(JOB, weights(0, 0))
        for turn in range(1, kills + 1):
            version, stop = policy.version, threading.Event()
            failed: list[BaseException] = []
            publishing = threading.Thread(target=_publish_until, args=(policy, turn, stop, judge, failed))
            publishing.start()
            assert eventually(lambda version=version, policy=policy: policy.version > version)
            other = store.publisher(JOB, weights(0, 0), takeover=True)
            publishing.join(60)
            assert not publishing.is_alive()
            assert [type(each) for each in failed] == [LeaseLost]
            refused += 1
            policy.close()
            policy = other
        policy.close()
    versions = judge.check(store.job(JOB), [watch.said])
    assert refused == kills
    assert versions - len(judge.acknowledged) <= kills


def _publish_until(
    policy: kvps.Publisher, seed: int, stop: threading.Event, judge: Judge, failed: list[BaseException]
) -> None:
    """Publish until another learner has taken over, or `stop` is set; note the error."""
    try:
        while not stop.is_set():
            model = weights(seed, policy.version + 1)
            judge.add([(policy.publish(model, loss=seed), digest(model))])
    except KvpsError as error:
        failed.append(error)


def test_a_fork_of_a_learner_does_nothing_and_the_learner_goes_on(store: Store) -> None:
    judge = Judge()
    with store.publisher(JOB, weights(0, 0), shards=2) as policy, store.watch(JOB) as watch:
        judge.add([(policy.publish(weights(1, 1), loss=1), digest(weights(1, 1)))])
        watch.update()
        pid = os.fork()
        if not pid:  # in the fork: the code says which call was not refused
            os._exit(_refused_in_a_fork(policy, watch))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        for version in (2, 3):
            judge.add([(policy.publish(weights(1, version), loss=1), digest(weights(1, version)))])
            assert watch.update() == version
    assert judge.check(store.job(JOB), []) == 3


def _refused_in_a_fork(policy: kvps.Publisher, watch: kvps.Watch) -> int:
    calls = [lambda: policy.publish(weights(2, 2)), policy.wait, lambda: policy.load(weights(0, 0)), watch.update]
    for number, call in enumerate(calls, 1):
        try:
            call()
            return number
        except WrongOrder:
            pass
    policy.close(finish=True)  # does nothing
    return 0


# -- the server ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_the_server_is_killed_and_has_all_that_was_acknowledged(tmp_path: Path, kills: int) -> None:
    chance, judge = random.Random(3), Judge()
    with ServerProcess.on_port(tmp_path, *IN_FILES) as server, kvps.connect(_url(server)) as store:
        policy = store.publisher(JOB, weights(0, 0), shards=2)
        with watching(store, JOB) as watch, _publishing(policy, judge):
            for _ in range(kills):
                _await_next(policy)
                time.sleep(chance.uniform(0, 0.1))
                server.kill()
                server.start()
            _await_next(policy)
        policy.close()
        judge.check(store.job(JOB), [watch.said])
        lost = [fields["lost"] for _, fields in log_entries(store.job(JOB)) if fields["kind"] == "recover"]
        assert lost == ["0"] * kills


def _url(server: ServerProcess) -> str:
    return f"redis://127.0.0.1:{server.port}"


def test_a_server_without_files_forgets_the_job_and_each_call_says_so(tmp_path: Path) -> None:
    with ServerProcess.on_port(tmp_path, "--save", "") as server, kvps.connect(_url(server)) as store:
        policy, watch = store.publisher(JOB, weights(0, 0), shards=2), store.watch(JOB)
        policy.publish(weights(1, 1), loss=1)
        watch.update()
        server.kill()
        server.start()
        for call in (lambda: policy.publish(weights(1, 2)), watch.update, lambda: policy.load(weights(0, 0))):
            with pytest.raises(JobNotFound, match="no job 'policy'") as raised:
                call()
            assert "\n" not in str(raised.value)
        assert not watch.running
        policy.close()
        with store.publisher(JOB, weights(2, 0)) as policy:
            assert policy.version == 0


@pytest.mark.parametrize("shards", [1, 2])
def test_a_server_that_lost_its_last_versions_takes_others_in_their_places(tmp_path: Path, shards: int) -> None:
    """The log notes how many are lost. A watcher goes back to what is committed, and never mixes the two."""
    with ServerProcess.on_port(tmp_path, "--save", "") as server, kvps.connect(_url(server)) as store:
        policy, watch = store.publisher(JOB, weights(0, 0), shards=shards), store.watch(JOB)
        for version in range(1, 4):
            policy.publish(weights(1, version), loss=1)
        server.ask("SAVE")
        for version in range(4, 7):
            policy.publish(weights(1, version), loss=1)
            watch.update()
        behind = store.watch(JOB)
        behind.update()
        server.kill()
        server.start()
        assert watch.update() == 3
        assert digest(watch.arrays) == digest(weights(1, 3))
        for version in (4, 5, 6):
            assert policy.publish(weights(2, version), loss=2) == version
            assert watch.update() == version
            assert digest(watch.arrays) == digest(weights(2, version))
        assert behind.update() == 6, "it has the version 6 that was lost"
        assert digest(behind.arrays) == digest(weights(2, 6))
        policy.close()
        assert Judge().check(store.job(JOB), []) == 6
        assert [fields["lost"] for _, fields in log_entries(policy.job) if fields["kind"] == "recover"] == ["3"]


@pytest.mark.parametrize(
    ("shards", "fills"),
    [(3, 2), pytest.param(1, 30, marks=pytest.mark.slow), pytest.param(3, 30, marks=pytest.mark.slow)],
)
def test_a_publish_waits_until_a_full_server_has_room(shards: int, fills: int) -> None:
    items, judge = 1_500_000, Judge()
    given = ("--maxmemory", "48mb", "--maxmemory-policy", "noeviction")

    def publish(policy: kvps.Publisher, wait: bool = True) -> Said:
        model = weights(1, policy.version + 1, items)
        return policy.publish(model, loss=1, wait=wait), digest(model)

    def made() -> int:  # a full Redis refuses what is in a MULTI, also a read, and `Job.state` would wait
        return int(other.hget(policy.job.access.keys.version, "version"))

    with running_server(*given) as url, kvps.connect(url) as store, redis.Redis.from_url(url) as other:
        policy = store.publisher(JOB, weights(0, 0, items), shards=shards)
        with watching(store, JOB) as watch:
            for _ in range(fills):
                judge.add([publish(policy), publish(policy)])
                waits = False
                while not waits:  # it takes what was held in reserve, and what older versions have
                    fill_memory(other)
                    said = publish(policy, wait=False)
                    waits = not eventually(lambda v=said[0]: made() == v, seconds=0.5)
                    if not waits:
                        assert policy.wait() == said[0]
                        judge.add([said])
                    assert policy.version < 100 * fills, "the server is never full"
                other.delete("ballast")
                assert policy.wait() == said[0]
                judge.add([said])
        policy.close()
        assert judge.check(store.job(JOB), [watch.said], items) == policy.version


# -- the job -------------------------------------------------------------------------------------------------------


def test_a_job_is_removed_under_its_learner_and_its_watchers(store: Store) -> None:
    policy, watch = store.publisher(JOB, weights(0, 0), shards=2), store.watch(JOB)
    policy.publish(weights(1, 1), loss=1)
    watch.update()
    store.remove_job(JOB)
    calls = (
        lambda: policy.publish(weights(1, 2)),
        lambda: policy.load(weights(0, 0)),
        watch.update,
        lambda: watch.update(wait=5),
        lambda: watch.at(1),
    )
    for call in calls[:-1]:
        with pytest.raises(JobNotFound, match="policy"):
            call()
    assert digest(watch.arrays) == digest(weights(1, 1)), "what was read is there"
    assert not watch.running
    policy.close()
    assert list(store.client.scan("kvps:*policy*")) == [], "nothing was stored after the removal"
    with store.publisher(JOB, weights(0, 0)) as again, store.watch(JOB) as new:
        assert again.publish(weights(2, 1), loss=2) == 1
        for call in (lambda: policy.job.state(), watch.update, lambda: watch.update(wait=5)):
            with pytest.raises(JobNotFound, match="policy"):
                call()
        assert not watch.running, "the job that was made anew is another one"
        assert new.update() == 1
        assert digest(new.arrays) == digest(weights(2, 1))


def test_a_job_that_was_made_anew_gets_no_version_of_the_learner_before(store: Store) -> None:
    policy = store.publisher(JOB, weights(0, 0), shards=2)
    policy.publish(weights(1, 1), loss=1)
    store.remove_job(JOB)
    again = store.publisher(JOB, weights(0, 0), shards=2)
    for _ in range(2):
        with pytest.raises(JobNotFound, match="policy"):
            policy.publish(weights(1, 2), loss=1)
    policy.close(finish=False)
    assert again.publish(weights(2, 1), loss=2) == 1
    judge = Judge()
    judge.add([(1, digest(weights(2, 1)))])
    judge.check(again.job, [])
    again.close()


# -- failovers -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kills", [8])
def test_sentinels_fail_over(kills: int) -> None:
    """With durability replicated nothing that was acknowledged is lost."""
    judge = Judge()
    with watched_servers(*IN_FILES) as watched, kvps.connect(watched.url) as store:
        policy = store.publisher(JOB, weights(0, 0), shards=2, durability="replicated")
        with watching(store, JOB) as watch, _publishing(policy, judge):
            for _ in range(kills):
                _await_next(policy)
                victim = watched.master
                victim.kill()
                assert eventually(lambda victim=victim: watched.failed_over(victim))
                victim.start()
                assert eventually(watched.is_whole)
            _await_next(policy)
        policy.close()
        judge.check(store.job(JOB), [watch.said])
        lost = [fields["lost"] for _, fields in log_entries(store.job(JOB)) if fields["kind"] == "recover"]
        assert lost == ["0"] * kills


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills"), [("control", 6), ("data", 6)])
def test_a_master_of_a_cluster_fails_over(kind: str, kills: int) -> None:
    judge = Judge()
    with running_cluster() as nodes, kvps.connect(nodes.url) as store:
        policy = store.publisher(JOB, weights(0, 0), shards=3, durability="replicated")
        keys = policy.job.access.keys
        with watching(store, JOB) as watch, _publishing(policy, judge):
            for number in range(kills):
                _await_next(policy)
                key = keys.version if kind == "control" else keys.slot(number % 3)
                victim = nodes.master_of(key)
                victim.kill()
                assert eventually(lambda victim=victim, key=key: nodes.master_of(key) is not victim)
                victim.start()
                assert eventually(nodes.is_whole)
            _await_next(policy)
        policy.close()
        judge.check(store.job(JOB), [watch.said])


@contextmanager
def _publishing(policy: kvps.Publisher, judge: Judge) -> Iterator[None]:
    """Publish on a thread while the block runs; no call may fail."""
    stop, failed = threading.Event(), list[BaseException]()
    thread = threading.Thread(target=_publish_until, args=(policy, 1, stop, judge, failed))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(120)
        assert failed == []  # first: else the block only says that no version came
    assert not thread.is_alive()


def _await_next(policy: kvps.Publisher) -> None:
    version = policy.version
    assert eventually(lambda: policy.version > version + 1)
