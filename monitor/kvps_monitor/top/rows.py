"""The lines and cells of `kvps top`, as pure functions from views of a job; they fit the width that they are given.

Names and holders come from Redis, where anybody with the password may have written them: `printable` text alone leaves
this module, as Rich's Text, in which brackets are no markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.text import Text

from kvps.errors import printable
from kvps.protocol.phases import SHARD_PHASES
from kvps_monitor import palette
from kvps_monitor.top import figures
from kvps_monitor.views import WORKING, JobView, ShardView, WorkerView

_GONE = ("finished", "left", "evicted")
_GLYPHS = {"compute": "█", "other": "▓", "fetch": "▒", "push": "▞", "wait": "░"}  # phases, in the order of a bar
_STEP = 1.1  # round times that differ by less than this factor are alike, so that rows keep their places
_SHOWN_S = 1.0  # a state that has lasted for less is shown without its time: it would change at each look


class Column(NamedTuple):
    """A column of workers: its title, its width in characters, whether it is aligned to the right, and what it shows.
    `cell` gets the slowest round in milliseconds, and the width."""

    title: str
    width: int
    right: bool
    cell: Callable[[WorkerView, float, int], Text]

    @property
    def head(self) -> Text:
        """The title in the column's width."""
        return _fitted(Text(self.title), self.width, self.right)

    def shown(self, w: WorkerView, slowest: float) -> Text:
        """Return what it shows of a worker, in the column's width."""
        return _fitted(self.cell(w, slowest, self.width), self.width, self.right)


# -- workers ----------------------------------------------------------------------------------------------------------


def slowest_ms(workers: Iterable[WorkerView]) -> float:
    """Return the round time of the slowest worker that is at work, in milliseconds; 0 if none is known."""
    return max((w.round_ms or 0.0 for w in workers if w.state not in _GONE), default=0.0)


def ordered(workers: Sequence[WorkerView], slowest_first: bool) -> list[WorkerView]:
    """Return workers by rank. With `slowest_first`: silent ones, then by the time of a round without the waiting, and
    at the end those that have gone."""
    return sorted(workers, key=_slowness if slowest_first else lambda w: w.rank)


def _slowness(w: WorkerView) -> tuple[int, int, int]:
    group = 0 if w.state == "silent" else 1 if w.state in WORKING else 2 if w.state not in _GONE else 3
    own_ms = (w.round_ms or 0.0) * (1 - w.shares.get("wait", 0.0))
    return group, -round(math.log(max(own_ms, 0.01), _STEP)), w.rank


def bar(w: WorkerView, slowest: float, width: int) -> Text:
    """Return the time of a worker's round, divided into phases; `width` is the time of the slowest worker's."""
    ms = w.round_ms or 0.0
    parts = [(phase, ms * w.shares.get(phase, 0.0)) for phase in _GLYPHS]
    out = Text()
    for phase, length in figures.stacked(parts, slowest, width):
        out.append(_GLYPHS[phase] * length, palette.ON_BLACK[phase])
    return out


def legend() -> Text:
    """Return what the parts of a bar are."""
    out = Text()
    for phase, glyph in _GLYPHS.items():
        out.append(glyph, palette.ON_BLACK[phase]).append(f" {palette.PHASE_WORDS[phase]}  ")
    return out


def doing(w: WorkerView) -> Text:
    """Return what a worker does, or whom it waits for, and for how long."""
    words = palette.doing(w)
    if w.state == "silent":
        words = f"silent for {figures.duration(w.state_s)}"
    elif w.state_s is not None and w.state_s >= _SHOWN_S:
        words += f" {figures.duration(w.state_s)}"
    return _text(words, palette.STYLES[palette.tone(w.state)])


def _text(words: object, style: str = "") -> Text:
    return Text(printable(str(words)).replace("\n", "\\n"), style, no_wrap=True)


def _number(value: int | None) -> Text:
    return _text(figures.UNKNOWN if value is None else f"{value:,}")


def _curve(w: WorkerView, width: int) -> Text:
    return _text(figures.curve([value for _, value in w.losses], width), "magenta")


_CURVE_WIDTH = 24  # of the losses that a learner said
_STATE, _BAR, _CURVE = "state", "round time", "loss curve"
_WORKER = [  # (importance, title, least width, to the right, cell), as they are shown
    (1, "worker", 6, False, lambda w, slowest, width: _text(w.worker)),
    (2, _STATE, 19, False, lambda w, slowest, width: doing(w)),
    (3, _BAR, 10, False, bar),
    (4, "round", 6, True, lambda w, slowest, width: _text(figures.duration(w.round_ms and w.round_ms / 1000))),
    (5, "wait", 4, True, lambda w, slowest, width: _text(figures.share(w.shares.get("wait")))),
    (6, "rounds/s", 8, True, lambda w, slowest, width: _text(figures.per_second(w.rounds_per_s))),
    (7, "ahead", 5, True, lambda w, slowest, width: _number(w.ahead)),
    (13, "behind", 6, True, lambda w, slowest, width: _number(w.behind)),
    (8, "stale", 5, True, lambda w, slowest, width: _number(w.staleness)),
    (11, "in/s", 7, True, lambda w, slowest, width: _text(figures.size(w.pulled_per_s))),
    (12, "out/s", 7, True, lambda w, slowest, width: _text(figures.size(w.pushed_per_s))),
    (9, "loss", 8, True, lambda w, slowest, width: _text(figures.loss(w.loss))),
    (10, _CURVE, 10, False, lambda w, slowest, width: _curve(w, width)),
]
_GROWING = {"worker": 24, _STATE: 34, _BAR: 30, _CURVE: 24}  # title: the width up to which it takes room that is left


