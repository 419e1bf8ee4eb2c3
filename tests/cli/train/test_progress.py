"""What `kvps up` shows: bars, and the time that is left."""

from __future__ import annotations

import io
import re

from helpers.harness import aggregating, await_version, gradient, model
from helpers.waiting import eventually
from kvps_cli.train.progress import Display
from rich.console import Console

from kvps.store import Store


def test_what_is_done_of_a_known_number_of_rounds_has_a_bar_and_a_time_left(store: Store) -> None:
    for rounds, bar, left in ((5, 24, True), (3, 24, False), (0, 0, False)):
        job = store.create_job("j", model(), workers=1, rounds=rounds)
        with aggregating(job), job.join("w0") as session:
            for round_ in range(3):
                session.push(gradient(session.pull(), 0, round_))
            await_version(job, 3)
            display = Display(job, quiet=True)
            console = Console(width=120, record=True, force_terminal=True, file=io.StringIO())
            assert not left or eventually(lambda display=display: display.line().endswith(" s left"))
            display.bars = {"w0": "\x1b[32m 42%|of its own\x1b[0m"}
            console.print(display.render())
            table = console.export_text()
            assert (" s left" in table, display.line().endswith(" s left")) == (left, left)
            line, own = (line for line in table.splitlines() if line.startswith("w0"))
            assert own == "w0:  42%|of its own"
            assert len(re.findall("[━╸╺]", line)) == bar
        assert " 0 contributions/s" not in Display(job, quiet=True).line(), "what is over has the rate of all its time"
        store.remove_job("j")


def test_the_line_of_many_workers_is_no_longer_than_that_of_a_few(store: Store) -> None:
    job = store.create_job("j", model(), workers=12, staleness=-1)
    for number in reversed(range(3)):
        job.join(f"w{number}")
    assert "clock w0=0 w1=0 w2=0  loss" in Display(job, quiet=True).line(), "by rank"
    for number in range(3, 12):
        job.join(f"w{number}")
    line = Display(job, quiet=True).line()
    assert "clock 0 to 0 of 12 workers  loss" in line
    assert len(line) < 100


def test_a_worker_and_a_bar_of_its_own_have_a_row_each_on_a_narrow_terminal(store: Store) -> None:
    job = store.create_job("j", model(), workers=2, rounds=5)
    with job.join("w0"), job.join("w1"):
        display = Display(job, quiet=True)
        display.bars = {"w0": "#" * 99}
        console = Console(width=60, record=True, force_terminal=True, file=io.StringIO())
        console.print(display.render())
    *_, first, second, own = (line.rstrip() for line in console.export_text().splitlines())
    assert (first[:2], second[:2], own[:5]) == ("w0", "w1", "w0: #")
    assert first[-1] == own[-1] == "…", "what is cut has a sign"
