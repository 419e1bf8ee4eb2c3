"""Lines and cells: they fit any width, tell what a worker does, and no name is obeyed by a terminal."""

from __future__ import annotations

import math
from typing import Any

import pytest
from kvps_monitor.top import rows
from kvps_monitor.views import JobView, ShardView, WorkerView

from kvps.history.evaluations import Evaluation


def worker(name: str, rank: int = 0, **facts: Any) -> WorkerView:
    known: dict[str, Any] = {"state": "computing", "state_s": None, "waits_for": []}
    known |= {"pushed": 5, "committed": 5, "clock": 5, "ahead": 0, "behind": 0, "staleness": 0}
    known |= {"silent_s": 0.1, "round_ms": 100.0, "rounds_per_s": 10.0}
    known |= {"shares": {"other": 0.1, "wait": 0.4, "fetch": 0.05, "compute": 0.4, "push": 0.05}}
    known |= {"pulled_per_s": 1e6, "pushed_per_s": 2e6, "loss": 0.5, "losses": [(n, 1 / n) for n in range(1, 9)]}
    known |= {"host": "here", "pid": 1, "device": "cpu"}
    return WorkerView(worker=name, rank=rank, **(known | facts))


def job(workers: list[WorkerView], **facts: Any) -> JobView:
    known: dict[str, Any] = {"at_ms": 0, "task": "digits", "mode": "SSP(2)", "staleness": 2, "transport": "redis"}
    known |= {"optimizer": "adam(lr=0.1)", "state": "runs", "waits_for": [], "why": ""}
    known |= {"version": 1234, "head": "", "backlog": 7, "commits_per_s": 12.3, "contributions": 5, "loss": 0.25}
    known |= {"gradient_norms": [], "units": 0, "units_done": 0, "rounds": 0, "backups": 0}
    known |= {"progress": None, "elapsed_s": 12.0, "eta_s": None}
    known |= {"memory": 12_300_000, "memory_limit": 0, "model_bytes": 400_000, "expected_workers": 3}
    known |= {"shards": [], "standbys": [], "events": []}
    return JobView(job="digits", workers=workers, **(known | facts))


def shown(w: WorkerView, width: int, slowest: float = 100.0) -> dict[str, str]:
    return {c.title: c.shown(w, slowest).plain for c in rows.worker_columns(width, [w])}


def test_the_columns_fit_any_width() -> None:
    workers = [worker("w0"), worker("w" * 64, state="waiting", waits_for=["w" * 64] * 4, state_s=1e7, loss=-1.5e-300)]
    for width in (*range(1, 260, 7), 79, 80, 119, 120):
        columns = rows.worker_columns(width, workers)
        assert sum(c.width for c in columns) + max(0, len(columns) - 1) <= width
        for w in workers:
            assert [c.shown(w, 100.0).cell_len for c in columns] == [c.width for c in columns]
        assert [c.head.cell_len for c in columns] == [c.width for c in columns]


def test_80_columns_have_the_most_important_and_120_have_all() -> None:
    assert list(shown(worker("w0"), 79)) == [
        *("worker", "state", "round time", "round", "wait", "rounds/s", "ahead", "stale", "loss")
    ]
    assert len(shown(worker("w0"), 119)) == 13


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "computing"),
        ({"state_s": 3.21}, "computing 3.2 s"),
        ({"state": "pushing", "state_s": 0.2}, "pushing"),
        ({"state": "waiting", "waits_for": ["w3", "w1"], "state_s": 2.0}, "waiting for w3, w1 2.0 s"),
        ({"state": "waiting", "waits_for": ["the aggregator"]}, "waiting for aggregator"),
        ({"state": "silent", "state_s": 4.2}, "silent for 4.2 s"),
        ({"state": "evicted", "state_s": None, "round_ms": None, "shares": {}}, "evicted"),
    ],
)
def test_a_state_says_for_whom_and_how_long(facts: dict[str, Any], words: str) -> None:
    assert rows.doing(worker("w0", **facts)).plain == words


def test_a_bar_has_the_phases_and_the_length_of_the_round() -> None:
    assert rows.bar(worker("w0"), 100.0, 20).plain == "████████▓▓▒▞░░░░░░░░"
    assert rows.bar(worker("w0", round_ms=50.0), 100.0, 20).plain == "████▓▒░░░░"
    assert rows.bar(worker("w0", round_ms=None, shares={}), 0.0, 20).plain == ""


