"""A job's settings: what is refused, what is read from Redis, and that docs/settings.md says the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from helpers.paths import ROOT

import kvps
from kvps.config import SPECS, JobConfig
from kvps.store import Store

ONE = {"x": np.ones(1, np.float32)}
TIMED = {"local_steps": "auto", "round_ms": 500}


def test_every_setting_is_described() -> None:
    assert list(SPECS) == [f.name for f in fields(JobConfig)]
    for name, spec in SPECS.items():
        assert spec.help.endswith("."), name
        assert bool(spec.group) == bool(spec.option), name
        assert bool(spec.bounds) == (type(getattr(JobConfig(), name)) is int), name


def test_the_table_in_the_docs_is_that_of_the_code() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "docs" / "settings.py"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == (ROOT / "docs" / "settings.md").read_text(), "python docs/settings.py > docs/settings.md"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": 0}, "workers must be a whole number from 1 to 4096, not 0"),
        ({"workers": True}, "workers must be a whole number from 1 to 4096, not True"),
        ({"seed": 2**32}, "seed must be a whole number from 0 to 4294967295"),
        ({"lease_ms": 99.5}, "lease_ms must be a whole number from 100 to 86400000, not 99.5"),
        (
            {"reduction": "mode"},
            "reduction must be one of mean, sum, weighted, median, or trimmed:PART with a PART above 0",
        ),
        ({"transport": ["shm"]}, "transport must be one of auto, redis, shm"),
        ({"late": np.zeros((3, 3))}, "late must be one of next, drop, not array([[0., 0., 0.], [0., 0., 0.], [0., 0"),
        ({"gradient_format": 999 * "a"}, "topk:PART with a PART up to 1, not 'aaaaaaa"),
        ({"optimizer": 5}, "optimizer must be a kvps optimizer such as kvps.SGD(...), not a builtins.int"),
        ({"optimizer": "sdg"}, "optimizer 'sdg' is unknown: use one of sgd"),
        ({"inner_optimizer": kvps.Adam()}, "inner_optimizer takes local steps, and local_steps is 1: give local_steps"),
        ({"inner_optimizer": "adam", "local_steps": 2}, "must be a kvps optimizer such as kvps.SGD(...)"),
        ({"local_steps": "often"}, "local_steps must be a whole number from 1 to 1000000, or auto, not 'often'"),
        ({"local_steps": True}, "local_steps must be a whole number from 1 to 1000000, or auto, not True"),
        ({"local_steps": "auto"}, "local_steps auto ends rounds by the clock: set round_ms"),
        ({"local_steps": "auto", "round_ms": -1}, "round_ms must be a whole number from 0 to 86400000, not -1"),
        ({"round_ms": 500}, "round_ms (--round-time) ends rounds by the clock: set local_steps to auto too"),
        ({"round_ms": 500, "local_steps": 4}, "round_ms (--round-time) ends rounds by the clock"),
        ({"reduction": "mean"} | TIMED, "reduction mean counts all workers alike, and with local_steps auto"),
        ({"reduction": "trimmed:0.1"} | TIMED, "set weighted, or one of your own"),
        ({"units": 9, "reduction": "weighted"} | TIMED, "units (--data units) have a fixed number of batches each"),
        (
            {"max_pending": 101, "reduction": "weighted"} | TIMED,
            "must be a whole number from 0 to 100 with",
        ),
        ({"local_steps": "auto", "push_every": "2"}, "local_steps steps on each batch, while push_every and procs"),
        ({"gradient_format": "fp8"}, "gradient_format must be one of fp32, bf16"),
        ({"gradient_format": 16}, "gradient_format must be printable text of at most 1024 characters, not 16"),
        ({"mirror_every": "0s"}, "mirror_every must be a number of versions, as 10, or of seconds, as 0.5s, not '0s'"),
        ({"task": 5}, "task must be printable text of at most 1024 characters, not 5"),
        ({"launched_by": "me"}, "launched_by may only be set by kvps up and kvps run, not to 'me'"),
        ({"workers": 2, "min_workers": 3}, "min_workers must be a whole number from 0 to 2, the number of workers"),
        ({"transport": "shm", "shards": 2}, "transport shm is for shards=1"),
        ({"workers": "9" * 10_000}, "…"),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_short_line(settings: Mapping[str, Any], words: str) -> None:
    with pytest.raises(kvps.InvalidSetting) as caught:
        JobConfig(**settings)
    message = str(caught.value)
    assert message.startswith((next(iter(settings)), "min_workers", "round_ms"))
    assert words in message
    assert len(message) < 240
    assert "\n" not in message


def test_what_is_stored_is_read_back() -> None:
    timed = JobConfig(reduction="weighted", staleness=10_000, **TIMED)
    assert (timed.timed_rounds, timed.takes_local_steps, timed.max_pending) == (True, True, 100)
    assert JobConfig(reduction="rules:mine", **TIMED).timed_rounds
    assert JobConfig.from_hash(timed.to_hash()) == timed
    config = JobConfig(staleness=-1, workers=4, optimizer=kvps.AdamW(lr=0.01), mirror_every="10", min_workers=2)
    stored = config.to_hash()
    assert JobConfig.from_hash(stored) == config
    assert JobConfig.from_hash(stored | {"of_a_newer_kvps": "7"}) == config


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("workers", "several", "must be a whole number from 1 to 4096, not 'several'"),
        ("workers", "1_0", "must be a whole number from 1 to 4096, not '1_0'"),
        ("workers", "٣", "must be a whole number"),
        ("workers", "9" * 5000, "must be a whole number from 1 to 4096"),
        ("workers", "0", "must be a whole number from 1 to 4096, not 0"),
        ("staleness", "", "must be a whole number"),
        ("staleness", None, "is missing"),
        ("gradient_format", None, "is missing"),
        ("transport", "smoke", "must be one of auto, redis, shm"),
        ("mirror_every", "often", "must be a number of versions"),
        ("optimizer", "nonsense", "holds 'nonsense'"),
        ("optimizer", "[]", "holds '[]'"),
        ("optimizer", '{"kind": "rprop", "lr": 0.1}', "optimizer 'rprop' is unknown"),
        ("optimizer", '{"kind": "sgd", "lr": {"kind": "warp"}}', "schedule 'warp' is unknown"),
        ("optimizer", '{"kind": "sgd", "lr": [1]}', "lr must be a finite number"),
        ("optimizer", "[" * 100_000, "holds '[[["),
        ("local_steps", "0", "must be a whole number from 1 to 1000000, or auto, not 0"),
        ("local_steps", "Auto", "must be a whole number from 1 to 1000000, or auto, not 'Auto'"),
        ("local_steps", "auto", "auto ends rounds by the clock: set round_ms"),
        ("inner_optimizer", "nonsense", "holds 'nonsense'"),
        ("inner_optimizer", '{"kind": "adam", "lr": 0.1}', "takes local steps, and local_steps is 1"),
        ("inner_optimizer", None, "is missing"),
        ("min_workers", "5", "from 0 to 3, the number of workers"),
        ("launched_by", "{}", "may only be set by kvps up and kvps run"),
    ],
)
def test_a_damaged_field_is_one_line_that_names_it_and_harms_no_other_job(
    store: Store, field: str, value: str | None, words: str
) -> None:
    damaged = store.create_job("damaged", ONE, workers=3)
    store.create_job("whole", ONE)
    command = (
        ("HDEL", damaged.access.keys.config, field)
        if value is None
        else ("HSET", damaged.access.keys.config, field, value)
    )
    store.client.call(*command)
    with pytest.raises(kvps.CorruptData) as caught:
        store.job("damaged")
    message = str(caught.value)
    assert message.startswith(f"job 'damaged': config field {field} ")
    assert words in message
    assert len(message) < 400
    assert "\n" not in message
    assert store.job("whole").state().version == 0
    store.remove_job("damaged")
    assert store.jobs() == ["whole"]
