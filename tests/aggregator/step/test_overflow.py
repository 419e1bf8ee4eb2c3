"""Finite contributions that make NaN or Inf: the one that is the cause is rejected, and nothing of it is committed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.digits_job import digits_job, proved, run_workers, training
from helpers.harness import aggregating, await_version, check_chain, log_entries, push_until_given_up
from kvps_cli.prove.verify import proof_of

import kvps
from kvps.arrays.layout import CHUNK_ITEMS
from kvps.job import Job
from kvps.session import push
from kvps.session.session import Session
from kvps.store import Store

ONE = {"x": np.zeros(4, np.float32)}
TWO_CHUNKS = {"x": np.zeros(CHUNK_ITEMS + 8, np.float32)}
OVERFLOWS = "it is the largest of those whose reduced gradient overflows"


@contextmanager
def _workers(job: Job) -> Iterator[list[Session]]:
    with ExitStack() as stack:
        yield [stack.enter_context(job.join(f"w{rank}")) for rank in range(job.config.workers)]


def _push(session: Session, number: float, weight: int | None = None) -> None:
    session.push({name: np.full_like(value, number) for name, value in session.pull().items()}, weight=weight)


def _rejected(job: Job) -> list[tuple[str, str]]:
    """Return the worker and the reason of each rejection."""
    entries = [fields for _, fields in log_entries(job) if fields["kind"] == "reject"]
    return [(fields["worker"], fields["reason"]) for fields in entries]


def _assert_finite(job: Job) -> None:
    assert all(np.isfinite(value).all() for value in job.snapshot()[1].values())
    check_chain(job)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": kvps.SGD(clip_norm=1.0)},
        {"gradient_format": "bf16"},
        {"reduction": "sum"},
        {"transport": "shm"},
    ],
    ids=str,
)
def test_the_largest_is_rejected_and_the_others_count(store: Store, settings: dict[str, Any]) -> None:
    job = store.create_job("job", ONE, workers=3, **settings)
    with _workers(job) as sessions, aggregating(job):
        for session, number in zip(sessions, (2e38, 3e38, 1.0), strict=True):
            _push(session, number)
        await_version(job, 1)
    (commit,) = job.log()
    assert [c.worker for c in commit.plan.contributions] == ["w0", "w2"]
    assert _rejected(job) == [("w1", OVERFLOWS)]
    _assert_finite(job)


def test_it_is_the_largest_with_its_weight(store: Store) -> None:
    job = store.create_job("job", ONE, workers=2, reduction="weighted")
    with _workers(job) as (first, second), aggregating(job):
        first.pull()
        second.pull()
        _push(first, 2e30, weight=1)
        _push(second, 1e30, weight=2_000_000_000)
        await_version(job, 1)
    assert _rejected(job) == [("w1", OVERFLOWS)]
    _assert_finite(job)


def test_it_is_the_largest_as_its_staleness_changes_it(store: Store) -> None:
    settings = {"staleness": -1, "quorum": 2, "reduction": "sum", "staleness_scaling": "inverse"}
    job = store.create_job("job", ONE, workers=3, **settings)
    with _workers(job) as sessions, aggregating(job):
        sessions[0].pull()
        for version in range(1, 4):
            for session in sessions[1:]:
                _push(session, 1.0)
            await_version(job, version)
        sessions[0].push({"x": np.full(4, 3.3e38, np.float32)})  # it counts a quarter
        _push(sessions[1], 2.9e38)
        await_version(job, 4)
    assert _rejected(job) == [("w1", OVERFLOWS)]
    _assert_finite(job)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_who_is_not_finite_is_to_blame_before_who_is_large(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    """Both overflow together in the first chunk, and one of them is not finite in the second."""
    monkeypatch.setattr(push, "finite", lambda array: True)  # a worker of another make
    job = store.create_job("job", TWO_CHUNKS, workers=2, reduction="sum")
    with _workers(job) as (first, second), aggregating(job):
        _push(first, 3e38)
        bad = np.full(TWO_CHUNKS["x"].shape, 2e38, np.float32)
        bad[-8:] = number
        second.pull()
        second.push({"x": bad})
        await_version(job, 1)
    assert _rejected(job) == [("w1", "it holds NaN or Inf")]
    _assert_finite(job)


NEAR_THE_END = {"a": np.zeros(4, np.float32), "b": np.full(4, -3e38, np.float32)}
STEPS: Sequence[dict[str, Any]] = (
    {"optimizer": kvps.SGD(lr=1.0)},
    {"optimizer": kvps.SGD(lr=1.0, clip_norm=3e38), "shards": 2},
    {"optimizer": kvps.SGD(lr=1.0), "transport": "shm"},
    {"optimizer": kvps.SGD(lr=1.0, momentum=0.9), "shards": 2, "reduction": "sum"},
)
NO_STEP = "optimizer 'sgd' makes NaN or Inf in the weights of 'b' of finite gradients"


@pytest.mark.parametrize("settings", STEPS, ids=str)
def test_a_step_that_overflows_is_not_committed(store: Store, settings: dict[str, Any]) -> None:
    job = store.create_job("job", NEAR_THE_END, **settings)
    with job.join("w0") as session:
        with pytest.raises(kvps.NotFinite) as caught, aggregating(job):
            push_until_given_up(job, session, 0.0, 3e38)
        assert str(caught.value) == (
            f"version 2 of job 'job' is not committed: {NO_STEP}: lower its learning rate, or create the job with "
            f"nonfinite='skip', which rejects contributions that do this"
        )
        assert (job.state().version, len(job.access.reader.inbox())) == (1, 1)


@pytest.mark.parametrize("settings", STEPS, ids=str)
def test_a_job_that_skips_what_is_not_finite_rejects_the_largest_of_such_a_step(
    store: Store, settings: dict[str, Any]
) -> None:
    job = store.create_job("job", NEAR_THE_END, workers=2, nonfinite="skip", **settings)
    with _workers(job) as (first, second), aggregating(job):
        _push(first, 3e38)
        _push(second, 1.0)
        await_version(job, 1)
    (commit,) = job.log()
    assert [c.worker for c in commit.plan.contributions] == ["w1"]
    assert _rejected(job) == [("w0", f"it is the largest of those of which {NO_STEP}")]
    _assert_finite(job)


CODE = """
class Root:
    slots = ()
    def step(self, weights, gradient, state, out, state_out, lr, version, xp):
        if 1 < len(out) < 100 and gradient.min() < -1000:
            raise ValueError("much too low")
        root = xp.sqrt(gradient) if 1 < len(out) < 100 else gradient
        xp.subtract(weights, root, out=out)