def test_figures_of_a_worker() -> None:
    cells = {title: cell.strip() for title, cell in shown(worker("w0", ahead=2, behind=1, staleness=3), 160).items()}
    wanted = {"round": "100 ms", "wait": "40%", "rounds/s": "10.0", "ahead": "2", "behind": "1", "stale": "3"}
    wanted |= {"in/s": "1.00 MB", "out/s": "2.00 MB", "loss": "0.5000", "loss curve": "█▄▃▂▂▁▁▁"}
    assert {title: cells[title] for title in wanted} == wanted


def test_the_slowest_is_first_and_who_has_gone_is_last() -> None:
    workers = [
        worker("gone", 0, state="left", round_ms=900.0),
        worker("fast", 1, round_ms=100.0, shares={"wait": 0.8}),
        worker("silent", 2, state="silent", round_ms=10.0),
        worker("slow", 3, round_ms=100.0, shares={"wait": 0.0}),
        worker("awaited", 4, state="awaited", round_ms=None, shares={}),
    ]
    assert [w.worker for w in rows.ordered(workers, True)] == ["silent", "slow", "fast", "awaited", "gone"]
    assert [w.rank for w in rows.ordered(workers[::-1], False)] == [0, 1, 2, 3, 4]
    assert rows.slowest_ms(workers) == 100.0, "a bar is measured by those that are at work"


def test_the_lines_above_tell_the_job() -> None:
    first, second, third = (line.plain for line in rows.header(job([worker("w0")]), 80))
    assert first == "digits  runs  SSP(2)  digits  adam(lr=0.1)"
    assert second == "version 1,234  12.3 versions/s  backlog 7  workers 1 of 3  loss 0.2500"
    assert third == "Redis 12.3 MB  model 400 kB"
    paused = rows.header(job([worker("w0", state="paused"), worker("w1", state="silent")], state="paused"), 80)
    assert "workers 1 of 3" in paused[1].plain
    evaluated = Evaluation(1200, {"loss": 0.25, "n": math.nan}, "evaluator\x1b[2J", 5)
    assert rows.header(job([], evaluation=evaluated), 80)[3].plain == (
        r"evaluation of version 1,200: loss 0.25, n nan, by evaluator\x1b[2J"
    )
    counted = rows.header(job([], units=300, units_done=120, eta_s=75.0, memory_limit=10**9), 80)[2].plain
    assert counted == "75 s left  units 120 of 300 (40%)  Redis 12.3 MB of 1.00 GB  model 400 kB"
    in_rounds = {"units": 300, "units_done": 120, "rounds": 50, "backups": 3, "version": 20}
    assert "units 120 of 300 (40%)  round 21 of 50  3 backup tasks" in rows.header(job([], **in_rounds), 120)[2].plain
    narrow = rows.header(job([], units=180_000, units_done=10_914, rounds=32_000, backups=168, eta_s=75.0), 80)
    assert "loss 0.2500" in narrow[1].plain
    assert narrow[2].plain.startswith("75 s left  units 10,914 of 180,000 (6%)")
    assert "all done" in rows.header(job([], units=3, units_done=3), 80)[2].plain


@pytest.mark.parametrize("width", [1, 79, 200])
def test_shards_fit_any_width_with_holder_and_phases(width: int) -> None:
    phases = {"fetch": 1.234, "reduce": 0.1, "step": 0.2, "store": 12.5, "commit": 0.9}
    shards = [ShardView(0, "host:12:345:abcdef", 3, 9.5, phases, 1e6, 2e6), ShardView(1, "", 0, None, {}, 0.0, 0.0)]
    titles, table = rows.shard_table(shards, width)
    assert len({tuple(c.cell_len for c in row) for row in (titles, *table)}) == 1
    assert sum(c.cell_len for c in titles) + len(titles) - 1 <= max(width, 22)
    if width >= 79:
        words = [[c.plain.strip() for c in row[:9]] for row in table]
        assert words[0] == ["0", "host:12", "3", "9.50", "1.2 ms", "0.1 ms", "0.2 ms", "12 ms", "0.9 ms"]
        assert words[1] == ["1", "nobody", "0", *["-"] * 6]


def test_what_a_terminal_would_obey_is_shown_as_its_code() -> None:
    odd = ShardView(0, "\x1b[2J\n[red]:7", 1, None, {}, 0.0, 0.0)
    cells = rows.shard_table([odd], 160)[1][0]
    lines = rows.header(job([], task="\x1b]0;x\x07", optimizer="[bold]\r"), 160)
    for text in (*cells, *lines):
        assert text.plain.isprintable()
    assert cells[1].plain.strip() == "\\x1b[2J\\n[red]:7"
