"""What `kvps up` and `kvps run` do alike: aggregators for a job, and a look at it until its workers have ended.

On a terminal the look is a live table, elsewhere plain lines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvps.cli.supervise import Child, Supervisor
from kvps.errors import InvalidSetting, KvpsError
from kvps.job import Job, Trace
from kvps.protocol.job_state import State

LOOK_S = 0.2
_FINISH_S = 5.0
_MOST_AGGREGATORS = 64
_LINE_EVERY_S = 2.0
_RATE_OVER = 8  # looks at the state over which steps/s is taken


class Display:
    """Shows a job's state; `rounds` is worker -> how many rounds it will do, of those of whom that is known."""

    def __init__(self, job: Job, rounds: dict[str, int], console: Console | None = None) -> None:
        self.console = console or Console()
        self._job = job
        self._rounds = rounds
        self._seen: deque[tuple[float, int]] = deque(maxlen=_RATE_OVER)
        self._next_line = 0.0
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def show(self, state: State, traces: dict[str, Trace], last: bool = False) -> None:
        """Show the job as it is now; `last` forces a line where lines are rationed."""
        self.observe(state)
        if self._live:
            self._live.update(self.render(state, traces), refresh=True)
        elif last or (state.members and time.monotonic() >= self._next_line):
            self._next_line = time.monotonic() + _LINE_EVERY_S
            self.console.print(self.line(state, traces), highlight=False, soft_wrap=True)

    def observe(self, state: State) -> None:
        """Note when the job was at which version, for its rate."""
        self._seen.append((time.monotonic(), state.version))

    def message(self, text: str) -> None:
        """A line above the table."""
        self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def line(self, state: State, traces: dict[str, Trace]) -> str:
        """The state in one plain line."""
        clocks = " ".join(f"{worker}={count}" for worker, count in sorted(state.clock.items()))
        return (
            f"version {state.version}  clock {clocks or '-'}  loss {_loss(traces)}  "
            f"{self._rate():.1f} steps/s  waiting {_waiting(traces):.0%}"
        )

    def render(self, state: State, traces: dict[str, Trace]) -> RenderableType:
        """The state as a table."""
        c = self._job.config
        title = Text.assemble(
            (self._job.name, "bold cyan"),
            f"  {c.mode}, {c.workers} workers, {c.optimizer}\n",
            ("version ", "dim"),
            (f"{state.version}", "bold"),
            ("   steps/s ", "dim"),
            (f"{self._rate():.0f}", "bold"),
            ("   loss ", "dim"),
            (_loss(traces), "bold"),
            ("   waiting ", "dim"),
            (f"{_waiting(traces):.0%}", "bold"),
        )
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("worker", "clock", "", "loss", "waiting", "state"):
            table.add_column(name, justify="right" if name in ("clock", "loss", "waiting") else "left")
        for m in sorted(state.members.values(), key=lambda m: (len(m.worker), m.worker)):
            trace = traces.get(m.worker, Trace(None, 0.0))
            total = self._rounds.get(m.worker, 0)
            table.add_row(
                m.worker,
                str(m.clock),
                ProgressBar(total=total, completed=m.round, width=24) if total else "",
                f"{trace.loss:.4f}" if trace.loss is not None else "-",
                f"{trace.waiting:.0%}",
                "finished" if m.finished else m.state,
            )
        return Group(title, table)

    def _rate(self) -> float:
        (then, before), (now, version) = self._seen[0], self._seen[-1]
        return (version - before) / (now - then) if now > then else 0.0


def _loss(traces: dict[str, Trace]) -> str:
    losses = [t.loss for t in traces.values() if t.loss is not None]
    return f"{sum(losses) / len(losses):.4f}" if losses else "-"


def _waiting(traces: dict[str, Trace]) -> float:
    return sum(t.waiting for t in traces.values()) / len(traces) if traces else 0.0


