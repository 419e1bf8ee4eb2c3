"""An optimizer and a reduction of the user's own, against those of kvps that compute the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import hostcupy
from helpers.digits_job import digits_job, proved, run_workers, training
from helpers.harness import (
    a_plan,
    aggregating,
    any_floats,
    await_version,
    check_chain,
    gradient,
    large_model,
    push_until_given_up,
    work,
)
from helpers.internals import forget_reductions
from kvps_aggregator import serve
from kvps_aggregator.step.device_step import DeviceStep
from kvps_aggregator.step.shard_arrays import ShardArrays
from kvps_cli.prove.verify import proof_of

import kvps
from kvps.arrays.layout import Layout
from kvps.device.base import Cuda
from kvps.history.checkpoint import Checkpoint
from kvps.job import Job
from kvps.optim import custom, from_json, parse
from kvps.optim.schedules import StepLR
from kvps.store import Store

OWN = "own_rules:Momentum:lr=0.1,mu=0.8"
PLAIN = {"kind": "custom", "lr": 0.1, "name": "own_rules:Momentum", "numbers": {}, "state_names": ["momentum"]}


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", hostcupy)


def _trained(store: Store, name: str, **settings: Any) -> dict[str, np.ndarray]:
    """Return the weights after 4 rounds of 3 workers; another aggregator makes the last two."""
    job = store.create_job(name, large_model(), workers=3, **settings)
    for last in (2, 4):
        with aggregating(job):
            work(job, 2, lambda s, params, r: gradient(params, s.rank, r), 3)
            await_version(job, last)
    assert check_chain(job) == 4
    return job.snapshot()[1]


def _assert_equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes()


def test_the_users_reduction_has_the_bits_of_the_median(store: Store, own_rules: Path) -> None:
    own = _trained(store, "own", reduction="own_rules:median", shards=2)
    _assert_equal(own, _trained(store, "kvps", reduction="median", shards=2))


def test_a_device_steps_on_any_floats_as_the_cpu_does(own_rules: Path, cupy: None) -> None:
    config = kvps.JobConfig(workers=2, optimizer=OWN, reduction="own_rules:median")
    layout, made = Layout.of(large_model(), 2), []
    for part in (ShardArrays(config, layout, 1), DeviceStep(config, layout, 1, Cuda(hostcupy, 0))):
        np.copyto(part.weights, any_floats(0, part.size))
        part.loaded()
        for version in range(1, 4):
            for chunk in part.chunks:
                grads = [any_floats(10 * version + i, chunk.stop - chunk.start) for i in range(2)]
                with np.errstate(over="ignore", under="ignore"):
                    assert part.step(a_plan(version), chunk, grads)
            part.promote()
        made.append([part.digest(array) for array in (part.weights, *part.state.values())])
    assert made[0] == made[1]


@pytest.mark.parametrize("settings", [{"shards": 2, "weight_format": "int8"}, {"transport": "shm"}], ids=str)
def test_the_users_momentum_has_the_bits_of_sgd(store: Store, own_rules: Path, settings: dict[str, Any]) -> None:
    """With groups, a schedule, clipping and maximize."""
    lr = StepLR(0.1, 2, 0.5)
    groups = [kvps.ParameterGroup("b", mu=0.5, lr=0.2), kvps.ParameterGroup("V", maximize=True)]
    own = custom("own_rules:Momentum", lr, clip_norm=50.0, groups=groups, mu=0.9)
    groups = [kvps.ParameterGroup("b", momentum=0.5, lr=0.2), kvps.ParameterGroup("V", maximize=True)]
    same = kvps.SGD(lr, momentum=0.9, clip_norm=50.0, groups=groups)
    _assert_equal(_trained(store, "own", optimizer=own, **settings), _trained(store, "sgd", optimizer=same, **settings))


def _digits(store: Store) -> Job:
    job = digits_job(store, workers=2, epochs=1, optimizer=OWN, reduction="own_rules:median")
    run_workers(job, *training(job, "w0", "w1"))
    return job


def test_a_replay_uses_them_and_says_when_it_cannot(
    store: Store, own_rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _digits(store)
    assert proved(store.job(job.name)).by == "recomputed"
    (own_rules / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    del sys.modules["own_rules"]
    forget_reductions()
    where = r"there is no module 'own_rules' in .*/elsewhere; run kvps where your optimizer is$"
    with pytest.raises(kvps.InvalidSetting, match=f"^optimizer 'own_rules:Momentum': {where}"):
        proved(store.job(job.name))
    source = (own_rules / "own_rules.py").read_text().replace("np.float32(self.mu)", "np.float32(self.mu / 2)")
    (own_rules / "elsewhere/own_rules.py").write_text(source)
    _, proof = proof_of(store.job(job.name))
    assert proof.differs == "commit 2: its contributions make other weights of shard 0 than those logged"


def test_a_reduction_may_use_the_weights_of_contributions(store: Store, own_rules: Path) -> None:
    Path("by_weight.py").write_text(
        "import numpy as np\n"
        "def heaviest(contributions, weights, out, xp):\n"
        "    xp.copyto(out, contributions[weights.index(max(weights))])\n"
    )
    start = {"x": np.zeros(2, np.float32)}
    job = store.create_job("job", start, workers=2, reduction="by_weight:heaviest", optimizer=kvps.SGD(1.0))
    with aggregating(job), job.join("w0") as first, job.join("w1") as second:
        for session, weight in ((first, 7), (second, 8)):
            session.pull()
            session.push({"x": np.full(2, weight, np.float32)}, weight=weight)
        await_version(job, 1)
    np.testing.assert_array_equal(job.snapshot()[1]["x"], [-8, -8])


def test_a_checkpoint_keeps_its_state(store: Store, own_rules: Path) -> None:
    """And who saves, loads or restores it imports nothing."""
    job = store.create_job("job", large_model(), workers=2, optimizer=OWN)
    with aggregating(job):
        work(job, 2, lambda s, params, r: gradient(params, s.rank, r), 2)
        await_version(job, 2)
    del sys.modules["own_rules"]
    (own_rules / "own_rules.py").unlink()
    path = own_rules / "made.safetensors"
    store.job("job").checkpoint().write(path)
    made = Checkpoint.load(path)
    assert list(made.slots) == ["momentum"]
    store.restore_job(made, "again")
    again = store.job("again")
    assert again.config.optimizer == job.config.optimizer
    assert again.config.user_code == ("own_rules:Momentum",)
    assert "own_rules" not in sys.modules


def test_an_error_while_it_trains_is_one_line_and_loses_nothing(store: Store, own_rules: Path) -> None:
    own_rules.joinpath("late.py").write_text(
        "class Late:\n"
        "    slots = ()\n"
        "    def step(self, weights, gradient, state, out, state_out, lr, version, xp):\n"
        "        if version == 5 and len(out) < 100:\n"
        "            raise RuntimeError('not\\nyet')\n"
        "        xp.subtract(weights, gradient, out=out)\n"
    )
    start = {"x": np.zeros(2, np.float32)}
    job = store.create_job("job", start, optimizer="late:Late:lr=1.0")
    failed = (
        r"^optimizer 'late:Late' failed: RuntimeError: not yet \(late.py, line 5; KVPS_TRACEBACK=1 shows all of it\)$"
    )
    with job.join("w0") as session:
        with pytest.raises(kvps.InvalidSetting, match=failed), aggregating(job):
            push_until_given_up(job, session, *(5 * [1.0]))
        assert job.state().version == 4
        assert [c.seq for c in job.access.reader.inbox()] == [5]
        del sys.modules["late"]
        source = own_rules.joinpath("late.py").read_text()
        own_rules.joinpath("late.py").write_text(source.replace("version == 5", "version == 500"))
        with aggregating(store.job("job")):
            await_version(job, 5)
    np.testing.assert_array_equal(job.snapshot()[1]["x"], [-5, -5])


def test_what_is_stored_is_read_without_an_import(own_rules: Path) -> None:
    optimizer = parse(OWN)
    config = kvps.JobConfig(optimizer=optimizer, reduction="own_rules:median")
    assert json.loads(config.to_hash()["optimizer"]) == PLAIN | {"maximize": False, "numbers": {"mu": 0.8}}
    assert str(optimizer) == "own_rules:Momentum(lr=0.1, mu=0.8)"
    del sys.modules["own_rules"]
    read = kvps.JobConfig.from_hash(config.to_hash())
    assert read == config
    assert read.user_code == ("own_rules:Momentum", "own_rules:median")
    assert "own_rules" not in sys.modules


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"name": "../os:system"},
        {"numbers": [[[], 1]]},
        {"numbers": {"mu": float("inf")}},
        {"numbers": {"a b": 1}},
        {"numbers": {"lr": 1}},
        {"numbers": {f"n{i}": 1 for i in range(65)}},
        {"state_names": "momentum"},
        {"state_names": ["w"]},
        {"state_names": ["m", "m"]},
        {"state_names": [f"m{i}" for i in range(9)]},
        {"groups": [{"names": ["b"], "name": "os:system"}]},
        {"code": "1"},
    ],
    ids=str,
)
def test_stored_settings_that_are_none(change: dict[str, Any]) -> None:
    with pytest.raises((kvps.InvalidSetting, kvps.CorruptData)) as caught:
        from_json(PLAIN | change)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert from_json(PLAIN).slots == ("momentum",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("own_rules:Momentum", "optimizer 'own_rules:Momentum' needs a learning rate: add lr=NUMBER"),
        ("own_rules:Momentum:lr=0.1,lr=1", "lr is given twice"),
        ("own_rules:Momentum:lr=0.1,groups=1", "'groups' cannot be the name of a number"),
        ("own_rules:Momentum:lr=0.1,rho=1", "unexpected keyword argument 'rho'"),
        ("own_rules:Moment:lr=0.1", "own_rules.py has no 'Moment'; did you mean Momentum?"),
        ("own_rules:median:lr=0.1", "is no class"),
        ("nowhere:Momentum:lr=0.1", "there is no module 'nowhere' in "),
        ("own_rules.py:Momentum:lr=0.1", "importing own_rules.py failed: ModuleNotFoundError"),
        ("json:JSONDecoder:lr=0.1", "there is no module 'json' in "),
        ("custom:lr=0.1", "optimizer 'custom' is unknown"),
    ],
)
def test_an_option_that_is_none(own_rules: Path, text: str, words: str) -> None:
    with pytest.raises(kvps.InvalidSetting) as caught:
        parse(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_state_than_that_of_the_job_is_refused(store: Store, own_rules: Path) -> None:
    job = store.create_job("job", large_model(), optimizer=OWN)
    source = (own_rules / "own_rules.py").read_text().replace('("momentum",)', '("momentum", "more")')
    (own_rules / "own_rules.py").write_text(source)
    del sys.modules["own_rules"]
    words = "has the slots momentum, more here, and the job was created with momentum: use the module"
    with pytest.raises(kvps.InvalidSetting, match=words):
        serve(store.job(job.name))
    assert job.access.reader.holders() == [""]
