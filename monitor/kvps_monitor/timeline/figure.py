"""Draws a recording as the figure of the textbooks: a lane for each worker, the server's updates above, time along. If
versions were evaluated in that time, the lowest lane has when their figures were reported.

Each kind of block is one group of the SVG with an id, as `push-w0` or `update-0`, and has its blocks in the order of
time; so has each kind of arrow. Times are milliseconds from the first block.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import starmap
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch

from kvps.errors import InvalidSetting, counted
from kvps.history.evaluations import figures_text
from kvps_monitor.palette import PHASE_COLOURS, PHASE_WORDS, TONES
from kvps_monitor.timeline.recording import EVALUATIONS, Absence, Block, Recording
from kvps_monitor.views import short_name

_MOST_NAME = 9  # characters, left of a lane
_EVALUATIONS = EVALUATIONS.replace(" ", "\n")  # a name that no worker has
MOST_WORKERS = 64
_SHARD_ROWS = 4  # more shards than these have one row together
_FEW_ARROWS = 120
_WIDTH, _ROW, _ABOVE, _BELOW = 11.0, 0.46, 0.44, 0.78  # inches: the figure, a lane, above the lanes, and below them
_LEFT, _RIGHT = 0.075, 0.975  # where the axes are, as parts of the width: half of the last number is beyond them
_HALF = 0.34  # of a block's height; lanes are 1 apart
_LETTER_PT, _LETTERS = 7.5, 0.6  # size of letters, and how wide one is as a part of that
_DPI = 150

_INK, _FAINT = "#22303c", "#b4bfc9"
_WHITE, _NOTHING, _EVICTED = "#ffffff", "#e4e9ed", "#a32a10"
_UPDATE = PHASE_COLOURS["reduce"]
_WORKER = ("wait", "other", "fetch", "compute", "push")  # phases in the order in which they are drawn
_LEGEND = {"fetch": "F  ", "compute": "R  round: ", "push": "P  "}  # what stands before a phase's word
_WORDS = {"fetch": ("F",), "compute": ("round {}", "R {}", "R"), "push": ("P",)}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvps",
    "font.family": "sans-serif",
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


class _Box(NamedTuple):
    """A block on the axes: from `start` to `end`, in ms."""

    start: float
    end: float
    number: int


def figure(recording: Recording, kind: str) -> bytes:
    """Return the figure as the bytes of an `.svg` or a `.png` file; `kind` is "svg" or "png". Raises InvalidSetting if
    there are too many workers for a figure."""
    if len(recording.workers) > MOST_WORKERS:
        raise InvalidSetting(
            f"a figure has room for {MOST_WORKERS} workers, and job {recording.job} has {len(recording.workers)}: "
            "write a .perfetto-trace or a .json"
        )
    with rc_context(_STYLE):
        drawn = _Drawing(recording).draw()
        out = io.BytesIO()
        drawn.savefig(out, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
    return out.getvalue()


class _Drawing:
    """One figure. Lanes are at heights 0, -1, -2, ...: first those of the server, then the workers, then the
    evaluations."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._origin, end = recording.window or (recording.start_us, recording.end_us)
        self._length = max(self._ms(end), 1e-3)
        several = 1 < len(recording.shards) <= _SHARD_ROWS
        self._servers = [f"shard {n}" for n in range(len(recording.shards))] if several else ["server"]
        rows = [*self._servers, *recording.workers, *([_EVALUATIONS] if recording.evaluations else [])]
        self._heights = {name: -float(row) for row, name in enumerate(rows)}
        height = _ABOVE + _ROW * len(rows) + _BELOW
        self._figure = Figure(figsize=(_WIDTH, height), facecolor="white")
        FigureCanvasAgg(self._figure)
        self._axes: Axes = self._figure.add_axes((_LEFT, _BELOW / height, _RIGHT - _LEFT, _ROW * len(rows) / height))

    def draw(self) -> Any:
        """Draw everything."""
        self._frame()
        for number, lane in enumerate(self._rows_of_the_server()):
            self._updates(number, lane)
        for worker, lane in self._recording.workers.items():
            self._iterations(worker, lane)
        self._evaluations()
        drawn = self._arrows()
        self._legend(drawn)
        return self._figure

    def _frame(self) -> None:
        r, axes = self._recording, self._axes
        parts = [(len(r.workers), "worker"), (len(r.versions), "version"), (r.iterations, "round")]
        parts = parts if r.workers else parts[1:2]  # a learner publishes the job
        parts += [(len(r.evaluations), "evaluation")] if r.evaluations else []
        counts = ", ".join(starmap(counted, parts))
        axes.set_title(r.mode, loc="left", fontsize=12, fontweight="bold", pad=9)
        axes.set_title(f"job {short_name(r.job, 32)}: {counts}", loc="right", fontsize=9, pad=9)
        axes.set_xlim(0, self._length)
        axes.set_ylim(-len(self._heights) + 0.5, 0.7)
        names = [name if name == _EVALUATIONS else short_name(name, _MOST_NAME) for name in self._heights]
        axes.set_yticks(list(self._heights.values()), names)
        axes.set_xlabel("ms", labelpad=1)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        for name, height in self._heights.items():
            if name in r.workers:
                axes.axhspan(height - _HALF, height + _HALF, color=_NOTHING, linewidth=0, zorder=0)
            else:
                axes.axhline(height - _HALF, color=_FAINT, linewidth=0.6, zorder=0)
        for absence in r.absences:
            self._absence(absence)

    def _absence(self, absence: Absence) -> None:
        """Draw the time in which a worker was not in the job, and why, where there is room for the word."""
        start, end = max(0.0, self._ms(absence.start_us)), min(self._length, self._ms(absence.end_us))
        if end <= start or absence.worker not in self._heights:
            return
        height, bad = self._heights[absence.worker], absence.why == "evicted"
        colour = TONES["bad"] if bad else _WHITE
        drawn = self._axes.broken_barh(
            [(start, end - start)], (height - _HALF, 2 * _HALF), facecolor=colour, zorder=0.5
        )
        drawn.set_gid(f"{absence.why.replace(' ', '-')}-{absence.worker}")
        if self._width_of(absence.why) < end - start:
            style: Any = {"fontsize": _LETTER_PT, "color": _EVICTED if bad else _FAINT}
            self._axes.text((start + end) / 2, height, absence.why, ha="center", va="center_baseline", **style)

    def _rows_of_the_server(self) -> Sequence[Sequence[Block]]:
        """Return the blocks of each row above the workers. In one row of several shards a version is one block, from
        when its first shard began to when its last one ended."""
        shards = self._recording.shards
        if len(shards) == len(self._servers):
            return shards
        versions: dict[int, list[Block]] = {}
        for block in sorted((b for lane in shards for b in lane), key=lambda block: block.start_us):
            versions.setdefault(block.number, []).append(block)
        last = {number: max(blocks, key=lambda block: block.end_us) for number, blocks in versions.items()}
        return [[blocks[0]._replace(spans=(blocks[0].spans[0], last[n].spans[-1])) for n, blocks in versions.items()]]

    def _updates(self, number: int, lane: Sequence[Block]) -> None:
        boxes = [_Box(self._ms(block.start_us), self._ms(block.end_us), block.number) for block in lane]
        height = self._heights[self._servers[number]]
        self._bars(f"update-{number}", boxes, height, "update")
        free = 0.0
        for box in boxes:
            word = f"v{box.number}"
            middle, half = (box.start + box.end) / 2, self._width_of(word) / 2
            if middle - half >= free and middle + half <= self._length:
                self._axes.text(middle, height + _HALF + 0.06, word, ha="center", va="bottom", fontsize=6.5)
                free = middle + 1.3 * half

    def _iterations(self, worker: str, lane: Sequence[Block]) -> None:
        for phase in _WORKER:
            spans = [(span, block.number) for block in lane for span in block.spans if span.phase == phase]
            boxes = [_Box(self._ms(span.start_us), self._ms(span.end_us), number) for span, number in spans]
            self._bars(f"{phase}-{worker}", boxes, self._heights[worker], phase)
            for box in boxes:
                self._write(box, self._heights[worker], phase)

    def _evaluations(self) -> None:
        """Draw a line where figures were reported, and before it the longest text about them that has room there."""
        if not self._recording.evaluations:
            return
        height, free = self._heights[_EVALUATIONS], 0.0
        times = [self._ms(1000 * evaluation.at_ms) for evaluation in self._recording.evaluations]
        self._axes.vlines(times, height - _HALF, height + _HALF, _INK).set_gid("evaluations")
        for at, (version, figures, *_) in zip(times, self._recording.evaluations, strict=True):
            first = dict([*figures.items()][:1])
            words = [f"v{version}: {figures_text(figures)}", f"v{version}: {figures_text(first)}", f"v{version}"]
            if word := next((word for word in words if self._width_of(word) < at - free), ""):
                style: Any = {"ha": "right", "va": "center_baseline", "fontsize": _LETTER_PT, "clip_on": True}
                self._axes.text(at - self._width_of("") / 2, height, word, **style)
            free = at

    def _bars(self, id: str, boxes: Sequence[_Box], height: float, phase: str) -> None:
        """Draw blocks. The edge keeps one that is shorter than a line is wide visible."""
        colour = PHASE_COLOURS.get(phase, _UPDATE)
        found = self._axes.broken_barh(
            [(box.start, box.end - box.start) for box in boxes],
            (height - _HALF, 2 * _HALF),
            facecolor=colour,
            edgecolor=_WHITE if phase == "compute" else colour,
            linewidth=0.5,
            zorder=1 if phase in ("wait", "other") else 2,
        )
        found.set_gid(id)

    def _write(self, box: _Box, height: float, phase: str) -> None:
        """Write the longest of the phase's words that fits into the block, if one does."""
        start, end = max(box.start, 0.0), min(box.end, self._length)
        words = [word.format(box.number) for word in _WORDS.get(phase, ())]
        if not (word := next((word for word in words if self._width_of(word) < end - start), "")):
            return
        self._axes.text(
            (start + end) / 2,
            height,
            word,
            ha="center",
            va="center_baseline",
            fontsize=_LETTER_PT,
            color=_WHITE if phase == "compute" else _INK,
            bbox={"facecolor": PHASE_COLOURS[phase], "edgecolor": "none", "pad": 0.6},
            zorder=4,
        )

    def _arrows(self) -> bool:
        """Draw the arrows, if they are few, and return whether they were."""
        arrows = list(self._recording.arrows())
        if len(arrows) > _FEW_ARROWS:
            return False
        for arrow in arrows:
            row = self._servers[int(arrow.shard.lane.split()[1])] if len(self._servers) > 1 else self._servers[0]
            server, worker = self._heights[row] - _HALF, self._heights[arrow.worker.lane] + _HALF
            # A worker may hear of its push, or a shard of its commit, after others have gone on: then it is upright.
            if arrow.kind == "push":
                colour, height, end = PHASE_COLOURS["push"], (worker, server), arrow.shard.start_us
                start = min(arrow.span.end_us, end)
            else:
                colour, height, end = PHASE_COLOURS["fetch"], (server, worker), arrow.span.start_us
                start = min(arrow.shard.end_us, end)
            drawn = FancyArrowPatch(
                (self._ms(start), height[0]),
                (self._ms(end), height[1]),
                arrowstyle="-|>",
                mutation_scale=6,
                shrinkA=0,
                shrinkB=0,
                linewidth=0.8,
                color=colour,
                alpha=0.8,
                zorder=3,
            )
            drawn.set_gid(f"arrow-{arrow.kind}-{arrow.worker.lane}-{arrow.worker.number}-{arrow.shard.lane.split()[1]}")
            self._axes.add_patch(drawn)
        return True

    def _legend(self, arrows: bool) -> None:
        handles: list[Any] = [Patch(facecolor=_UPDATE, label="a new version")]
        for phase in reversed(_WORKER):
            label = _LEGEND.get(phase, "") + PHASE_WORDS[phase]
            handles.append(Patch(facecolor=PHASE_COLOURS[phase], label=label))
        handles.append(Patch(facecolor=_NOTHING, label="not recorded"))
        if arrows:
            for phase, label in (("push", "gradient"), ("fetch", "weights")):
                handles.append(Line2D([], [], color=PHASE_COLOURS[phase], marker=">", markersize=3, label=label))
        self._figure.legend(
            handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8, handlelength=1.5
        )

    def _ms(self, at_us: float) -> float:
        return (at_us - self._origin) / 1000

    def _width_of(self, word: str) -> float:
        """Return about how many ms of the axes a word is wide."""
        points = _LETTER_PT * _LETTERS * (len(word) + 0.4)
        return points / (72 * _WIDTH * (_RIGHT - _LEFT)) * self._length
