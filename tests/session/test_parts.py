"""Workers that pull and push parts of a model: what each version is, on real servers, against a plain simulation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.digits_job import proved
from helpers.harness import Params, abandoned, aggregating, await_version, check_chain, log_entries
from helpers.internals import lose_next_answer

import kvps
from kvps.session.residual_store import ResidualStore
from kvps.session.session import Session
from kvps.store import Store

SHAPES = {"a.w": (300, 1_001), "head.w": (5, 3), "a.b": (7,), "b.w": (40, 50), "b.b": (1,)}
PARTS = {"a": "a.*", "b": ["b.w", "b.b"], "head": "head.*"}
LR, MOMENTUM = 0.5, 0.75
F = np.float32


def model() -> Params:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(F) for name, shape in SHAPES.items()}


def names_in(part: str) -> list[str]:
    return [name for name in SHAPES if part in ("", name.partition(".")[0])]


def left_out(job: kvps.Job) -> Params:
    """Return what w0's format has left out so far, name -> array, as w0 stored it when it left."""
    values = np.zeros(job.layout.size, F)
    stored = ResidualStore(job.access.client, job.access.keys, job.layout, "w0")
    stored.load(job.state().members["w0"].residual, values)
    return job.layout.cut(values)


def create(store: Store, **settings: Any) -> kvps.Job:
    settings = {"optimizer": kvps.SGD(lr=LR, momentum=MOMENTUM), "transport": "redis", "parts": PARTS} | settings
    return store.create_job("job", model(), **settings)


def some_gradient(seed: int, part: str) -> Params:
    rng = np.random.default_rng(seed)
    return {name: (rng.integers(-8, 9, SHAPES[name]) / 4).astype(F) for name in names_in(part)}


class Plain:
    """The job in one process: only what a version has a gradient of steps."""

    def __init__(self) -> None:
        self.weights = model()
        self.momentum = {name: np.zeros(shape, F) for name, shape in SHAPES.items()}

    def step(self, contributions: list[Params], divisor: int) -> None:
        for name in SHAPES:
            rows = [each[name] for each in contributions if name in each]
            if rows:
                total = rows[0].copy()
                for row in rows[1:]:
                    total = total + row
                total = total / F(divisor) if divisor > 1 else total
                self.momentum[name] = self.momentum[name] * F(MOMENTUM) + total
                self.weights[name] = self.weights[name] - self.momentum[name] * F(LR)


def assert_same(job: kvps.Job, plain: Plain) -> None:
    _, weights = job.snapshot()
    for name, array in plain.weights.items():
        assert weights[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    ("transport", "shards", "reduction"), [("redis", 1, "mean"), ("redis", 3, "sum"), ("shm", 1, "mean")]
)
def test_versions_are_those_of_a_plain_loop(
    store: Store, tmp_path: Path, transport: str, shards: int, reduction: str
) -> None:
    """Three workers push a part each, chosen at random, or the whole model; a takeover comes in between."""
    rng, plain = random.Random(f"{transport}{shards}{reduction}"), Plain()
    job = create(store, workers=3, transport=transport, shards=shards, reduction=reduction)
    sessions = [job.join(f"w{rank}") for rank in range(3)]

    def train(first: int, end: int) -> None:
        for version in range(first, end):
            pushed = []
            for rank, session in enumerate(sessions):
                part = rng.choice(["a", "b", "head", ""])
                weights = session.pull(part)
                assert list(weights) == names_in(part)
                for name, array in weights.items():
                    assert array.tobytes() == plain.weights[name].tobytes(), (version, name)
                pushed.append(some_gradient(100 * version + rank, part))
                session.push(pushed[-1], part=part)
            await_version(job, version + 1)
            plain.step(pushed, 3 if reduction == "mean" else 1)

    with aggregating(job, record=tmp_path):
        train(0, 5)
    with aggregating(job, record=tmp_path):
        train(5, 10)
        for session in sessions:
            session.leave()
        job.await_finished()
    assert_same(job, plain)
    check_chain(job)
    assert proved(job, tmp_path).replayed == 10


