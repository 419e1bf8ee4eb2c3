"""The options for a job's settings. They are made from `JobConfig`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any, Self

import numpy as np
import typer
from kvps_workers.task import CheckedTask

from kvps import optim
from kvps.config import SPECS, JobConfig, Metadata, Spec, division_of
from kvps.config.combinations import against_unit_rounds
from kvps.config.metadata import METADATA
from kvps.config.specs import as_text
from kvps.errors import InvalidSetting
from kvps.staleness import ASP
from kvps_cli import completion
from kvps_cli.options import SharedOptions, is_given
from kvps_cli.output import say

WORKERS = 3
"""The number of workers of a job that is created from a command line without --workers."""
_OF_TASK = ("batch_size", "epochs")  # a task chooses defaults for these
_TASKS_ONLY = (*_OF_TASK, "procs")  # a script has its own loop
_TABLE = SPECS | {"procs": METADATA["procs"]}
_OFTEN = ("workers", "staleness", "quorum", "optimizer", "gradient_format", "seed", *_OF_TASK)  # in --help
_ELASTIC = "With MIN:MAX, a job that hands out units waits for MIN workers and keeps up to MAX: see kvps scale."
_WHOLE = re.compile(r"-?[0-9]{1,18}", re.ASCII)


@dataclass(frozen=True)
class JobOptions(SharedOptions):
    """The settings of a new job, of a task or a script, as the command line gives them: an option for each setting.

    given      the settings that the user gave, under the names of JobConfig and in its units
    optimizer  the value of --optimizer
    lr         the value of --lr
    most       the most workers that are kept at work; it is `workers` unless --workers is MIN:MAX
    """

    given: Mapping[str, Any]
    optimizer: str
    lr: float | None
    most: int

    @property
    def workers(self) -> int:
        """The number of workers that train, or for which the job waits if more may."""
        return int(self.given.get("workers", WORKERS))

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change while the job trains."""
        return self.most > self.workers

    def check_each(self) -> None:
        """Check each setting alone: what it goes with may be in the script, whose create_job checks all of them. Raises
        InvalidSetting."""
        for name, value in {"workers": self.workers, **self.given}.items():
            _TABLE[name].check(value)

    @classmethod
    def parameters(cls) -> list[Parameter]:
        """Return an option for each setting that has one, and --lr and --data, which only a command line has."""
        return _options(of_task=issubclass(cls, TaskOptions))

    @classmethod
    def of(cls, context: typer.Context, values: Mapping[str, Any]) -> Self:
        """Return the settings; `given` has only those that the user gave. Raises InvalidSetting."""
        least, most = parse_workers(values["workers"])
        values = {**values, "workers": least}
        given = {
            name: _checked(name, value) for name, value in values.items() if name in _TABLE and is_given(context, name)
        }
        if "optimizer" in given or values["lr"] is not None:
            given["optimizer"] = optim.parse(values["optimizer"], values["lr"])
        of_task = {"data": values["data"]} if "data" in values else {}
        most = max(most, given.get("workers", 0))
        return cls(given=given, optimizer=values["optimizer"], lr=values["lr"], most=most, **of_task)


@dataclass(frozen=True)
class TaskOptions(JobOptions):
    """The settings of a new job that trains a task.

    data  the value of --data; "" if it was not given
    """

    data: str

    def job_config(self, name: str, task: CheckedTask, quiet: bool = True) -> JobConfig:
        """Return the settings of a job; the task chooses what the user left out. Raises InvalidSetting.

        It trains in rounds of units if neither --data nor another setting says otherwise. Unless `quiet`, say which
        setting did.
        """
        config = self._job_config(name, task, quiet)
        if self.elastic and not config.units:
            raise InvalidSetting(
                f"--workers {self.workers}:{self.most} is for a job that hands out units, which any number of workers "
                f"shares: give --data units too, or one number"
            )
        return config

    def _job_config(self, name: str, task: CheckedTask, quiet: bool) -> JobConfig:
        if self.data not in ("", "static", "units"):
            raise InvalidSetting(f"--data must be static or units, not {self.data!r}")
        chosen = {"workers": WORKERS} | {option: getattr(task, option) for option in _OF_TASK} | dict(self.given)
        asked_for = chosen.pop("units_per_round", None)
        metadata = Metadata(chosen.pop("procs", 1), name)
        if asked_for and self.data == "static":
            raise InvalidSetting("--units-per-round makes rounds of units: leave --data static out")
        static = JobConfig(metadata=metadata, **self._with_rate(chosen, task.lr))
        as_they_come = asked_for == 0 or static.staleness == ASP
        if self.data == "static" or (as_they_come and not self.data and not asked_for):
            return static
        per_round = asked_for or (0 if as_they_come else task.units_per_round)
        if not asked_for and (against := against_unit_rounds(static, per_round)):
            if not self.data:
                if not quiet:
                    say(f"each worker has its own part of the data (--data static): {against.why}")
                return static
            per_round = 0
        division = division_of(len(task.data(0, 1, np)[0]), static)
        units = dict[str, Any](units=division.units, units_per_epoch=division.units_per_epoch)
        rated = self._with_rate(chosen, task.lr if static.staleness or not per_round else task.units_lr)
        return JobConfig(metadata=metadata, units_per_round=per_round, **units, **rated)

    def _with_rate(self, chosen: Mapping[str, Any], lr: float) -> dict[str, Any]:
        """Return settings with the learning rate that the user left out. The task has good ones for plain SGD, of which
        `lr` is one; the other optimizers have rates of their own."""
        left_out = self.lr is None and self.optimizer.partition(":")[0] == "sgd" and "lr=" not in self.optimizer
        return {**chosen, **({"optimizer": optim.parse(self.optimizer, lr)} if left_out else {})}


