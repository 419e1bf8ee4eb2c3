"""`kvps_bench workers`: how the cost of one contribution grows with the number of workers.

A few processes hold all the sessions, each session on its own thread. A session joins, then pulls and pushes a tiny
gradient as fast as it can, until it is told to leave. The server itself or the kernel counts everything, between two
commits. Every phase has a time limit, so that a case that is too slow is reported and not awaited.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from kvps.connection.client import Client
from kvps.connection.sockets import SOCKET_TIMEOUT_S
from kvps.errors import InvalidSetting
from kvps.staleness import mode_name
from kvps.store import connect
from kvps_bench.cost import Cost
from kvps_bench.crew import Place, crew
from kvps_bench.result import Bar, Figures, Result, Row, machine
from kvps_bench.roles import Aggregator
from kvps_bench.sessions import Sessions
from kvps_bench.turns import Ratio, Times, in_turns
from kvps_bench.workers_case import GUESTS, MODEL_BYTES, ONCE, Setting, WorkersCase

WORKERS, QUICK_WORKERS = "4,64,256,1000", "2,6"
_PROCESSES = 8
_BAR = 14
_MOST_GROWTH, _MOST_MS, _MOST_JOIN_S = 3.0, 10.0, 20.0
_SHOWN = ("push", "plan, opens one", "plan, opens none", "ready, commits", "free", *ONCE)

_NOTES = (
    f"At most {_PROCESSES} processes hold the sessions, over a Unix socket. The model has {MODEL_BYTES} bytes, and no "
    "session computes anything. Each turn has its own job and sessions, and begins to count when each worker has "
    "contributed twice on average; so no turn is thrown away as a warm-up.",
    "Joining: all sessions begin to join at once, and train as soon as they have joined. Each has its own name; in "
    "jobs that measure only this, each takes any free name. Leaving: all sessions leave at once, too.",
    "Contributions: milliseconds from one committed contribution to the next, of all workers together. Bytes, time in "
    "scripts and CPU are per committed contribution. `script us` is the server's time in all scripts.",
    "Scripts: every call as the server timed it (SLOWLOG), in its own phase. `us a contribution` is the time of all "
    f"calls of that phase over its contributions. join and leave are of {GUESTS} more workers, one after another, "
    "while all others train. evict looks for silent workers; an aggregator does so once a second by default.",
    "The worker timeout and the lease are an hour here, so heartbeats, renewals and looks for silent workers are in no "
    "other number. No process gives up on the server within a phase's time limit; the default is 10 s.",
    "After each turn the commit log is checked: it is one chain, holds what was acknowledged, and shows no eviction.",
)


def settings_of(counts: Sequence[int], modes: Sequence[int], seconds: float, limit_s: float) -> list[Setting]:
    """Return a setting for every mode and number of workers, from the fewest to the most."""
    return [
        Setting(count, mode, seconds, limit_s, named)
        for count in sorted(set(counts))
        for mode in modes
        for named in (True, False)
    ]


def measure(
    place: Place, settings: Sequence[Setting], turns: int, say: Callable[[str], None] = lambda _: None
) -> Result:
    """Measure all these settings. The server must be this benchmark's own."""
    most = max(s.workers for s in settings)
    with ExitStack() as stack:
        store = stack.enter_context(connect(_patient(place.urls["unix"], max(s.limit_s for s in settings))))
        _check_connections(store.client, most)
        makers = [(Sessions, store.url) for _ in range(min(_PROCESSES, most))]
        aggregator, *processes = stack.enter_context(crew((Aggregator, store.url), *makers))
        cases = {s: WorkersCase(Place(store, {}), aggregator, processes, s, say) for s in settings}
        in_turns({s.name: case.turn for s, case in cases.items()}, turns, warm_up=False)
        where = machine(store.client)
    modes = dict.fromkeys(s.staleness for s in settings)
    rows = [row for part in (_joining, _contributions, _scripts) for case in cases.values() for row in part(case)]
    bars = [bar for mode in modes for bar in _bars([case for s, case in cases.items() if s.staleness == mode])]
    failures = [case.failure for case in cases.values() if case.failure]
    return Result("workers", turns, rows, bars, where, (*_NOTES, *failures))


def _patient(url: str, limit_s: float) -> str:
    """Return the URL with a timeout so long that no session gives up just because two cores are busy."""
    return f"{url}{'&' if '?' in url else '?'}socket_timeout={max(limit_s, SOCKET_TIMEOUT_S):g}"


def _check_connections(client: Client, workers: int) -> None:
    needed = 2 * workers + 100
    allowed = int(client.call("CONFIG", "GET", "maxclients")[1])
    if allowed < needed:
        raise InvalidSetting(
            f"--workers {workers}: the server takes {allowed} connections, and needs {needed}: raise ulimit -n"
        )


