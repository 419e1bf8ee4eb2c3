"""One colour and one word a thing: the pages of the dashboard have those of the palette."""

from __future__ import annotations

import re

import pytest
from kvps_monitor import palette
from kvps_monitor.dashboard.app import STATIC
from kvps_monitor.job_now import NAMED

from kvps.protocol.phases import SHARD_PHASES, WORKER_PHASES

STYLE, WORDS = ((STATIC / name).read_text() for name in ("style.css", "words.js"))


def test_the_palette_has_every_phase() -> None:
    assert palette.PHASE_COLOURS.keys() == palette.PHASE_WORDS.keys() == {*WORKER_PHASES, *SHARD_PHASES}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pages_have_its_colours(theme: str) -> None:
    light, dark = (dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", each)) for each in STYLE.split(":root {")[1:3])
    colours, wanted = (light, palette.PHASE_COLOURS) if theme == "light" else (light | dark, palette.ON_BLACK)
    assert {phase: colours[phase] for phase in wanted} == wanted
    assert {tone: light[f"{tone}-back"] for tone in palette.TONES} == palette.TONES


def test_the_pages_have_its_words_and_tones() -> None:
    words = dict(re.findall(r'^  ([a-z]+): "([^"]+)",$', WORDS, re.MULTILINE))
    assert words == palette.PHASE_WORDS
    tones = {
        tone: re.findall(r'"([a-z ]+)"', names) for tone, names in re.findall(r"^  (\w+): \[(.*)\],$", WORDS, re.M)
    }
    assert {state: tone for tone, states in tones.items() for state in states} == palette.TONE_OF
    assert f"const NAMED = {NAMED};" in (STATIC / "dom.js").read_text()
    assert palette.tone("computing") == palette.tone("runs") == "good"


@pytest.mark.parametrize(
    ("state", "waits_for", "why", "shown"),
    [
        ("runs", [], "", "runs"),
        ("stalled", ["w2"], "", "stalled: waits for w2"),
        ("paused", [], "paused by w0: a look", "paused by w0: a look"),
        ("finished", [], "stopped: enough", "finished; stopped: enough"),
    ],
)
def test_a_job_says_who_has_stopped_it(state: str, waits_for: list[str], why: str, shown: str) -> None:
    assert palette.job_does(state, waits_for, why) == shown
