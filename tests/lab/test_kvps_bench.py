"""kvps_bench: each measurement in a tiny form, what it says, and what is asked wrongly. No time is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import bench_run
from kvps_bench.cost import ScriptCall, by_kind
from kvps_bench.crew import crew
from kvps_bench.result import Bar, bars_table, rows_tables
from kvps_bench.roles import model, sizes
from kvps_bench.round import has_torch
from kvps_bench.sessions import Sessions
from kvps_bench.straggler import Mode, Setting, at_best, is_slow
from kvps_bench.turns import CaseFailed, Ratio, Times, in_turns

from kvps.errors import KvpsError
from kvps.store import Store

pytestmark = pytest.mark.slow  # each starts whole commands


def bench(*arguments: str) -> dict[str, Any]:
    """What `python -m kvps_bench ... --json` prints, with what every bench must have."""
    done = bench_run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["bench"] == arguments[0]
    assert {"date", "cores", "server", "python", "memory_gb"} <= set(found["machine"])
    assert found["rows"]
    for row in found["rows"]:
        assert row["transport"] in ("tcp", "unix", "shm")
        if "not_measured" not in row:
            assert 0 < row["p10_ms"] <= row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
            assert row["n"] >= 1
    for bar in found["bars"]:
        measured = "ratio" in bar
        assert measured != ("not_measured" in bar)
        assert (bar["holds"] is None) == (not measured or bar["wanted"] == "stated")
        assert not measured or bar["least"] <= bar["ratio"] <= bar["greatest"]
    assert rows_tables(found)
    assert bars_table(found)
    return found


# -- the six ------------------------------------------------------------------------------------------------------


def test_transport(home: Path) -> None:
    found = bench("transport", "--mb", "0.5", "--turns", "1", "--transport", "unix")
    rows = {(row["move"], row["case"]) for row in found["rows"]}
    assert rows == {(m, c) for m in ("push", "pull") for c in ("kvps", "bare sockets", "redis-py", "redis-py, hiredis")}
    assert [bar["bar"] for bar in found["bars"]] == [1, 1]


def test_round_beside_an_all_reduce(home: Path) -> None:
    found = bench("round", "--mb", "0.04", "--workers", "2", "--tensors", "1", "--quick", "--turns", "1")
    rows = {(row["case"], row["transport"]): row for row in found["rows"]}
    for transport in ("tcp", "unix"):
        for case in ("bare sockets", "bare sockets, fresh names", "bare sockets, half the bytes", "kvps", "kvps, bf16"):
            assert rows[case, transport]["over_bare"] > 0
    if has_torch():
        assert rows["gloo all_reduce", "tcp"]["over_bare"] > 0
    else:
        assert rows["gloo all_reduce", "tcp"]["not_measured"] == "not installed"
    assert found["bars"] == []


def test_round_of_many_tensors_and_adam_as_a_table(home: Path) -> None:
    sized = ["--mb", "0.04", "--workers", "1", "--tensors", "5", "--optimizer", "adam", "--quick", "--turns", "1"]
    done = bench_run("round", *sized, "--transport", "unix", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "tensors 5, optimizer adam" in done.stdout
    assert "gloo all_reduce" in done.stdout


def test_units(home: Path) -> None:
    found = bench("units", "--quick", "--mb", "0.04", "--workers", "2", "--transport", "unix,shm", "--turns", "1")
    cases = [(row["case"], row["transport"]) for row in found["rows"]]
    assert cases == [(case, t) for t in ("unix", "shm") for case in ("static partition", "rounds of units")]
    assert [bar["bar"] for bar in found["bars"]] == [20, 20]


def test_straggler(home: Path) -> None:
    tiny = ["--accuracy", "0.3", "--compute-ms", "1", "-w", "2", "--turns", "1", "--slow", "moves"]
    found = bench("straggler", *tiny)
    assert [row["case"] for row in found["rows"]] == [
        "BSP",
        "rounds of units",
        "rounds of units, batch of BSP",
        "SSP(3)",
        "ASP",
    ]
    assert all(row["contributions"] > 0 for row in found["rows"])
    assert [bar["bar"] for bar in found["bars"]] == [11, 21, 21, 21, 21]


def test_scale(home: Path) -> None:
    found = bench("scale", "--quick", "--turns", "1", "--transport", "unix")
    rows = found["rows"]
    assert {row["part"] for row in rows} == {"tensors", "optimizer", "sizes"}
    assert {row["tensors"] for row in rows if row["part"] == "tensors"} == {1, 160}
    assert all({"aggregator_x", "worker_x", "server_x"} <= set(row) for row in rows if row["part"] == "sizes")
    assert [bar["bar"] for bar in found["bars"]] == [6, 7, 8]


def test_readers(home: Path) -> None:
    crowd = ["--mb", "2", "--readers", "2", "--replicas", "1", "--transport", "tcp,shm"]
    found = bench("readers", *crowd, "--quick", "--turns", "1")
    rows = {(row["transport"], row["case"]): row for row in found["rows"]}
    alone, copied = ("job alone", "job, read by 2", "a read meanwhile"), "a read meanwhile from 1 replicas"
    assert {case for _, case in rows} >= {*alone, copied, "job alone beside 1 replicas"}
    assert rows["tcp", "a read meanwhile"]["fetches"] >= 1
    assert rows["tcp", copied]["fetches"] >= 1
    assert rows["shm", "a read meanwhile"]["fetches"] == 0
    assert [bar["bar"] for bar in found["bars"]] == [10] * 3
    assert found["bars"][1]["what"] == "a round with 2 readers over one without, tcp, 1 replicas"


def test_shards(home: Path) -> None:
    found = bench("shards", "--quick", "--shards", "1,10,20", "--turns", "1")
    assert [(row["shards"], row["aggregators"]) for row in found["rows"]] == [
        (1, 1),
        (10, 1),
        (20, 1),
        (10, 2),
        (20, 2),
    ]
    assert all(row["commands_a_shard"] > 10 and row["script_us_a_shard"] > 0 for row in found["rows"])
    assert [(bar["bar"], bar["holds"]) for bar in found["bars"]] == [(19, True), (19, True)]


def test_workers(home: Path) -> None:
    found = bench("workers", "--quick", "--workers", "2,3", "--staleness", "2", "--seconds", "0.2")
    parts: dict[str, dict[tuple[str, int], Any]] = {}
    for row in found["rows"]:
        parts.setdefault(row["part"], {})[row["case"], row["workers"]] = row
    cases = [("SSP(2)", 2), ("SSP(2)", 3)]
    moves = ("all join", "all leave", "all join under any name")
    assert set(parts["joining"]) == {(f"{mode}: {move}", count) for mode, count in cases for move in moves}
    assert list(parts["contributions"]) == cases
    for row in parts["contributions"].values():
        assert row["contributions_per_s"] >= row["versions_per_s"] > 0
        assert row["scripts"] > 1  # each was pushed, and some plan holds it
        assert min(row["bytes_sent"], row["bytes_received"]) > 1024  # its own, and the weights for it
        assert min(row[f"{who}_cpu_us"] for who in ("server", "aggregator", "workers")) >= 0
    for mode, count in cases:
        for script in ("push", "plan, opens one", "ready, commits", "join", "leave", "evict"):
            row = parts["scripts"][f"{mode}: {script}", count]
            assert row["greatest_ms"] >= round(row["p50_ms"], 3)
        in_scripts = parts["contributions"][mode, count]["script_us"]
        assert 0 < parts["scripts"][f"{mode}: push", count]["us_a_contribution"] < 100 * in_scripts
    assert [bar["bar"] for bar in found["bars"]] == [14] * 7
    assert all("ratio" in bar for bar in found["bars"])


def test_a_session_that_fails_is_reported_and_the_others_end_with_their_job(store: Store) -> None:
    job = store.create_job("twice", model(64), workers=2)
    with crew((Sessions, store.url)) as (process,):
        joined = process("join", job.name, ["w0", "w0"], 60)
        assert joined.number < 2
        store.remove_job(job.name)
        left = process("leave", 60)
    assert (left.remaining, left.acknowledged) == (0, 0)
    assert left.error.startswith("WorkerAlive: worker 'w0' of job 'twice' has joined")


def test_a_process_that_is_gone_is_noticed_by_who_asks_it_next(store: Store) -> None:
    with crew((Sessions, store.url)) as (process,):
        process.process.kill()
        process.process.join()
        with pytest.raises(KvpsError, match=r"^a process of the benchmark died \(exit code -9\)$"):
            process.begin("leave", 60)


def test_sessions_that_have_not_joined_in_time_are_counted(store: Store) -> None:
    job = store.create_job("slow", model(64), workers=2)
    with crew((Sessions, store.url)) as (process,):
        store.client.call("CLIENT", "PAUSE", 60_000, "WRITE")  # reads are answered: who joins is not
        try:
            joined = process("join", job.name, ["w0", "w1"], 0.2)
        finally:
            store.client.call("CLIENT", "UNPAUSE")
        assert joined.number == 0
        store.remove_job(job.name)
        assert process("leave", 60) == (0, 0, "")


def test_a_plan_that_a_commit_follows_has_opened_it() -> None:
    calls = [("plan", 1.0), ("push", 2.0), ("plan", 3.0), ("free", 4.0), ("ready", 5.0), ("plan", 6.0)]
    assert by_kind([ScriptCall(*call) for call in calls]) == {
        "plan, opens none": [1],
        "push": [2],
        "free": [4],
        "plan, opens one": [3],
        "ready, commits": [5],
    }


def test_wake_and_the_page_that_is_made_of_it(home: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvps_bench.page", "--quick", "--only", "wake", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "performance.json").read_text()).values()
    assert [bar["bar"] for bar in found["bars"]] == [12] * 8
    page = (tmp_path / "performance.md").read_text()
    assert "`python -m kvps_bench wake --json --quick`" in page
    assert "| bare XREAD, woken by XADD | tcp |" in page


# -- what is asked wrongly ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        "round --mb 0",
        "round --tensors 100 --mb 0.001 --workers 2,0",
        "round --optimizer sloth",
        "transport --transport pigeon",
        "transport --turns 0",
        "straggler --accuracy 95",
        "straggler --slow everybody",
        "scale --parts wings",
        "workers --workers 5000",
        "workers --staleness 0.5",
        "workers --seconds 0",
        "wake --redis unix:///nowhere/s",
    ],
)
def test_what_is_asked_wrongly_is_said_in_one_line(home: Path, arguments: str) -> None:
    done = bench_run(*arguments.split())
    assert done.returncode in (1, 2)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("kvps: error: ")


def test_a_server_of_the_users_own_is_reached_one_way(home: Path, server_url: str) -> None:
    done = bench_run("wake", "--redis", server_url, "--transport", "tcp")
    assert done.stderr == "kvps: error: --transport tcp: the server of --redis is reached over unix\n"


# -- turns --------------------------------------------------------------------------------------------------------


def test_turns_alternate_and_the_first_is_not_counted() -> None:
    said: list[str] = []

    def case(name: str, seconds: float) -> Any:
        return lambda: (said.append(name), (seconds * len(said),))[1]

    times = in_turns({"a": case("a", 1), "b": case("b", 2)}, 2)
    assert said == ["a", "b"] * 3
    assert times["a"].seconds == [3, 5]
    assert times["b"].over(times["a"]).to_dict() == {"ratio": (8 / 3 + 12 / 5) / 2, "least": 12 / 5, "greatest": 8 / 3}


def test_a_case_that_fails_leaves_the_others_their_turns() -> None:
    def fails() -> list[float]:
        raise CaseFailed("no more")

    times = in_turns({"a": fails, "b": lambda: [1.0]}, 3)
    assert list(times) == ["b"]
    assert len(times["b"].turns) == 3


def test_turns_without_a_warm_up_all_count() -> None:
    assert len(in_turns({"a": lambda: [1.0]}, 2, warm_up=False)["a"].turns) == 2


def test_quantiles_lie_between() -> None:
    times = Times(((1.0, 2.0), (4.0,)))
    assert (times.quantile(0), times.median, times.quantile(0.75), times.quantile(1)) == (1, 2, 3, 4)


def test_bars() -> None:
    ratio = Ratio(1.1, 1.0, 1.3)
    assert Bar(2, "", True, 1.2, ratio).holds is True
    assert Bar(2, "", False, 1.2, ratio).holds is False
    assert Bar(2, "", True, None, ratio).holds is None
    assert Bar(2, "", True, 1.2, None).to_dict()["not_measured"] == "not installed"
    assert ratio.inverse == Ratio(1 / 1.1, 1 / 1.3, 1.0)


def test_a_model_of_many_tensors_has_the_size_asked_for() -> None:
    assert sum(sizes(4_000_000, 160)) == 1_000_000
    assert min(sizes(4_000_000, 160)) >= 1
    assert sum(array.nbytes for array in model(4_000_000, 160).values()) == 4_000_000


def test_one_is_slow_at_a_time() -> None:
    slow = [[is_slow("moves", rank, i, 4, None) for rank in range(4)] for i in range(64)]  # type: ignore[arg-type]
    assert all(sum(row) == 1 for row in slow)
    assert [row.index(True) for row in slow[::8]] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_at_best_slow_workers_cost_what_the_bound_makes_them_cost() -> None:
    setting = Setting(workers=4, compute_ms=10)
    fast, slow = 10 / 1000 / 4, 50 / 1000 / 4
    assert at_best(setting, "always", Mode(0)) == pytest.approx(slow)
    assert at_best(setting, "always", Mode(-1)) == pytest.approx(1 / (3 / 0.01 + 1 / 0.05), rel=0.02)
    assert at_best(setting, "always", Mode(0, units=True)) == pytest.approx(1 / (3 / 0.01 + 1 / 0.05))
    assert at_best(setting, "always", Mode(0, units=True, cut=8)) == pytest.approx(1 / (3 / 0.01 + 1 / 0.05) / 8)
    assert at_best(setting, "moves", Mode(0)) == pytest.approx(slow)
    assert fast < at_best(setting, "moves", Mode(-1)) < at_best(setting, "moves", Mode(3)) < slow