@pytest.mark.parametrize("gradient_format", ["bf16", "int8", "topk:0.2"])
def test_what_a_format_leaves_out_of_a_part_waits_for_that_part(
    store: Store, tmp_path: Path, gradient_format: str
) -> None:
    """Over two turns of each part, what arrived and what is left are what was pushed; a replay has the same bits."""
    job = create(store, gradient_format=gradient_format, optimizer=kvps.SGD(lr=1.0), shards=2)
    pushed = {name: np.zeros(shape, np.float64) for name, shape in SHAPES.items()}
    with aggregating(job, record=tmp_path):
        session = job.join("w0")
        for number, part in enumerate(["a", "b", "a", "head", "", "b"]):
            session.pull(part)
            grads = {name: array / F(3) for name, array in some_gradient(number, part).items()}
            session.push(grads, part=part)
            for name, array in grads.items():
                pushed[name] += array
        await_version(job, 6)
        session.leave(finished=False)
    left = left_out(job)
    weights, before = job.snapshot()[1], model()
    for name in SHAPES:
        np.testing.assert_allclose(before[name] - weights[name] + left[name], pushed[name], atol=1e-4, err_msg=name)
    assert proved(job, tmp_path).replayed == 6


def test_a_refused_part_leaves_no_trace_in_the_residual(store: Store) -> None:
    job = create(store, gradient_format="topk:0.2", optimizer=kvps.SGD(lr=1.0))
    with aggregating(job), job.join("w0") as session:
        session.pull()
        spoilt = some_gradient(1, "b")
        spoilt["b.b"][0] = np.nan
        with pytest.raises(kvps.NotFinite):
            session.push(spoilt, part="b")
        session.push(some_gradient(2, "head"), part="head")
        session.leave(finished=False)
    left = left_out(job)
    assert not left["b.w"].any()
    assert left["head.w"].any()


def test_only_the_bytes_of_a_part_move(store: Store) -> None:
    """Counted by the server: the head is 60 of 1.2 million bytes."""
    job = create(store)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.push(some_gradient(0, "head"), part="head")
        await_version(job, 1)
        before = _received_and_sent(store)
        session.pull("head")
        session.push(some_gradient(1, "head"), part="head")
        after = _received_and_sent(store)
        assert after[1] - before[1] < 200_000
        assert after[0] - before[0] < 2.5 * job.layout.nbytes  # the aggregator stores all of version 2 and its momentum


def _received_and_sent(store: Store) -> tuple[int, int]:
    stats = store.client.call("INFO", "stats")
    return int(stats["total_net_input_bytes"]), int(stats["total_net_output_bytes"])


def test_clipping_is_by_the_norm_of_the_parts_that_are_there(store: Store) -> None:
    job = create(store, shards=2, optimizer=kvps.SGD(lr=1.0, clip_norm=1.0))
    before = model()
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.push({"head.w": np.full((5, 3), 2, F)}, part="head")
        session.pull()
    _, weights = job.snapshot()
    moved = before["head.w"] - weights["head.w"]
    np.testing.assert_allclose(moved, np.full((5, 3), 1 / np.sqrt(15)), rtol=1e-5)
    assert all(weights[name].tobytes() == before[name].tobytes() for name in SHAPES if name != "head.w")


def test_a_restored_job_has_its_parts(store: Store, tmp_path: Path) -> None:
    plain, job = Plain(), create(store, workers=1)

    def train(session: Session, number: int, part: str) -> None:
        session.pull(part)
        session.push(some_gradient(number, part), part=part)
        plain.step([some_gradient(number, part)], 1)

    with aggregating(job), job.join("w0") as session:
        for number, part in enumerate(["a", "head", "b"]):
            train(session, number, part)
        await_version(job, 3)
    checkpoint = job.checkpoint()
    checkpoint.write(tmp_path / "c.safetensors")
    again = store.restore_job(kvps.Checkpoint.load(tmp_path / "c.safetensors"), "again", shards=2)
    assert again.layout.parts == ("a", "head", "b")
    with aggregating(again), again.join("w0") as session:
        for number, part in enumerate(["head", "b"]):
            train(session, number + 10, part)
        await_version(again, 5)
    assert_same(again, plain)


