"""What `kvps up` and `kvps run` share: they start aggregators, and show a job until its workers have ended.

A terminal gets a live table, anything else plain lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import typer
from kvps_monitor import palette
from kvps_monitor.job_now import FINISHED
from kvps_monitor.live import JobWatch
from kvps_monitor.views import JobView
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvps.errors import KvpsError, coloured, counted
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.protocol.job_state import State
from kvps.protocol.phases import WAIT
from kvps_cli.child import Child, Line
from kvps_cli.long_work import duration
from kvps_cli.output import leave_lost_terminal, loss_text, surviving_its_reader
from kvps_cli.supervise import Supervisor
from kvps_cli.train.scale import Copies

log = logging.getLogger("kvps.supervise")

POLL_S = 0.2
_FINISH_S = 5.0
_EACH = 6  # of more workers, a line does not show each
_LINE_EVERY_S = 2.0


class Display:
    """A view of a job's state on stderr; with `quiet` it shows nothing."""

    def __init__(self, job: Job, quiet: bool = False, title: str = "") -> None:
        """`title` begins each plain line: of several jobs, which one it is about."""
        self._title = title
        self._console = Console(stderr=True, quiet=quiet)
        self._job = job
        self._watch = JobWatch(job)
        self._next_line = 0.0
        self._final: int | None = None  # the version for which the last line was printed
        self._rate = 0.0  # contributions in a second when workers were last at work
        self.bars: Mapping[str, str] = {}  # of each copy that draws a progress bar of its own
        self._live: Live | None = None
        if self._console.is_terminal and not quiet:
            # Rich prints stdout above the table if stdout is a terminal; it must not touch output into a file.
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, state: State, last: bool = False) -> None:
        """Show the job as it is now. Without a table, print a line every 2 s, and with `last` one more per version."""
        if self._live:
            self._live.update(self.render(), refresh=True)
        elif last and self._final != state.version:
            self._final = state.version
            self._print()
        elif not last and state.members and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            self._print()

    def _look(self) -> JobView:
        view = self._watch.look()
        self._rate = sum(w.rounds_per_s or 0.0 for w in view.workers) or self._rate
        if not self._rate and view.state == FINISHED and view.elapsed_s:  # it was over before a look at it
            self._rate = view.contributions / view.elapsed_s
        return view

    def _print(self) -> None:
        self._console.print(self._title + self.line(), highlight=False, soft_wrap=True)

    def line(self) -> str:
        """Return the job as it is now as one plain line."""
        view = self._look()
        units = f"units {view.units_done:,} of {view.units:,}  " if view.units else ""
        return (
            f"version {view.version:,}  {units}clock {_clocks(view)}  loss {loss_text(view.loss)}  "
            f"{self._rate:.0f} contributions/s  waiting {_waiting(view):.0%}{_left(view)}"
        )

    def render(self) -> RenderableType:
        """Return the job as it is now as a table."""
        c, view = self._job.config, self._look()
        title = Text.assemble(
            (self._job.name, "bold cyan"),
            f"  {c.mode}, {counted(c.workers, 'worker')}, {c.optimizer}\n",
            ("version ", "dim"),
            (f"{view.version:,}", "bold"),
            ("   contributions/s ", "dim"),
            (f"{self._rate:,.0f}", "bold"),
            ("   loss ", "dim"),
            (loss_text(view.loss), "bold"),
            ("   waiting ", "dim"),
            (f"{_waiting(view):.0%}", "bold"),
            (_left(view).replace("  ", "   "), "bold"),
        )
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("worker", "clock", "", "loss", "waiting", "state"):
            table.add_column(name, no_wrap=True, justify="right" if name in ("clock", "loss", "waiting") else "left")
        rounds = 0 if c.units else c.metadata.rounds
        for w in view.workers:
            table.add_row(
                w.worker,
                f"{w.clock:,}",
                ProgressBar(total=rounds, completed=rounds if w.state == "finished" else w.committed, width=24)
                if rounds
                else "",
                loss_text(w.loss),
                f"{w.shares.get(WAIT, 0.0):.0%}",
                palette.doing(w),
            )
        cut: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"}
        bars = [Text.from_ansi(coloured(f"{name}: {bar}"), **cut) for name, bar in self.bars.items()]
        if not c.units:
            return Group(title, table, *bars)
        done = Table.grid(padding=(0, 2))
        done.add_column(no_wrap=True)
        done.add_column(no_wrap=True)
        done.add_row(ProgressBar(total=c.units, completed=view.units_done, width=16), Text(view.units_text))
        return Group(title, done, table, *bars)


