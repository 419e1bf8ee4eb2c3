"""A job's settings: what is refused, what is read from Redis, and that docs/settings.md says the same."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import signature
from typing import Any, Unpack, get_args, get_type_hints

import numpy as np
import pytest
from helpers.paths import ROOT

import kvps
from kvps.config import SPECS, JobConfig, JobSettings, Metadata
from kvps.config.gone import GONE, UNUSED
from kvps.config.specs import as_text
from kvps.launch import RunContext
from kvps.optim import parse
from kvps.optim.custom import CustomOptimizer
from kvps.store import Store

ONE = {"x": np.ones(1, np.float32)}


def test_every_setting_is_described() -> None:
    assert [*SPECS, "metadata"] == [f.name for f in fields(JobConfig)]
    for name, spec in SPECS.items():
        assert spec.help.endswith("."), name
        assert bool(spec.bounds) == (type(getattr(JobConfig(), name)) is int), name


@pytest.mark.parametrize("call", [kvps.local, Store.create_job, RunContext.create_job])
def test_a_call_shows_its_keywords_with_their_defaults(call: Callable[..., object]) -> None:
    """To a type checker too, which finds a wrong keyword and a wrong value in a user's program."""
    shown, table = signature(call).parameters, get_type_hints(JobConfig)
    assert JobConfig(**{name: shown[name].default for name in SPECS}) == JobConfig()
    assert "settings" not in shown
    assert get_type_hints(call)["settings"] == Unpack[JobSettings]
    for name, kind in get_type_hints(JobSettings).items():
        assert kind == (table[name] | str if name == "optimizer" else table[name])
        words = [word for of in get_args(kind) for word in get_args(of) or [of] if isinstance(word, str)]
        assert words == list(SPECS[name].choices), "the words of a type are those that the table allows"


def test_what_is_made_from_settings_and_optimizers_is_as_it_would_be_made_now() -> None:
    for path, made in runpy.run_path(str(ROOT / "docs" / "settings.py"))["MADE"].items():
        text = (ROOT / path).read_text()
        assert made(text) == text, f"python docs/settings.py writes {path}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": 0}, "workers must be a whole number from 1 to 4096, not 0"),
        ({"staleness": 1.5}, "staleness must be a whole number from -1 to 1000000, not 1.5"),
        ({"nonfinite": "ignore"}, "nonfinite must be one of reject, skip, not 'ignore'"),
        ({"workers": True}, "workers must be a whole number from 1 to 4096, not True"),
        (
            {"reduction": "mode"},
            "reduction must be one of mean, sum, weighted, median, or trimmed:PART with a PART above 0",
        ),
        ({"transport": ["shm"]}, "transport must be one of auto, redis, shm"),
        ({"late": np.zeros((3, 3))}, "late must be one of next, drop, not array([[0., 0., 0.], [0., 0., 0.], [0., 0"),
        ({"gradient_format": 999 * "a"}, "topk:PART with a PART up to 1, not 'aaaaaaa"),
        ({"optimizer": 5}, "optimizer must be a kvps optimizer such as kvps.SGD(...), not a builtins.int"),
        ({"local_steps": "often"}, "local_steps must be a whole number from 1 to 1000000, not 'often'"),
        ({"samples": 9}, "divided into batches that count once each: set batch_size and epochs too"),
        (
            {"samples": 9, "batch_size": 2, "epochs": 2, "units": 9},
            "samples=9 are 10 units in 2 epochs of batches of 2",
        ),
        (
            {"gradient_format": 16},
            "gradient_format must be one of fp32, bf16, fp16, int8, topk:PART with a PART up to 1, not 16",
        ),
        ({"workers": 2, "min_workers": 3}, "min_workers must be a whole number from 0 to 2, the number of workers"),
        (
            {"durability": "replicated:0"},
            "durability must be memory, replicated or replicated:N with a number of replicas",
        ),
        ({"transport": "shm", "shards": 2}, "transport shm is for shards=1"),
        ({"quorum": 3, "workers": 2}, "quorum must be a whole number from 0 to 2, the number of workers, not 3"),
        ({"quorum": 2, "staleness": 1, "workers": 2}, "the bound of SSP waits for every worker"),
        ({"grace_ms": 5}, "grace is the time after a quorum: set quorum too"),
        ({"late": "drop"}, "late drop is for rounds that a quorum closes"),
        ({"late": "drop", "quorum": 2, "staleness": -1, "workers": 2}, "late drop is for rounds that a quorum closes"),
        ({"workers": "9" * 10_000}, "…"),
        ({"reject_norm": "0.5"}, "reject_norm must be a number from 1, as 10 or 2.5, not"),
        ({"reject_norm": "nan"}, "reject_norm must be a number from 1, as 10 or 2.5, not"),
        ({"backup_after": "-1"}, "backup_after must be 0, or a number from 1e-09 to 999999999, as"),
        ({"backup_after": "nan"}, "backup_after must be 0, or a number from 1e-09 to 999999999, as"),
        ({"backup_after": None}, "backup_after must be 0, or a number from 1e-09 to 999999999, as"),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_short_line(settings: Mapping[str, Any], words: str) -> None:
    with pytest.raises(kvps.InvalidSetting) as caught:
        JobConfig(**settings)
    message = str(caught.value)
    assert message.startswith((next(iter(settings)).removesuffix("_ms"), "min_workers"))
    assert words in message
    assert len(message) < 240
    assert "\n" not in message


