"""`kvps graph`: a picture of who is connected to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kvps_monitor import graph as graphs
from kvps_monitor.live import JobWatch

from kvps.errors import InvalidSetting
from kvps.parsing import json_of
from kvps_cli import connect, options
from kvps_cli.output import print_json, say, write_file

_KINDS = ("svg", "json")


def graph(
    job: options.JobName,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="Write to FILE.svg or FILE.json; svg and json print it."),
    ] = _KINDS[0],
    as_json: options.AsJson = False,
    redis: options.Redis = None,
) -> None:
    """Draw a job as it is now.

    The picture has the server with its shards, the aggregators that hold them or stand by, the workers, and how many
    bytes a second each pushes and pulls.
    """
    if as_json and output != _KINDS[0]:
        raise InvalidSetting("--json prints what -o would write: leave one of them out")
    kind = output if output in _KINDS else Path(output).suffix.removeprefix(".")
    if kind not in _KINDS:
        raise InvalidSetting(f"--output must be svg, json, or a file whose name ends in .svg or .json, not {output!r}")
    with connect.existing_job(redis, job) as opened:
        drawn = graphs.as_json(opened, JobWatch(opened).look())
    if output == "json" or as_json:
        print_json(drawn)
    elif output == "svg":
        print(graphs.as_svg(drawn), end="")
    else:
        write_file("--output", Path(output), graphs.as_svg(drawn) if kind == "svg" else json_of(drawn) + "\n")
        say(f"wrote {output}")
