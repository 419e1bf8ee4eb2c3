"""Where rows go, as a user says it: `tensorboard`, `tensorboard:DIR`, `wandb` or `csv:PATH`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

from kvps.errors import InvalidSetting, install
from kvps.job import Job
from kvps.machine.files import make_directory, private
from kvps_monitor.loggers.csv_file import CsvFile
from kvps_monitor.loggers.event_file import EventFile, files_in, free_directory
from kvps_monitor.loggers.lineage import Lineage
from kvps_monitor.loggers.logger import Logger
from kvps_monitor.loggers.wandb_run import WandbRun

RUNS = Path("runs")
"""Where a job's directory is if the user names none, as TensorBoard's users expect."""
_LIBRARIES = {"tensorboard": ("tensorboardX", "tensorboard"), "wandb": ("wandb",)}
_INSTALL = {"tensorboard": install("tensorboard"), "wandb": "pip install wandb"}


class Target(NamedTuple):
    """One place where rows go: its kind, and a path, which is the user's or None."""

    kind: str
    path: Path | None

    def __str__(self) -> str:
        return self.kind if self.path is None else f"{self.kind}:{self.path}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read what a user wrote, and make sure that its library is there. Raises InvalidSetting."""
        kind, colon, path = text.partition(":")
        if kind not in ("csv", *_LIBRARIES) or (colon and not path) or (kind == "csv") > bool(path):
            raise InvalidSetting(f"a log is csv:PATH, tensorboard, tensorboard:DIR or wandb, not {text!r}")
        if kind == "wandb" and path:
            raise InvalidSetting(
                f"wandb takes no path: WANDB_PROJECT and WANDB_DIR are in the environment, not {text!r}"
            )
        if kind in _LIBRARIES and not any(map(_is_installed, _LIBRARIES[kind])):
            raise InvalidSetting(f"--log {kind} needs {' or '.join(_LIBRARIES[kind])}: {_INSTALL[kind]}")
        return cls(kind, Path(path) if path else None)

    def of(self, which: str) -> Target:
        """Return where the rows of a later job of a run go, which the run calls `which`: a file or folder beside."""
        if not which or self.path is None:
            return self
        return Target(self.kind, self.path.with_name(f"{self.path.stem}.{which}{self.path.suffix}"))

    def check(self, fresh: bool = False) -> None:
        """Make the file or directory if it is missing. Raises InvalidSetting if it cannot be written, or, for a `fresh`
        job, if it has rows."""
        try:
            if self.kind == "csv" and self.path is not None:
                os.close(private(str(self.path), os.O_RDWR | os.O_CREAT | os.O_APPEND))
                if not self.path.is_file():
                    raise InvalidSetting(f"{self} is no regular file: name a file")
                has_rows = self.path.stat().st_size > 0
            elif self.kind == "tensorboard":
                make_directory(self.path or RUNS)
                has_rows = bool(self.path and files_in(self.path))
                if not os.access(self.path or RUNS, os.W_OK | os.X_OK):
                    raise InvalidSetting(f"{self}: no permission to write there")
            else:
                return
        except OSError as error:
            raise InvalidSetting(f"{self}: {error.strerror}") from None
        if fresh and has_rows:
            raise InvalidSetting(f"{self} has rows of another job: name another place")

    def open(self, job: Job) -> tuple[Logger, str]:
        """Return the logger of a job, and a line that says where its rows are. Raises InvalidSetting, CorruptData."""
        lineage = Lineage.of(job)
        if self.kind == "csv":
            assert self.path is not None
            return CsvFile(self.path, lineage), ""
        if self.kind == "wandb":
            run = WandbRun(job.name, dict(job.config.to_hash()), lineage)
            return run, f"training curves: {run.place}"
        directory = self.path or free_directory(RUNS / job.name, lineage)
        return EventFile(directory, lineage), f"training curves: tensorboard --logdir {directory}"


def _is_installed(library: str) -> bool:
    spec = importlib.util.find_spec(library)
    return bool(spec and spec.origin)  # a folder of that name, as one of logs, has none