@pytest.mark.parametrize(
    "optimizer",
    [
        kvps.AdamW(lr=0.01),
        kvps.SGD(kvps.schedules.CosineAnnealingLR(0.1, over=5), 0.9, True),
        parse("delayed-nesterov:lr=0.7,momentum=0.9,every=8"),
        kvps.DelayedNesterov(every=3, groups=(kvps.ParameterGroup("b", every=2),)),
    ],
    ids=str,
)
def test_what_is_stored_is_read_back(optimizer: kvps.Optimizer) -> None:
    config = JobConfig(staleness=-1, workers=4, optimizer=optimizer, min_workers=2, metadata=Metadata(2, "digits"))
    stored = config.to_hash()
    assert JobConfig.from_hash(stored) == config
    assert JobConfig.from_hash(stored | {"of_a_newer_kvps": "7"}) == config


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("backup_after", 0.0, "0"),
        ("backup_after", 0.04, "0.04"),
        ("backup_after", 1e-5, "1e-05"),
        ("backup_after", 1 / 3, "0.3333333333333333"),
        ("reject_norm", None, ""),
        ("reject_norm", 5.0, "5"),
        ("reject_norm", 2.5, "2.5"),
    ],
)
def test_a_number_has_the_text_that_it_always_had(name: str, value: Any, text: str) -> None:
    """A job that was created before these settings were numbers opens, and an older kvps opens the jobs of this one."""
    config = JobConfig(staleness=-1, **{name: value})
    assert config.to_hash()[name] == text
    assert JobConfig.from_hash(config.to_hash()) == config == JobConfig(staleness=-1, **{name: text})
    assert type(getattr(JobConfig.from_hash(config.to_hash()), name)) is type(value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("workers", "1_0", "must be a whole number from 1 to 4096, not '1_0'"),
        ("workers", "٣", "must be a whole number"),
        ("workers", "9" * 5000, "must be a whole number from 1 to 4096"),
        ("staleness", None, "is missing"),
        ("transport", "smoke", "must be one of auto, redis, shm"),
        ("optimizer", "nonsense", "holds 'nonsense'"),
        ("optimizer", '{"kind": "sgd", "lr": {"kind": "warp"}}', "schedule 'warp' is unknown"),
        ("optimizer", '{"kind": "sgd", "lr": [1]}', "lr must be a finite number"),
        ("optimizer", "[" * 100_000, "holds '[[["),
        ("local_steps", "auto", "must be a whole number from 1 to 1000000, not 'auto'"),
        ("round_ms", "500", "which kvps no longer does: in a job of units"),
        ("inner_optimizer", '{"kind": "adam", "lr": 0.1}', "kvps no longer does: a script takes local steps"),
        ("min_workers", "5", "from 0 to 3, the number of workers"),
        ("max_pending", "4", "is '4', and not 1: kvps chooses it: 1 in BSP, N + 1 in SSP"),
        ("max_pending", None, "is None, and not 1"),
        ("launched_by", "{}", "may only be set by kvps up and kvps run"),
        ("delay_compensation", "0.04", "which kvps no longer does: a stale gradient counts for less with"),
    ],
)
def test_a_damaged_field_is_one_line_that_names_it_and_harms_no_other_job(
    store: Store, field: str, value: str | None, words: str
) -> None:
    damaged = store.create_job("damaged", ONE, workers=3)
    store.create_job("whole", ONE)
    command, new = ("HDEL", ()) if value is None else ("HSET", (value,))
    store.client.call(command, damaged.access.keys.config, field, *new)
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reduction", "module:code"),
        ("task", "module:code"),
        ("optimizer", as_text(CustomOptimizer(name="module:Code", lr=0.1))),
        ("missing", "skip"),
    ],
)
def test_a_setting_that_was_changed_since_the_job_was_made_is_refused(store: Store, field: str, value: str) -> None:
    """A worker may write there, because its scripts declare the key, and would choose what other processes import."""
    job = store.create_job("job", ONE)
    keys, before = job.access.keys, store.client.call("HGET", job.access.keys.config, field)
    store.client.call("HSET", keys.config, field, value)
    with pytest.raises(kvps.CorruptData, match=rf"^job 'job': config field {field} is .* when the job was made"):
        store.job("job")
    store.client.call("HDEL", keys.made_with, field)  # as if this kvps had a setting more than the one that made it
    with pytest.raises(kvps.CorruptData, match=rf"config field {field} is .*, and was None when the job was made"):
        store.job("job")
    store.client.call("DEL", keys.made_with)
    assert store.job("job").config != job.config, "an earlier version of kvps made no copy"
    store.client.call("HSET", keys.config, field, before)
    assert store.job("job").config == job.config


