"""`kvps inspect`: what the weights of a job are now, parameter by parameter."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from kvps.arrays.layout import Array
from kvps.arrays.pieces import Parameter
from kvps.arrays.summary import Bin, distance, histogram, summary
from kvps.errors import InvalidSetting, counted, some_of
from kvps.job import Job
from kvps.parsing import names_like
from kvps.protocol.plan import Contribution
from kvps_cli import connect, options
from kvps_cli.output import print_json
from kvps_cli.tables import plain_console, print_rows

_COLUMNS = ("parameter", "shape", "shards", "norm", "least", "greatest", "mean", "zeros", "change")
_BAR = 40  # columns of the longest bar of a histogram
_FULL = "█"
_NAMED = 5  # parameters that a message names

Weights = Mapping[str, Array]


def inspect(
    job: options.AnyJobName = None,
    parameter: Annotated[
        str | None,
        typer.Argument(
            metavar="[PARAM]", help="A parameter, with a histogram; or a pattern of several.", show_default=False
        ),
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            max=86_400,
            help="Print again so often, until Ctrl-C, and say how far the weights have come since the last time.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object each time.")] = False,
    redis: options.Redis = None,
) -> None:
    """Show the weights of a job as they are now: shape, shards, norm, range, and contributions that wait.

    They are those of one whole version, and no worker is stopped.
    """
    with connect.existing_job(redis, job) as opened:
        chosen = _chosen(opened, parameter)
        before: Weights = {}
        while True:
            version, weights = opened.snapshot()
            rows = [_facts(opened, p, weights[p.name], before.get(p.name)) for p in chosen]
            bins = {p.name: histogram(weights[p.name]) for p in chosen if p.name == parameter}
            waiting = opened.access.reader.inbox()
            if as_json:
                print_json(_as_json(version, rows, bins, waiting))
            else:
                _print(version, rows, bins, None if opened.config.metadata.publishes else waiting)
            if every is None:
                return
            before = {p.name: weights[p.name].copy() for p in chosen}
            time.sleep(every)


def _chosen(job: Job, pattern: str | None) -> list[Parameter]:
    """Return the parameters that are meant. Raises InvalidSetting."""
    parameters = {p.name: p for p in job.layout.parameters}
    if pattern is None:
        return list(parameters.values())
    if names := names_like(pattern, parameters):
        return [parameters[name] for name in names]
    known = ", ".join(list(parameters)[:_NAMED]) + (", ..." if len(parameters) > _NAMED else "")
    raise InvalidSetting(f"job {job.name} has no parameter {pattern!r}: it has {known}")


def _facts(job: Job, p: Parameter, array: Array, before: Array | None) -> dict[str, Any]:
    """Return what is known of a parameter, as JSON. `change` is how far it has come from `before`, as a part of the
    norm of `before`."""
    change = None if before is None else distance(array, before) / (summary(before).norm or 1.0)
    return {
        "parameter": p.name,
        "shape": list(p.shape),
        "dtype": str(array.dtype),
        "shards": sorted({shard for shard, _ in job.layout.chunks_of[job.layout.numbers[p.name]]}),
        **summary(array)._asdict(),
        "change": change,
    } | {what: value for what, value in (("part", p.part), ("buffer", p.buffer)) if value}


def _as_json(
    version: int, rows: Sequence[Mapping[str, Any]], bins: Mapping[str, Sequence[Bin]], waiting: list[Contribution]
) -> dict[str, Any]:
    parameters = [dict(row) for row in rows]
    for row in parameters:
        if row["parameter"] in bins:
            row["histogram"] = [b._asdict() for b in bins[row["parameter"]]]
    in_flight = [{"worker": c.worker, "round": c.round, "base": c.base} for c in waiting]
    return {"version": version, "waiting": in_flight, "parameters": parameters}


def _print(
    version: int,
    rows: Sequence[Mapping[str, Any]],
    bins: Mapping[str, Sequence[Bin]],
    waiting: list[Contribution] | None,
) -> None:
    console = plain_console()
    names = f": {some_of([f'{c.worker} round {c.round:,}' for c in waiting])}" if waiting else ""
    waits = "" if waiting is None else f"  {counted(len(waiting), 'contribution')} waiting{names}"
    console.print(f"version {version:,}{waits}")
    print_rows(_COLUMNS, map(_row, rows))
    for histogram_ in bins.values():
        most = max((b.items for b in histogram_), default=1)
        for b in histogram_:
            bar = _FULL * math.ceil(_BAR * b.items / most)
            console.print(f"{b.low:>11.4g} to {b.high:>11.4g}  {b.items:>11,}  {bar}")


def _row(facts: Mapping[str, Any]) -> list[str]:
    shape = " x ".join(map(str, facts["shape"])) or "one number"
    shards = facts["shards"]
    where = f"{shards[0]} to {shards[-1]}" if len(shards) > 1 else "".join(map(str, shards)) or "-"
    numbers = [f"{facts[name]:.4g}" for name in ("norm", "least", "greatest", "mean")]
    zeros = f"{facts['zeros'] / max(1, math.prod(facts['shape'])):.0%}"
    change = "-" if facts["change"] is None else f"{facts['change']:.2%}"
    return [facts["parameter"], shape, where, *numbers, zeros, change]
