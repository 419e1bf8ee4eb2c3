"""The pictures of simulations, as SVG, and a page of them that needs no other file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from kvps.errors import counted
from kvps_simulate.result import Result
from kvps_simulate.sweep import Limit
from kvps_simulate.units import seconds, size

_WIDTH, _LEFT, _TOP, _ROW = 760, 250, 44, 24
_LINES = ("#c0392b", "#d68910", "#239b56", "#2471a3", "#7d3c98", "#5d6d7e", "#17202a")
_INK, _FAINT = "#17202a", "#d5d8dc"
_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:800px;margin:2em auto;padding:0 1em;color:#17202a;background:#fff}"
    "table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #d5d8dc}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"
)


def page(result: Result, swept: Sequence[Result], limits: Sequence[Limit], facts: Iterable[tuple[str, str]]) -> str:
    """Return the page: what a run comes to (`facts`: name, value), its resources, and the sweep."""
    s = result.setting
    title = f"{counted(s.workers, 'worker')}, {counted(s.nodes, 'data node')}, {size(s.size)}"
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts)
    far = "".join(f"<tr><td>{counted(e.nodes, 'data node')}</td><td>{escape(_far(e))}</td></tr>" for e in limits)
    parts = [
        f"<h1>{escape(title)}</h1><p>What <code>kvps simulate</code> computed; nothing here was run.</p>",
        f"<table>{rows}</table>{busy_picture(result)}",
        "<h2>How far it goes, and what breaks first</h2><p>The same job with other numbers of workers and data nodes."
        f" The time of a round, and in each field what is busiest.</p>{rounds_picture(swept)}{map_picture(swept)}",
        f"<table><tr><th></th><th>workers that compute at least half of the time</th></tr>{far}</table>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _far(limit: Limit) -> str:
    if not limit.bottleneck:
        return f"all of them, up to {limit.workers:,}"
    return f"{f'up to {limit.workers:,}' if limit.workers else 'none'}; then: {limit.bottleneck}"


def busy_picture(result: Result) -> str:
    """Return bars: the part of the time for which each resource is busy."""
    rows = [(name, part) for name, part in result.busy.items() if part >= 0.001]
    body = []
    for i, (name, part) in enumerate(rows):
        y, width = _TOP + _ROW * i, (_WIDTH - _LEFT - 70) * min(1.0, part)
        body.append(
            _text(_LEFT - 8, y + 16, name, "end")
            + f'<rect x="{_LEFT}" y="{y + 4}" width="{max(1.0, width):.1f}" height="{_ROW - 8}" '
            f'fill="{_LINES[0] if i == 0 else "#aeb6bf"}"/>' + _text(_LEFT + width + 6, y + 16, f"{part:.1%}")
        )
    return _svg("What is busy, and for which part of the time", _TOP + _ROW * len(rows) + 12, body)


def rounds_picture(swept: Sequence[Result]) -> str:
    """Return the time of a round over the number of workers, a line for each number of data nodes; both logarithmic."""
    height, right, bottom = 340, _WIDTH - 150, 290
    xs = [math.log10(r.setting.workers) for r in swept]
    ys = [math.log10(r.median_s) for r in swept]
    low, high = math.floor(min(ys)), math.ceil(max(ys) + 1e-9)
    left, first, last = 80, min(xs), max(max(xs), min(xs) + 1)

    def at(r: Result) -> tuple[float, float]:
        x = left + (math.log10(r.setting.workers) - first) / (last - first) * (right - left)
        return x, bottom - (math.log10(r.median_s) - low) / max(1, high - low) * (bottom - _TOP)

    body = []
    for power in range(low, high + 1):
        y = bottom - (power - low) / max(1, high - low) * (bottom - _TOP)
        body.append(
            f'<path d="M{left} {y:.1f}H{right}" stroke="{_FAINT}"/>' + _text(left - 8, y + 4, _log(power), "end")
        )
    for r in {r.setting.workers: r for r in swept}.values():
        body.append(_text(at(r)[0], bottom + 20, f"{r.setting.workers:,}", "middle"))
    body.append(_text((left + right) / 2, bottom + 40, "workers", "middle"))
    ends: list[float] = []
    for i, nodes in enumerate(dict.fromkeys(r.setting.nodes for r in swept)):
        points = [at(r) for r in swept if r.setting.nodes == nodes]
        colour = _LINES[i % len(_LINES)]
        body.append(f'<path d="M{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" stroke="{colour}"'
                    f' stroke-width="2"/>')  # fmt: skip
        y = points[-1][1]
        while any(abs(y - other) < 15 for other in ends):  # labels stand apart
            y += 15
        ends.append(y)
        body.append(_text(points[-1][0] + 8, y + 4, counted(nodes, "node"), fill=colour))
    return _svg("Time of a round", height, body)


def map_picture(swept: Sequence[Result]) -> str:
    """Return a field for each pair of workers and data nodes: its bottleneck, and how much of the time goes to work."""
    workers = list(dict.fromkeys(r.setting.workers for r in swept))
    nodes = list(dict.fromkeys(r.setting.nodes for r in swept))
    names = list(dict.fromkeys(r.bottleneck for r in swept))
    left, row = 90, 40
    column = (_WIDTH - left - 12) / len(workers)
    bottom = _TOP + 20 + row * len(nodes)
    body = [_text(left + column * (i + 0.5), _TOP + 12, f"{n:,}", "middle") for i, n in enumerate(workers)]
    body += [_text(left - 8, _TOP + 44 + row * i, counted(n, "node"), "end") for i, n in enumerate(nodes)]
    for r in swept:
        x, y = left + column * workers.index(r.setting.workers), _TOP + 20 + row * nodes.index(r.setting.nodes)
        colour = _LINES[names.index(r.bottleneck) % len(_LINES)]
        body.append(
            f'<rect x="{x + 1:.1f}" y="{y + 1}" width="{column - 2:.1f}" height="{row - 2}" fill="{colour}" '
            f'fill-opacity="0.22"/>'
            + _text(x + column / 2, y + 17, seconds(r.median_s), "middle")
            + _text(x + column / 2, y + 33, f"{r.efficiency:.0%} work", "middle")
        )
    for i, name in enumerate(names):
        y = bottom + 12 + 20 * i
        colour = _LINES[i % len(_LINES)]
        body.append(f'<rect x="{left}" y="{y}" width="14" height="14" fill="{colour}" fill-opacity="0.35"/>')
        body.append(_text(left + 22, y + 12, name))
    return _svg("What is busiest, with how many workers", bottom + 24 + 20 * len(names), body)


# -- parts ------------------------------------------------------------------------------------------------------------


def _svg(title: str, height: float, body: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="13"><rect width="{_WIDTH}" height="{height:.0f}" '
        f'fill="#ffffff"/><text x="12" y="26" font-size="15" font-weight="bold" fill="{_INK}">{escape(title)}</text>'
        f"{''.join(body)}</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = _INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'


def _log(power: int) -> str:
    return f"{10.0**power:,g} s"
