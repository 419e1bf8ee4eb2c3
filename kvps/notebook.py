"""What a notebook shows: a bar while a job trains, and tables in place of long lines. It shows nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

_EVERY_S = 0.2


def is_here() -> bool:
    """Return whether this process is the kernel of a notebook."""
    python = sys.modules.get("IPython")
    return hasattr(python.get_ipython(), "kernel") if python else False


class Bar:
    """A bar in the cell that runs. `every_s` is how often to call `show`; None where there is no notebook."""

    def __init__(self, of: int) -> None:
        self._of, self._began = of, time.monotonic()
        self._update: Callable[[Any], None] | None = None
        self.every_s: float | None = None
        if is_here():
            from IPython.display import HTML, display

            self._html, self.every_s = HTML, _EVERY_S
            self._update = display(HTML(""), display_id=True).update

    def show(self, done: int, words: str) -> None:
        """Show that so much is done, and say these words beside it."""
        if self._update:
            spent = time.monotonic() - self._began
            left = f", {spent * (self._of - done) / done:.0f} s left" if 0 < done < self._of else f", {spent:.1f} s"
            self._update(self._html(f'<progress value="{done}" max="{self._of}"></progress> {escape(words + left)}'))


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table as HTML. Names may come from anybody: what HTML obeys is escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def workers_table(state: Any) -> str:
    """Return the workers of a `kvps.protocol.job_state.State` as HTML."""
    members = sorted(state.members.values(), key=lambda m: m.rank)
    states = {m.worker: "finished" if m.finished else "evicted" if m.evicted else m.state for m in members}
    rows = [(m.worker, states[m.worker], f"{m.round:,}", f"{m.clock:,}", m.host, m.device) for m in members]
    title = f"version {state.version:,}, head {state.head[:12]}{f', {state.run.why}' if state.run.why else ''}"
    return table(title, ("worker", "state", "round", "clock", "host", "device"), rows)
