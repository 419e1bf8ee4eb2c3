"""Actors that send experience: their prompts, the room that they wait for, and what becomes of both when they end."""

from __future__ import annotations

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.learners import weights
from helpers.rollouts import JOB, VALUE, actor, fates, ids_of, kinds, learner, model, put, silence
from helpers.rollouts_oracle import Process, create, made
from helpers.waiting import eventually

import kvps
from kvps.arrays.layout import Layout
from kvps.config import JobConfig, Metadata
from kvps.errors import InvalidSetting, JobNotFound, JobSuspended, UsageError, WorkerEvicted, WrongOrder
from kvps.store import Store

pytestmark = pytest.mark.contract


def test_an_actor_that_is_silent_gives_its_prompt_and_its_room_back(store: Store) -> None:
    """What was accepted stays: another actor adds what the group lacks."""
    with learner(store, prompts=1, group=2) as policy, actor(store, "a0") as first, actor(store, "a1") as second:
        policy.rollouts.take(groups=1, wait=0)
        ids = put(first)
        assert first.next_unit() == 0
        assert second.next_unit(wait=0) is None, "another one has it"
        silence(store, "a0")
        assert policy.rollouts.take(groups=1, wait=0) == []
        assert [each.name for each in policy.job.rollouts.now().actors] == ["a1"]
        ids += put(second)
        assert first.rollouts.put(VALUE, version=0, unit=0) is None, "its prompt is answered"
        items = policy.rollouts.take(groups=1)
        assert ids_of(items) == ids
        assert {item.actor for item in items} == {"a0", "a1"}
        policy.publish(model(1), trained=items)
        assert first.next_unit() is None
        assert second.next_unit() is None


def test_an_actor_that_was_silent_goes_on_where_there_are_no_prompts(store: Store) -> None:
    with learner(store) as policy, actor(store, "a0") as watch:
        policy.rollouts.take(1, wait=0)
        put(watch)
        silence(store, "a0")
        policy.rollouts.take(2, wait=0)
        assert policy.job.rollouts.now().actors == []
        put(watch)
        assert [each.items for each in policy.job.rollouts.now().actors] == [1], "of its present incarnation"


def test_the_end_of_a_watch_gives_the_prompt_back(store: Store) -> None:
    with learner(store, prompts=2, group=2) as policy:
        with actor(store, "a0") as first:
            put(first)
        with actor(store, "a1") as second:
            assert second.next_unit() == 0
            put(second, 3)
        assert [item.unit for item in policy.rollouts.take(groups=1)] == [0, 0]
        with pytest.raises(WrongOrder, match="closed"):
            first.next_unit()
        with pytest.raises(WrongOrder, match="closed"):
            first.rollouts.put(VALUE, version=0)
        assert policy.job.rollouts.now().actors == []
        assert policy.job.rollouts.now().offered == 0


def test_a_second_actor_of_a_name_ends_the_first(store: Store) -> None:
    with learner(store, prompts=3) as policy, actor(store, "a0") as first, actor(store, "a0") as second:
        assert first.next_unit() == 0
        assert second.next_unit() == 0, "the prompt of the first is given back"
        assert first.rollouts.put(VALUE, version=0) is None
        with pytest.raises(WorkerEvicted, match="a0") as raised:
            first.next_unit()
        assert "\n" not in str(raised.value)
        assert second.next_unit() == 0
        put(second, 3)
        first.close()
        assert [item.unit for item in policy.rollouts.take(groups=3)] == [0, 1, 2]


def test_a_put_waits_for_room_and_goes_on_after_a_publish(store: Store) -> None:
    with learner(store, capacity=2) as policy, actor(store) as watch, ThreadPoolExecutor(1) as pool:
        put(watch, 2)
        assert not watch.rollouts.room()
        putting = pool.submit(put, watch)
        time.sleep(0.1)
        items = policy.rollouts.take(2)
        assert not putting.done()
        policy.publish(model(1), trained=items)
        assert putting.result(60)
        assert kinds(store) == ["trained", "trained", "waiting"]


