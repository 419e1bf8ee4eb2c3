"""The files that a job keeps on this machine: a record, checkpoints and training curves, with their options."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from kvps_aggregator.checkpoints import AS_USUAL, Checkpoints, KeptLog
from kvps_monitor.loggers.targets import Target
from kvps_monitor.loggers.training_log import TrainingLog

from kvps.job import Job
from kvps.machine.files import writable_directory
from kvps_cli import training_log
from kvps_cli.options import DEFAULT_CHECKPOINTS, FILES, SharedOptions

_option = partial(typer.Option, rich_help_panel=FILES)
RESUMABLE_EVERY = 100
"""After how many versions a checkpoint is written with --resume, unless the user says otherwise."""


@dataclass
class KeptFiles(SharedOptions):
    """The options of commands that start aggregators. `prepare` them before anything else.

    saving    what checkpoints they ask for
    kept_log  how much of the commit log stays in Redis, and where the rest goes
    targets   where training curves go
    """

    record: Annotated[
        Path | None,
        _option(
            metavar="DIR",
            help="Keep every contribution in a file in this directory, for kvps verify --record.",
            hidden=True,
        ),
    ] = None
    checkpoint_every: Annotated[
        int | None,
        _option(
            metavar="N",
            min=1,
            help="Write a checkpoint after every N-th and the last version, and move the commit log into a file "
            "beside it.",
        ),
    ] = None
    checkpoints: Annotated[
        Path | None,
        _option(
            metavar="DIR",
            help="Where checkpoints are written, and the older part of the commit log is moved.",
            show_default=f"{DEFAULT_CHECKPOINTS} with --checkpoint-every",
        ),
    ] = None
    keep: Annotated[
        int,
        _option(metavar="K", min=1, help="How many checkpoints of a job are kept.", hidden=True),
    ] = 3
    log_keep: Annotated[
        int | None,
        _option(
            metavar="N",
            min=0,
            help="How many versions the commit log in Redis has about. Older ones are moved into a file in the "
            "directory of --checkpoints; without one they are deleted. 0 keeps all.",
            show_default="100,000 divided by the workers, at least 200",
            hidden=True,
        ),
    ] = None
    log: training_log.Logs = None
    saving: Checkpoints | None = field(init=False, default=None)
    kept_log: KeptLog = field(init=False, default=AS_USUAL)
    targets: list[Target] = field(init=False, default_factory=list)

    def prepare(self, fresh: bool = False, resumable: bool = False) -> None:
        """Check the options and make the directories. With `fresh` the job is a new one. A job that is to be
        `resumable` is saved, if it has a directory. Raises InvalidSetting."""
        if resumable and self.checkpoints and not self.checkpoint_every:
            self.checkpoint_every = RESUMABLE_EVERY
        directory = self.checkpoints or (DEFAULT_CHECKPOINTS if self.checkpoint_every else None)
        if directory:
            directory = writable_directory("--checkpoints", directory)
        if directory and self.checkpoint_every:
            self.saving = Checkpoints(directory, self.checkpoint_every, self.keep)
        self.kept_log = KeptLog(self.log_keep, directory)
        if self.record is not None:
            self.record = writable_directory("--record", self.record)
        self.targets = training_log.targets_of(self.log, "--log", fresh)

    def aggregator_options(self) -> list[str]:
        """Return the options with which an aggregator keeps the record and the checkpoints."""
        options = ["--record", str(self.record)] if self.record else []
        if self.saving:
            options += ["--checkpoint-every", str(self.saving.every), "--keep", str(self.saving.keep)]
        versions, directory = self.kept_log
        options += ["--checkpoints", str(directory)] if directory else []
        return options + ([] if versions is None else ["--log-keep", str(versions)])

    def logging_to(
        self, job: Job, quiet: bool, holds_newest: bool = False, which: str = ""
    ) -> AbstractContextManager[TrainingLog]:
        """Write the training curves of a job inside the block; `which` tells it from the first job of its run."""
        targets = [target.of(which) for target in self.targets]
        return training_log.logging_to(targets, job, quiet, self.kept_log.directory, holds_newest)
