"""Options of a command line that are made from JobConfig, and what they come to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import typer
from helpers.options import settings_of
from kvps_cli import help_text
from kvps_cli.options import with_shared
from kvps_cli.train.settings import WORKERS, JobOptions, TaskOptions
from kvps_workers import load_task
from typer.testing import CliRunner

import kvps
from kvps.config import SPECS, JobConfig, Metadata

OF_TASK = {"batch_size", "epochs"}


@pytest.mark.parametrize("kind", [TaskOptions, JobOptions])
def test_every_setting_that_has_an_option_is_in_the_help_with_its_default(kind: type[JobOptions]) -> None:
    def command(settings: JobOptions) -> None: ...

    command.__annotations__["settings"] = kind
    app = typer.Typer()
    app.command()(with_shared(command))
    help_text.add_to(app)
    shown = " ".join(CliRunner().invoke(app, ["--help-all"], env={"COLUMNS": "200"}).output.split())
    for name, spec in SPECS.items():
        wanted = spec.option if kind is TaskOptions or name not in OF_TASK else ()
        assert set(wanted) <= set(re.findall(r"(?<!\S)--?[a-z-]+", shown)), name
        assert not wanted or spec.help[:40] in shown
    assert f"[default: {JobConfig().lease_ms / 1000}]" in shown
    assert ("--data" in shown) == ("--epochs" in shown) == (kind is TaskOptions)


def test_a_time_too_short_for_milliseconds_is_refused() -> None:
    """It would be 0, which for some settings is another rule."""
    with pytest.raises(kvps.InvalidSetting, match=r"^--grace must be 0, or 0\.001 seconds or more, not 0\.0004$"):
        _ = settings_of(JobOptions, "--quorum 1 --grace 0.0004").given
    assert settings_of(JobOptions, "--quorum 1 --grace 0.001").given["grace_ms"] == 1


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("", {}),
        ("-w 3 -s 0", {"workers": 3, "staleness": 0}),  # the defaults, but said
        ("--worker-timeout 2.5 --lease 1", {"worker_timeout_ms": 2500, "lease_ms": 1000}),
        ("--optimizer adam:beta1=0.8", {"optimizer": kvps.Adam(beta1=0.8)}),
        ("--lr 0.2", {"optimizer": kvps.SGD(lr=0.2)}),
    ],
)
def test_what_was_given_is_told_from_defaults(arguments: str, given: Mapping[str, Any]) -> None:
    assert settings_of(JobOptions, arguments).given == given


def test_a_job_of_a_task_has_its_choices_where_nothing_was_given() -> None:
    task = load_task("digits")
    config = settings_of(TaskOptions).job_config("digits", task)
    assert (config.workers, config.batch_size, config.epochs) == (WORKERS, task.batch_size, task.epochs)
    assert config.optimizer == kvps.SGD(lr=task.units_lr)
    assert settings_of(TaskOptions, "--data static").job_config("d", task).optimizer == kvps.SGD(lr=task.lr)
    config = settings_of(TaskOptions, "--optimizer adam --epochs 2 --data units").job_config("d", task)
    assert (config.optimizer, config.epochs) == (kvps.Adam(), 2)
    assert config.units > 0
    assert settings_of(TaskOptions, "--procs 2").job_config("d", task).metadata == Metadata(2, "d")


def test_a_job_with_units_may_have_a_smallest_and_a_largest_number_of_workers() -> None:
    settings = settings_of(TaskOptions, "-w 2:8")
    assert (settings.workers, settings.most, settings.elastic) == (2, 8, True)
    assert settings.job_config("digits", load_task("digits")).workers == 2
    settings = settings_of(TaskOptions, "-w 2:2")
    assert (settings.given, settings.most, settings.elastic) == ({"workers": 2}, 2, False)
    assert settings_of(TaskOptions).most == WORKERS


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ("8:2", "--workers MIN:MAX: MAX must not be less than MIN, as in 8:2"),
        ("2:", "--workers must be a number or MIN:MAX, as in 4 or 2:8, not '2:'"),
        ("2:x", "--workers must be a number or MIN:MAX, as in 4 or 2:8, not '2:x'"),
        ("2:9999", "--workers MIN:MAX: MAX must be a whole number from 1 to 4096, not 9999"),
        (
            "2:3 --data static",
            "--workers 2:3 is for a job that hands out units, which any number of workers shares: give --data",
        ),
    ],
)
def test_numbers_of_workers_that_cannot_be_are_refused_in_one_line(workers: str, words: str) -> None:
    with pytest.raises(kvps.InvalidSetting) as caught:
        settings_of(TaskOptions, f"-w {workers}").job_config("digits", load_task("digits"))
    assert str(caught.value).startswith(words)


def test_a_task_trains_in_rounds_of_units_whatever_the_number_of_workers() -> None:
    one, many = (settings_of(TaskOptions, line).job_config("d", load_task("digits")) for line in ("-w 1", "-w 7 -s 0"))
    assert (one.units, one.units_per_epoch, one.units_per_round) == (1350, 45, 6)
    assert replace(many, workers=1) == one
    config = settings_of(TaskOptions, "--units-per-round 4 -s 2").job_config("d", load_task("digits"))
    assert (config.units, config.units_per_epoch, config.units_per_round) == (1350, 45, 4)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--data static", ""),
        ("-s -1", ""),
        ("--units-per-round 0", ""),
        ("--quorum 2", "quorum closes a round without some contributions"),
        ("--gradient-format int8", "gradient_format int8 keeps what it leaves out at the worker"),
    ],
)
def test_each_worker_has_its_own_part_where_a_setting_needs_it_and_a_line_says_which(
    arguments: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings_of(TaskOptions, arguments).job_config("digits", load_task("digits"), quiet=False)
    assert (config.units, config.units_per_round) == (0, 0)
    line = capsys.readouterr().err
    assert line.startswith(f"each worker has its own part of the data (--data static): {why}" if why else "")
    assert line.count("\n") == bool(why)


@pytest.mark.parametrize(
    ("arguments", "in_rounds"), [("", True), ("--units-per-round 0", False), ("-s -1", False), ("--quorum 2", False)]
)
def test_units_that_were_asked_for_come_in_rounds_where_that_goes(arguments: str, in_rounds: bool) -> None:
    config = settings_of(TaskOptions, f"--data units {arguments}").job_config("digits", load_task("digits"))
    assert (config.units, config.unit_rounds is not None) == (1350, in_rounds)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--data static", "leave --data static out"),
        ("--quorum 2", "leave quorum out"),
        ("--gradient-format int8", "choose fp32"),
    ],
)
def test_rounds_of_units_that_were_asked_for_are_refused_in_one_line(arguments: str, words: str) -> None:
    with pytest.raises(kvps.InvalidSetting, match=words):
        settings_of(TaskOptions, f"--units-per-round 5 {arguments}").job_config("digits", load_task("digits"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--lease 0.01", "--lease must be from 0.1 to 86400 seconds, not 0.01"),
        ("--worker-timeout nan", "--worker-timeout must be from 0.1 to 86400 seconds, not nan"),
        ("--epochs 0", "--epochs must be 1 or more, not 0"),
        ("--grace inf", "--grace must be from 0 to 86400 seconds, not inf"),
    ],
)
def test_what_is_out_of_range_is_named_as_the_option(arguments: str, words: str) -> None:
    with pytest.raises(kvps.InvalidSetting) as caught:
        settings_of(TaskOptions, arguments)
    assert str(caught.value) == words
