"""What commands share that write training curves: the option --log, and a log that does nothing if nobody asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from kvps_monitor.loggers.targets import Target
from kvps_monitor.loggers.training_log import TrainingLog

from kvps.errors import InvalidSetting
from kvps.job import Job
from kvps_cli import options
from kvps_cli.output import say

METAVAR = "csv:PATH|tensorboard[:DIR]|wandb"

Logs = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar=METAVAR,
        help="Write loss, learning rate and staleness of each version there. May be given several times.",
        rich_help_panel=options.FILES,
    ),
]


def targets_of(texts: Sequence[str] | None, option: str, fresh: bool = False) -> list[Target]:
    """Return where rows go. With `fresh` the job is a new one, and no rows may be there. Raises InvalidSetting."""
    targets = [Target.parse(text) for text in texts or ()]
    for target in targets:
        if targets.count(target) > 1:
            raise InvalidSetting(f"{option} {target} was given twice")
        target.check(fresh)
    return targets


@contextmanager
def logging_to(
    targets: Sequence[Target], job: Job, quiet: bool, checkpoints: Path | None = None, holds_newest: bool = False
) -> Iterator[TrainingLog]:
    """Write the rows of a job inside the block. See `TrainingLog`. Raises InvalidSetting, CorruptData."""
    log = TrainingLog(job, targets, checkpoints, holds_newest)
    for place in log.places if not quiet else ():
        say(place)
    with log:
        yield log
