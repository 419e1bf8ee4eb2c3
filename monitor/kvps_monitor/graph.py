"""Who is connected to whom, and how much moves between them: the other half of the textbooks' figure, as it is now."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import Any, NamedTuple

from kvps.connection.urls import redacted
from kvps.errors import KvpsError, NotPermitted, printable
from kvps.job import Job
from kvps.parsing import bytes_text
from kvps_monitor.palette import PHASE_COLOURS, TONES, doing, tone
from kvps_monitor.views import JobView, ShardView, WorkerView, short_name

_ACROSS, _MOST_ROWS = 6, 4  # boxes of a row, and rows of workers; the others are one box
_BOX, _GAP, _MARGIN, _HEIGHT = 146, 34, 24, 58
_TOP, _SERVER, _IN_SERVER, _BELOW, _NEXT_ROW = 58, 200, 110, 66, 74  # where rows begin, or how far they are apart
_LANE = 9  # between the arrows of two rows, which pass through one gap
_TEXT = _BOX - 12  # the width of the longest line of a box
_LETTER = 7.6  # about the widest that a letter is on average, in bold: a longer line is drawn narrower
_INK, _SOFT, _PAPER = "#1b2631", "#5d6d7e", "#ffffff"
_PUSH, _FETCH = PHASE_COLOURS["push"], PHASE_COLOURS["fetch"]


def as_json(job: Job, view: JobView) -> dict[str, Any]:
    """Return the graph as nodes: the server with its shards and replicas, the aggregators or the learner that holds
    them, workers, and other programs of kvps that are connected. Rates are in bytes a second."""
    members = job.state().members.values()
    pids = {os.getpid()} | {m.pid for m in members} | {_pid(name) for name in _aggregators(view)}
    clients, replicas = _clients(job), _replicas(job)
    others = (
        None
        if clients is None
        else [
            {"name": name, "connections": count}
            for name, count in sorted(clients.items())
            if _pid(name, "-") not in pids
        ]
    )
    return {
        "job": view.job,
        "mode": view.mode,
        "transport": view.transport,
        "version": view.version,
        "server": {"url": redacted(job.access.client.url), "memory": view.memory, "replicas": replicas},
        "shards": [_shard(shard) for shard in view.shards],
        "aggregators": [
            {"name": name, "is": "learner" if view.published_by else "aggregator", "shards": _held(view, name)}
            for name in _aggregators(view)
        ],
        "workers": [_worker(worker) for worker in view.workers],
        "others": others,
    }


def _shard(shard: ShardView) -> dict[str, Any]:
    known = ("shard", "holder", "term", "received_per_s", "stored_per_s")
    return {name: getattr(shard, name) for name in known}


def _worker(worker: WorkerView) -> dict[str, Any]:
    known = ("worker", "host", "device", "state", "waits_for", "pushed_per_s", "pulled_per_s", "rounds_per_s")
    return {name: getattr(worker, name) for name in known} | {"doing": doing(worker)}


def _aggregators(view: JobView) -> list[str]:
    """Return the holders, in the order of their shards, and then those that stand by."""
    return [*dict.fromkeys(shard.holder for shard in view.shards if shard.holder), *view.standbys]


def _held(view: JobView, name: str) -> list[int]:
    return [shard.shard for shard in view.shards if shard.holder == name]


def _pid(name: str, between: str = ":") -> int:
    """Return the process id in an aggregator's or a connection's name; 0 if it has none."""
    parts = name.split(between)
    return int(parts[1]) if len(parts) > 2 and parts[1].isdecimal() and len(parts[1]) < 12 else 0


def _clients(job: Job) -> Counter[str] | None:
    """Return the programs of kvps that are connected, as they name themselves, with how many connections each has; None
    if this user may not ask."""
    try:
        found = job.access.server.call("CLIENT LIST")
    except KvpsError:
        return None
    names = (str(client.get("name", "")) for client in found)
    return Counter(name for name in names if name.startswith("kvps-"))


def _replicas(job: Job) -> list[str]:
    """Return the replicas of the job's server, as host:port; none for a user that may not ask."""
    info: Mapping[str, Any] = {}
    with suppress(NotPermitted):
        info = job.access.server.call("INFO", "replication")
    found = (value for name, value in info.items() if name.startswith("slave") and isinstance(value, dict))
    return sorted(f"{each.get('ip')}:{each.get('port')}" for each in found)


# -- the picture ------------------------------------------------------------------------------------------------------


class _Box(NamedTuple):
    """A box of the picture: its lines of text, its colour, and whether its border is dashed."""

    lines: Sequence[str]
    fill: str = _PAPER
    dashed: bool = False


