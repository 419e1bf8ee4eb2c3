"""kvps_bench screens, on real pages in a real browser: when a run counts as seen, and what ends with a turn."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from helpers.commands import bench_run
from helpers.waiting import eventually, processes_of
from kvps_bench.screen_systems import SYSTEMS, Command, System, Turn
from kvps_bench.screens import measure, table

pytestmark = [
    pytest.mark.slow,  # each starts a browser
    pytest.mark.skipif(not shutil.which("chromium"), reason="Chromium is not installed"),
]

DELAY_S = 1.0
PAGE = """
import http.server, sys, time
port, delay, answer = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
begin = time.monotonic()

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write((answer if time.monotonic() - begin >= delay else "<p>no run yet").encode())

http.server.ThreadingHTTPServer(("127.0.0.1", port), Page).serve_forever()
"""
ASKS_ANOTHER = '<script async src="http://192.0.2.1/x.js"></script>'  # an address that is nobody's
ASKS_A_TOKEN = """
<p id=run hidden>{name}</p>
<div role=dialog>Authentication Token Required
<input type=password onchange="if (this.value == 'let me in') {{ run.hidden = false; this.parentNode.remove() }}"></div>
"""


def page_of(turn: Turn, answer: str, delay_s: float = 0) -> list[Command]:
    return [Command((sys.executable, "-c", PAGE, str(turn.port), str(delay_s), answer))]


def test_a_run_is_seen_when_its_page_shows_it_and_not_before() -> None:
    system = System(
        "late",
        "",
        ("kvps",),
        lambda turn: page_of(turn, f"<p>{turn.name}</p>{ASKS_ANOTHER}", DELAY_S),
        "/",
        lambda turn: turn.name,
    )
    found = measure(None, [system], 2, None, lambda line: None)
    (row,) = found["rows"]
    assert len(row["seconds"]) == 2
    assert min(row["seconds"]) >= DELAY_S
    assert row["versions"].startswith("kvps ")
    assert row["other_hosts"] == ["192.0.2.1"]
    assert table(found)[1][0][2] == "1"


def test_a_page_that_asks_for_a_token_gets_it_and_the_pictures_are_taken(tmp_path: Path) -> None:
    system = System(
        "closed",
        "",
        ("kvps",),
        lambda turn: page_of(turn, ASKS_A_TOKEN.format(name=turn.name)),
        "/",
        lambda turn: turn.name,
        {"front": "/"},
        (sys.executable, "-c", "print('let me in')"),
    )
    (row,) = measure(None, [system], 1, tmp_path, lambda line: None)["rows"]
    assert row["seconds"]
    assert len(row["commands"]) == 2
    for size in ("wide", "phone"):
        assert (tmp_path / f"closed-front-{size}.png").read_bytes().startswith(b"\x89PNG")


def test_a_command_that_fails_is_said_in_its_own_words() -> None:
    broken = System(
        "broken", "", (), lambda turn: [Command((sys.executable, "-c", "raise SystemExit('no')"))], "/", str
    )
    (row,) = measure(None, [broken], 1, None, lambda line: None)["rows"]
    assert row["not_measured"] == "failed: no"


def test_kvps_is_seen_in_its_terminal_and_ends_with_the_turn() -> None:
    (kvps,) = (system for system in SYSTEMS if system.name == "kvps up")
    folders: list[Path] = []

    def commands(turn: Turn) -> list[Command]:
        folders.append(turn.folder)
        return kvps.commands(turn)

    mine = System(kvps.name, "", kvps.packages, commands, "", kvps.shows)
    (row,) = measure(None, [mine], 1, None, lambda line: None)["rows"]
    assert row["seconds"][0] > 0
    assert eventually(lambda: not processes_of(folders[0])), processes_of(folders[0])


def test_what_is_not_installed_is_said_and_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = bench_run("screens", "--systems", "TensorBoard", "--peers", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "not installed" in done.stdout
    for wrong in (["--systems", "Excel"], ["--peers", str(tmp_path / "none")], ["--turns", "0"]):
        done = bench_run("screens", *wrong)
        assert done.returncode == 2
        assert done.stderr.startswith("kvps: error: ")
        assert done.stderr.count("\n") == 1
