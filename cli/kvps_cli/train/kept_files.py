"""What the commands that start aggregators share: the options for a record and for checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kvps_aggregator.checkpoints import Checkpoints

from kvps.errors import InvalidSetting
from kvps_cli.options import FILES, check_directory

Record = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="DIR",
        help="Keep every contribution in a file in this directory, for kvps verify --record.",
        rich_help_panel=FILES,
    ),
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every",
        metavar="N",
        help="Write a checkpoint after every N-th and the last version, and move the commit log into a file beside it.",
        rich_help_panel=FILES,
    ),
]
CheckpointDirectory = Annotated[
    Path,
    typer.Option("--checkpoints", metavar="DIR", help="Where checkpoints are written.", rich_help_panel=FILES),
]
Keep = Annotated[int, typer.Option(metavar="K", help="How many checkpoints of a job are kept.", rich_help_panel=FILES)]


def checkpoints_of(every: int | None, directory: Path, keep: int) -> Checkpoints | None:
    """Return what checkpoints these options ask for; None without --checkpoint-every. Raises InvalidSetting."""
    for option, number in (("--checkpoint-every", every), ("--keep", keep)):
        if number is not None and number < 1:
            raise InvalidSetting(f"{option} must be 1 or more, not {number}")
    return None if every is None else Checkpoints(check_directory("--checkpoints", directory), every, keep)


def kept_options(record: Path | None, saving: Checkpoints | None) -> list[str]:
    """Return an aggregator's options for a record and checkpoints. Raises InvalidSetting for an unusable directory."""
    options = ["--record", str(check_directory("--record", record))] if record is not None else []
    if saving:
        options += ["--checkpoint-every", str(saving.every), "--checkpoints", str(saving.directory)]
        options += ["--keep", str(saving.keep)]
    return options
