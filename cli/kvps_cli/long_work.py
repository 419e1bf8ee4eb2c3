"""Progress of a command that takes longer than 2 s, on stderr, so that stdout has results alone.

A terminal gets a bar with the time left, anything else a plain line every 2 s, `--json` a line of JSON instead, and
`--quiet` nothing. A quick command shows nothing at all.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from kvps.errors import KvpsError
from kvps_cli.output import say

PATIENCE_S = 2.0
_BAR_EVERY_S = 0.2

Measure = Callable[[], int]


@dataclass
class Stage:
    """A part of a command's work: `done` of `total` units; a `total` of 0 is not known.

    what     the work, as a person reads it
    measure  returns how much is done, if `add` is not called
    """

    what: str
    total: int = 0
    unit: str = ""
    measure: Measure | None = None
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, number: int = 1) -> None:
        """Note that so many units more are done."""
        self.done += number

    def update(self) -> None:
        """Set `done` to what the measure returns."""
        if self.measure:
            try:
                self.done = max(0, self.measure())
            except (KvpsError, OSError):  # the work itself meets the same error and says it
                self.measure = None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float | None:
        """The time that the rest takes at the rate so far; None if that is not known."""
        if not self.total or not self.done:
            return None
        return self.elapsed_s * max(0, self.total - self.done) / self.done

    @property
    def counted(self) -> str:
        """How much is done, with its unit: bytes as MB."""
        if not self.total:
            return ""
        if self.unit == "bytes":
            return f"{self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB"
        return f"{self.done:,} of {self.total:,} {self.unit}"

    @property
    def timed(self) -> str:
        """The time left, or else the time so far."""
        left = self.left_s
        return f"{duration(self.elapsed_s)} so far" if left is None else f"{duration(left)} left"

    def line(self) -> str:
        """Return the stage as one plain line."""
        return ", ".join(filter(None, [f"{self.what}: {self.counted}" if self.counted else self.what, self.timed]))

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        left = self.left_s
        facts = {"progress": self.what, "done": self.done, "total": self.total or None, "unit": self.unit or None}
        return facts | {"elapsed_s": round(self.elapsed_s, 3), "left_s": None if left is None else round(left, 3)}


def duration(seconds: float) -> str:
    """Return a time as a person reads it: 42 s, 3 min 10 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class LongWork:
    """The work of one command, a stage after another. It shows the present stage from 2 s on, from a thread of its
    own, because the command's thread works. A terminal that cannot take a bar away again gets none."""

    def __init__(self, quiet: bool = False, as_json: bool = False) -> None:
        self._console = Console(stderr=True)
        self._quiet = quiet or (self._console.is_dumb_terminal and not as_json)
        self.as_json = as_json
        self._stage: Stage | None = None
        self._over = threading.Event()
        self._bar: Progress | None = None
        self._thread = threading.Thread(target=self._watch, name="kvps-progress", daemon=True)

    @contextmanager
    def stage(self, what: str, total: int = 0, unit: str = "", measure: Measure | None = None) -> Iterator[Stage]:
        """Make this the present stage inside the block."""
        with self.showing(Stage(what, total, unit, measure)) as stage:
            yield stage

    @contextmanager
    def showing(self, stage: Stage) -> Iterator[Stage]:
        """Make a stage the present one inside the block."""
        before, self._stage = self._stage, stage
        try:
            yield stage
        finally:
            self._stage = before

    @property
    def shows_bar(self) -> bool:
        """Whether a person looks at a terminal."""
        return self._console.is_terminal and not self.as_json and not self._quiet

    def __enter__(self) -> LongWork:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if not self._quiet:
            self._thread.join()
        if self._bar:
            self._bar.stop()

    def _watch(self) -> None:
        wait = PATIENCE_S
        while not self._over.wait(wait):
            wait = _BAR_EVERY_S if self.shows_bar else PATIENCE_S
            if stage := self._stage:
                stage.update()
                self._show(stage)

    def _show(self, stage: Stage) -> None:
        if self.shows_bar:
            self._draw(stage)
        elif self.as_json:
            print(json.dumps(stage.to_dict()), file=sys.stderr, flush=True)
        else:
            say(stage.line())

    def _draw(self, stage: Stage) -> None:
        if self._bar is None:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
            self._bar = Progress(
                *columns,
                TextColumn("{task.fields[counted]}", markup=False),
                TextColumn("{task.fields[timed]}", markup=False),
                console=self._console,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._bar.add_task("", total=None, counted="", timed="")
            self._bar.start()
        (task,) = self._bar.task_ids
        total = stage.total or None
        if total is None and self._bar.tasks[0].total is not None:
            self._bar.reset(task, total=None)  # an update cannot take a total away
        done = min(stage.done, stage.total) if total else 0
        self._bar.update(
            task, description=stage.what, total=total, completed=done, counted=stage.counted, timed=stage.timed
        )
