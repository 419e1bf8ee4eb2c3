"""What is printed where, and how much: results on stdout, the rest on stderr, by --quiet and -v. Real runs."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import KVPS, TINY, kvps_run, refused
from kvps_cli import output, tables

from kvps.store import Store

slow = pytest.mark.slow  # each starts whole commands

RESULT = re.compile(
    r"60 contributions in 10 versions, [\d.]+ s, \d+ contributions/s, test loss [\d.]+\ntest accuracy 0\.\d+\n"
)
LOGGED = re.compile(r"(?:\w+: )?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING) kvps\.\w+: .*")


@slow
def test_quiet_prints_the_results_and_nothing_else(home: Path) -> None:
    done = kvps_run("up", "digits", *TINY, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert RESULT.fullmatch(done.stdout)
    line = refused("worker", "--quiet", "--redis", "redis://127.0.0.1:1", code=1)
    assert line.startswith("no Redis server answers"), "but errors"


@slow
def test_verbose_adds_the_log_of_every_process_with_times(home: Path) -> None:
    done = kvps_run("up", "digits", *TINY, "-v")
    assert RESULT.fullmatch(done.stdout)
    logged = [line for line in done.stderr.splitlines() if LOGGED.fullmatch(line)]
    assert any(line.startswith("aggregator: ") and "kvps.lease: job digits: holds shard 0" in line for line in logged)
    assert any(line.startswith("w2: ") and "kvps.worker: job digits: joined as w2" in line for line in logged)
    assert " DEBUG " not in "".join(logged)
    assert " DEBUG kvps.supervise: w0 (process " in kvps_run("run", "-w", "1", "-vv", "--", "true").stderr


# -- what others wrote ---------------------------------------------------------------------------------------------

EVIL = "[bold]:100:\x1b[2J\udcff\ud800\r\u202e\x07\x9b31m"
SHOWN = r"[bold]:100:\x1b[2J\udcff\ud800\r\u202e\x07\x9b31m"


def test_every_way_to_print_shows_what_a_terminal_would_obey(capsys: pytest.CaptureFixture[str]) -> None:
    """And what the library that prints would obey: brackets are its markup, and `:100:` is an emoji."""
    output.say(f"a{EVIL}b")
    tables.print_rows(["one", "two"], [[f"a{EVIL}b", "c\nd"]])
    tables.plain_console().print(f"shard 0  a{EVIL}b\nshard 1  made up")
    log = logging.getLogger("kvps")
    before = log.handlers[:], log.level, log.propagate
    try:
        output.start_log(quiet=False, verbose=1)
        logging.getLogger("kvps.any").warning("lost %s", f"a{EVIL}b")
    finally:
        log.handlers, log.propagate = before[0], before[2]
        log.setLevel(before[1])
    printed = capsys.readouterr()
    assert printed.err.splitlines()[0] == f"a{SHOWN}b"
    assert printed.err.endswith(f"WARNING kvps.any: lost a{SHOWN}b\n")
    header, row, line = printed.out.splitlines()
    assert header.split() == ["one", "two"]
    assert row.split() == [f"a{SHOWN}b", r"c\nd"]
    assert line == rf"shard 0  a{SHOWN}b\nshard 1  made up"


WIDE = [["a", "1", "2"], ["b" * 300, "23456", "7"], ["c", "3", "reason " * 60]]


def test_cells_are_cut_to_the_terminal_and_short_ones_never(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def on(width: int, *least: str) -> list[str]:
        """The lines of the table as a terminal of this width gets them, or a program if it is 0."""
        monkeypatch.setattr("sys.stdout.isatty", lambda: width > 0)
        monkeypatch.setenv("COLUMNS", str(width))
        tables.print_rows(["name", "rank", "why"], WIDE, least)
        return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()

    lines = on(60)
    assert [len(line) for line in lines] == [37, 35, 35, 60]
    assert lines[2].split() == ["b" * 24 + "\u2026", "23456", "7"]
    records = on(40)
    assert records[:4] == ["name  a", "rank  1", "why   2", ""]
    assert records[4:6] == [f"name  {'b' * 33}\u2026", "rank  23456"]
    assert max(map(len, records)) == 40
    *lines, left_out = on(40, "why", "rank")
    assert [line.split() for line in lines[1:]] == [["a", "1"], ["b" * 32 + "\u2026", "23456"], ["c", "3"]]
    assert left_out == "a wider terminal shows why too"
    piped = on(0)
    assert [len(line) for line in piped[:3]] == [112, 110, 110], (
        "a name is cut at 100, and no row is as wide as a reason"
    )
    assert piped[3].endswith("reason")


@pytest.mark.slow
def test_commands_show_what_others_wrote_as_text(store: Store, tmp_path: Path) -> None:
    """Where no parser refuses it first: who holds a shard, and names of files."""
    job = store.create_job("job", {"x": np.ones(2, np.float32)}, task="[bold]:100:[/]")
    store.client.call("SET", job.access.keys.lease(0), "[host]:100:\x1b[2J\udcff\nshard 1:1:abc")
    (tmp_path / "a\x1b]0;b\udcff\n.safetensors").write_bytes(b"x")
    store.client.call("RPUSH", "rq:queue:kvps", "\x1b[2J")
    store.client.call("HSET", "rq:job:\x1b[2J", "kvps_why", "\x1b[2J")
    known = {"KVPS_REDIS_URL": store.url, "PYTHONIOENCODING": "ascii"}  # of the first: it takes a fresh interpreter
    for command, seen in (
        (["status", "job"], r"shard 0  [host]:100:\x1b[2J\udcff\nshard 1:1:abc"),
        (["checkpoint", "ls", str(tmp_path)], r"a\x1b]0;b\udcff\n.safetensors"),
        (["queue"], "?[2J"),
        (["jobs"], "[bold]:100:[/]"),
        (["status", "job", "--json"], r"\u001b"),
        (["checkpoint", "ls", str(tmp_path), "--json"], r"\u001b"),
    ):
        done = kvps_run(*command, **known)
        known.pop("PYTHONIOENCODING", None)
        assert (done.returncode, done.stderr) == (0, "")
        assert seen in done.stdout
        assert "\x1b" not in done.stdout
        assert os.linesep + "shard 1" not in done.stdout


FULL = "kvps: error: No space left on device while writing: make room, or send the output elsewhere\n"
"""What is said of a full disk, also if the output is kept back until there is more of it."""


@pytest.fixture(params=[pytest.param("1", id="at once", marks=pytest.mark.slow), pytest.param("", id="kept back")])
def unbuffered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", request.param)


@pytest.mark.slow
def test_a_full_disk_is_one_line(unbuffered: None) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*KVPS, "acl", "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, FULL)


FAILS = """
import typer
from kvps_cli import main
from kvps.errors import KvpsError

app = typer.Typer()

@app.command()
def fails(late: bool = False) -> None:
    print("all of it")
    if late:
        raise typer.Exit(3)
    raise KvpsError("no luck")

main(app)
"""


@pytest.mark.slow
def test_a_closed_pipe_makes_no_success_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    command = [sys.executable, "-c", FAILS, "--late"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 3


def test_a_reader_that_has_closed_its_pipe_hears_nothing_more(unbuffered: None) -> None:
    with subprocess.Popen([*KVPS, "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (0, 1), "no 120, with which Python ends if it cannot write"


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (None, "-"),
        (0.12345, "0.1235"),
        (12345.678, "12345.6780"),
        (3e38, "3e+38"),
        (-2e9, "-2e+09"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_a_loss_is_never_wide(loss: float | None, text: str) -> None:
    assert output.loss_text(loss) == text
