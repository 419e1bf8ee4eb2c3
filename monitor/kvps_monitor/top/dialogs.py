"""What `kvps top` asks: which job, and whether a worker is to be evicted."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from kvps.errors import printable
from kvps_monitor.top.feed import JobLine


class JobChoice(ModalScreen[str | None]):
    """A list of jobs; its result is the name of the chosen one, or None."""

    BINDINGS = [  # noqa: RUF012 - Textual's own way
        ("escape", "dismiss(None)", "Back"),
        ("q,ctrl+c", "app.quit", "Quit"),
    ]

    def __init__(self, jobs: list[JobLine]) -> None:
        super().__init__()
        self._jobs = jobs

    def compose(self) -> ComposeResult:
        """Make the list."""
        width = max((len(job.name) for job in self._jobs), default=0)
        lines = [
            Text(printable(f"{job.name:{width}}  " + (f"{job.mode}  version {job.version:,}  " if job.mode else "")))
            + Text(printable(job.about), "dim")
            for job in self._jobs
        ]
        with Vertical(classes="dialog"):
            yield Static("Which job? Enter chooses, Escape goes back." if lines else "No jobs are on this server.")
            yield OptionList(*(Option(line) for line in lines))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Return the chosen one."""
        self.dismiss(self._jobs[event.option_index].name)


class Confirmation(ModalScreen[bool]):
    """A question; its result is whether the answer is yes."""

    BINDINGS = [  # noqa: RUF012
        ("y", "dismiss(True)", "Yes"),
        ("n,escape,q", "dismiss(False)", "No"),
        ("ctrl+c", "app.quit", "Quit"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Make the question."""
        with Vertical(classes="dialog"):
            yield Static(Text(printable(self._question)), id="question")
            yield Static("y: yes   n: no")
