"""kvps_bench: each measurement in a tiny form, what it says, and what is asked wrongly. No time is judged here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import bench_run
from kvps_bench.crew import crew
from kvps_bench.result import Bar, bars_table, rows_tables
from kvps_bench.roles import model
from kvps_bench.straggler import is_slow
from kvps_bench.turns import Ratio, in_turns
from kvps_bench.workers import Sessions

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


# -- what is measured ------------------------------------------------------------------------------------------------


def test_round_beside_bare_sockets(home: Path) -> None:
    found = bench("round", "--mb", "0.04,4", "--workers", "2", "--quick", "--turns", "1", "--transport", "unix,shm")
    rows = {(row["case"], row["transport"], row["mb"]): row for row in found["rows"]}
    assert {(case, transport) for case, transport, _ in rows} == {
        *((case, "unix") for case in ("bare sockets", "kvps", "kvps, bf16")),
        *((case, "shm") for case in ("kvps", "kvps, in its buffers")),
    }
    assert all(row["over_bare"] > 0 for row in rows.values())
    assert [bar["bar"] for bar in found["bars"]] == [2]


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
    assert [bar["bar"] for bar in found["bars"]] == [11, 21, 21]


def test_readers(home: Path) -> None:
    found = bench("readers", "--mb", "2", "--readers", "2", "--transport", "tcp,shm", "--quick", "--turns", "1")
    rows = {(row["transport"], row["case"]): row for row in found["rows"]}
    assert {case for _, case in rows} == {"job alone", "job, read by 2", "a read meanwhile"}
    assert rows["tcp", "a read meanwhile"]["fetches"] >= 1
    assert rows["shm", "a read meanwhile"]["fetches"] == 0
    assert [bar["bar"] for bar in found["bars"]] == [10] * 2
    assert found["bars"][1]["what"] == "a round with 2 readers over one without, shm"


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
    moves = ("all join", "all leave")
    assert set(parts["joining"]) == {(f"{mode}: {move}", count) for mode, count in cases for move in moves}
    assert list(parts["contributions"]) == cases
    for row in parts["contributions"].values():
        assert row["contributions_per_s"] >= row["versions_per_s"] > 0
        assert row["scripts"] > 1  # each was pushed, and some plan holds it
        assert min(row["bytes_sent"], row["bytes_received"]) > 1024  # its own, and the weights for it
        assert min(row[f"{who}_cpu_us"] for who in ("server", "aggregator", "workers")) >= 0
    assert [bar["bar"] for bar in found["bars"]] == [14] * 4
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


# -- what is asked wrongly ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        "round --mb 0",
        "round --workers 2,0",
        "round --transport pigeon",
        "units --turns 0",
        "straggler --accuracy 95",
        "straggler --slow everybody",
        "workers --workers 5000",
        "workers --staleness 0.5",
        "workers --seconds 0",
        "units --redis unix:///nowhere/s",
    ],
)
def test_what_is_asked_wrongly_is_said_in_one_line(home: Path, arguments: str) -> None:
    done = bench_run(*arguments.split())
    assert done.returncode in (1, 2)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("kvps: error: ")


# -- turns --------------------------------------------------------------------------------------------------------


def test_turns_alternate_and_the_first_is_not_counted() -> None:
    said: list[str] = []

    def case(name: str, seconds: float) -> Any:
        return lambda: (said.append(name), (seconds * len(said),))[1]

    times = in_turns({"a": case("a", 1), "b": case("b", 2)}, 2)
    assert said == ["a", "b"] * 3
    assert times["a"].seconds == [3, 5]
    assert times["b"].over(times["a"]).to_dict() == {"ratio": (8 / 3 + 12 / 5) / 2, "least": 12 / 5, "greatest": 8 / 3}


def test_bars() -> None:
    ratio = Ratio(1.1, 1.0, 1.3)
    assert Bar(2, "", True, 1.2, ratio).holds is True
    assert Bar(2, "", False, 1.2, ratio).holds is False
    assert Bar(2, "", True, None, ratio).holds is None
    assert Bar(2, "", True, 1.2, None, "no hosts").to_dict()["not_measured"] == "no hosts"


def test_one_is_slow_at_a_time() -> None:
    slow = [[is_slow("moves", rank, i, 4, None) for rank in range(4)] for i in range(64)]  # type: ignore[arg-type]
    assert all(sum(row) == 1 for row in slow)
    assert [row.index(True) for row in slow[::8]] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_actors(home: Path) -> None:
    found = bench("actors", "--mb", "2", "--actors", "2", "--gbit", "0", "--quick", "--turns", "1")
    rows = {row["case"]: row for row in found["rows"]}
    assert set(rows) == {"difference", "whole", "safetensors over HTTP"}
    assert rows["whole"]["read_mb"] == rows["safetensors over HTTP"]["read_mb"] == 4.0
    assert rows["difference"]["read_mb"] < 0.2
    assert len(found["bars"]) == 2
