"""`kvps_bench scale`: what many tensors, a heavier optimizer and large models cost a round.

Each part compares two cases in turns: 160 tensors with one of the same bytes, Adam with SGD, and large models with a
small one by bytes per second.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvps.optim import Adam
from kvps.transport.shm import ShmTransport
from kvps_bench import round as rounds
from kvps_bench.crew import Place, crew
from kvps_bench.result import Bar, Figures, Result, Row, machine
from kvps_bench.roles import Aggregator, Role, Worker, model, temporary_job
from kvps_bench.round import Setting
from kvps_bench.turns import Ratio, Times, in_turns

PARTS = ("tensors", "optimizer", "sizes")
_TENSORS = 160
_WORKERS = 2
_WEIGHED_ROUNDS = 4  # after two rounds the server holds as many versions as it ever will
_WATCH_EVERY_S = 0.005
_FREE_SHARE = 0.85  # of the free memory; the rest is left to the machine


def measure(
    place: Place,
    transports: Sequence[str],
    turns: int,
    quick: bool = False,
    parts: Sequence[str] = PARTS,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Measure the parts asked for, over each transport."""
    rows: list[Row] = []
    bars: list[Bar] = []
    run = {"tensors": _tensors, "optimizer": _optimizers, "sizes": _sizes}
    for transport in transports:
        for part in parts:
            say(f"{part}, {transport}")
            more_rows, more_bars = run[part](place, transport, turns, quick)
            rows += more_rows
            bars += more_bars
    return Result("scale", turns, rows, bars, machine(place.store.client), _NOTES)


_NOTES = (
    f"Rounds are as in `python -m kvps_bench round`, with {_WORKERS} workers; the part `sizes` has 1 worker, so that "
    "larger models fit.",
    "Memory is a process's own peak, less its memory before it opened the job, over the model's size in float32. The "
    "server's is its greatest use, less its use before. Over shm a process's memory includes the segments that it has "
    "mapped; `segments x` states those too. Memory was measured in other rounds than the times.",
    "Large models take their turns with the small one, on a server that holds both.",
)
Measured = tuple[list[Row], list[Bar]]


def _mb(full: int, quick: bool) -> int:
    """Return the bytes of a case; a quick run only checks that the bench works."""
    return full * 1_000_000 // (500 if quick else 1)


# -- tensors, optimizer -------------------------------------------------------------------------------------------


def _tensors(place: Place, transport: str, turns: int, quick: bool) -> Measured:
    one = Setting(_mb(100, quick), _WORKERS)
    times = _rounds(place, transport, {"one": one, "many": replace(one, tensors=_TENSORS)}, turns, quick)
    rows = [
        _row("tensors", "1 tensor", transport, one, times["one"]),
        _row("tensors", f"{_TENSORS} tensors", transport, replace(one, tensors=_TENSORS), times["many"]),
    ]
    ratio = times["many"].over(times["one"])
    return rows, [Bar(6, f"{_TENSORS} tensors over 1 of the same bytes, {transport}", True, 1.1, ratio)]


def _optimizers(place: Place, transport: str, turns: int, quick: bool) -> Measured:
    sgd = Setting(_mb(40, quick), _WORKERS)
    adam = replace(sgd, optimizer=Adam())
    times = _rounds(place, transport, {"sgd": sgd, "adam": adam}, turns, quick)
    rows = [
        _row("optimizer", "SGD", transport, sgd, times["sgd"]),
        _row("optimizer", "Adam", transport, adam, times["adam"]),
    ]
    limit = 1.15 if transport == "shm" else 1.4
    return rows, [Bar(7, f"Adam over SGD, {transport}", True, limit, times["adam"].over(times["sgd"]))]


def _rounds(place: Place, transport: str, settings: Mapping[str, Setting], turns: int, quick: bool) -> dict[str, Times]:
    with ExitStack() as stack:
        cases = {
            name: stack.enter_context(rounds.kvps(place, transport, setting, setting.rounds(quick)))
            for name, setting in settings.items()
        }
        return in_turns(cases, turns)


def _row(part: str, case: str, transport: str, setting: Setting, times: Times, **more: Any) -> Row:
    figures = {"gb_per_s": _speed(setting, times), **more}
    return Row(case, transport, _figures(part, setting), times, figures)


def _figures(part: str, setting: Setting) -> Figures:
    return {"part": part, **setting.figures()}