def _clocks(view: JobView) -> str:
    """Return the clock of each worker, by rank; of many only the lowest and the highest, or the line is too long."""
    if len(view.workers) <= _EACH:
        return " ".join(f"{w.worker}={w.clock:,}" for w in view.workers) or "-"
    clocks = [w.clock for w in view.workers]
    return f"{min(clocks):,} to {max(clocks):,} of {counted(len(clocks), 'worker')}"


def _left(view: JobView) -> str:
    """Return the time that what is left takes; "" if that is not known."""
    return f"  {duration(view.eta_s)} left" if view.eta_s else ""


def _waiting(view: JobView) -> float:
    """Return the mean of the workers' shares of time that they waited."""
    return sum(w.shares.get(WAIT, 0.0) for w in view.workers) / len(view.workers) if view.workers else 0.0


def aggregators_option(**more: Any) -> Any:
    """Return the option --aggregators; `more` as in typer.Option."""
    help = "How many aggregators are started: one works, the others stand by."
    return typer.Option(metavar="N", min=1, max=64, help=help, rich_help_panel="Failures", hidden=True, **more)


def aggregate(supervisor: Supervisor, job: str, number: int, options: Sequence[str], which: str = "") -> list[Child]:
    """Start `number` aggregators of the job, which need not exist yet; `which` tells them from those of other jobs."""
    names = [f"aggregator{n or ''}{which}" for n in range(number)]
    return [supervisor.start(name, "aggregator", "start", "--job", job, *options) for name in names]


class Followed:
    """A job that a command serves and shows. Its aggregators are `serving`; it calls `finished` once the job is
    finished, before any line is printed that a worker wrote after that."""

    def __init__(
        self, job: Job, serving: list[Child], display: Display, finished: Callable[[State], None] = lambda _: None
    ) -> None:
        self.job = job
        self.serving = serving
        self.over = False
        self._display = display
        self._finished = finished
        self._holders = [""] * job.layout.shards
        self._state: State | None = None

    def look(self, last: bool = False, bars: Mapping[str, str] | None = None) -> None:
        """Show the job as it is now, with the progress bars that copies draw."""
        self._display.bars = bars or {}
        self._state = state = self.job.state()
        self.over = state.finished(self.job.config)
        self._display.show(state, last=last or self.over)
        if self.over:
            self._finished(state)

    def say_end(self) -> None:
        """Say how far the job was, if it has not finished."""
        if self._state and not self.over:
            log.info("leaves job %s at version %d, before it has finished", self.job.name, self._state.version)

    def check(self, supervisor: Supervisor, copies: Copies, ended: dict[str, bool]) -> None:
        """Keep the job served. Raises KvpsError if it cannot finish: too many workers have `ended`, and whether they
        failed, before they had joined, or all aggregators failed."""
        assert self._state
        job = self.job
        self._holders = _log_failovers(supervisor, self._holders, job.access.reader.holders())
        joined = {m.worker for m in self._state.members.values() if not m.awaited}
        absent = {name: failed for name, failed in ended.items() if name not in joined}
        to_come = [child for child in copies.all if child.name not in {*joined, *ended}]
        lacking = len(joined) + len(to_come) < job.config.workers
        if absent and lacking and not (copies.stopping or self.over):
            how = "failed" if any(absent.values()) else "ended"
            raise KvpsError(f"job {job.name} ends: {', '.join(absent)} {how} before it had joined")
        _keep_served(job, self.serving, supervisor)


def follow(supervisor: Supervisor, followed: Callable[[], Sequence[Followed]], copies: Copies) -> None:
    """Show the jobs until their workers have ended and all their contributions are committed. `followed` returns those
    that are there. Raises KvpsError if one of them cannot finish. After Ctrl-C a line says how far each is."""
    try:
        _follow(supervisor, followed, copies)
    except KeyboardInterrupt:
        with suppress(KvpsError):
            for each in followed():
                each.say_end()
        raise


