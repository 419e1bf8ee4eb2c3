"""What leaves a worker: chunk by chunk while gradients are computed, and in every format; the log proves each."""

from __future__ import annotations

import threading
from pathlib import Path

import kvps_aggregator
import numpy as np
import pytest
from helpers.arrays import assert_same_bits
from helpers.digits_job import digits_job, proved, run_workers, task_gradient, training
from helpers.harness import aggregating, check_chain, gradient, model, plain_loop, staleness_used, work
from helpers.slowly import slowly
from helpers.waiting import eventually
from kvps_aggregator.verify.contribution import Coding
from kvps_cli.prove.verify import proof_of
from kvps_workers.training_loop import train

import kvps
from kvps.arrays.error_feedback import Residual
from kvps.arrays.formats import format_of
from kvps.arrays.layout import Layout
from kvps.connection.client import Client
from kvps.device.base import open_device
from kvps.job import Job
from kvps.session.session import Session
from kvps.store import Store
from kvps.transport.version_reader import VersionReader
from kvps.transport.weight_reader import PullRequest, Weights

pytestmark = pytest.mark.contract

LOSSY = ["bf16", "fp16", "int8", "topk:0.25"]
PATIENT = {"worker_timeout_ms": 60_000}


def _gradients(job: Job) -> set[str]:
    return {key for key in job.access.client.scan(job.access.keys.all_bytes) if ":g:" in key}


# -- put -----------------------------------------------------------------------------------------------------------


def test_what_is_put_ahead_makes_the_same_weights(store: Store) -> None:
    job = store.create_job("job", model(), workers=2, shards=3, optimizer=kvps.SGD(lr=0.05))

    def step(session: Session, params: dict[str, np.ndarray], round_: int) -> dict[str, np.ndarray]:
        grads = gradient(params, session.rank, round_)
        ahead = list(reversed(grads))[: round_ % 4]  # as a backward pass ends with the first layer
        for name in ahead:
            session.put(name, grads.pop(name))
        return grads

    with aggregating(job):
        work(job, 12, step, 2)
        assert eventually(lambda: job.state().version == 12)
    expected = plain_loop(model(), 2, 12, 0.05)
    assert_same_bits(expected, job.snapshot()[1])
    assert check_chain(job) == 12


def test_chunks_leave_before_the_push(store: Store) -> None:
    """A chunk is there as soon as the arrays it is made of were put; nothing is accepted before push."""
    params = {"a": np.zeros(300_000, np.float32), "b": np.zeros(300_000, np.float32)}
    job = store.create_job("job", params, transport="redis", **PATIENT)
    with job.join("w0") as session:
        session.pull()
        session.put("b", np.ones(300_000, np.float32))
        arrived = threading.Event()
        while not arrived.wait(0.001):
            if {key[-1] for key in _gradients(job)} == {"2"}:
                arrived.set()
        assert not job.access.client.call("XLEN", job.access.keys.inbox)
        assert session.push({"a": np.ones(300_000, np.float32)}) == 1
        assert {key[-1] for key in _gradients(job)} == {"0", "1", "2"}