def worker_columns(width: int, workers: Iterable[WorkerView]) -> list[Column]:
    """Return the columns that fit a terminal of `width` characters, with one character between two."""
    longest = max((len(w.worker) for w in workers), default=0)
    widths, left = dict[str, int](), width + 1
    for _, title, least, _, _ in sorted(_WORKER, key=lambda column: column[0]):
        if left < least + 1:
            break
        widths[title] = least
        left -= least + 1
    wanted = _GROWING | {"worker": min(_GROWING["worker"], longest)}
    for title in ("worker", _STATE, _BAR, _CURVE):
        if title in widths:
            more = min(left, max(0, wanted[title] - widths[title]))
            more = more if title == "worker" else min(more, -(-left // 2))
            widths[title] += more
            left -= more
    return [Column(title, widths[title], right, cell) for _, title, _, right, cell in _WORKER if title in widths]


# -- shards -----------------------------------------------------------------------------------------------------------

_SHARD = (("shard", 5), ("holder", 16), ("term", 4), ("versions/s", 10))
_LONGEST_HOLDER = 40


def shard_table(shards: Sequence[ShardView], width: int) -> tuple[list[Text], list[list[Text]]]:
    """Return the titles and the rows of shards: who holds each, and how long each phase of a version takes."""
    titles = [*(title for title, _ in _SHARD), *SHARD_PHASES, "in/s", "out/s"]
    widths = [*(least for _, least in _SHARD), *(6 for _ in SHARD_PHASES), 8, 8]
    while sum(widths) + len(widths) - 1 > width and len(widths) > 2:
        titles, widths = titles[:-1], widths[:-1]
    holders = [_holder(s.holder) for s in shards]
    left = max(0, width - sum(widths) - len(widths) + 1)
    widths[1] += min(left, max([0, *(min(_LONGEST_HOLDER, len(h)) - widths[1] for h in holders)]))
    rows = [_shard(s, holder) for s, holder in zip(shards, holders, strict=True)]
    right = [title != "holder" for title in titles]
    table = [[_text(title) for title in titles], *rows]
    fitted = [[_fitted(*each) for each in zip(row, widths, right, strict=False)] for row in table]
    return fitted[0], fitted[1:]


def _shard(s: ShardView, holder: str) -> list[Text]:
    phases = [_text(figures.duration(s.phases[p] / 1000 if p in s.phases else None)) for p in SHARD_PHASES]
    moved = [_text(figures.size(s.received_per_s)), _text(figures.size(s.stored_per_s))]
    return [_text(s.shard), _text(holder), _text(s.term), _text(figures.per_second(s.commits_per_s)), *phases, *moved]


def _holder(holder: str) -> str:
    """Return the host and the process of a holder, without what only makes its name unique."""
    return ":".join(holder.split(":")[:2]) or "nobody"


def _fitted(text: Text, width: int, right: bool) -> Text:
    """Return a text cut or filled up to a width."""
    text = text.copy()
    text.truncate(width, overflow="ellipsis")
    text.align("right" if right else "left", width)
    return text


# -- the job ----------------------------------------------------------------------------------------------------------


def header(view: JobView, width: int) -> list[Text]:
    """Return the lines above the tables."""
    does = printable(palette.job_does(view.state, view.waits_for, view.why))
    first = Text.assemble((printable(view.job), "bold"), "  ", (does, palette.STYLES[palette.tone(view.state)]))
    first.append(f"  {view.mode}  {printable(view.task) or 'made in Python'}  {printable(view.optimizer)}")
    there = sum(w.state in (*WORKING, "paused") for w in view.workers)
    rate = figures.per_second(view.commits_per_s)
    workers = palette.present(view.state, there, view.expected_workers)
    who = [view.published_by] if view.published_by else [f"backlog {view.backlog:,}", f"workers {workers}"]
    curve = figures.curve([loss for _, loss in view.losses], _CURVE_WIDTH)
    second = [
        f"version {view.version:,}",
        f"{rate} versions/s",
        *who,
        f"loss {figures.loss(view.loss)} {curve}".strip(),
    ]
    memory = f"Redis {figures.size(view.memory)}"
    memory += f" of {figures.size(view.memory_limit)}" if view.memory_limit else ""
    third = [memory, f"model {figures.size(view.model_bytes)}"]  # what a narrow terminal cuts comes last
    if view.units:
        third.insert(0, view.units_text)
        left = view.units_done < view.units
        if not left or view.eta_s is not None:
            third.insert(0, f"{figures.duration(view.eta_s)} left" if left else "all done")
    lines = [first, _text("  ".join(second)), _text("  ".join(third))]
    lines += [_text(f"rollouts {palette.experience(view.rollouts.brief)}")] if view.rollouts else []
    lines += [_text(view.evaluation_text)] if view.evaluation else []
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines
