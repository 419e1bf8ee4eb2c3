"""What `kvps up` and `kvps run` show while it trains: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvps.job import Job, Trace
from kvps.protocol.job_state import State

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
