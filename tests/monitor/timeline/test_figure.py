"""The figure, read back as XML: lanes, labels and arrows, and how BSP and ASP differ."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from helpers.timelines import ClockErrors, alternating_job, timed_job
from kvps_monitor.timeline.figure import MOST_WORKERS, figure
from kvps_monitor.timeline.recording import Recording, record

from kvps.errors import InvalidSetting
from kvps.history.evaluations import Evaluation
from kvps.store import Store

pytestmark = pytest.mark.slow  # each draws a picture
_SVG = "{http://www.w3.org/2000/svg}"
_FIRST_X = re.compile(r"M ([\d.]+) ")
_AXES_PT = 72 * 11.0 * 0.913


class Drawn:
    """A figure that is read back."""

    def __init__(self, recording: Recording, clocks_us: float = 0.0) -> None:
        self.root = ElementTree.fromstring(figure(recording, "svg"))
        self.texts = ["".join(text.itertext()).strip() for text in self.root.iter(f"{_SVG}text")]
        self.clocks = clocks_us * _AXES_PT / (recording.end_us - recording.start_us)
        self._groups = {g.get("id", ""): g for g in self.root.iter(f"{_SVG}g")}

    def starts(self, id: str) -> list[float]:
        """Return where the blocks of a group begin, from left to right in points."""
        paths = self._groups[id].iter(f"{_SVG}path")
        return [float(found[1]) for path in paths if (found := _FIRST_X.match(path.get("d", "")))]

    def arrows(self, kind: str) -> list[str]:
        return [id for id in self._groups if id.startswith(f"arrow-{kind}-")]


def test_in_bsp_each_update_stands_behind_the_last_push_of_its_round(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = ClockErrors(monkeypatch)
    found = record(timed_job(store, rounds=6, pause_ms=10, staleness=0))
    drawn = Drawn(found, errors.apart_us)
    updates = drawn.starts("update-0")
    pushes = [drawn.starts(f"push-w{number}") for number in range(3)]
    assert len(updates) == 6
    assert all(len(each) == 6 for each in pushes)
    for round_, update in enumerate(updates):
        assert update > max(each[round_] for each in pushes) - drawn.clocks
        assert all(update < each[round_ + 1] + drawn.clocks for each in pushes if round_ < 5)
    assert "BSP" in drawn.texts
    assert "job j: 3 workers, 6 versions, 18 rounds" in drawn.texts


def test_in_asp_each_push_has_an_update_of_its_own(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = ClockErrors(monkeypatch)
    drawn = Drawn(record(alternating_job(store)), errors.apart_us)
    updates = drawn.starts("update-0")
    pushes = sorted(x for number in range(3) for x in drawn.starts(f"push-w{number}"))
    assert len(updates) == len(pushes) == 12
    for push, update, later in zip(pushes, updates, [*pushes[1:], math.inf], strict=True):
        assert push - drawn.clocks < update < later + drawn.clocks
    assert "ASP" in drawn.texts


def test_lanes_labels_arrows_and_a_legend(store: Store) -> None:
    found = record(timed_job(store, staleness=2, pause_ms=20, shards=2))
    drawn = Drawn(found)
    assert {"SSP(2)", "shard 0", "shard 1", "w0", "w1", "w2", "ms", "round 1", "v1"} <= set(drawn.texts)
    for label in ("a new version", "F  fetches", "P  pushes", "waits", "own code", "not recorded", "gradient"):
        assert label in drawn.texts
    arrows = list(found.arrows())
    for kind in ("push", "fetch"):
        assert len(drawn.arrows(kind)) == len([arrow for arrow in arrows if arrow.kind == kind])
    push = next(arrow for arrow in arrows if arrow.kind == "push")
    assert f"arrow-push-{push.worker.lane}-{push.worker.number}-0" in drawn.arrows("push")


def test_evaluations_have_the_lowest_lane(store: Store) -> None:
    """A text stands before its mark, and is as long as there is room since the mark before."""
    found = record(timed_job(store, rounds=6, pause_ms=10, staleness=0))
    tenth = (found.end_us - found.start_us) / 10_000
    many = {"loss": 0.5, **{f"n{n}": 1.0 for n in range(31)}}

    def evaluation(version: int, tenths: float, figures: dict[str, float]) -> Evaluation:
        return Evaluation(version, figures, "me", round(found.start_us / 1000 + tenths * tenth))

    each = [evaluation(2, 4, {"loss": 0.75, "top-5": 0.5}), evaluation(3, 7, many), evaluation(4, 7.5, many)]
    drawn = Drawn(replace(found, evaluations=[*each, evaluation(5, 7.5, {"loss": 0.25})]))
    assert {"evaluated", "versions", "v2: loss 0.75, top-5 0.5", "v3: loss 0.5"} <= set(drawn.texts)
    assert drawn.texts.count("v4") == 2, "one is of the update"
    assert not [text for text in drawn.texts if text.startswith("v5:")], "it has no room"
    marks = drawn.starts("evaluations")
    assert len(marks) == 4
    assert marks == sorted(marks)
    assert "job j: 3 workers, 6 versions, 18 rounds, 4 evaluations" in drawn.texts


def test_too_many_workers_are_refused(store: Store) -> None:
    found = record(timed_job(store, workers=1, rounds=2))
    lane = found.workers["w0"]
    many = replace(found, workers={f"w{number}": lane for number in range(MOST_WORKERS + 1)})
    with pytest.raises(InvalidSetting, match=r"room for 64 workers, and job j has 65: write a \.perfetto-trace"):
        figure(many, "svg")