def test_a_lost_answer_counts_a_part_once(store: Store) -> None:
    """The same push again, of the part and of another one that is equal bytes."""
    job = store.create_job("job", {"x": np.ones(3, F), "y": np.ones(3, F)}, parts={"x": "x", "y": "y"})
    with abandoned(job) as aggregator, job.join("w0") as session:
        aggregator.hold(at_once=True)
        session.pull()
        lose_next_answer()
        with pytest.raises(kvps.ServerLost):
            session.push({"x": np.ones(3, F)}, part="x")
        with pytest.raises(kvps.WrongOrder, match="another gradient"):
            session.push({"y": np.ones(3, F)}, part="y")
        assert session.push({"x": np.ones(3, F)}, part="x") == 1
        assert [(c.seq, c.part) for c in job.access.reader.inbox()] == [(1, "x")]


def test_a_contribution_of_an_unknown_part_is_rejected(store: Store) -> None:
    """Another program may announce one: it is logged with its reason, and the job goes on."""
    job = create(store)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        round_state = job.access.reader.round_state()
        job.access.scripts.push("w0", session.incarnation, 1, 0, 1, "0" * 16, round_state.history, part="nobody")
        await_version(job, 1)
        reasons = [fields["reason"] for _, fields in log_entries(job) if fields.get("kind") == "reject"]
        assert reasons == ["the job has no part nobody"]
    assert job.snapshot()[1]["a.w"].tobytes() == model()["a.w"].tobytes()


def test_what_cannot_be_is_one_line(store: Store) -> None:
    job = create(store)
    with job.join("w0") as session:
        with pytest.raises(kvps.InvalidSetting, match="no part 'tail': it has a, head, b"):
            session.pull("tail")
        session.pull()
        with pytest.raises(kvps.InvalidSetting, match="no part 3: it has"):
            session.push(some_gradient(0, ""), part=3)  # type: ignore[arg-type]
        with pytest.raises(kvps.LayoutMismatch, match=r"not in part head a\.w"):
            session.push(some_gradient(0, ""), part="head")
        with pytest.raises(kvps.LayoutMismatch, match=r"missing b\.b"):
            session.push({"b.w": np.zeros((40, 50), F)}, part="b")
        session.put("b.w", np.zeros((40, 50), F))
        with pytest.raises(kvps.WrongOrder, match="put\\(\\) hands over gradients of the whole model"):
            session.push({"b.b": np.zeros(1, F)}, part="b")
        session.leave(finished=False)
    for settings, why in [
        ({"optimizer": kvps.Adam()}, "optimizer adam counts its steps"),
        ({"optimizer": kvps.SGD(momentum=0.9, dampening=0.1)}, "optimizer sgd counts its steps"),
        ({"reject_norm": 3}, "reject_norm compares contributions of the whole model"),
        ({"fragments": 2, "local_steps": 4}, "leave parts or fragments out"),
    ]:
        with pytest.raises(kvps.InvalidSetting, match=why):
            store.create_job("other", model(), **{"parts": PARTS} | settings)
    plain = store.create_job("plain", model())
    with plain.join("w0") as session:
        with pytest.raises(kvps.InvalidSetting, match="no part 'a': it has none"):
            session.pull("a")
        session.leave(finished=False)


@pytest.mark.parametrize("staleness", [1, -1])
def test_what_was_prefetched_before_pulls_of_parts_is_not_used_after_them(store: Store, staleness: int) -> None:
    """The whole model that was on its way during a pull of a part came out of a pull twenty versions later."""
    params, settings = {"x": np.zeros(4, F), "y": np.zeros(4, F)}, {"optimizer": kvps.SGD(lr=1.0), "transport": "redis"}
    job = store.create_job("job", params, parts={"x": "x", "y": "y"}, staleness=staleness, **settings)
    with aggregating(job), job.join("w0", prefetch=True) as session:
        session.pull()
        session.push({"x": -np.ones(4, F), "y": -np.ones(4, F)})
        await_version(job, 1)
        for round_ in range(1, 20):
            session.pull("x")
            session.push({"x": -np.ones(4, F)}, part="x")
            await_version(job, round_ + 1)
        weights = session.pull()
        assert session.version == 20
        assert weights["x"].tolist() == [20.0] * 4