# -- what was found -------------------------------------------------------------------------------------------------


def _figures(part: str, case: WorkersCase) -> Figures:
    return {"part": part, "workers": case.setting.workers}


def _mode(case: WorkersCase) -> str:
    return mode_name(case.setting.staleness)


def _joining(case: WorkersCase) -> Iterator[Row]:
    if not case.setting.named:
        yield _row_of(case, "all join under any name", case.joining)
        return
    yield _row_of(case, "all join", case.joining)
    yield _row_of(case, "all leave", case.leaving)


def _row_of(case: WorkersCase, what: str, seconds: Sequence[float]) -> Row:
    times = Times(tuple((s,) for s in seconds)) if seconds else None
    return Row(f"{_mode(case)}: {what}", "unix", _figures("joining", case), times, why=case.why)


def _contributions(case: WorkersCase) -> Iterator[Row]:
    if not case.setting.named:
        return
    settings = _figures("contributions", case)
    if not case.costs:
        yield Row(_mode(case), "unix", settings, why=case.why)
        return
    times = Times(tuple((cost.at_s / cost.contributions,) for cost in case.costs))

    def median(of: Callable[[Cost], float]) -> float:
        return float(f"{statistics.median(of(cost) / cost.contributions for cost in case.costs):.4g}")

    more = {
        "contributions_per_s": round(1 / times.median, 1),
        "versions_per_s": round(statistics.median(cost.versions / cost.at_s for cost in case.costs), 1),
        "bytes_sent": median(lambda cost: cost.sent_bytes),
        "bytes_received": median(lambda cost: cost.received_bytes),
        "script_us": median(lambda cost: 1e6 * cost.script_s),
        "scripts": median(lambda cost: cost.script_calls),
        "server_cpu_us": median(lambda cost: 1e6 * cost.server_s),
        "aggregator_cpu_us": median(lambda cost: 1e6 * cost.aggregator_s),
        "workers_cpu_us": median(lambda cost: 1e6 * cost.workers_s),
    }
    yield Row(_mode(case), "unix", settings, times, more)


def _scripts(case: WorkersCase) -> Iterator[Row]:
    for kind in _SHOWN:
        if times := _times_of(case, kind):
            more: dict[str, float | str] = {"greatest_ms": round(1000 * times.quantile(1), 3)}
            if kind not in ONCE:
                spent = [script_s.get(kind, 0.0) for script_s in case.script_s]
                more["us_a_contribution"] = float(f"{1e6 * statistics.median(spent):.4g}")
            yield Row(f"{_mode(case)}: {kind}", "unix", _figures("scripts", case), times, more)


def _times_of(case: WorkersCase, kind: str) -> Times | None:
    turns = tuple(tuple(calls[kind]) for calls in case.calls if calls.get(kind))
    return Times(turns) if turns else None


def _bars(cases: Sequence[WorkersCase]) -> Iterator[Bar]:
    """Return the bars of one mode; `cases` go from the fewest workers to the most."""
    few, many, any_name = cases[0], cases[-2], cases[-1]
    mode, name = _mode(many), f"{many.setting.workers} workers"
    grown: dict[str, Callable[[Cost], float]] = {
        "bytes sent": lambda cost: cost.sent_bytes,
        "bytes received": lambda cost: cost.received_bytes,
        "time in scripts": lambda cost: cost.script_s,
    }
    for what, of in grown.items() if few is not many else ():
        label = f"{mode}: {what} a contribution, {many.setting.workers} workers over {few.setting.workers}"
        yield Bar(_BAR, label, True, _MOST_GROWTH, _growth(many.costs, few.costs, of), many.why or few.why)
    for kind in ("plan, opens one", "ready, commits"):
        times = _times_of(many, kind)
        yield Bar(_BAR, f"{mode}: ms of {kind}, {name}", True, _MOST_MS, _milliseconds(times), many.why)
    for how, case in (("", many), (" under any name", any_name)):
        joining = Ratio.of(case.joining) if case.joining else None
        yield Bar(_BAR, f"{mode}: seconds until all have joined{how}, {name}", True, _MOST_JOIN_S, joining, case.why)


def _growth(many: Sequence[Cost], few: Sequence[Cost], of: Callable[[Cost], float]) -> Ratio | None:
    turns = list(zip(many, few, strict=False))  # one case may have failed in a later turn
    each = [(of(mine) / mine.contributions) / (of(its) / its.contributions) for mine, its in turns]
    return Ratio.of(each) if each else None


def _milliseconds(times: Times | None) -> Ratio | None:
    return Ratio.of([1000 * second for second in times.seconds]) if times else None
