"""The process of a run that evaluates versions beside the workers, and for which nobody waits.

KVPS_EVALUATES   what it is to do, as JSON: every how many versions, and if the best one is kept, by which figure and in
                 which directory
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvps.arrays.layout import Array
from kvps.errors import WrongOrder
from kvps.history.best import Best
from kvps.history.commit_log import origins
from kvps.history.evaluations import Evaluation, Wanted, checked_figures
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.machine import launcher
from kvps.parsing import Fields

Evaluate = Callable[[dict[str, Array]], Mapping[str, Any]]


class Orders(NamedTuple):
    """What the evaluator of a run is to do. `keep_best` is a figure, as `Wanted.parse` reads it, or "" to keep none."""

    every: int
    keep_best: str = ""
    directory: str = ""

    def variable(self) -> dict[str, str]:
        """Return the environment variable by which a process gets them."""
        return {launcher.EVALUATES: json.dumps(self._asdict())}

    @classmethod
    def of_this_process(cls) -> Orders | None:
        """Return the orders of this process; None if it is no evaluator. Raises CorruptData."""
        if not launcher.evaluates():
            return None
        f = Fields.of_json(os.environ[launcher.EVALUATES], launcher.EVALUATES)
        return cls(f.whole("every", 1), f.text("keep_best"), f.text("directory", 1 << 14))


class Evaluator:
    """The evaluator of one job: the versions that it is to evaluate, its reports, and the best version."""

    def __init__(self, job: Job, orders: Orders) -> None:
        self.job = job
        self._orders = orders
        self._present: tuple[int, dict[str, Array]] | None = None  # what versions() has yielded last
        self._best: Best | None = None
        if orders.keep_best:
            self._best = Best(Path(orders.directory), Wanted.parse(orders.keep_best), job.name, job.id)
            for origin in origins(LogStream(job.access), job.id, Path(orders.directory)):
                if self._best.inherit(*origin):
                    break

    def versions(self) -> Iterator[tuple[int, dict[str, Array]]]:
        """Yield what `Job.versions` does, after the last version that was evaluated."""
        last, kept, state = self.job.evaluation(), self._best and self._best.evaluation, self.job.state()
        if kept and max(last.version if last else 0, state.begin.version) < kept.version <= state.version:
            last = self.job.report(kept.version, kept.figures, kept.by)  # an earlier evaluator did not get that far
        for version, weights in self.job.versions(self._orders.every, last.version if last else 0):
            self._present = version, dict(weights)
            yield version, weights

    def report(self, version: int, figures: Mapping[str, Any]) -> Evaluation:
        """Report figures as `Job.report` does. Weights that are the best so far are kept first: whoever dies in between
        could not read them again. Raises WrongOrder."""
        if self._present is None or version != self._present[0]:
            raise WrongOrder(f"version {version!r} is not the one that versions() has yielded last: report that one")
        checked = checked_figures(figures)
        if self._best:
            at_ms = int(1000 * self.job.access.server.seconds())
            self._best.offer(Evaluation(version, checked, launcher.EVALUATOR, at_ms), self._present[1])
        return self.job.report(version, checked, launcher.EVALUATOR)

    def run(self, evaluate: Evaluate) -> None:
        """Report what `evaluate` returns of each version, until the job's last one."""
        for version, weights in self.versions():
            self.report(version, evaluate(weights))
