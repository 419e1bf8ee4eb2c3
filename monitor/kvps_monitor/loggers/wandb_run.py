"""Rows in a run of Weights & Biases. Nothing leaves the machine unless the user's environment sets WANDB_MODE.

The user installs wandb. A run that goes on online continues after its last step; offline, each process makes a run of
its own, because the runs before are in files that only `wandb sync` reads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kvps.errors import InvalidSetting
from kvps_monitor.loggers.lineage import Lineage
from kvps_monitor.loggers.logger import Logger
from kvps_monitor.loggers.rows import Row


class WandbRun(Logger):
    """A logger. `place` is the run's URL, or its directory."""

    FAILS = Exception  # wandb raises errors of many kinds

    def __init__(self, name: str, settings: dict[str, Any], lineage: Lineage) -> None:
        """Begin or continue a run with the `name` and `settings` of a job. Raises InvalidSetting."""
        import wandb

        super().__init__("wandb")
        mode = os.environ.get("WANDB_MODE") or "offline"
        with self._told_as(InvalidSetting):
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "kvps",
                name=name,
                id=lineage.mark.replace(".", "-"),
                resume="allow" if mode == "online" else None,
                mode=mode,
                config=settings,
                settings=wandb.Settings(console="off", silent=True),
            )
            self.place = str(self._run.url if mode == "online" else self._run.dir)
            if self._run.resumed:
                self.last = int(self._run.step) - 1
                self.evaluated = int(self._run.summary.get("eval/at_ms") or 0)
            self._run.define_metric("eval/*", step_metric="eval/version")

    def _write(self, rows: Sequence[Row]) -> None:
        """Hand rows to wandb. Its steps never go back: evaluations have their version as a figure, which charts of them
        have as their x axis."""
        for row in rows:
            if row.is_evaluation:
                facts, step = {"eval/version": row.version, "eval/at_ms": row.at_ms}, self.last
            else:
                facts, step = {"at_ms": row.at_ms}, row.version
            self._run.log(facts | dict(row.values), step=step)

    def _close(self) -> None:
        self._run.finish()
