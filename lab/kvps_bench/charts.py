"""Bar charts as SVG, for docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_ROW, _LEFT, _WIDTH, _RIGHT, _TOP = 22, 300, 420, 120, 44
_COLOURS = {"ours": "#c0392b", "limit": "#5d6d7e", "other": "#aeb6bf"}


class Bar(NamedTuple):
    """One bar: its length, and the spread around it; `kind` is "ours", "limit" or "other"."""

    label: str
    value: float
    low: float
    high: float
    kind: str


def chart(title: str, unit: str, bars: Sequence[Bar]) -> str:
    """Return an SVG of horizontal bars with their spread, each followed by its number."""
    longest = max(max(bar.value, bar.high) for bar in bars)
    height = _TOP + _ROW * len(bars) + 12
    width = _LEFT + _WIDTH + _RIGHT
    body = "".join(_drawn(bar, _TOP + _ROW * i, _WIDTH / longest, unit) for i, bar in enumerate(bars))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13"><rect width="{width}" height="{height}" fill="#ffffff"/>'
        f'<text x="12" y="26" font-size="15" font-weight="bold" fill="#17202a">{escape(title)}</text>{body}</svg>\n'
    )


def _drawn(bar: Bar, y: float, scale: float, unit: str) -> str:
    middle, end = y + _ROW / 2, _LEFT + scale * max(bar.value, bar.high)
    low, high = _LEFT + scale * bar.low, _LEFT + scale * bar.high
    return (
        f'<text x="{_LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end" fill="#17202a">{escape(bar.label)}</text>'
        f'<rect x="{_LEFT}" y="{y + 3:.1f}" width="{scale * bar.value:.1f}" height="{_ROW - 6}" '
        f'fill="{_COLOURS[bar.kind]}"/>'
        f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}" stroke="#17202a" stroke-width="1.5"/>'
        f'<text x="{end + 6:.1f}" y="{middle + 4:.1f}" fill="#17202a">{_number(bar.value)} {escape(unit)}</text>'
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