def root(contributions, weights, out, xp):
    xp.copyto(out, xp.sqrt(contributions[0]) if 1 < len(out) < 100 else contributions[0])
"""  # the trial on small arrays has one item, or hundreds


@pytest.fixture
def rules(own_rules: Path) -> Path:
    own_rules.joinpath("late.py").write_text(CODE)
    return own_rules


OWN: Sequence[dict[str, Any]] = (
    {"optimizer": "late:Root:lr=1.0", "shards": 2},
    {"optimizer": "late:Root:lr=1.0,clip_norm=100"},
    {"reduction": "late:root"},
    {"reduction": "late:root", "optimizer": kvps.SGD(clip_norm=100.0)},
)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("settings", OWN, ids=str)
def test_what_the_users_code_makes_nan_of_is_not_committed(store: Store, rules: Path, settings: dict[str, Any]) -> None:
    what = "optimizer 'late:Root' makes NaN or Inf in the weights of 'x' of finite gradients"
    if "reduction" in settings:
        what = "reduction 'late:root' makes NaN or Inf of finite contributions"
    job = store.create_job("job", ONE, **settings)
    with job.join("w0") as session:
        with (
            pytest.raises(kvps.NotFinite, match=f"^version 3 of job 'job' is not committed: {what}: mend it"),
            aggregating(job),
        ):
            push_until_given_up(job, session, 1.0, 1.0, -1.0)
        assert job.state().version == 2
        assert [c.seq for c in job.access.reader.inbox()] == [3]
    _assert_finite(job)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("settings", "number"), [*((own, -1.0) for own in OWN), (OWN[0], -2000.0)], ids=str)
def test_a_damaged_contribution_is_to_blame_before_the_users_code(
    store: Store, rules: Path, settings: dict[str, Any], number: float
) -> None:
    """Its code never saw such values before, and may raise what it will."""
    job = store.create_job("job", ONE, workers=2, transport="redis", **settings)
    with _workers(job) as (first, second):
        for session in (first, second):
            _push(session, 1.0)
        for shard in range(job.config.shards):
            key = job.access.keys.gradient(shard, "w0", first.incarnation, 1, 0)
            nbytes = job.access.client.call("STRLEN", key)
            assert nbytes
            job.access.client.put([(key, [memoryview(np.full(nbytes // 4, number, np.float32)).cast("B")])])
        with aggregating(job):
            await_version(job, 1)
    assert _rejected(job) == [("w0", "its bytes differ from its digest")]
    _assert_finite(job)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_replay_with_code_that_makes_nan_differs(store: Store, rules: Path) -> None:
    job = digits_job(store, workers=2, epochs=1, optimizer="late:Root:lr=1.0")
    run_workers(job, *training(job, "w0", "w1"))
    assert proved(store.job(job.name)).by == "recomputed"
    rules.joinpath("late.py").write_text(CODE.replace("1 < len(out) < 100", "True"))
    del sys.modules["late"]
    _, proof = proof_of(store.job(job.name))
    assert proof.differs == (
        "commit 1: optimizer 'late:Root' makes NaN or Inf in the weights of 'W1' of finite gradients: mend it, or "
        "create the job with nonfinite='skip', which rejects contributions that do this"
    )
