"""The pictures in docs/images are of this release: each word in them is one that its screens still say."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
from helpers.harness import aggregating, gradient, model
from helpers.paths import ROOT
from kvps_cli.train.progress import Display, Figures
from kvps_monitor import graph
from kvps_monitor.dashboard.app import STATIC
from kvps_monitor.live import JobWatch
from kvps_monitor.timeline.figure import figure
from kvps_monitor.timeline.recording import record
from kvps_monitor.top import rows
from kvps_monitor.top.app import Top
from PIL import Image
from rich.console import Console

from kvps.store import Store

IMAGES = ROOT / "docs/images"
PICTURES = ("up", "top", "graph", "timeline-bsp", "timeline-ssp", "timeline-asp")
OF_STATES = (
    "computing fetching pushing waiting for silent awaited stands finished left runs aggregator BSP SSP ASP SGD sgd"
)
OF_COMMANDS = "kvps up top digits staleness slow test loss accuracy cpu min unix redis sock run left all done"
OF_COMMANDS += " units round backup task tasks"
OF_JOBS = "bsp ssp asp the arrays are in shared memory"
_TEXT = "{http://www.w3.org/2000/svg}text"


def words(text: str) -> set[str]:
    """Return the words of three letters and more, and what is counted per second."""
    return {w for w in re.split(r"[^A-Za-z/]+", text) if re.fullmatch(r"[A-Za-z]{3,}(/s)?", w)}


def drawn_words(svg: str) -> set[str]:
    return words(" ".join("".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(_TEXT)))


@pytest.fixture
def said(store: Store) -> set[str]:
    """The words that the screens say of a job that runs, has a standby and ends."""
    job = store.create_job("digits", model(), workers=2, staleness=2)
    display, console = Display(job, quiet=True), Console(width=120, record=True, quiet=True)
    with aggregating(job), aggregating(job), job.join("w0") as w0, job.join("w1") as w1:
        for number in range(4):
            for session in (w0, w1):
                session.push(gradient(session.pull(), session.rank, number), loss=1.0)
        state, view = job.state(), JobWatch(job).look()
        console.print(display.render())
        lines = [*rows.header(view, 160), rows.legend(), *(c.head for c in rows.worker_columns(160, view.workers))]
        drawn = graph.as_svg(graph.as_json(job, view))
    top = [*(line.plain for line in lines), *(c.plain for c in rows.shard_table(view.shards, 160)[0])]
    text = [console.export_text(), display.line(), str(Figures.of(job, state)), *top, "a whole bar is"]
    text += [getattr(binding, "description", "") for binding in Top.BINDINGS]
    known = words(" ".join([*text, OF_STATES, OF_COMMANDS, OF_JOBS]))
    return known | drawn_words(drawn) | drawn_words(figure(record(job), "svg").decode())


def test_words_in_the_pictures_are_those_of_the_screens(said: set[str]) -> None:
    old = {name: drawn_words((IMAGES / f"{name}.svg").read_text()) - said for name in PICTURES}
    assert not {name: unknown for name, unknown in old.items() if unknown}, "run make picture and make timelines"


def test_words_in_the_picture_of_the_dashboard_are_those_of_its_pages() -> None:
    pages = "".join(path.read_text() for path in STATIC.glob("*.js"))
    labels = json.loads(Image.open(IMAGES / "dashboard.png").text["labels"])
    assert "Timeline" in labels
    assert [label for label in labels if f'"{label}"' not in pages] == [], "run make picture"
