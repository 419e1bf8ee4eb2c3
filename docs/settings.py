"""Writes what is made from the table of settings and from the optimizers: pages, and the keywords of calls."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from kvps.config import SPECS, Spec
from kvps.config.metadata import METADATA
from kvps.optim import OPTIMIZERS, Optimizer

_IN_EACH = {f.name for f in fields(Optimizer)} | {"weight_decay"}
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
NOTED_HEAD = """
## What a job notes beside them

No version of the weights depends on these. They lie in the same hash in Redis. `Store.create_job` takes `task`,
`procs` and `rounds` beside the settings, and kvps notes the others itself.

| field | option | default | values | what it says |
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
    return PAGE_HEAD + "".join(map(_row, SPECS.values())) + NOTED_HEAD + "".join(map(_row, METADATA.values()))


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


def optimizers(page: str) -> str:
    """Return docs/optimizers.md with a row for each rule."""
    rows = "".join(map(_rule, OPTIMIZERS.values()))
    return re.sub(r"(\| `kvps\.[^\n]*\n)+", lambda _: rows, page, count=1)


def _rule(kind: type[Optimizer]) -> str:
    own = ", ".join(f"`{f.name}`" for f in fields(kind) if f.name not in _IN_EACH)
    torch_has = f"`{kind.torch_name}`" if kind.torch_name else f"none; {kind.paper}"
    return f"| `kvps.{kind.__name__}` | {torch_has} | {own} |\n"


def reference(page: str) -> str:
    """Return docs/api/kvps.md with an entry for each rule."""
    entry = "::: kvps.{}\n    options:\n      merge_init_into_class: true\n      members: []\n\n"
    entries = "".join(entry.format(kind.__name__) for kind in OPTIMIZERS.values())
    return re.sub(
        r"(?<=\(schedules\.md\)\.\n\n).*?(?=::: kvps\.ParameterGroup)", lambda _: entries, page, flags=re.DOTALL
    )


MADE: dict[str, Callable[[str], str]] = {
    "docs/settings.md": lambda _: page(),
    "kvps/config/job_settings.py": lambda _: keywords(),
    "docs/optimizers.md": optimizers,
    "docs/api/kvps.md": reference,
}
"""Each file, and what makes it of the file as it is."""

if __name__ == "__main__":
    for name, made in MADE.items():
        path = Path(name)
        path.write_text(made(path.read_text()))