def _speed(setting: Setting, times: Times) -> float:
    """Return the GB/s that the server carries: each gradient in and out, the weights in, and out to every worker."""
    carried = setting.nbytes * (3 * setting.workers + 1)
    return round(carried / times.median / 1e9, 3)


# -- sizes --------------------------------------------------------------------------------------------------------


def _sizes(place: Place, transport: str, turns: int, quick: bool) -> Measured:
    """Measure the model of 100 MB in turns with each larger one."""
    rows: list[Row] = []
    bars: list[Bar] = []
    small = Setting(_mb(100, quick), 1)
    for size in (1000,) if quick else (1000, 4000):
        large = Setting(_mb(size, quick), 1)
        what = f"{large.nbytes / 1e6:g} MB: bytes/s over those of {small.nbytes / 1e6:g} MB, {transport}"
        needed, free = needed_bytes(large, transport), free_bytes()
        if needed > free:
            why = f"needs {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} are free"
            rows.append(Row("kvps", transport, _figures("sizes", large), why=why))
            bars.append(Bar(8, what, False, 0.9, None, why))
            continue
        more, ratio = _side_by_side(place, transport, small, large, turns, quick)
        rows += more
        bars.append(Bar(8, what, False, 0.9, ratio))
    return rows, bars


def _side_by_side(
    place: Place, transport: str, small: Setting, large: Setting, turns: int, quick: bool
) -> tuple[list[Row], Ratio]:
    models = {"small": small, "large": large}
    memory = {name: _memory(place, transport, setting) for name, setting in models.items()}
    times = _rounds(place, transport, models, turns, quick)
    rows = [_row("sizes", "kvps", transport, setting, times[name], **memory[name]) for name, setting in models.items()]
    slower = times["large"].over(times["small"])
    factor = large.nbytes / small.nbytes
    return rows, Ratio(slower.median / factor, slower.least / factor, slower.greatest / factor).inverse


def _memory(place: Place, transport: str, setting: Setting) -> Figures:
    """Return all processes' peaks in some rounds, over the model's size. Not timed, because the server is polled."""
    url, client = place.urls[transport], place.store.client
    makers: list[tuple[Any, ...]] = [(Idle, url, Aggregator), (Idle, url, Worker)]
    before = client.memory()[0]
    with (
        temporary_job(place, transport, model(setting.nbytes), workers=1) as job,
        crew(*makers) as (aggregator, worker),
    ):
        bases = [float(member("memory")["peak"]) for member in (aggregator, worker)]
        aggregator("become", job.name)
        worker("become", job.name, 0)
        with _watched(lambda: client.memory()[0] - before) as most:
            worker("rounds", _WEIGHED_ROUNDS)
        peaks = [float(member("memory")["peak"]) for member in (aggregator, worker)]
        segments = job.access.transport.segments if isinstance(job.access.transport, ShmTransport) else None
        shared = sum(path.stat().st_size for path in segments.folder.iterdir()) if segments else 0
    mine = [(peak - base) * 1e6 / setting.nbytes for peak, base in zip(peaks, bases, strict=True)]
    return {
        "aggregator_x": round(mine[0], 2),
        "worker_x": round(mine[1], 2),
        "server_x": round(most[0] / setting.nbytes, 2),
        "segments_x": round(shared / setting.nbytes, 2),
    }


@contextmanager
def _watched(look: Callable[[], int]) -> Iterator[list[int]]:
    """Yield a list whose one item is the greatest number seen while the block runs."""
    most, over = [look()], threading.Event()

    def watch() -> None:
        while not over.wait(_WATCH_EVERY_S):
            most[0] = max(most[0], look())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


class Idle(Role):
    """A process that has imported all its modules, and has not taken its role yet."""

    def __init__(self, url: str, kind: Any) -> None:
        super().__init__(url)
        self._url, self._kind = url, kind
        self._is: Any = None

    def become(self, *arguments: Any) -> None:
        self._is = self._kind(self._url, *arguments)

    def rounds(self, number: int) -> list[float]:
        return self._is.rounds(number)  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._is:
            self._is.close()
        super().close()


def needed_bytes(setting: Setting, transport: str) -> int:
    """Return the most memory that all processes of a job need together; rather too much than too little."""
    server = 4 + setting.workers  # three versions, a spare, and the gradients that wait
    if transport == "shm":
        server += 3  # versions of the mirror
    return (server + 2 * setting.workers + 3) * setting.nbytes


def free_bytes() -> int:
    """Return how many bytes of the machine's memory may be used."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(_FREE_SHARE * 1024 * int(line.split()[1]))
    return int(_FREE_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
