"""The evaluator of a `kvps run`: one more process beside the copies, for which no worker waits; with its options."""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvps.errors import InvalidSetting, KvpsError
from kvps.evaluator import Orders
from kvps.history.best import best_file, best_of
from kvps.history.evaluations import Wanted
from kvps.machine import launcher
from kvps.machine.files import writable_directory
from kvps_cli.options import DEFAULT_CHECKPOINTS, SharedOptions
from kvps_cli.output import say
from kvps_cli.supervise import Supervisor
from kvps_cli.train.progress import relay

log = logging.getLogger("kvps.supervise")

_option = partial(typer.Option, rich_help_panel="Evaluation")
_LOOK_S = 0.2
_SAY_S = 2.0
_AGAIN = 3  # times it is started again without an evaluation in between


@dataclass
class EvaluatorOptions(SharedOptions):
    """What `kvps run` evaluates. `prepare` them before anything else. `orders` are None without an evaluator."""

    evaluator: Annotated[
        str | None,
        _option(
            metavar="COMMAND",
            help="Run this beside the copies, to evaluate versions: kvps.from_env() has versions() and report() there.",
            show_default="COMMAND..., up to @worker.evaluates, with --eval-every",
        ),
    ] = None
    eval_every: Annotated[
        int | None,
        _option(
            metavar="N",
            min=1,
            help="Evaluate the newest version whenever N more are made, and the last one. No worker waits for that.",
            show_default="1 with --evaluator",
        ),
    ] = None
    keep_best: Annotated[
        str | None,
        _option(
            metavar="FIGURE[:max]",
            help="Keep the weights of the version that has the lowest (or highest) FIGURE, in the folder best of "
            f"--checkpoints ({DEFAULT_CHECKPOINTS} without one).",
        ),
    ] = None
    eval_grace: Annotated[
        float,
        _option(
            metavar="SECONDS",
            min=0,
            help="How long the run waits for the evaluation of the last version.",
            hidden=True,
        ),
    ] = 300.0
    orders: Orders | None = field(init=False, default=None)
    command: list[str] | None = field(init=False, default=None)

    def prepare(self, checkpoints: Path | None, checked: Callable[[Sequence[str]], list[str]]) -> None:
        """Check the options; `checked` does so with a command. Raises InvalidSetting."""
        if self.evaluator is None and self.eval_every is None:
            if self.keep_best is not None:
                raise InvalidSetting("--keep-best is for versions that are evaluated: give --eval-every or --evaluator")
            return
        directory = ""
        if self.keep_best is not None:
            Wanted.parse(self.keep_best)
            directory = str(writable_directory("--checkpoints", checkpoints or DEFAULT_CHECKPOINTS))
        if self.evaluator is not None:
            try:
                self.command = checked(shlex.split(self.evaluator))
            except ValueError as error:
                raise InvalidSetting(f"--evaluator {self.evaluator}: {error}") from None
        self.orders = Orders(self.eval_every or 1, self.keep_best or "", directory)


class EvaluatorProcess:
    """The evaluator beside one run. A thread relays its lines, and starts it again if it is killed or fails: a few
    times, and then the training goes on without it.

    `supervisor` starts it, and nothing else. Without a command of its own it is one more copy of `command`.
    """

    def __init__(
        self, supervisor: Supervisor, options: EvaluatorOptions, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        assert options.orders
        self._supervisor = supervisor
        self._orders = options.orders
        self._grace_s = options.eval_grace
        self._ending = threading.Event()
        self._over = threading.Event()
        self._child = supervisor.run(
            launcher.EVALUATOR, options.command or command, {"PYTHONUNBUFFERED": "1", **environment}
        )
        self._thread = threading.Thread(target=self._watch, name="kvps-evaluator", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        left, last = _AGAIN, 0
        while not self._ending.is_set():
            ended = self._child.heard.wait(_LOOK_S)
            relay(self._supervisor.new_lines())
            if not ended or self._ending.is_set():
                continue
            if self._child.code == 0:
                break
            with suppress(KvpsError):  # a server that is away: it has evaluated what it had
                jobs = self._supervisor.jobs()
                done = sum(newest.version + 1 for job in jobs if (newest := job.evaluation()))
                if done > last:
                    left, last = _AGAIN, done
            end = f"was killed ({self._child.kill})" if self._child.signal else f"failed (code {self._child.code})"
            if not left:
                log.error("%s %s again: the training goes on without evaluations", self._child, end)
                break
            left -= 1
            old = str(self._child)
            self._supervisor.run_again(self._child)
            log.info("%s %s: started again as process %d", old, end, self._child.process.pid)
        self._over.set()

    def await_last(self, quiet: bool, hurries: Callable[[], bool]) -> None:
        """Wait until it has evaluated the last version of a finished job, until the grace is over or the run `hurries`;
        say which version was the best."""
        began, said = time.monotonic(), quiet
        while not self._over.wait(_LOOK_S) and not hurries() and time.monotonic() - began < self._grace_s:
            if not said and time.monotonic() - began > _SAY_S:
                said = True
                say(f"waits for the evaluation of the last version, {self._grace_s:g} s at the most (--eval-grace)")
        if not self._over.is_set():
            why = "the run is stopped" if hurries() else f"{self._grace_s:g} s are over (--eval-grace)"
            log.error("%s is ended before it has evaluated the last version: %s", self._child, why)
        jobs = self._supervisor.jobs()
        for job in jobs if self._orders.keep_best and not quiet else ():
            path = best_file(Path(self._orders.directory), job.name, job.id)
            best, of_job = best_of(path), f" of job {job.name}" if len(jobs) > 1 else ""
            line = f"best {self._orders.keep_best}{of_job}: {best}, kept in {path}"
            say(line if best else f"no version{of_job} was the best: no file")

    def end(self) -> None:
        """End it, if it still runs."""
        self._ending.set()
        self._thread.join()
        self._supervisor.end()
        relay(self._supervisor.new_lines())

    def __enter__(self) -> EvaluatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
