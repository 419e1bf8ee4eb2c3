"""A session in trouble: refused, interrupted, begun anew. Each acknowledged gradient counts once, as it was."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers.arrays import assert_same_bits
from helpers.digits_job import digits_job, proved, task_gradient
from helpers.faults import full_server
from helpers.harness import aggregating, log_entries
from helpers.internals import lose_next_answer
from helpers.waiting import eventually
from kvps_aggregator import Aggregator, Outcome
from kvps_aggregator.shard import storage_redis
from kvps_aggregator.shard.fetch import ContributionFetch, Sizes

import kvps
from kvps.arrays.error_feedback import Residual
from kvps.connection.sockets import _Bulk
from kvps.session.membership import Membership
from kvps.store import Store
from kvps.transport import redis as redis_transport
from kvps.transport.version_reader import VersionReader
from kvps.transport.weight_reader import PullRequest, Weights

PATIENT: dict[str, Any] = {"worker_timeout_ms": 60_000, "transport": "redis"}
SMALL = {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)}
LARGE = {"a": np.zeros(300_000, np.float32), "b": np.zeros(300_000, np.float32)}


def _of(params: dict[str, np.ndarray], value: float) -> dict[str, np.ndarray]:
    return {name: np.full_like(array, value) for name, array in params.items()}


def _rejected(job: kvps.Job) -> list[str]:
    return [fields["reason"] for _, fields in log_entries(job) if fields["kind"] == "reject"]


# -- all gradients in one array ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient_format", ["fp32", "int8"])
def test_a_push_of_one_array_is_the_push_of_its_parts(store: Store, transport: str, gradient_format: str) -> None:
    ends = []
    for in_one in (False, True):
        job = digits_job(store, workers=1, transport=transport, gradient_format=gradient_format)
        with aggregating(job), job.join("w0") as session:
            for _ in range(5):
                grads = task_gradient(job, session)
                if in_one:
                    session.push_flat(np.concatenate([grads[p.name] for p in job.layout.parameters], axis=None))
                else:
                    session.push(grads)
            session.pull()
        ends.append(job.snapshot()[1])
        store.remove_job("digits")
    assert_same_bits(*ends)


def test_what_is_not_all_gradients_in_one_array_is_refused_and_changes_nothing(store: Store) -> None:
    job = store.create_job("job", SMALL, workers=1)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        for wrong in (None, [0.0] * 6, np.zeros(5, np.float32), np.zeros(6), np.zeros((6, 2), np.float32)[:, 0]):
            with pytest.raises(kvps.LayoutMismatch, match="all gradients are"):
                session.push_flat(wrong)  # type: ignore[arg-type]
        with pytest.raises(kvps.NotFinite, match="'b' holds NaN"):
            session.push_flat(np.array([0, 0, 0, 0, np.nan, 0], np.float32))
        assert session.push_flat(np.ones(6, np.float32)) == 1
        session.pull()
        session.put("a", SMALL["a"])
        with pytest.raises(kvps.WrongOrder, match="push_flat"):
            session.push_flat(np.ones(6, np.float32))
        assert session.push({"b": SMALL["b"]}) == 2


# -- pushes that fail ----------------------------------------------------------------------------------------------


def test_a_push_that_a_full_server_refused_counts_once(store: Store) -> None:
    """What a format had left out is in the gradient once, too, though that was pushed twice."""
    job = digits_job(store, gradient_format="bf16", workers=1, **PATIENT)
    with aggregating(job), job.join("w0") as session:
        for clock in (1, 2, 3):
            grads = task_gradient(job, session)
            if clock == 2:
                with full_server(store), pytest.raises(kvps.ServerFull):
                    session.push(grads)
            assert session.push(grads) == clock
        session.pull()
    assert (proved(job).by, proved(job).contributions) == ("recomputed", 3)


@pytest.mark.contract
@pytest.mark.parametrize("size", [3, 900_000])
@pytest.mark.parametrize("put", [False, True])
def test_what_has_left_of_a_gradient_with_a_nan_does_not_count(
    store: Store, transport: str, size: int, put: bool
) -> None:
    """Its last item is looked at when most of it has been sent."""
    params = {"a": np.zeros(size, np.float32), "b": np.zeros(size, np.float32)}
    bad, good = _of(params, 1), _of(params, 2)
    bad["b"][-1] = np.nan
    job = store.create_job("job", params, optimizer=kvps.SGD(lr=0.5), **PATIENT | {"transport": transport})
    with aggregating(job), job.join("w0") as session:
        for clock in (1, 2):
            session.pull()
            for _ in range(2):
                if put:
                    session.put("a", good["a"])
                with pytest.raises(kvps.NotFinite, match="'b' holds NaN or Inf"):
                    session.push({"b": bad["b"]} if put else bad)
                if put:
                    session.pull()
            assert session.push(good) == clock
        session.pull()
    assert job.snapshot()[1]["b"].tolist() == [-2.0] * size
    assert [c.seq for commit in job.log() for c in commit.plan.contributions] == [1, 2]


@pytest.mark.parametrize("size", [3, 900_000])
def test_a_gradient_that_is_skipped_when_most_of_it_has_left(store: Store, transport: str, size: int) -> None:
    """Again with the same one when the answer was lost; another one is not taken for it. Nothing of it is stored: the
    server would hold it until a sweep, and a run that skips many would fill it."""
    params = {"a": np.zeros(size, np.float32)}
    bad, good = _of(params, 1), _of(params, 2)
    bad["a"][-1] = np.inf
    settings = {**PATIENT, "transport": transport, "nonfinite": "skip"}
    job = store.create_job("job", params, optimizer=kvps.SGD(lr=0.5), **settings)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        lose_next_answer()
        with pytest.raises(kvps.ServerLost):
            session.push(bad)
        assert list(store.client.scan("kvps:*:g:*")) == []
        with pytest.raises(kvps.WrongOrder, match="another gradient"):
            session.push(good)
        assert session.push(bad) == 1
        session.pull()
        assert session.push(good) == 2
        session.pull()
    assert job.snapshot()[1]["a"].tolist() == [-1.0] * size
    assert [c.weight for commit in job.log() for c in commit.plan.contributions] == [0, 1]


@pytest.mark.contract
def test_another_gradient_is_not_acknowledged_in_place_of_one_that_counted(store: Store) -> None:
    """The answer to a push was lost for good, and its user goes on with the next batch."""
    job = store.create_job("job", SMALL, optimizer=kvps.SGD(lr=1.0), **PATIENT)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        lose_next_answer()
        with pytest.raises(kvps.ServerLost):
            session.push(_of(SMALL, 1))
        assert eventually(lambda: job.state().version == 1)
        session.pull()
        with pytest.raises(kvps.WrongOrder, match="leave, and join again"):
            session.push(_of(SMALL, 2))
        assert session.push(_of(SMALL, 1)) == 1, "the same one is the one that counted"
        session.pull()
        assert session.push(_of(SMALL, 2)) == 2
        session.pull()
    assert job.snapshot()[1]["b"].tolist() == [-3.0] * 3


def test_another_gradient_is_not_taken_for_one_whose_push_was_interrupted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes when it has been accepted, and before it is counted here."""
    job = store.create_job("job", SMALL, optimizer=kvps.SGD(lr=1.0), gradient_format="bf16")
    with aggregating(job), job.join("w0") as session:
        session.pull()
        with monkeypatch.context() as patch:
            patch.setattr(Residual, "keep", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                session.push(_of(SMALL, 1))
        with pytest.raises(kvps.WrongOrder, match="how the push before this one ended is not known"):
            session.push(_of(SMALL, 2))
        assert session.push(_of(SMALL, 1)) == 1
        session.leave(finished=False)


# -- put -----------------------------------------------------------------------------------------------------------


@pytest.mark.contract
def test_nothing_of_a_skipped_contribution_counts(store: Store) -> None:
    """Neither what was finite, nor later what a format had left out of it; and those after it are whole."""
    job = store.create_job("job", SMALL, shards=2, nonfinite="skip", gradient_format="bf16", **PATIENT)
    with aggregating(job), job.join("w0") as session:
        for bad in (True, False, False):
            session.pull()
            session.put("a", np.full(3, np.nan if bad else 1, np.float32))
            session.put("b", np.ones(3, np.float32))
            session.push()
        session.pull()
    assert not _rejected(job)
    for value in job.snapshot()[1].values():
        np.testing.assert_allclose(value, -0.2, rtol=1e-2)


def test_a_put_that_found_no_room_leaves_nothing_of_its_nan_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient that is pushed in its place counts as it is, and not as zeros."""
    settings = {**PATIENT, "transport": "shm", "nonfinite": "skip"}
    job = store.create_job("job", SMALL, optimizer=kvps.SGD(lr=1.0), **settings)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with aggregating(job), job.join("w0") as session:
        session.pull()
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(kvps.ServerFull):
                session.put("a", np.full(3, np.nan, np.float32))
        session.put("a", np.ones(3, np.float32))
        assert session.push({"b": np.ones(3, np.float32)}) == 1
        assert session.pull()["a"].tolist() == [-1.0] * 3
    assert [c.weight for commit in job.log() for c in commit.plan.contributions] == [1]


@pytest.mark.contract
def test_what_was_put_with_a_nan_counts_as_zeros_whatever_fails_before_its_push(store: Store, transport: str) -> None:
    """Until the next pull, which forgets it."""
    settings = {**PATIENT, "transport": transport, "nonfinite": "skip"}
    job = store.create_job("job", SMALL, optimizer=kvps.SGD(lr=1.0), **settings)
    ones, nan = np.ones(3, np.float32), np.full(3, np.nan, np.float32)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.put("a", nan)
        session.pull()
        session.put("a", ones)
        with pytest.raises(kvps.LayoutMismatch, match="put already"):
            session.put("a", nan)
        with pytest.raises(kvps.LayoutMismatch, match="shape"):
            session.put("b", nan[:2])
        assert session.push({"b": ones}) == 1
        session.pull()
        session.put("a", nan)
        with pytest.raises(kvps.LayoutMismatch, match="unknown c"):
            session.push({"b": ones, "c": ones})
        with pytest.raises(kvps.UsageError, match="the loss"):
            session.push({"b": ones}, "low")
        assert session.push({"b": ones}) == 2
        assert session.pull()["a"].tolist() == [-1.0] * 3
    assert [c.weight for commit in job.log() for c in commit.plan.contributions] == [1, 0]


@pytest.mark.parametrize("where", ["write_set", "digest_of"])
def test_an_interrupted_put_leaves_no_holes(store: Store, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    job = store.create_job("job", LARGE, **PATIENT)
    place: Any = _Bulk if where == "write_set" else redis_transport
    with aggregating(job), job.join("w0") as session:
        session.pull()
        with monkeypatch.context() as interrupting:
            interrupting.setattr(place, where, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                session.put("b", LARGE["b"])
        with pytest.raises(kvps.LayoutMismatch, match="missing b"):
            session.push({"a": LARGE["a"]})
        with pytest.raises(kvps.WrongOrder, match="leave, and join again"):
            session.push(LARGE)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        assert session.push(_of(LARGE, 1)) == 1
        session.pull()
    assert not _rejected(job)


@pytest.mark.contract
@pytest.mark.parametrize("params", [SMALL, LARGE])
def test_a_batch_that_failed_is_begun_anew(store: Store, params: dict[str, np.ndarray]) -> None:
    """What was put for it is forgotten with the next pull."""
    job = store.create_job("job", params, optimizer=kvps.SGD(lr=1.0), gradient_format="bf16", **PATIENT)
    with aggregating(job), job.join("w0") as session:
        for _ in range(2):
            session.pull()
            session.put("b", _of(params, 4)["b"])
        session.pull()
        session.put("b", _of(params, 1)["b"])
        assert session.push({"a": _of(params, 1)["a"]}) == 1
        session.pull()
    assert not _rejected(job)
    assert np.unique(job.snapshot()[1]["b"]).tolist() == [-1.0]


def test_what_was_put_for_a_removed_job_is_gone(store: Store) -> None:
    job = store.create_job("job", LARGE, **PATIENT)

    def work() -> None:
        with job.join("w0") as session:
            session.pull()
            store.remove_job("job")
            session.put("b", LARGE["b"])
            raise ValueError("the user's backward fails")

    with pytest.raises(ValueError, match="backward"):
        work()
    assert not list(store.client.scan("kvps:{job*"))


# -- prefetch ------------------------------------------------------------------------------------------------------


def has_prefetched() -> bool:
    """Return whether no weights are being read ahead in this process."""
    return all(thread.name != "kvps-prefetch" for thread in threading.enumerate())


def test_a_pull_that_fails_keeps_the_weights_apart(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ones are not fetched into those that the user has."""
    job = store.create_job("job", SMALL, staleness=-1, **PATIENT)
    with aggregating(job), job.join("w0", prefetch=True) as session:
        session.pull()
        session.push(_of(SMALL, 1))
        assert eventually(has_prefetched)
        with monkeypatch.context() as failing:
            failing.setattr(Membership, "round_state", lambda _: (_ for _ in ()).throw(kvps.ServerLost("gone")))
            with pytest.raises(kvps.ServerLost):
                session.pull()
        params = session.pull()
        before = params["b"].copy()
        session.push(_of(SMALL, 1))
        assert eventually(has_prefetched)
        assert params["b"].tobytes() == before.tobytes()


def test_an_interrupted_pull_has_nobody_else_fetch_into_its_array(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = store.create_job("job", SMALL, staleness=-1, **PATIENT)
    targets: list[int] = []
    gate, read = threading.Event(), VersionReader.read

    def slow(self: VersionReader, request: PullRequest) -> Weights:
        if threading.current_thread().name.startswith("kvps-prefetch"):
            targets.append(id(request.into))
            gate.wait(120)
        return read(self, request)

    monkeypatch.setattr(VersionReader, "read", slow)
    with aggregating(job), job.join("w0", prefetch=True) as session:
        session.pull()
        session.push(_of(SMALL, 1))
        assert eventually(lambda: len(targets) == 1)
        with monkeypatch.context() as interrupting:
            interrupting.setattr(Future, "result", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                session.pull()
        gate.set()
        session.pull()
        assert len(targets) == 1, "what is being fetched is waited for"


@pytest.mark.contract
def test_who_joins_behind_is_waited_for_with_prefetch_too(store: Store) -> None:
    """SSP(1): the next weights have come already when a third worker joins, two rounds behind."""
    job = store.create_job("job", SMALL, staleness=1, workers=2, **PATIENT)
    with aggregating(job), job.join("w0", prefetch=True) as w0, job.join("w1") as w1:
        for _ in range(5):
            for session in (w0, w1):
                session.pull()
                session.push(_of(SMALL, 1))
        assert eventually(lambda: sum(job.state().clock.values()) == 10)
        w0.pull()
        w1.pull()
        w1.push(_of(SMALL, 1))
        assert eventually(has_prefetched)
        joined, leaving = threading.Event(), threading.Event()

        def third() -> None:
            with job.join("w2"):
                joined.set()
                time.sleep(0.5)  # if w0 did not wait, its pull would return meanwhile
                leaving.set()

        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(third)
            assert joined.wait(120)
            w0.push(_of(SMALL, 1))
            w0.pull()
            assert leaving.is_set(), "w0 waits for w2, two rounds behind, until that leaves"
            ended.result()


def test_a_script_that_does_not_leave_ends_all_the_same(store: Store) -> None:
    store.create_job("job", SMALL, staleness=-1, **PATIENT)
    code = f"import kvps; session = kvps.connect({store.url!r}).job('job').join('w0', prefetch=True); session.pull()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- its other end -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_stale_holder_that_looks_for_who_made_a_sum_infinite(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another has committed meanwhile, and freed what it wants to look at: it stands by."""
    monkeypatch.setattr(storage_redis, "_FEW_KEYS", 1)
    job = store.create_job("job", SMALL, staleness=-1, workers=2, reduction="sum", lease_ms=60_000, **PATIENT)
    stale, other = Aggregator(job, threading.Event()), Aggregator(job, threading.Event())
    check = ContributionFetch.check

    def late(self: ContributionFetch, sizes: Sizes, rejects: bool) -> None:
        monkeypatch.setattr(ContributionFetch, "check", check)
        stale.held.leases.give_up(0)
        other.hold(at_once=True)
        assert eventually(lambda: other.work() is Outcome.COMMITTED), "it rejects one and commits the other"
        check(self, sizes, rejects)

    with job.join("w0") as w0, job.join("w1") as w1:
        for session in (w0, w1):
            session.pull()
        for session in (w0, w1):
            session.push(_of(SMALL, 3e38))
        stale.hold(at_once=True)
        monkeypatch.setattr(ContributionFetch, "check", late)
        stale.work()
        assert not stale.held.shards
    stale.release()
    other.release()
    assert job.state().version == 1


@pytest.mark.parametrize("error", [ValueError("I/O operation on closed file."), AttributeError("'NoneType' object")])
def test_who_is_in_the_middle_of_a_call_when_a_store_is_closed_meets_one_error(
    error: Exception, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what redis-py raises on a socket that another thread has closed: a heartbeat's thread would show it."""
    with kvps.connect(server_url) as other:

        def closed_meanwhile(*_: object) -> None:
            other.client.close()
            raise error

        monkeypatch.setattr(other.client._arrays, "exchange", closed_meanwhile)
        with pytest.raises(kvps.ServerLost, match="was closed here"):
            other.client.call("PING")


def test_a_write_into_a_pulled_array_says_what_to_do(store: Store) -> None:
    """NumPy refuses it, because the array is the job's."""
    job = store.create_job("job", {"x": np.zeros(3, np.float32)}, workers=1)
    with pytest.raises(ValueError, match="read-only") as caught, job.join("w0") as session:
        session.pull()["x"] += 1
    assert caught.value.__notes__ == ["arrays that pull() returns are the job's: change a copy, as params[name].copy()"]