def test_bytes_are_room_too(store: Store) -> None:
    with learner(store, capacity_bytes=64 << 20) as policy, actor(store) as watch, ThreadPoolExecutor(1) as pool:
        large = {"frames": np.zeros(40 << 20, np.uint8)}
        put(watch, 1, large)
        putting = pool.submit(put, watch, 1, large)
        time.sleep(0.1)
        assert not putting.done()
        assert policy.job.rollouts.now().nbytes < 41 << 20
        policy.rollouts.reject(policy.rollouts.take(1), "large")
        assert putting.result(60)
        for size in (1 << 26, 1 << 27):
            with pytest.raises(InvalidSetting, match="split it into several") as raised:
                watch.rollouts.put({"frames": np.zeros(size, np.uint8)}, version=0)
            assert "\n" not in str(raised.value)


def test_an_actor_sees_whether_what_it_begins_will_be_fresh(store: Store) -> None:
    with learner(store, max_staleness=1, capacity=8) as policy, actor(store) as watch:
        assert watch.rollouts.room()
        put(watch, 2)
        assert policy.rollouts.take(2)
        assert watch.rollouts.room(), "one version is made of these two"
        put(watch, 2)
        assert not watch.rollouts.room(), "and another one of the next two"
        policy.publish(model(1), trained=policy.rollouts.take(2))
        policy.rollouts.give_back()
        watch.update()
        assert watch.rollouts.room()


def test_each_misuse_of_an_actor_is_one_line_and_nothing_is_lost(store: Store) -> None:
    with learner(store, prompts=4) as policy, actor(store, "a0") as watch:
        with pytest.raises(WrongOrder, match="no prompt: call next_unit"):
            watch.rollouts.put(VALUE, version=0)
        assert watch.next_unit() == 0
        assert watch.rollouts.put(VALUE, version=0, unit=3) is None, "another prompt than it has"
        for item, version, text in (
            (VALUE, 7, "version 7 was not read here"),
            (VALUE, -1, "version"),
            (VALUE, None, "version"),
            (VALUE, 0.5, "version"),
            (VALUE, "0", "version"),
            (VALUE, [(0, 0, 0)], "version"),
            (VALUE, [], "."),
            (VALUE, [(5, 0), (2, 0)], "."),
            ({}, 0, "."),
            ({"o": object()}, 0, "o"),
            (np.zeros(3), 0, "."),
        ):
            with pytest.raises(InvalidSetting, match=text) as raised:
                watch.rollouts.put(item, version=version)  # type: ignore[arg-type]
            assert "\n" not in str(raised.value)
        put(watch)
        assert watch.next_unit() == 1
        for other in ({"m": np.arange(3)}, {"n": np.arange(3.0)}, {"n": 3}, VALUE | {"x": 1.0}):
            with pytest.raises(InvalidSetting, match="another form than the first ones") as raised:
                watch.rollouts.put(other, version=0)
            assert "\n" not in str(raised.value)
        assert watch.next_unit() == 1, "the prompt is still its own"
        put(watch, 3)
        assert kinds(store) == ["waiting"] * 4
        assert policy.job.rollouts.now().offered == 0
    with pytest.raises(kvps.KvpsError, match="name"):
        store.watch(JOB, actor="a b")


