"""Writes what is made from the table of a job's settings: docs/settings.md, and the keywords of calls."""

from __future__ import annotations

import textwrap
from pathlib import Path

from kvps.config import SPECS, Spec
from kvps.optim import Optimizer

PAGE, KEYWORDS = Path("docs/settings.md"), Path("kvps/config/job_settings.py")
PAGE_HEAD = """# Settings of a job

A job's settings are chosen when it is created, and stay. This table is made from
[kvps/config/settings.py](../kvps/config/settings.py) by `python docs/settings.py`.

`kvps up`, `create` and `submit` have an option for each setting, except for those marked -. `kvps run`
has them too, except for those of tasks: `--batch-size`, `--epochs` and `--procs`. On a command line
times are in seconds, `workers` is 3 unless it is given, and `batch_size` and `epochs` are the task's.
`--help` shows the options that most people use, and `--help-all` shows all of them. In Python the
settings are keywords of `create_job`, `kvps.local` and `kvps.JobConfig`.

| setting | option | default | values | what it decides |
| --- | --- | --- | --- | --- |
"""
KEYWORDS_HEAD = '''"""The settings of a job as keywords of calls. `python docs/settings.py` writes this module."""

from __future__ import annotations

from typing import Literal, TypedDict

from kvps.optim import Optimizer


class JobSettings(TypedDict, total=False):
    """The keywords of `Store.create_job`, `kvps.local` and `RunContext.create_job`; docs/settings.md explains each."""

'''


def page() -> str:
    """Return docs/settings.md."""
    return PAGE_HEAD + "".join(map(_row, SPECS.values()))


def keywords() -> str:
    """Return the module with the keywords."""
    return KEYWORDS_HEAD + "".join(map(_keyword, SPECS.values()))


def _row(spec: Spec) -> str:
    option = f"`{spec.option[0]}`" if spec.option else "-"
    values = f"{spec.bounds[0]} to {spec.bounds[1]}" if spec.bounds else ", ".join(spec.choices) or "see right"
    return f"| `{spec.name}` | {option} | `{_default(spec)}` | {values} | {spec.help} |\n"


def _keyword(spec: Spec) -> str:
    """Return the declaration of a keyword. The text behind it is what an editor shows."""
    kind = spec.type.replace("'", '"')
    first = spec.help.split(". ")[0].removesuffix(".")
    text = textwrap.fill(
        f'"""Default {_default(spec)}. {first}."""', 120, initial_indent=4 * " ", subsequent_indent=4 * " "
    )
    return f"    {spec.name}: {kind}\n{text}\n"


def _default(spec: Spec) -> str:
    return "kvps.SGD()" if isinstance(spec.default, Optimizer) else repr(spec.default).replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(page())
    KEYWORDS.write_text(keywords())