def check_aggregators(number: int) -> None:
    """Raise InvalidSetting for a number of aggregators that cannot be."""
    if not 1 <= number <= _MOST_AGGREGATORS:
        raise InvalidSetting(f"--aggregators must be from 1 to {_MOST_AGGREGATORS}, not {number}")


def aggregate(supervisor: Supervisor, job: str, number: int, options: Sequence[str]) -> list[Child]:
    """Start so many aggregators of the job, which need not be there yet."""
    names = [f"aggregator{n or ''}" for n in range(number)]
    return [supervisor.start(name, "aggregator", "start", "--job", job, *options) for name in names]


def follow(supervisor: Supervisor, job: Job, serving: list[Child], workers: list[Child], display: Display) -> None:
    """Show the job until its workers have ended and all that they pushed is committed.

    Raises KvpsError when that cannot come: a worker ended before it had joined, or all aggregators failed.
    """
    while not all(child.done for child in workers) or not job.state().settled:
        supervisor.watch(LOOK_S)
        for line in supervisor.said():
            display.message(line)
        ended = {child.name: child.failed for child in workers if child.done}
        state = job.state()  # behind that: who ended may have joined
        display.show(state, job.traces())
        if never := {name: failed for name, failed in ended.items() if name not in state.members}:
            how = "failed" if any(never.values()) else "ended"
            raise KvpsError(f"job {job.name} ends: {', '.join(never)} {how} before it had joined")
        _keep_served(job, serving, supervisor)
    display.show(job.state(), job.traces(), last=True)


def finish(supervisor: Supervisor, job: Job, serving: list[Child]) -> list[str]:
    """End the aggregators of a job whose workers have ended; what was said last."""
    if job.state().finished(job.config):
        supervisor.await_end([child.name for child in serving], _FINISH_S)  # they sweep up first
    supervisor.end()
    return supervisor.said()


def _keep_served(job: Job, serving: list[Child], supervisor: Supervisor) -> None:
    """Start an aggregator again if none is left and the job needs one. Raises what they said last if all failed."""
    if all(child.failed for child in serving):
        said = " ".join(supervisor.said()) or f"its aggregator ended with code {serving[0].code}"
        raise KvpsError(f"job {job.name} ends: {said}")
    # They end when the job is finished. It may be open again after that: a script joins a second time.
    if all(child.done for child in serving) and not job.state().settled:
        supervisor.run_again(next(child for child in serving if not child.failed))


def check_trained(job: str, version: int, workers: list[Child]) -> None:
    """Raise KvpsError if nothing was committed (version 0), or any of the workers failed."""
    failed = [child.name for child in workers if child.failed]
    all_failed = len(failed) == len(workers)
    if version == 0:
        what = "all its workers failed before anything" if all_failed else "nothing"
        raise KvpsError(f"job {job}: {what} was committed: there are no figures")
    if all_failed:
        raise KvpsError(f"job {job}: all its workers failed; the figures above are of what they had done by then")
    if failed:
        raise KvpsError(f"job {job}: {', '.join(failed)} failed; the others went on, their figures are above")


def check_killed(job: str, copies: list[Child]) -> None:
    """Raise KvpsError if a signal ended any of these copies of a script when its worker had finished."""
    if killed := [f"{child.name} ({child.signal})" for child in copies if child.signal]:
        raise KvpsError(
            f"job {job}: killed after the last round: {', '.join(killed)}; the weights are complete, but what the "
            f"script does after its rounds may be missing"
        )


class Figures(NamedTuple):
    """How many versions a job has, in how many seconds of training, and how many a second."""

    version: int
    seconds: float
    steps_per_s: float

    @classmethod
    def of(cls, job: Job, version: int) -> Figures:
        """Those of a job that has come to this version."""
        seconds = job.training_seconds()
        return cls(version, seconds, version / seconds if seconds else 0.0)

    def __str__(self) -> str:
        return f"{self.version} steps in {self.seconds:.1f} s, {self.steps_per_s:.0f} steps/s"