@pytest.mark.parametrize("how", ["stop", "suspend"])
def test_a_job_that_is_ended_hands_nothing_out(store: Store, how: str) -> None:
    policy = learner(store, prompts=9, group=2, capacity=2)
    with actor(store) as watch, actor(store) as other, ThreadPoolExecutor(2) as pool:
        put(watch, 2)
        taking = pool.submit(policy.rollouts.take, groups=1)
        assert [item.unit for item in taking.result(60)] == [0, 0]
        assert watch.next_unit() == 1
        putting = pool.submit(watch.rollouts.put, VALUE, 0)
        time.sleep(0.1)
        assert not putting.done(), "there is no room"
        getattr(policy.job, how)("enough")
        assert putting.result(60) is None
        assert watch.next_unit() is None
        assert other.next_unit() is None
        if how == "stop":
            assert policy.rollouts.take(groups=1) == []
        else:  # or the end of the block would finish the job
            with pytest.raises(JobSuspended, match="enough"):
                policy.rollouts.take(groups=1)
        policy.close()
        policy = learner(store, prompts=9, group=2, capacity=2)  # goes on
        assert [item.unit for item in policy.rollouts.take(groups=1)] == [0, 0]
        policy.publish(model(1), trained=[each.id for each in policy.job.rollouts.fates()])
        assert watch.next_unit() == 1
        put(watch, 2)
        assert [item.unit for item in policy.rollouts.take(groups=1)] == [1, 1]
        policy.close()


def test_experience_goes_on_while_a_job_is_paused(store: Store) -> None:
    with learner(store, prompts=9) as policy, actor(store) as watch:
        policy.job.pause()
        put(watch, 2)
        items = policy.rollouts.take(groups=2)
        policy.publish(model(1), trained=items, wait=False)
        put(watch)
        time.sleep(0.1)
        assert sorted(kinds(store)) == ["taken", "taken", "waiting"]
        policy.job.resume()
        assert policy.wait() == 1
        assert sorted(kinds(store)) == ["trained", "trained", "waiting"]


def test_a_learner_returns_with_the_same_settings_or_leaves_them_out(store: Store) -> None:
    learner(store, prompts=3, group=2).close()
    with pytest.raises(UsageError, match="differ in epochs") as raised:
        learner(store, prompts=3, group=2, epochs=2)
    assert "\n" not in str(raised.value)
    learner(store, prompts=3, group=2).close()
    with store.publisher(JOB, model(), wait=0) as policy:
        assert policy.rollouts.settings == kvps.Rollouts(prompts=3, group=2)


def test_a_job_of_an_older_kvps_takes_no_experience(store: Store) -> None:
    layout = Layout.of_state(model(), 1, None)
    config = JobConfig(staleness=-1, transport="redis", metadata=Metadata(publishes=1))
    store.create_published(JOB, layout, np.zeros(layout.size, np.float32), config)
    with store.publisher(JOB, model(), wait=0) as policy, actor(store) as watch:
        calls = (
            lambda: watch.rollouts.put(VALUE, version=0),
            watch.next_unit,
            watch.rollouts.room,
            lambda: policy.rollouts.take(1),
            lambda: policy.job.rollouts.now(),
            lambda: policy.job.rollouts.settings,
        )
        for call in calls:
            with pytest.raises(UsageError, match="takes no experience") as raised:
                call()
            assert "\n" not in str(raised.value)
        assert policy.publish(model(1)) == 1
        assert watch.update() == 1
        assert policy.job.rollouts.fates() == []
    with pytest.raises(UsageError, match="other rollouts"):
        learner(store, prompts=3)


def test_prompts_are_asked_for_only_where_there_are_some(store: Store) -> None:
    with learner(store), actor(store) as watch:
        with pytest.raises(UsageError, match="hands out no prompts"):
            watch.next_unit()
        with pytest.raises(InvalidSetting, match="hands out no prompts"):
            watch.rollouts.put(VALUE, version=0, unit=0)


def test_what_there_is_at_an_instant(store: Store) -> None:
    with learner(store, max_staleness=4, prompts=3, group=2) as policy, actor(store, "a0") as watch:
        put(watch, 2)
        policy.publish(model(1))
        watch.update()
        put(watch, 1)
        policy.rollouts.take(groups=1)
        now = policy.job.rollouts.now()
        assert (now.waiting, now.taken, now.offered, now.handed_out, now.closed) == (1, 2, 0, 2, 0)
        assert now.staleness == {0: 1, 1: 2}
        [there] = now.actors
        assert (there.name, there.items, there.version, there.unit) == ("a0", 3, 1, 1)
        assert there.silent_s < 60