@pytest.mark.parametrize(
    ("settings", "units"),
    [
        ({}, (12, 6, 4)),
        ({"units_per_round": 2}, (12, 6, 2)),
        ({"local_steps": 5}, (3, 0, 4)),
    ],
)
def test_units_follow_from_samples(settings: dict[str, Any], units: tuple[int, int, int]) -> None:
    config = JobConfig(**{"samples": 45, "batch_size": 8, "epochs": 2} | settings)
    assert (config.units, config.units_per_epoch, config.units_per_round) == units
    assert JobConfig.from_hash(config.to_hash()) == config


def test_what_a_job_notes_beside_its_settings_is_stored_with_them(store: Store) -> None:
    job = store.create_job("job", ONE, workers=2, task="digits", procs=3, rounds=7)
    stored = store.client.call("HGETALL", job.access.keys.config)
    assert {name: stored[name] for name in ("procs", "task", "rounds", "launched_by", "memory")} == {
        "procs": "3",
        "task": "digits",
        "rounds": "7",
        "launched_by": "",
        "memory": "",
    }
    assert store.job("job").config.metadata == Metadata(3, "digits", 7)
    for given, words in (
        ({"procs": 0}, "procs must be a whole number from 1 to 256, not 0"),
        ({"rounds": -1}, "rounds must be a whole number from 0 to"),
        ({"task": 5}, "task must be printable text of at most 1024 characters, not 5"),
        ({"launched_by": "me"}, "no setting 'launched_by': kvps up and kvps run note it themselves"),
        ({"config": JobConfig(), "task": "digits"}, "task is in config: give either config or single settings"),
    ):
        with pytest.raises(kvps.InvalidSetting, match=words):
            store.create_job("other", ONE, **given)


def test_a_job_of_an_earlier_version_lacks_the_settings_that_came_since() -> None:
    stored = JobConfig(workers=3, units=8).to_hash()
    for name in ("units_per_round", "units_per_epoch", "backup_after", "samples"):
        del stored[name]
    assert JobConfig.from_hash(stored) == JobConfig(workers=3, units=8)


@pytest.mark.parametrize("name", sorted(GONE))
def test_a_setting_that_is_gone_says_what_takes_its_place(name: str) -> None:
    with pytest.raises(kvps.InvalidSetting) as caught:
        JobConfig.of("create_job", None, {name: 1})
    assert str(caught.value) == f"create_job: no setting {name!r}: {GONE[name]}"


def test_a_job_of_an_earlier_version_that_did_not_use_what_is_gone_goes_on() -> None:
    config = JobConfig(workers=3)
    assert JobConfig.from_hash(config.to_hash() | UNUSED) == config
    assert not set(UNUSED) & set(SPECS)
