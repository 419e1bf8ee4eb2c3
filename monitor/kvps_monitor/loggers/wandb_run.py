"""Rows in a run of Weights & Biases. Nothing leaves the machine unless the user's environment sets WANDB_MODE.

The user installs wandb. A run that goes on online continues after its last step; offline, each process makes a run of
its own, because the runs before are in files that only `wandb sync` reads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kvps.errors import InvalidSetting, KvpsError
from kvps_monitor.loggers.lineage import Lineage
from kvps_monitor.loggers.rows import Row


class WandbRun:
    """A logger. `last` is the version of the last row that the run has, 0 without one, `evaluated` the time of the last
    evaluation, in ms; `place` is its URL, or its directory."""

    def __init__(self, name: str, settings: dict[str, Any], lineage: Lineage) -> None:
        """Begin or continue a run with the `name` and `settings` of a job. Raises InvalidSetting."""
        import wandb

        mode = os.environ.get("WANDB_MODE") or "offline"
        self.last = self.evaluated = 0
        try:
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
        except Exception as error:  # wandb raises errors of many kinds
            raise InvalidSetting(f"wandb: {' '.join(str(error).split())}") from None

    def write(self, rows: Sequence[Row]) -> None:
        """Hand rows to wandb. Raises KvpsError."""
        try:
            for row in rows:
                self._run.log({"at_ms": row.at_ms, **row.values}, step=row.version)
                self.last = row.version
        except Exception as error:
            raise KvpsError(f"wandb: {' '.join(str(error).split())}") from None

    def write_evaluations(self, rows: Sequence[Row]) -> None:
        """Hand rows of evaluations to wandb. Its steps never go back: they have their version as a figure, which charts
        of them have as their x axis. Raises KvpsError."""
        try:
            for row in rows:
                facts = {"eval/version": row.version, "eval/at_ms": row.at_ms}
                self._run.log(facts | dict(row.values), step=self.last)
                self.evaluated = row.at_ms
        except Exception as error:
            raise KvpsError(f"wandb: {' '.join(str(error).split())}") from None

    def close(self) -> None:
        """End the run. Raises KvpsError."""
        try:
            self._run.finish()
        except Exception as error:
            raise KvpsError(f"wandb: {' '.join(str(error).split())}") from None