def test_neither_side_is_pickled_and_a_fork_of_one_does_nothing(store: Store) -> None:
    with learner(store, prompts=2) as policy, actor(store, "a0") as watch:
        assert watch.next_unit() == 0
        policy.rollouts.take(groups=1, wait=0)
        for each in (policy.rollouts, watch.rollouts):
            with pytest.raises(UsageError, match="cannot be pickled") as raised:
                pickle.dumps(each)
            assert "\n" not in str(raised.value)
        pid = os.fork()
        if not pid:  # in the fork: the code says which call was not refused
            os._exit(_refused_in_a_fork(policy, watch))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        put(watch, 2)
        assert {each.actor for each in policy.rollouts.take(groups=2)} == {"a0"}


def _refused_in_a_fork(policy: kvps.Publisher, watch: kvps.Watch) -> int:
    calls = (
        watch.next_unit,
        lambda: watch.rollouts.put(VALUE, version=0),
        lambda: policy.rollouts.take(groups=1, wait=0),
        policy.rollouts.give_back,
        lambda: policy.rollouts.reject([], "none"),
    )
    for number, call in enumerate(calls, 1):
        try:
            call()
            return number
        except WrongOrder:
            pass
    watch.close()
    policy.close(finish=True)
    return 0


def test_a_job_is_removed_under_its_actors_and_its_learner(store: Store) -> None:
    policy, watch = learner(store, prompts=9), actor(store)
    put(watch, 2)
    items = policy.rollouts.take(groups=1)
    store.remove_job(JOB)
    for call in (
        watch.next_unit,
        lambda: watch.rollouts.put(VALUE, version=0, unit=2),
        watch.rollouts.room,
        lambda: policy.rollouts.take(groups=1),
        lambda: policy.rollouts.reject(items, "gone"),
        lambda: policy.publish(model(1), trained=items),
    ):
        with pytest.raises(JobNotFound, match=JOB):
            call()
    watch.close()
    policy.close()
    assert eventually(lambda: list(store.client.scan("kvps:*policy*")) == [])


def test_many_actors_answer_all_prompts_of_all_epochs_once(store: Store) -> None:
    def act(name: str) -> None:
        with kvps.connect(store.url) as own, actor(own, name) as watch:
            while watch.next_unit() is not None:
                watch.update()
                watch.rollouts.put(VALUE, version=watch.version)

    settings = {"prompts": 10, "epochs": 2, "group": 3, "capacity": 12, "max_staleness": 3}
    with learner(store, 2, **settings) as policy, ThreadPoolExecutor(3) as pool:
        acting = [pool.submit(act, f"a{number}") for number in range(3)]
        while batch := policy.rollouts.take(groups=2):
            policy.publish(model(policy.version + 1), trained=batch)
        for each in acting:
            each.result(60)
    trained = [each.unit for each in fates(store).values() if each.fate == "trained"]
    assert sorted(trained) == [unit for unit in range(20) for _ in range(3)]


@pytest.mark.slow
def test_an_actor_that_is_killed_is_missed_though_nothing_else_happens(store: Store, tmp_path: Path) -> None:
    """Also where its timeout is as short as the time between two looks of a learner that waits."""
    create(store, kvps.Rollouts(prompts=1, group=40), worker_timeout_ms=1_000)
    killed = Process(tmp_path, store.url, "act", "dead", 0)
    policy = store.publisher(JOB, weights(0, 0), rollouts=None)
    assert eventually(lambda: [each.unit for each in policy.job.rollouts.now().actors] == [0])
    killed.kill()
    with actor(store, "a0") as watch, ThreadPoolExecutor(1) as pool:
        taking = pool.submit(policy.rollouts.take, groups=1)
        lacking = 40 - len(fates(store))
        assert watch.next_unit(wait=60) == 0
        for _ in range(lacking):
            put(watch, 1, made("a", 0))
        assert len(taking.result(60)) == 40
    policy.close()
