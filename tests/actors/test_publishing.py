"""A learner publishes, others watch: every version is seen whole or not at all, whoever is replaced or restarted."""

from __future__ import annotations

import json
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.harness import log_entries
from helpers.servers import ServerProcess
from helpers.waiting import eventually

import kvps
from kvps.errors import (
    JobNotFound,
    JobStopped,
    JobSuspended,
    LayoutMismatch,
    LeaseLost,
    NotFinite,
    UsageError,
    WrongOrder,
)
from kvps.protocol.bounds import MOST_DIFFERENCES
from kvps.store import Store

pytestmark = pytest.mark.contract

Arrays = dict[str, np.ndarray]


def made(version: int, items: int = 5_000) -> Arrays:
    """Return the model of a version: of several dtypes, with a few items that change from version to version."""
    rng = np.random.default_rng(0)
    model: Arrays = {
        "w": rng.normal(0, 0.02, (items // 10, 10)).astype(ml_dtypes.bfloat16),
        "h": rng.normal(size=7).astype(np.float16),
        "f": rng.normal(size=(3, 5)).astype(np.float32),
        "steps": np.array(version, np.int64),
        "mask": np.arange(9) % 2 == 0,
        "none": np.zeros((0, 4), np.float32),
    }
    flat = model["w"].reshape(-1)
    for each in range(version):
        flat[each * 37 % items :: 101] += ml_dtypes.bfloat16(0.25)
    return model


def same(one: Any, other: Arrays) -> bool:
    return list(one) == list(other) and all(one[name].tobytes() == array.tobytes() for name, array in other.items())


@pytest.mark.parametrize("shards", [1, 3])
def test_a_watcher_has_the_bits_of_each_version(store: Store, shards: int) -> None:
    with store.publisher("policy", made(0), shards=shards) as policy, store.watch("policy") as watch:
        assert (policy.version, watch.version, watch.running) == (0, -1, True)
        target = {name: np.zeros_like(array) for name, array in made(0).items()}
        assert watch.load(target) == 0
        assert same(target, made(0))
        for version in range(1, 6):
            assert policy.publish(made(version), loss=1 / version) == version
            assert watch.update(target) == version
            assert same(target, made(version))
            assert same(watch.arrays, made(version))
        late = store.watch("policy")
        assert late.update() == 5
        assert (watch.traffic.differences, watch.traffic.wholes, watch.traffic.repairs) == (5, 1, 0)
        for version in range(6, 9):
            policy.publish(made(version))
        assert late.update() == 8, "three differences"
        assert same(late.arrays, made(8))
        assert late.traffic.differences == 3
        whole = sum(array.nbytes for array in made(0).values())
        assert late.traffic.nbytes < 1.5 * whole
    assert not watch.running
    commits = [fields for _, fields in log_entries(policy.job) if fields["kind"] == "commit"]
    assert [int(fields["version"]) for fields in commits] == list(range(1, 9))
    assert '"loss":0.5,' in commits[1]["plan"]


def test_what_a_learner_hands_over_at_its_return_is_not_published(store: Store) -> None:
    first = store.publisher("policy", made(3))
    first.publish(made(4))
    first.close()
    with store.publisher("policy", made(9)) as policy:
        assert policy.version == 1
        model = made(9)
        assert policy.load(model) == 1
        assert same(model, made(4))
        assert store.watch("policy").update() == 1
        assert policy.publish(made(5)) == 2


def test_the_next_learner_waits_or_takes_over_and_the_other_one_commits_nothing(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    first = store.publisher("policy", made(0), shards=2)
    first.publish(made(1))
    with pytest.raises(UsageError, match="is published by"):
        store.publisher("policy", made(0), wait=0)
    beside = store.watch("policy")
    beside.update()
    second = store.publisher("policy", made(0), takeover=True)
    assert second.version == 1
    for _ in range(2):
        with pytest.raises(LeaseLost, match="another learner publishes job 'policy'"):
            first.publish(made(7))
    assert second.publish(made(2)) == 2
    assert beside.update() == 2
    assert (beside.traffic.differences, beside.traffic.wholes) == (1, 1), "from one learner's last version to the next"
    first.close()
    waiting = threading.Thread(target=lambda: store.publisher("policy", made(0)).close())
    waiting.start()
    assert eventually(lambda: "job policy: stands by: " in caplog.text), "a script shows warnings"
    assert second.publish(made(3)) == 3
    second.close()
    waiting.join(60)
    assert not waiting.is_alive()
    watch = store.watch("policy")
    assert watch.update() == 3
    assert same(watch.arrays, made(3))


def test_the_end_of_a_learner_that_was_replaced_does_not_finish_the_job(store: Store) -> None:
    def replaced() -> None:
        with store.publisher("policy", made(0)) as first:
            first.publish(made(1))
            second.append(store.publisher("policy", made(0), takeover=True))

    second: list[kvps.Publisher] = []
    with pytest.raises(LeaseLost):
        replaced()
    assert store.watch("policy").running
    assert second[0].publish(made(2)) == 2
    second[0].close()


def test_publishing_beside_the_next_step(store: Store) -> None:
    model = made(1)
    with store.publisher("policy", made(0)) as policy:
        assert policy.publish(model, wait=False) == 1
        model["w"][:] = 0  # the learner trains on
        assert policy.wait() == 1
        watch = store.watch("policy")
        watch.update()
        assert same(watch.arrays, made(1))
        bad = made(2)
        bad["f"][1, 2] = np.nan
        with pytest.raises(NotFinite, match="'f'"):
            policy.publish(bad, wait=False)
        assert policy.version == 1
        store.publisher("policy", made(0), takeover=True).close()
        policy.publish(made(2), wait=False)
        with pytest.raises(LeaseLost):
            policy.publish(made(3), wait=False)
        policy.close()
    assert store.watch("policy").update() == 1


def test_a_block_that_fails_leaves_the_job_to_be_gone_on_with(store: Store) -> None:
    def fail(error: BaseException) -> None:
        with store.publisher("policy", made(0), wait=0) as policy:
            policy.publish(made(policy.version + 1))
            raise error

    for error in (ValueError("mine"), SystemExit(75), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fail(error)
        assert store.watch("policy").running
    with store.publisher("policy", made(0), wait=0) as policy:
        assert policy.version == 3
    assert not store.watch("policy").running
    with store.publisher("policy", made(0), wait=0) as policy:  # it goes on all the same
        assert store.watch("policy").running
        assert policy.publish(made(4)) == 4


def test_a_job_that_is_stopped_takes_no_version(store: Store) -> None:
    with store.publisher("policy", made(0)) as policy:
        policy.publish(made(1))
        store.job("policy").stop("enough")
        with pytest.raises(JobStopped, match="enough"):
            policy.publish(made(2))
        policy.publish(made(2))
        pytest.fail("the block goes on behind JobStopped")
    assert store.job("policy").state().version == 1
    with store.publisher("policy", made(0)) as policy:
        store.job("policy").pause()
        policy.publish(made(2), wait=False)
        time.sleep(0.3)
        assert store.job("policy").state().version == 1
        store.job("policy").resume()
        assert policy.wait() == 2


def test_each_misuse_is_one_line_and_changes_nothing(store: Store) -> None:
    with store.publisher("policy", made(0)) as policy:
        other = made(1)
        del other["h"]
        with pytest.raises(LayoutMismatch, match="h"):
            policy.publish(other)
        with pytest.raises(LayoutMismatch):
            policy.publish(made(1) | {"h": np.zeros(7, np.float32)})
        with pytest.raises(LayoutMismatch):
            policy.publish(made(1) | {"h": np.zeros(8, np.float16)})
        with pytest.raises(LayoutMismatch, match="another model"):
            store.publisher("policy", other, takeover=True)
        with pytest.raises(kvps.InvalidSetting, match="loss"):
            policy.publish(made(1), loss=float("nan"))
        with pytest.raises(UsageError, match="has no workers"):
            store.job("policy").join("w0")
        with pytest.raises(LayoutMismatch):
            store.watch("policy").update({"w": np.zeros(3, np.float32)})
        with pytest.raises(WrongOrder, match="no version yet"):
            _ = store.watch("policy").arrays
        assert policy.version == store.job("policy").state().version == 0
        for each in (policy, store.watch("policy")):
            with pytest.raises(UsageError, match="cannot be pickled"):
                pickle.dumps(each)
    with pytest.raises(WrongOrder, match="closed"):
        policy.publish(made(1))
    store.create_job("trained", {"x": np.zeros(3, np.float32)})
    with pytest.raises(UsageError, match="trained by its workers"):
        store.publisher("trained", {"x": np.zeros(3, np.float32)})
    with pytest.raises(JobNotFound):
        store.watch("nothing", wait=0.1)


def test_an_old_version_is_there_while_its_bytes_are(store: Store) -> None:
    with store.publisher("policy", made(0)) as policy:
        for version in range(1, 4):
            policy.publish(made(version))
        watch = store.watch("policy")
        for version in range(1, 4):
            assert same(watch.at(version), made(version))
        for version in (4, 99):
            with pytest.raises(kvps.InvalidSetting, match=f"version {version} of job 'policy' is not kept"):
                watch.at(version)
        assert watch.version == -1


def test_engines_get_what_has_changed(store: Store) -> None:
    with store.publisher("policy", made(0)) as policy:
        watch = store.watch("policy")
        assert [name for name, _ in watch.changed()] == list(made(0))
        policy.publish(made(0) | {"h": np.ones(7, np.float16)})
        assert [(name, array.tolist()) for name, array in watch.changed()] == [("h", [1.0] * 7)]
        assert list(watch.changed()) == []


def test_a_watcher_waits_for_the_next_version(store: Store) -> None:
    with store.publisher("policy", made(0)) as policy:
        watch = store.watch("policy")
        watch.update()
        assert watch.update(wait=0.2) == 0
        threading.Timer(0.3, policy.publish, [made(1)]).start()
        assert watch.update(wait=60) == 1
        assert eventually(lambda: policy.version == 1)


@pytest.mark.parametrize(
    ("fault", "repairs"), [("gone", 0), ("cut", 0), ("longer", 0), ("changed", 1), ("applied before", 1)]
)
def test_a_difference_that_does_not_fit_is_repaired_by_a_whole_read(store: Store, fault: str, repairs: int) -> None:
    with store.publisher("policy", made(0)) as policy, store.watch("policy") as watch:
        policy.publish(made(1))
        policy.publish(made(2))
        watch.update()
        [before] = policy.job.state().names
        policy.publish(made(3))
        [name], keys, call = policy.job.state().names, policy.job.access.keys, store.client.call
        key = keys.pulled(0, name, 0)
        value = call("STRLEN", key)
        if fault == "gone":
            call("UNLINK", key)
        elif fault == "longer":
            call("APPEND", key, "more")
        elif fault == "changed":
            call("SETRANGE", key, value // 2, "changed")
        elif fault == "cut":
            call("SET", key, "cut")
        else:
            call("COPY", keys.pulled(0, before, 0), key, "REPLACE")
            manifest = json.loads(call("GET", keys.manifest(0, name)))
            manifest["differences"][-1] = call("STRLEN", key)
            call("SET", keys.manifest(0, name), json.dumps(manifest))
        assert watch.update() == 3
        assert same(watch.arrays, made(3))
        assert (watch.traffic.repairs, watch.traffic.wholes) == (repairs, 2)


def test_differences_are_kept_up_to_a_number_and_up_to_the_bytes_of_a_version(store: Store) -> None:
    flat = np.zeros(200_000, np.int16)
    with store.publisher("many", {"w": flat}) as many, store.publisher("large", {"w": flat[:2_000].copy()}) as large:
        near, far, other = store.watch("many"), store.watch("many"), store.watch("large")
        for watch in (far, other):
            watch.update()
        for version in range(1, MOST_DIFFERENCES + 1):
            flat[version] += 1
            many.publish({"w": flat})
            large.publish({"w": flat[:2_000]})
            if version == 1:
                near.update()
        assert [watch.update() for watch in (near, far, other)] == [MOST_DIFFERENCES] * 3
        assert near.traffic[:2] == (MOST_DIFFERENCES - 1, 1)
        assert far.traffic[:2] == (0, 2), "so many are not kept"
        assert other.traffic[:2] == (0, 2), "they have more bytes than the version"
        assert same(far.arrays, {"w": flat})


def test_a_watch_that_fails_has_no_version_until_it_has_read_one(store: Store) -> None:
    with store.publisher("policy", made(0)) as policy, store.watch("policy") as watch:
        policy.publish(made(1))
        watch.update()
        policy.publish(made(2))
        keys, [name] = policy.job.access.keys, policy.job.state().names
        for key in (keys.weights(0, name, 0), keys.pulled(0, name, 0)):
            store.client.call("SETRANGE", key, 50, "damage")
        with pytest.raises(kvps.CorruptData, match="not those that were committed"):
            watch.update()
        assert watch.version == -1
        assert same(watch.at(1), made(1)), "not what was read of version 2"
        policy.publish(made(3))
        assert watch.update() == 3
        assert same(watch.arrays, made(3))


def test_what_an_engine_has_not_taken_comes_again(store: Store) -> None:
    with store.publisher("policy", made(0)), store.watch("policy") as watch:
        names = list(made(0))
        for name, _ in watch.changed():
            if name == names[2]:
                break
        assert [name for name, _ in watch.changed()] == names[2:]
        assert list(watch.changed()) == []


def test_an_actor_waits_while_the_job_is_suspended(store: Store) -> None:
    def suspended() -> None:
        with store.publisher("policy", made(0)) as policy:
            policy.job.suspend("later")
            policy.publish(made(1))

    with pytest.raises(JobSuspended, match="later"):
        suspended()
    watch = store.watch("policy")
    assert (watch.update(), watch.running) == (0, True)
    with ThreadPoolExecutor(1) as actor:
        waiting = actor.submit(watch.update, wait=60)
        with store.publisher("policy", made(0), wait=0) as policy:
            assert policy.publish(made(1)) == 1
            assert waiting.result() == 1, "it does not come back while the job is suspended"
    assert not watch.running


def test_damaged_weights_are_never_handed_on(store: Store) -> None:
    with store.publisher("policy", made(0)) as policy, store.watch("policy") as watch:
        policy.publish(made(1))
        key = policy.job.access.keys.weights(0, policy.job.state().names[0], 0)
        store.client.call("SETRANGE", key, 100, "damage")
        with pytest.raises(kvps.CorruptData, match="not those that were committed"):
            watch.update()
        assert watch.version == -1
        policy.publish(made(2))
        assert watch.update() == 2
        assert same(watch.arrays, made(2))


def test_a_restart_of_the_server_loses_no_version_that_was_acknowledged(tmp_path: Path) -> None:
    files = ("--appendonly", "yes", "--appendfsync", "always")
    with ServerProcess.on_port(tmp_path, *files) as server, kvps.connect(f"redis://127.0.0.1:{server.port}") as store:
        with store.publisher("policy", made(0), shards=2) as policy:
            watch = store.watch("policy")
            for version in range(1, 5):
                assert policy.publish(made(version)) == version
                assert watch.update() == version
                server.kill()
                server.start()
            assert same(watch.arrays, made(4))
            assert policy.publish(made(5)) == 5
        assert watch.update() == 5
        assert same(watch.arrays, made(5))