def parse_workers(text: str) -> tuple[int, int]:
    """Return (2, 8) for "2:8", and (4, 4) for "4". Raises InvalidSetting."""
    least, colon, most = text.partition(":")
    if not _WHOLE.fullmatch(least) or (colon and not _WHOLE.fullmatch(most)):
        raise InvalidSetting(f"--workers must be a number or MIN:MAX, as in 4 or 2:8, not {text!r}")
    lowest, highest = int(least), int(most or least)
    if lowest > highest:
        raise InvalidSetting(f"--workers MIN:MAX: MAX must not be less than MIN, as in {text}")
    if colon and (why := SPECS["workers"].why_refused(highest)):
        raise InvalidSetting(f"--workers MIN:MAX: MAX {why}")
    return lowest, highest


def _options(of_task: bool) -> list[Parameter]:
    named = [spec for name, spec in _TABLE.items() if spec.option and (of_task or name not in _TASKS_ONLY)]
    options = sorted(map(_option, named), key=lambda option: option.name != "workers")
    rate = "the task's for sgd, else the optimizer's" if of_task else "the optimizer's"
    options.append(_parameter("lr", float | None, None, "--lr", help="Learning rate.", show_default=rate))
    if of_task:
        help = (
            "How samples are divided. units: batches are handed out one by one, and each batch counts once an epoch, "
            "even if workers are killed; a version is made of a whole round of them (--units-per-round). static: each "
            "worker has a part of its own."
        )
        default = "units, or static in ASP and where a setting needs it"
        options.append(_parameter("data", str, "", "--data", metavar="static|units", help=help, show_default=default))
    return options


def _option(spec: Spec) -> Parameter:
    """Return the option of a setting."""
    name, default = spec.name, spec.default
    metavar = spec.metavar or "|".join(spec.choices) or None
    more: dict[str, Any] = {"help": spec.help, "metavar": metavar, "rich_help_panel": spec.group}
    more["hidden"] = name not in _OFTEN
    if name in _OF_TASK:
        return _parameter(name, int | None, None, *spec.option, show_default="the task's", **more)
    if isinstance(default, optim.Optimizer):
        default = default.kind
        more["autocompletion"] = completion.optimizers
    elif name == "workers":
        default = str(WORKERS)
        more |= {"help": f"{spec.help} {_ELASTIC}", "metavar": "N|MIN:MAX"}
    elif name.endswith("_ms"):
        default /= 1000
    elif spec.read:
        default = as_text(default)
    return _parameter(name, type(default), default, *spec.option, **more)


def _parameter(name: str, kind: Any, default: Any, *option: str, **more: Any) -> Parameter:
    info = typer.Option(*option, **{"rich_help_panel": "Training", **more})
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _checked(name: str, value: Any) -> Any:
    """Convert an option's value to its setting's unit. Raises InvalidSetting for a wrong value that JobConfig would
    report under another name or in another unit."""
    spec = _TABLE[name]
    option = spec.option[0]
    if name in _OF_TASK and value < 1:
        raise InvalidSetting(f"{option} must be 1 or more, not {value}")
    if spec.read:
        return spec.read(value)
    if not name.endswith("_ms"):
        return value
    low, high = (bound / 1000 for bound in spec.bounds or ())
    if not low <= value <= high:
        raise InvalidSetting(f"{option} must be from {low:g} to {high:g} seconds, not {value:g}")
    milliseconds = round(value * 1000)
    if value and not milliseconds:
        raise InvalidSetting(f"{option} must be 0, or 0.001 seconds or more, not {value:g}")
    return milliseconds


def check_prefetch(prefetch: bool, config: JobConfig) -> None:
    """Raise InvalidSetting for --prefetch in BSP, where it has no effect."""
    if prefetch and not config.staleness:
        raise InvalidSetting("--prefetch is for SSP and ASP (--staleness): in BSP there is nothing to fetch ahead")