def as_svg(graph: dict[str, Any]) -> str:
    """Return the picture of a graph: aggregators above, the server with its shards, and the workers in rows below."""
    aggregators = _bounded([_aggregator_box(a) for a in graph["aggregators"]], "aggregators", _ACROSS)
    workers = _bounded([_worker_box(w) for w in graph["workers"]], "workers", _ACROSS * _MOST_ROWS)
    shards = [_Box([f"shard {s['shard']}", f"term {s['term']}"], TONES["good"]) for s in graph["shards"]]
    shards, beside = _bounded(shards, "shards", _ACROSS), _beside(graph)
    columns = max(len(aggregators), min(len(workers), _ACROSS), len(shards) + len(beside), 3)
    width, rows = 2 * _MARGIN + columns * (_BOX + _GAP) + 40, -(-len(workers) // _ACROSS)
    parts = [_frame(graph, width), *_boxes(aggregators, _TOP, width), *_boxes([*shards, *beside], _SERVER + 14, width)]
    for x, shard in zip(_places(len(shards) + len(beside), width), graph["shards"][: len(shards)], strict=False):
        parts += _shard_arrows(graph, shard, x, _places(len(aggregators), width))
    drawn = _drawn_of(graph["workers"], len(workers))
    for row in range(rows):
        part = slice(row * _ACROSS, (row + 1) * _ACROSS)
        y = _SERVER + _IN_SERVER + _BELOW + row * (_HEIGHT + _NEXT_ROW)
        places = _places(min(len(workers), _ACROSS), width)
        for x, box, worker in zip(places, workers[part], drawn[part], strict=False):
            parts += [*_worker_arrows(worker, x, y, row), _drawn(box, x, y)]
    height = _SERVER + _IN_SERVER + _BELOW + max(rows, 1) * (_HEIGHT + _NEXT_ROW) - 18
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}"><defs>{_head("push", _PUSH)}{_head("fetch", _FETCH)}'
        f'</defs><rect width="{width}" height="{height}" fill="{_PAPER}"/>{"".join(parts)}'
        f"{_legend(height - 20)}</svg>\n"
    )


def _aggregator_box(aggregator: dict[str, Any]) -> _Box:
    shards = ", ".join(map(str, aggregator["shards"]))
    held = f"holds shard {shards}" if shards else "stands by"
    return _Box(
        [aggregator["is"], short_name(" ".join(aggregator["name"].split(":")[:2])), held],
        TONES["good"] if shards else _PAPER,
        not shards,
    )


def _worker_box(worker: dict[str, Any]) -> _Box:
    about = f"{worker['device']} on {worker['host']}"
    return _Box([short_name(worker["worker"]), short_name(about), worker["doing"]], TONES[tone(worker["state"])])


def _beside(graph: dict[str, Any]) -> list[_Box]:
    """Return the boxes beside the shards: replicas, and the other programs that are connected."""
    boxes = [_Box(["replica", short_name(name)], dashed=True) for name in graph["server"]["replicas"][:3]]
    if graph["others"]:
        boxes.append(_Box(["other programs", f"{len(graph['others'])} connected"], dashed=True))
    return boxes


def _bounded(boxes: list[_Box], what: str, most: int) -> list[_Box]:
    if len(boxes) <= most:
        return boxes
    return [*boxes[: most - 1], _Box([f"{len(boxes) - most + 1:,} more", what], dashed=True)]


def _drawn_of(nodes: list[dict[str, Any]], boxes: int) -> list[dict[str, Any]]:
    """Return the nodes that have a box each; the last one stands for the others, with the sums of their rates."""
    if len(nodes) <= boxes:
        return nodes
    first, rest = nodes[: boxes - 1], nodes[boxes - 1 :]
    rates = {name: sum(node[name] or 0.0 for node in rest) for name in rest[0] if name.endswith("_per_s")}
    return [*first, rest[0] | rates]


def _places(count: int, width: float) -> list[float]:
    """Return the left edges of a row of boxes in the middle of the picture."""
    left = (width - count * _BOX - max(0, count - 1) * _GAP) / 2
    return [left + i * (_BOX + _GAP) for i in range(count)]


def _boxes(boxes: Sequence[_Box], y: float, width: float) -> list[str]:
    return [_drawn(box, x, y) for box, x in zip(boxes, _places(len(boxes), width), strict=True)]