def _follow(supervisor: Supervisor, followed: Callable[[], Sequence[Followed]], copies: Copies) -> None:
    while not copies.over([each.job for each in followed()]):
        supervisor.watch(POLL_S)
        jobs = followed()
        copies.follow([each.job for each in jobs if not each.over or each is jobs[-1]])
        lines = supervisor.new_lines()
        ended = {child.name: child.failed for child in copies.all if child.done}
        # Read last: the state then has the joins of ended workers, and `finished` is called before later lines.
        bars = {child.name: child.bar for child in copies.all if child.bar and not child.done}
        with surviving_its_reader(copies.stopping):
            for each in jobs:
                each.look(bars=bars)
            relay(lines)
        for each in jobs:
            each.check(supervisor, copies, ended)
    with surviving_its_reader(copies.stopping):
        for each in followed():
            each.look(last=True)


def relay(lines: Sequence[Line]) -> None:
    """Print the lines of children: results to stdout, all else to stderr; nowhere once their terminal is gone."""
    leave_lost_terminal()
    for line in lines:
        print(coloured(line.text), file=sys.stdout if line.result else sys.stderr, flush=True)


def _log_failovers(supervisor: Supervisor, before: list[str], holders: list[str]) -> list[str]:
    """Log which aggregator took over a shard from which. Return the last holder of each shard."""
    for shard, (old, new) in enumerate(zip(before, holders, strict=True)):
        if old and new and old != new:
            log.info("shard %d: %s took over from %s", shard, supervisor.name_of(new), supervisor.loss_of(old))
    return [new or old for old, new in zip(before, holders, strict=True)]


def finish(supervisor: Supervisor, followed: Sequence[Followed]) -> None:
    """End the aggregators of jobs whose workers have ended, and print the last lines of all children."""
    for each in followed:
        if each.job.state().finished(each.job.config):
            # Aggregators sweep before they end.
            supervisor.await_end([child.name for child in each.serving], _FINISH_S)
    supervisor.end()
    relay(supervisor.new_lines())


def _keep_served(job: Job, serving: list[Child], supervisor: Supervisor) -> None:
    """Restart an aggregator if all ended and the job needs one. Raises KvpsError, with their output, if all failed."""
    if all(child.failed for child in serving):
        printed = " ".join(line.text for line in supervisor.new_lines())
        raise KvpsError(f"job {job.name} ends: {printed or f'its aggregator ended with code {serving[0].code}'}")
    # Aggregators end when the job is finished. A script that joins a second time opens the job again.
    if all(child.done for child in serving) and not job.state().settled:
        again = next(child for child in serving if not child.failed)
        old = str(again)
        supervisor.run_again(again)
        log.info("%s ended with its job, but a worker rejoined: started again as process %d", old, again.process.pid)


def check_trained(job: str, version: int, workers: list[Child]) -> None:
    """Raise KvpsError if nothing was committed (version 0) or any worker failed."""
    failed = [child.name for child in workers if child.failed]
    all_failed = len(failed) == len(workers)
    if version == 0:
        what = "all its workers failed before anything" if all_failed else "nothing"
        raise KvpsError(f"job {job}: {what} was committed: there are no figures")
    if all_failed:
        raise KvpsError(f"job {job}: all its workers failed; the figures above are of what was committed by then")
    if failed:
        raise KvpsError(f"job {job}: {', '.join(failed)} failed; the others went on, their figures are above")


def check_killed(job: str, copies: list[Child]) -> None:
    """Raise KvpsError if a signal ended any copy of a script after its worker had finished."""
    if killed := [f"{child.name} ({child.signal})" for child in copies if child.signal]:
        raise KvpsError(
            f"job {job}: killed after the last round: {', '.join(killed)}; the weights are complete, but what the "
            f"script does after its rounds may be missing"
        )


class Figures(NamedTuple):
    """A job's result: its version, the contributions in it, and the seconds from the first join to the last commit."""

    version: int
    contributions: int
    seconds: float

    @classmethod
    def of(cls, job: Job, state: State) -> Figures:
        """Return the figures of a job at this state."""
        return cls(state.version, sum(state.clock.values()), LogStream(job.access).training_seconds())

    @property
    def contributions_per_s(self) -> float:
        return self.contributions / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{counted(self.contributions, 'contribution')} in {counted(self.version, 'version')}, "
            f"{self.seconds:.1f} s, {self.contributions_per_s:.0f} contributions/s"
        )
