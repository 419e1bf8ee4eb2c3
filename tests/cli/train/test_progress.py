"""What `kvps up` shows: bars, and the time that is left."""

from __future__ import annotations

import re

from helpers.harness import aggregating, await_version, gradient, model
from kvps_cli.train.progress import Display
from rich.console import Console

from kvps.job import Job
from kvps.store import Store


def rendered(display: Display, job: Job) -> str:
    console = Console(width=120, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(display.render(job.state()))
        return console.export_text()


def bar_of(text: str) -> str:
    """Return the part of a worker's line that is its bar."""
    (line,) = (line for line in text.splitlines() if line.startswith("w0"))
    return "".join(re.findall("[━╸╺]", line))


def shown(store: Store, total: int) -> tuple[str, str]:
    """Return the line and the table of a job of which w0 has done one round, of `total` in all."""
    job = store.create_job("j", model(), workers=1)
    display = Display(job, {"w0": total}, quiet=True)
    with aggregating(job), job.join("w0") as session:
        display.observe(job.state())
        session.push(gradient(session.pull(), 0, 0))
        await_version(job, 1)
        display.observe(job.state())
        return display.line(job.state()), rendered(display, job)


def test_what_is_done_of_a_known_number_of_rounds_has_a_bar_and_a_time_left(store: Store) -> None:
    line, table = shown(store, 4)
    assert line.endswith(" s left")
    assert len(bar_of(table)) == 24
    assert " s left" in table


def test_what_is_done_or_unknown_has_no_time_left(store: Store) -> None:
    line, _ = shown(store, 1)
    assert "left" not in line
    store.remove_job("j")
    line, table = shown(store, 0)
    assert "left" not in line
    assert bar_of(table) == ""
