"""One colour and one word a thing on all screens. Colours of phases are Okabe and Ito's, which people with any colour
vision tell apart. The pages of the dashboard repeat them in style.css and words.js, which a test compares with this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvps.errors import counted
from kvps_monitor.job_now import FINISHED, NAMED
from kvps_monitor.views import WorkerView

PHASE_COLOURS = {
    "other": "#a9aca5",
    "wait": "#e69f00",
    "fetch": "#56b4e9",
    "compute": "#0072b2",
    "push": "#cc79a7",
    "reduce": "#009e73",
    "step": "#0072b2",
    "store": "#d55e00",
    "commit": "#e5d72c",
}
ON_BLACK = PHASE_COLOURS | {"other": "#6d726e", "compute": "#3b95d3", "step": "#3b95d3"}
PHASE_WORDS = {
    "other": "own code",
    "wait": "waits",
    "fetch": "fetches",
    "compute": "computes",
    "push": "pushes",
    "reduce": "reduces",
    "step": "optimizer steps",
    "store": "stores",
    "commit": "commits",
}
"""What a worker or a shard does in a phase. Own code is the program's between a push and the next pull."""
TONES = {"good": "#e0f2ea", "warn": "#fbeed5", "bad": "#fbe4de", "done": "#ecece8"}
"""The backs of boxes and pills by the tone of a state."""
STYLES = {"good": "green", "warn": "yellow", "bad": "bold red", "done": "dim"}
"""How a terminal shows a state of a tone."""
TONE_OF = {
    **dict.fromkeys(("waiting", "awaited", "rejoining", "paused", "suspended"), "warn"),
    **dict.fromkeys(("silent", "stalled", "all workers left", "evicted", "unreadable"), "bad"),
    **dict.fromkeys(("finished", "left", "stopped"), "done"),
}
"""The tones of states; that of all others is good, or warn where they begin with "waits"."""


def tone(state: str) -> str:
    """Return the tone of a worker's state or a job's: good, warn, bad or done."""
    if state.startswith("waits"):
        return "warn"
    return TONE_OF.get(state, "good")


def doing(w: WorkerView) -> str:
    """Return what a worker does, or whom it waits for, without for how long."""
    return f"waiting for {', '.join(w.waits_for).removeprefix('the ')}" if w.waits_for else w.state


def job_does(state: str, waits_for: Sequence[str], why: str) -> str:
    """Return what a job does, as "stalled: waits for w2" or "paused by w0: a look at the data", its `why`."""
    if why:
        return why if why.startswith(state) else f"{state}; {why}"
    if not waits_for:
        return state
    more = f" and {len(waits_for) - NAMED:,} more" if len(waits_for) > NAMED else ""
    return f"{state}: waits for {', '.join(waits_for[:NAMED])}{more}"


def present(state: str, there: int, expected: int) -> str:
    """Return how many workers of a job are there, "2 of 3"; of a finished job, how many it had; "-" if it has none."""
    if not expected:
        return "-"
    return f"{expected:,}" if state == FINISHED else f"{there:,} of {expected:,}"


def experience(brief: Mapping[str, int] | None) -> str:
    """Return what there is of a job's experience, "5 waiting, 2 taken, 0 dropped, 3 actors"; "" if it takes none."""
    if brief is None:
        return ""
    items = ", ".join(f"{brief[name]:,} {name}" for name in ("waiting", "taken", "dropped"))
    return f"{items}, {counted(brief['actors'], 'actor')}"
