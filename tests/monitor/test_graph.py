"""`kvps graph`: every node and edge is what Redis says, and the picture is SVG whatever names are in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.commands import kvps_run
from helpers.harness import abandoned, aggregating, await_version, gradient, model
from helpers.waiting import eventually
from kvps_monitor.graph import as_json, as_svg
from kvps_monitor.live import JobWatch

from kvps.store import Store

SVG = "{http://www.w3.org/2000/svg}"


def test_it_has_who_holds_who_stands_by_and_who_works(store: Store) -> None:
    job = store.create_job("j", model(), workers=3, shards=2, lease_ms=20_000)
    with aggregating(job), job.join("w0") as w0, job.join("w1") as w1, job.join("w2") as w2:
        sessions = (w0, w1, w2)
        for number in range(4):
            for session in sessions:
                session.push(gradient(session.pull(), session.rank, number))
            await_version(job, number + 1)
        with aggregating(job), job.access.client.twin(5) as another_program:
            another_program.call("CLIENT SETNAME", "kvps-1-abcdef01")
            assert eventually(lambda: len(JobWatch(job).look().standbys) == 1)
            graph = as_json(job, JobWatch(job).look())
    holder = graph["shards"][0]["holder"]
    assert [a["shards"] for a in graph["aggregators"]] == [[0, 1], []]
    assert graph["aggregators"][0]["name"] == holder != graph["aggregators"][1]["name"]
    assert [w["worker"] for w in graph["workers"]] == ["w0", "w1", "w2"]
    assert all(w["pushed_per_s"] > 0 and w["pulled_per_s"] > 0 for w in graph["workers"])
    assert graph["others"] == [{"name": "kvps-1-abcdef01", "connections": 1}], "all others are of this process"
    json.dumps(graph)
    words = _words(as_svg(graph))
    assert {"w0", "w1", "w2", "shard 0", "shard 1", "holds shard 0, 1", "stands by"} <= words


@pytest.mark.parametrize("workers", [0, 12, 30])
def test_the_picture_at_every_size(store: Store, workers: int) -> None:
    job = store.create_job("j", model(), workers=max(1, workers), shards=12)
    for rank in range(workers):
        job.access.scripts.join(f"{60 * 'x'}-{rank}", "n", "", {"host": "<b>&\"'", "pid": 1, "device": "cpu"})
    with abandoned(job):
        drawn = as_svg(as_json(job, JobWatch(job).look()))
    words, svg = _words(drawn), ElementTree.fromstring(drawn)
    assert ("workers" in words) == (workers == 30), "7 more workers are one box"
    assert {"7 more", "shards"} <= words
    assert "<b>" not in drawn
    assert ({"xxxxxxxxxx…xxxxxxx-0", "xxxxxxxxxx…xxxxxxx-1"} <= words) == (workers > 0), "they stay apart"
    boxes = [each for each in svg.iter(f"{SVG}rect") if each.get("width") == "146"]
    assert len({each.get("y") for each in boxes}) == 2 + {0: 0, 12: 2, 30: 4}[workers], "rows"
    assert max(float(each.get("x", "0")) + 146 for each in boxes) < float(svg.get("width", "0")) < 1200
    lines = [each for each in svg.iter(f"{SVG}text") if each.get("text-anchor") == "middle"]
    assert all(len("".join(each.itertext())) < 18 or each.get("textLength") == "134" for each in lines), (
        "none overflows"
    )


@pytest.mark.slow
def test_the_command_writes_what_it_is_asked_for(store: Store, tmp_path: Path) -> None:
    store.create_job("j", model())

    def run(*arguments: str) -> tuple[int, str, str]:
        done = kvps_run("graph", *arguments, KVPS_REDIS_URL=store.url)
        return done.returncode, done.stdout, done.stderr

    code, drawn, _ = run("j", "-o", "svg")
    assert (code, "shard 0" in _words(drawn)) == (0, True)
    code, text, _ = run("j", "-o", "json")
    assert (code, json.loads(text)["job"]) == (0, "j")
    assert json.loads(run("j", "--json")[1])["job"] == "j"
    code, _, told = run("j", "--json", "-o", "a.svg")
    assert (code, told) == (2, "kvps: error: --json prints what -o would write: leave one of them out\n")
    for name in ("a.svg", "a.json"):
        code, said, told = run("j", "-o", str(tmp_path / name))
        assert (code, said, told) == (0, "", f"wrote {tmp_path / name}\n")
    assert json.loads((tmp_path / "a.json").read_text())["version"] == 0
    assert "shard 0" in _words((tmp_path / "a.svg").read_text())
    code, _, told = run("j", "-o", "a.png")
    assert code != 0
    assert told.startswith("kvps: error: --output must be svg, json, or a file whose name ends in .svg or .json")
    code, _, told = run("j", "-o", os.fspath(tmp_path / "no" / "a.svg"))
    assert (code != 0, told.count("\n")) == (True, 1)
    assert run("nobody")[0] == 1


def _words(drawn: str) -> set[str]:
    return {"".join(text.itertext()) for text in ElementTree.fromstring(drawn).iter(f"{SVG}text")}