def test_mistakes_with_put_change_nothing(store: Store) -> None:
    job = store.create_job("job", {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}, **PATIENT)
    good = {"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)}
    with aggregating(job), job.join("w0") as session:
        with pytest.raises(kvps.WrongOrder, match="needs a pull"):
            session.put("a", good["a"])
        session.pull()
        with pytest.raises(kvps.LayoutMismatch, match="missing a, b"):
            session.push()
        session.put("a", good["a"])
        for name, value, match in [
            ("a", good["a"], "put already"),
            ("c", good["a"], "unknown c"),
            ("b", good["a"], r"has shape \(2,\)"),
            ("b", np.ones(3), "float64"),
        ]:
            with pytest.raises(kvps.LayoutMismatch, match=match):
                session.put(name, value)
        with pytest.raises(kvps.NotFinite, match="'b' holds NaN or Inf"):
            session.put("b", np.full(3, np.nan, np.float32))
        with pytest.raises(kvps.LayoutMismatch, match="put already a"):
            session.push(good)
        assert session.push({"b": good["b"]}) == 1
        session.pull()
        assert session.push(good) == 2
        session.pull()
    np.testing.assert_allclose(job.snapshot()[1]["b"], -0.2, rtol=1e-6)


# -- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient_format", LOSSY)
def test_bsp_equals_a_plain_loop_over_what_was_sent(store: Store, gradient_format: str) -> None:
    """Each worker's gradients go through the format with their residual; else nothing differs from fp32."""
    job = store.create_job(
        "job", model(), workers=2, shards=2, optimizer=kvps.SGD(lr=0.05), gradient_format=gradient_format
    )
    layout, format_ = Layout.of(model(), 2), format_of(gradient_format)
    residuals = [Residual(format_, np.zeros(layout.size, np.float32)) for _ in range(2)]
    coding = Coding(layout, format_)

    def sent(rank: int, grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        flat = np.concatenate([g.reshape(-1) for g in grads.values()])
        return {name: a.copy() for name, a in layout.views(coding.decode(coding.encode(flat, residuals[rank]))).items()}

    with aggregating(job):
        work(job, 10, lambda session, params, round_: gradient(params, session.rank, round_), 2)
        assert eventually(lambda: job.state().version == 10)
    params = model()
    for round_ in range(10):
        grads = [sent(rank, gradient(params, rank, round_)) for rank in range(2)]
        params = {n: params[n] - np.float32(0.05) * ((grads[0][n] + grads[1][n]) / np.float32(2)) for n in params}
    assert_same_bits(params, job.snapshot()[1])


@pytest.mark.parametrize(
    ("gradient_format", "staleness"),
    [("bf16", -1), ("int8", 1), ("topk:0.25", 0), *slowly([("int8", -1), ("fp16", 0)])],
)
def test_lossy_runs_are_replayed_bit_for_bit(
    store: Store, tmp_path: Path, gradient_format: str, staleness: int
) -> None:
    """Computed again with the residuals that its workers had; or from what was recorded."""
    job = digits_job(store, shards=2, gradient_format=gradient_format, staleness=staleness)
    run_workers(job, *training(job, "w0", "w1", "w2"), record=tmp_path)
    assert proved(job).by == "recomputed"
    assert proved(job, tmp_path).by == "recorded"


def test_a_replay_begins_with_an_incarnation_though_its_first_gradient_counts_as_zeros(store: Store) -> None:
    job = digits_job(store, workers=1, gradient_format="int8", nonfinite="skip")
    with aggregating(job):
        for _ in range(2):
            session = job.join("w0")
            for number in range(3):
                grads = task_gradient(job, session)
                session.push({name: grad * np.float32(np.nan if number == 0 else 1) for name, grad in grads.items()})
            session.pull()
            job.access.scripts.evict("w0", session.incarnation)
    assert [c.weight for commit in job.log() for c in commit.plan.contributions] == [0, 1, 1] * 2
    assert proved(job).by == "recomputed"


def test_a_remainder_that_is_not_known_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a contribution that was damaged on its way, and rejected, a replay cannot know what it had left out."""
    job = digits_job(store, workers=1, gradient_format="bf16")
    monkeypatch.setattr(Client, "small_bytes", 0)  # stored and accepted in two steps, with a moment between them
    with aggregating(job), job.join("w0") as session:
        push = job.access.scripts.push
        for number in range(3):
            grads = task_gradient(job, session)
            with monkeypatch.context() as damaging:
                if number == 1:
                    key = job.access.keys.gradient(0, "w0", session.incarnation, 2, 0)
                    damaging.setattr(
                        job.access.scripts,
                        "push",
                        lambda *a, key=key, **n: (job.access.client.call("SETRANGE", key, 0, "no"), push(*a, **n))[1],
                    )
                session.push(grads)
        session.pull()
    assert "commit 3: contribution 3 of w0" in (differs := proof_of(job)[1].differs)
    assert "the bf16 residual of its worker is unknown" in differs


def test_workers_pull_rounded_weights_and_nobody_else_does(store: Store) -> None:
    job = store.create_job("job", model(), shards=2, optimizer=kvps.SGD(lr=0.05), weight_format="bf16", **PATIENT)
    pulled = []
    with aggregating(job), job.join("w0") as session:
        for _ in range(3):
            pulled.append({name: value.copy() for name, value in session.pull().items()})
            exact = job.snapshot()[1]
            for name, value in pulled[-1].items():
                bits = value.view(np.uint32)
                assert not (bits & 0xFFFF).any(), "16 bits were on the wire"
                np.testing.assert_allclose(value, exact[name], rtol=2**-8)
                assert value.tobytes() != exact[name].tobytes()
            session.push(gradient(pulled[-1], 0, session.round))
        session.pull()
    store.remove_job("job")
    assert not list(store.client.scan("kvps:{job*"))


def test_a_large_model_is_pulled_rounded(store: Store) -> None:
    """More chunks than fit ahead at once, of two shards."""
    params = {"x": np.random.default_rng(0).normal(size=3_000_000).astype(np.float32)}
    job = store.create_job("job", params, shards=2, weight_format="bf16", **PATIENT)
    with aggregating(job), job.join("w0") as session:
        np.testing.assert_allclose(session.pull()["x"], params["x"], rtol=2**-8)
        session.push({"x": np.ones(3_000_000, np.float32)})
        np.testing.assert_allclose(session.pull()["x"], params["x"] - np.float32(0.1), rtol=2**-7, atol=1e-6)


# -- prefetch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("staleness", "weight_format"), [(1, "bf16"), (3, "fp32"), (-1, "bf16")])
def test_weights_fetched_ahead_keep_the_bound(store: Store, staleness: int, weight_format: str) -> None:
    """From the log; and the versions a worker computes on never go back. Then all of it is replayed."""
    job = digits_job(store, workers=2, staleness=staleness, shards=2, weight_format=weight_format)
    run_workers(job, *[lambda w=w: train(job, open_device(None), w, prefetch=True) for w in ("w0", "w1")])
    if staleness > 0:
        assert staleness_used(job, 2) <= staleness
    bases: dict[str, list[int]] = {"w0": [], "w1": []}
    for commit in job.log():
        for c in commit.plan.contributions:
            bases[c.worker].append(c.base)
    assert all(seen == sorted(seen) for seen in bases.values())
    assert proved(job).by == "recomputed"


def test_what_was_fetched_ahead_is_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = store.create_job("job", model(), workers=1, staleness=-1, **PATIENT)
    ahead, here = set[int](), list[int]()
    read = VersionReader.read

    def noted(self: VersionReader, request: PullRequest) -> Weights:
        weights = read(self, request)
        if threading.current_thread().name.startswith("kvps-prefetch"):
            ahead.add(weights.version)
        else:
            here.append(weights.version)
        return weights

    monkeypatch.setattr(VersionReader, "read", noted)
    with aggregating(job), job.join("w0", prefetch=True) as session:
        for round_ in range(20):
            session.push(gradient(session.pull(), 0, round_))
            # The next pull finds what was fetched ahead, once it is there.
            assert eventually(lambda round_=round_: round_ + 1 in ahead), (ahead, here)
    assert here == [0], "only the first pull read by itself"


def test_there_is_nothing_to_fetch_ahead_in_bsp(store: Store) -> None:
    job = store.create_job("job", model())
    with pytest.raises(kvps.InvalidSetting, match="in BSP the next weights are not there"):
        job.join("w0", prefetch=True)
    assert not job.state().members


# -- early ---------------------------------------------------------------------------------------------------------


def _bytes_sent(store: Store) -> int:
    """How many bytes the servers have sent. Whoever asks again and again must not be sent many for that."""
    ask = "return string.match(redis.call('INFO', 'stats'), 'total_net_output_bytes:(%d+)')"
    return sum(store.client.on_masters(lambda server: int(server.call("EVAL", ask, 0))))


@pytest.mark.parametrize("gradient_format", ["fp32", "int8"])
def test_what_waits_for_others_is_fetched_early(store: Store, gradient_format: str) -> None:
    """The first of two gradients is read before the second is there; the sum is the same."""
    rng = np.random.default_rng(0)
    params = {"x": np.zeros(600_000, np.float32)}
    grads = [{"x": rng.normal(size=600_000).astype(np.float32)} for _ in range(2)]
    job = store.create_job(
        "job", params, workers=2, shards=2, gradient_format=gradient_format, optimizer=kvps.SGD(lr=1.0), **PATIENT
    )
    expected = np.zeros(600_000, np.float32)
    layout = job.layout
    residuals = [Residual(format_of(gradient_format), np.zeros(layout.size, np.float32)) for _ in range(2)]
    coding = Coding(layout, format_of(gradient_format))
    nbytes = coding.nbytes(0) + coding.nbytes(1)
    with aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
        for round_ in range(1, 4):
            sessions = [w0, w1] if round_ % 2 else [w1, w0]
            for session in sessions:
                session.pull()
            before = _bytes_sent(store)
            sessions[0].push(grads[sessions[0].rank])
            assert eventually(lambda before=before: _bytes_sent(store) >= before + nbytes), "it waits for the other"
            sessions[1].push(grads[sessions[1].rank])
            assert eventually(lambda round_=round_: job.state().version == round_)
            sent = [
                coding.decode(coding.encode(g["x"], r if gradient_format != "fp32" else None))
                for g, r in zip(grads, residuals, strict=True)
            ]
            expected = expected - (sent[0] + sent[1]) / np.float32(2)
            assert job.snapshot()[1]["x"].tobytes() == expected.tobytes()
    assert {key.split(":")[4] for key in _gradients(job)} == {"4"}, "their memory has the names that come next"


# -- dead bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, *slowly([2])])
def test_dead_bytes_become_those_that_come_next(store: Store, staleness: int) -> None:
    """A large model's server holds as many bytes after sixteen rounds as after five; none are left in the end."""
    params = {"x": np.zeros(700_000, np.float32)}
    settings = {"workers": 2, "shards": 2, "staleness": staleness, "reduction": "sum"} | PATIENT
    job = store.create_job("job", params, optimizer=kvps.SGD(lr=1.0, momentum=0.5), **settings)
    stop, held = threading.Event(), []

    def step(session: Session, params: dict[str, np.ndarray], round_: int) -> dict[str, np.ndarray]:
        if session.rank == 0 and round_ >= 5:
            held.append(len(list(store.client.scan(job.access.keys.all_bytes))))
        return {"x": np.full(700_000, round_ % 2, np.float32)}

    aggregator = threading.Thread(target=kvps_aggregator.serve, args=(job,), kwargs={"stop": stop})
    aggregator.start()
    work(job, 16, step, 2)
    aggregator.join(120)
    assert check_chain(job) >= 8
    sets = 2 * (settings["staleness"] + 2)  # of gradients: of two workers, all that may wait and one on its way
    versions = 8  # 5.6 MB each: five fit into what a small job keeps, one is made, one is reused
    assert max(held) <= 4 * sets + versions * (2 * 4 + 2), "four chunks each, and two manifests"
    kinds = {key.split(":")[2] for key in store.client.scan(job.access.keys.all_bytes)}
    assert kinds <= {"w", "opt.momentum", "m", "owner"}
    names = {key.split(":")[3] for key in store.client.scan(job.access.keys.all_bytes) if ":w:" in key}
    assert all(int(name.split(".")[0]) <= job.state().version for name in names), names
    assert np.unique(job.snapshot()[1]["x"]).size == 1
