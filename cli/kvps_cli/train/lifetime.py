"""The options that say how a run ends, goes on, and what it outlives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from kvps.errors import InvalidSetting
from kvps_cli.connect import ServerOptions
from kvps_cli.options import SharedOptions
from kvps_cli.supervise import GRACE_S, Care
from kvps_cli.train.kept_files import RESUMABLE_EVERY, KeptFiles

_option = partial(typer.Option, rich_help_panel="Stop and resume")


@dataclass(frozen=True)
class Lifetime(SharedOptions):
    """How a run of a script ends and goes on."""

    resume: Annotated[
        bool,
        _option(
            "--resume",
            help="Go on with the job of this name: the one on the server, or else its newest checkpoint in the "
            "directory of --checkpoints. If there is neither, begin anew. So the same line starts a run and resumes "
            f"it. With --checkpoints, --checkpoint-every is {RESUMABLE_EVERY} unless you give it.",
        ),
    ] = False
    stop_grace: Annotated[
        float,
        _option(
            metavar="SECONDS",
            min=0,
            help="How long a process that was asked to end has, before it is killed.",
            hidden=True,
        ),
    ] = GRACE_S
    max_restarts: Annotated[
        int,
        _option(
            metavar="N",
            min=0,
            help="How many times in all copies that end with an error of their own are started again. Those that a "
            "signal ends always are.",
            hidden=True,
        ),
    ] = 0

    def check(self, kept: KeptFiles, server: ServerOptions) -> None:
        """Raise InvalidSetting if there is nothing from which a later run could resume."""
        if self.resume and not (kept.checkpoints or kept.checkpoint_every or server.redis or server.data_dir):
            raise InvalidSetting(
                "--resume needs what outlives a run: give --checkpoints DIR; or a server that keeps its jobs, with "
                "--redis URL or --data-dir DIR"
            )

    def care(self, share_cores: bool, options: Sequence[str]) -> Care:
        """Return how the processes of the run are treated, see `Care`."""
        return Care(
            grace_s=self.stop_grace, restarts=self.max_restarts, share_cores=share_cores, options=tuple(options)
        )
