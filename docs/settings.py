"""Prints docs/settings.md, the table of a job's settings: `python docs/settings.py > docs/settings.md`."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from kvps.config import SPECS, JobConfig, Spec

HEAD = """# Settings of a job

A job's settings are chosen when it is created, and stay. This table is made from
[kvps/config/settings.py](../kvps/config/settings.py) by `python docs/settings.py`.

`kvps up`, `create` and `submit` have an option for each setting, except for those marked -. `kvps run`
has them too, except for those of tasks: `--batch-size`, `--epochs` and `--procs`. On a command line
times are in seconds, `workers` is 3 unless it is given, and `batch_size` and `epochs` are the task's.
`--help` shows the options that most people use, and `--help-all` shows all of them. In Python the
settings are keywords of `create_job`, `kvps.local` and `kvps.JobConfig`.

| setting | option | default | values | what it decides |
| --- | --- | --- | --- | --- |"""


def row(setting: Field[Any]) -> str:
    """One setting as a row of the table."""
    spec = SPECS[setting.name]
    option = f"`{spec.option[0]}`" if spec.option else "-"
    default = "`kvps.SGD()`" if setting.default is MISSING else f"`{setting.default!r}`".replace("'", '"')
    return f"| `{setting.name}` | {option} | {default} | {_values(spec)} | {spec.help} |"


def _values(spec: Spec) -> str:
    if spec.bounds:
        return ", ".join([f"{spec.bounds[0]} to {spec.bounds[1]}", *spec.choices])
    return ", ".join(spec.choices) or "see right"


if __name__ == "__main__":
    print(HEAD, *map(row, (field for field in fields(JobConfig) if field.name in SPECS)), sep="\n")