def _drawn(box: _Box, x: float, y: float) -> str:
    dash = ' stroke-dasharray="5 4"' if box.dashed else ""
    lines = "".join(
        f'<text x="{x + _BOX / 2:.1f}" y="{y + 18 + 16 * i:.1f}" text-anchor="middle"{_narrower(line)} '
        f'font-weight="{"normal" if i else "bold"}">{_text(line)}</text>'
        for i, line in enumerate(box.lines)
    )
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{_BOX}" height="{_HEIGHT}" rx="6" fill="{box.fill}" stroke="{_SOFT}"{dash}/>'
        f"{lines}"
    )


def _narrower(line: str) -> str:
    """Return what keeps a long line inside its box, whatever its letters are."""
    return f' textLength="{_TEXT}" lengthAdjust="spacingAndGlyphs"' if len(line) * _LETTER > _TEXT else ""


def _frame(graph: dict[str, Any], width: float) -> str:
    """The title, and the server's box."""
    server = graph["server"]
    title = f"{graph['job']}: {graph['mode']}, version {graph['version']:,}"
    about = f"{server['url']}, {bytes_text(server['memory'])} in use"
    if graph["transport"] == "shm":
        about += "; the arrays are in shared memory"
    return (
        f'<text x="{_MARGIN}" y="34" font-size="16" font-weight="bold">{_text(title)}</text>'
        f'<rect x="{_MARGIN}" y="{_SERVER}" width="{width - 2 * _MARGIN}" height="{_IN_SERVER}" rx="10" fill="#fbfcfc" '
        f'stroke="{_INK}" stroke-width="1.5"/><text x="{_MARGIN + 14}" y="{_SERVER + 96}">'
        f'<tspan font-weight="bold">Redis</tspan> <tspan fill="{_SOFT}">{_text(about)}</tspan></text>'
    )


def _shard_arrows(graph: dict[str, Any], shard: dict[str, Any], x: float, places: list[float]) -> Iterable[str]:
    """Yield the arrows between a shard and its holder: contributions go up, new weights come down."""
    names = [a["name"] for a in graph["aggregators"]]
    if shard["holder"] not in names:
        return
    place = min(names.index(shard["holder"]), len(places) - 1)
    held = graph["aggregators"][names.index(shard["holder"])]["shards"]
    above = places[place] + _BOX * (held.index(shard["shard"]) + 1) / (len(held) + 1)
    below, foot, head = x + _BOX / 2, _SERVER + 14, _TOP + _HEIGHT
    trained = graph["mode"] != "published"  # no gradients go up to a learner
    if trained:
        yield _path([(below - 7, foot), (above - 5, head)], "push")
    yield _path([(above + 5, head), (below + 7, foot)], "fetch")
    near = below + 0.25 * (above - below)
    if trained:
        yield _label(near - 12, _SERVER - 8, _rate(shard["received_per_s"]), "end")
    yield _label(near + 12, _SERVER - 8, _rate(shard["stored_per_s"]), "start")


def _worker_arrows(worker: dict[str, Any], x: float, y: float, row: int) -> Iterable[str]:
    """Yield a worker's arrows: gradients go up to the server, weights come down. Those of a lower row pass the boxes
    above it on their left."""
    middle, low = x + _BOX / 2, _SERVER + _IN_SERVER
    left, right, beside = middle - 7, middle + 7, x - _LANE * row
    if row:
        yield _path([(left, y), (left, y - 9), (beside - 4, y - 9), (beside - 4, low)], "push")
        yield _path([(beside, low), (beside, y - 15), (right, y - 15), (right, y)], "fetch")
    else:
        yield _path([(left, y), (left, low)], "push")
        yield _path([(right, low), (right, y)], "fetch")
    yield _label(left - 5, y - 24, _rate(worker["pushed_per_s"]), "end")
    yield _label(right + 5, y - 24, _rate(worker["pulled_per_s"]), "start")


def _path(points: Sequence[tuple[float, float]], kind: str) -> str:
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    colour = _PUSH if kind == "push" else _FETCH
    return f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="1.6" marker-end="url(#{kind})"/>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" fill="{_SOFT}" text-anchor="{anchor}">{text}</text>'


def _legend(y: float) -> str:
    words = "gradients, in bytes a second", "weights, in bytes a second", "dashed: holds nothing"
    x, out = float(_MARGIN), ""
    for word, colour in zip(words, (_PUSH, _FETCH, _SOFT), strict=True):
        out += f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
        out += f'<text x="{x + 15}" y="{y}" fill="{_SOFT}">{word}</text>'
        x += 195
    return out


def _head(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_text(bytes_per_s)}/s"


def _text(text: str) -> str:
    """Return text for SVG. Names may come from anybody."""
    return escape(printable(text))
