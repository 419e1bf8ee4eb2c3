"""Classic arrangements by name: which settings each stands for, what wins, and that each one trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import TINY, kvps_run
from helpers.harness import aggregating, await_version, gradient, model
from helpers.options import settings_of
from kvps_cli.train.settings import JobOptions, TaskOptions
from kvps_workers import load_task

import kvps
from kvps.config import JobConfig
from kvps.store import Store
from kvps.topologies import TOPOLOGIES

ADAGRAD = kvps.Adagrad()
MEANT: dict[str, dict[str, Any]] = {
    "bsp": {"staleness": 0},
    "downpour": {"staleness": -1, "optimizer": ADAGRAD},
    "sandblaster": {"staleness": 0, "shards": 4},
    "hogwild": {"staleness": -1, "transport": "shm"},
}


# -- on a command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_name_stands_for_settings(name: str) -> None:
    said = settings_of(TaskOptions, f"--topology {name}")
    assert dict(said.given) == MEANT[name]
    assert said.data == {"sandblaster": "units", "bsp": "static"}.get(name, "")
    config = said.job_config("digits", load_task("digits"))
    assert {setting: getattr(config, setting) for setting in MEANT[name]} == MEANT[name]
    assert bool(config.units) == (name == "sandblaster")


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("downpour --optimizer sgd:lr=0.2 --shards 3", {"optimizer": kvps.SGD(0.2), "shards": 3}),
        ("downpour --lr 0.5", {"optimizer": kvps.Adagrad(0.5)}),
        ("sandblaster --shards 7 --data units", {"shards": 7}),
        ("hogwild -w 9 -s -1", {"workers": 9, "transport": "shm"}),
        ("sandblaster --transport shm --data units", {"transport": "shm"}),
        ("downpour --local-steps 4", {"local_steps": 4, "optimizer": kvps.Adagrad()}),
        ("downpour --procs 2", {"procs": 2, "optimizer": kvps.Adagrad()}),
    ],
)
def test_what_the_user_says_wins(line: str, given: Mapping[str, Any]) -> None:
    found = dict(settings_of(TaskOptions, f"--topology {line}").given)
    staleness = found.pop("staleness")
    assert staleness == MEANT[line.split()[0]]["staleness"]
    assert found == given


def test_a_script_is_told_only_what_a_script_can_be_told() -> None:
    """How often it pushes, and on which data it computes, is in its own loop."""
    said = settings_of(JobOptions, "--topology downpour")
    assert said.given == {"staleness": -1, "optimizer": ADAGRAD}
    assert said.topology == "topology downpour: --staleness -1 --optimizer adagrad"
    assert settings_of(JobOptions, "--topology sandblaster").given == {"staleness": 0, "shards": 4}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bsp --staleness 3", "topology bsp means staleness 0, not 3: leave one of the two out"),
        ("downpour -s 0", "topology downpour means staleness -1, not 0: leave one of the two out"),
        ("sandblaster --data static", "topology sandblaster means data units, not 'static': leave one of the two out"),
        ("hogwild --transport redis", "topology hogwild means transport shm, not 'redis': leave one of the two out"),
        ("ring", "topology must be one of bsp, downpour, sandblaster, hogwild, not 'ring'"),
        ("''", "topology must be one of bsp, downpour, sandblaster, hogwild, not ''"),
    ],
)
def test_a_contradiction_is_one_line(line: str, words: str) -> None:
    with pytest.raises(kvps.InvalidSetting) as caught:
        settings_of(TaskOptions, f"--topology {line}")
    assert str(caught.value) == words


@pytest.mark.slow
@pytest.mark.parametrize("name", ["downpour", "sandblaster", "hogwild"])
def test_each_one_trains_and_is_replayed(lasting: Store, tmp_path: Path, name: str) -> None:
    done = kvps_run("up", "digits", "--job", name, "--topology", name, *TINY)
    assert done.returncode == 0, done.stderr
    assert f"topology {name}: --staleness" in done.stderr
    assert "test accuracy" in done.stdout
    config = lasting.job(name).config
    assert {setting: getattr(config, setting) for setting in MEANT[name]} == MEANT[name]
    assert bool(config.units) == (name == "sandblaster")
    verified = kvps_run("verify", name)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "bit-identical" in verified.stdout


# -- in Python -------------------------------------------------------------------------------------------------------


def test_settings_for_a_program_of_ones_own(store: Store) -> None:
    job = store.create_job("mine", model(), **kvps.topology("downpour", workers=1, shards=2))
    assert (job.config.staleness, job.config.optimizer, job.config.shards) == (-1, ADAGRAD, 2)
    with aggregating(job), job.join("w0") as session:
        session.push(gradient(session.pull(), 0, 0))
        await_version(job, 1)
    assert not np.array_equal(job.snapshot()[1]["W"], model()["W"])
    for name, more in (("bsp", {}), ("sandblaster", {"units": 8}), ("hogwild", {"workers": 2})):
        config = JobConfig(**kvps.topology(name, **more))
        assert {setting: getattr(config, setting) for setting in MEANT[name]} == MEANT[name]


def test_what_is_no_topology_is_refused() -> None:
    with pytest.raises(kvps.InvalidSetting, match="topology sandblaster hands out units of data: give units=N, one"):
        kvps.topology("sandblaster")
    with pytest.raises(kvps.InvalidSetting, match=r"topology must be one of bsp, .*, not 3"):
        kvps.topology(3)  # type: ignore[arg-type]
