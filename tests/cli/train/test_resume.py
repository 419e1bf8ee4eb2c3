"""`kvps run --resume`: the same line starts a run, and resumes it after a stop, a kill or the loss of its server. Real
processes and real signals; the weights are those of an undisturbed run."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.arrays import assert_same_bits
from helpers.commands import KVPS, LONG_UP, TINY, kvps_run, private_store, refused
from helpers.harness import ends_of_units, gradient, model
from helpers.terminals import on_a_terminal
from helpers.waiting import eventually, processes_of

import kvps
from kvps.history.checkpoint import Checkpoint
from kvps.history.checkpoint_directory import newest
from kvps.history.log_file import LogFile

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]  # each starts whole commands

ROUNDS, UNITS = 300, 800
RATE = kvps.schedules.StepLR(0.05, every=7, factor=0.9)
STATIC = f"""
import pathlib, sys, time
import kvps
from helpers.harness import gradient, model

with kvps.from_env() as worker:
    job = worker.create_job(model(), optimizer=kvps.SGD(lr=kvps.schedules.{RATE!r}))
    with job.join(worker.id) as session:
        assert session.state == ({{"done": session.clock}} if session.clock else {{}}), session.state
        while session.clock < {ROUNDS}:
            params = session.pull()
            if not pathlib.Path("hurry").exists():
                time.sleep(0.05)
            session.state["done"] = session.clock + 1
            session.push(gradient(params, session.rank, session.clock))
"""
OF_UNITS = f"""
import pathlib, time
import kvps
from helpers.harness import gradient, model

with kvps.from_env() as worker:
    job = worker.create_job(model(), optimizer=kvps.SGD(lr=0.05), units={UNITS}, units_per_round=4)
    with job.join(worker.id) as session:
        while (unit := session.next_unit()) is not None:
            params = session.pull()
            if not pathlib.Path("hurry").exists():
                time.sleep(0.05)
            session.push(gradient(params, 0, unit))
"""


@pytest.fixture(autouse=True)
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directory, with two scripts that take their time until there is a file `hurry`."""
    (tmp_path / "static.py").write_text(STATIC)
    (tmp_path / "units.py").write_text(OF_UNITS)
    return tmp_path


def line(script: str, workers: int = 2, *options: str) -> list[str]:
    """The line that starts a run, and resumes it."""
    kept = ["--checkpoints", "kept", "--resume", *options]
    return ["run", "-w", str(workers), *kept, "--", sys.executable, f"{script}.py"]


@cache
def undisturbed() -> Mapping[str, Any]:
    """The weights that the job of the other script has if nothing happens to it."""
    optimizer = kvps.SGD(lr=RATE)
    with kvps.local(model(), workers=2, optimizer=optimizer) as job:
        return job.train(gradient, rounds=ROUNDS)


def check_weights(checkpoint: Checkpoint, script: str) -> None:
    expected = undisturbed() if script == "static" else ends_of_units(units=UNITS, units_per_round=4)
    assert_same_bits(expected, checkpoint.layout.views(checkpoint.weights))


def last(script: str) -> Checkpoint:
    """The newest checkpoint of a run."""
    found = newest(Path("kept"), script)
    assert found
    return found.checkpoint


def version_of(script: str) -> int:
    """The version of the job on the private server, which the command that trains it keeps running."""
    try:
        with private_store() as store:
            return store.job(script).state().version
    except (AssertionError, kvps.KvpsError):
        return 0


def at(script: str, version: int) -> Callable[[], bool]:
    return lambda: version_of(script) >= version


@pytest.mark.parametrize(("script", "workers"), [("static", (2, 2, 2)), ("units", (2, 3, 1))])
def test_a_run_that_is_stopped_twice_ends_with_the_bits_of_one_that_is_not(
    here: Path, start: Any, script: str, workers: tuple[int, ...]
) -> None:
    version = 0
    for turn, copies in enumerate(workers[:2]):
        running = start(*line(script, copies))
        seen = running.until("goes on at version" if turn else "begins anew")
        assert f"goes on at version {version}, from " in seen or not turn
        assert eventually(at(script, version + 8))
        second = (signal.SIGINT, "Ctrl-C") if script == "static" else (signal.SIGHUP, "SIGHUP")
        number, word = ((signal.SIGTERM, "SIGTERM"), second)[turn]
        running.process.send_signal(number)
        rest = running.output(os.EX_TEMPFAIL)
        assert f"{word}: waits until all copies have done the same round; a second one ends them at once" in rest
        (stopped,) = re.findall(r"^stopped at version (\d+), can be resumed: the same command goes on$", rest, re.M)
        version = int(stopped)
        assert last(script).version == version
        assert "asked to leave" not in rest, "each ended its round, and then by itself"
        if script == "static":
            assert set(last(script).clock.values()) == {version}
    (here / "hurry").touch()
    done = kvps_run(*line(script, workers[2]))
    assert done.returncode == 0, done.stderr
    assert f"job {script}: goes on at version {version}, from {here}/kept/{script}." in done.stderr
    check_weights(last(script), script)
    if script == "units":
        assert last(script).units["done"] == str(UNITS)

    again = kvps_run(*line(script, workers[2]))
    assert again.returncode == 0
    finished = rf"job {script}: finished at version {last(script).version} in .*: nothing is left to train"
    assert re.search(finished, again.stderr)
    assert "contributions" not in again.stderr


def test_a_run_is_stopped_though_the_reader_of_its_output_has_ended(here: Path, start: Any) -> None:
    """As tee does of Ctrl-C: it is in the same group of processes."""
    running = start(*line("static", 2))
    running.until("begins anew")
    assert eventually(at("static", 8))
    running.process.send_signal(signal.SIGINT)
    running.process.stdout.close()
    assert running.process.wait(300) == os.EX_TEMPFAIL
    assert list((here / "kept").glob("static.*")), "a checkpoint and the log"
    (here / "hurry").touch()
    done = kvps_run(*line("static", 2))
    assert done.returncode == 0, done.stderr
    assert "goes on at version" in done.stderr
    check_weights(last("static"), "static")


STUCK = STATIC.replace("params =", "stuck()\n            params =").replace(
    "with kvps.from_env()",
    """
def told(*_):
    pathlib.Path("told").touch()

def stuck():
    if worker.rank == 1 and session.clock == 10 and pathlib.Path("stuck").exists():
        pathlib.Path("is-stuck").touch()
        while True:
            time.sleep(1)

signal.signal(signal.SIGTERM, told)
with kvps.from_env()""",
)


def test_a_copy_that_does_not_end_its_round_is_killed_and_named_and_that_round_is_done_again(
    here: Path, start: Any
) -> None:
    """It has been told: it catches SIGTERM, so that is passed on to it."""
    (here / "static.py").write_text(STUCK.replace("import pathlib", "import pathlib, signal"))
    (here / "stuck").touch()
    (here / "hurry").touch()
    running = start(*line("static", 2, "--stop-grace", "1"))
    assert eventually((here / "is-stuck").exists)
    running.process.send_signal(signal.SIGTERM)
    rest = running.output(os.EX_TEMPFAIL)
    assert re.search(r"^w1 \(process \d+\) was asked to leave, and was killed after 1 s$", rest, re.M)
    assert "stopped at version 10, can be resumed" in rest
    assert (here / "told").exists()
    (here / "stuck").unlink()
    done = kvps_run(*line("static", 2))
    assert done.returncode == 0, done.stderr
    check_weights(last("static"), "static")


def test_a_supervisor_that_is_killed_is_resumed_from_the_server_or_from_the_newest_checkpoint_that_can_be_read(
    here: Path, home: Path, start: Any
) -> None:
    often = ["--checkpoint-every", "10"]
    running = start(*line("static", 2, *often))
    assert eventually(at("static", 35))
    running.process.kill()
    running.wait()
    assert eventually(lambda: processes_of(home) == []), "the private server ends with it"
    newer, older = sorted(here.glob("kept/*.safetensors"), reverse=True)[:2]
    damaged = bytearray(newer.read_bytes())
    damaged[-1] ^= 1
    newer.write_bytes(damaged)

    running = start(*line("static", 2, *often))
    seen = running.until("goes on at version")
    assert f"passed over, damaged or cut short: {newer.name}\n" in seen
    assert seen.splitlines()[-1].endswith(f"from {older}")
    assert eventually(at("static", 45))

    with private_store() as store:  # it keeps the server
        running.process.kill()
        running.wait()
        job = store.job("static")
        assert eventually(lambda: (launched := job.config.metadata.foreign_launcher) is None or launched.is_dead)
        (here / "hurry").touch()
        done = kvps_run(*line("static", 2, *often))
        assert done.returncode == 0, done.stderr
        assert re.search(r"job static: goes on at version \d+, from the job on the server\n", done.stderr)
        assert store.job("static").id == job.id
        entries = [fields for _, fields in LogFile(here / "kept", "static", job.id).entries()]
        assert [e["by"][:18] for e in entries if e["kind"] == "adopt"] == ["kvps run (process "]
    check_weights(last("static"), "static")


def test_a_run_whose_server_is_lost_and_keeps_its_files_goes_on_from_them(
    here: Path, home: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPS_PATIENCE", "2")
    command = ["run", "-w", "2", "--data-dir", "data", "--resume", "--", sys.executable, "static.py"]
    running = start(*command)
    assert eventually(at("static", 20))
    with private_store() as store:
        os.kill(int(store.client.call("INFO", "server")["process_id"]), signal.SIGKILL)
    assert "no answer from" in running.output(1)
    monkeypatch.delenv("KVPS_PATIENCE")
    assert eventually(lambda: processes_of(home) == [])
    (here / "hurry").touch()
    running = start(*command)
    seen = running.until("contributions in")
    assert re.search(r"job static: goes on at version \d+, from the job on the server\n", seen)
    with private_store() as store:
        store.job("static").await_finished()
        assert store.job("static").state().clock == {"w0": ROUNDS, "w1": ROUNDS}
        assert_same_bits(store.job("static").snapshot()[1], undisturbed())
    running.wait()


def test_what_cannot_be_resumed_is_refused_in_one_line(lasting: kvps.Store, here: Path, start: Any) -> None:
    words = ["--", sys.executable, "static.py"]
    assert "--resume needs what outlives a run: give --checkpoints DIR" in refused("run", "--resume", *words)
    running = start("run", "-w", "2", *words)
    assert eventually(at("static", 3))
    resume = ["run", "--checkpoints", "kept", "--resume"]
    lines = kvps_run(*resume, "-w", "2", *words).stderr.splitlines()
    pid = running.process.pid
    assert re.fullmatch(rf"kvps: error: kvps run \(process {pid} on .*\) trains job 'static': wait .*", lines[-1])
    running.process.kill()
    running.wait()

    lines = kvps_run(*resume, "-w", "3", *words).stderr.splitlines()
    assert lines[-1].startswith(
        "kvps: error: job 'static' has 2 workers, each with its own part of the data, and would"
    )
    lines = kvps_run(*resume, "-w", "2", "--staleness", "3", *words).stderr.splitlines()
    other = "job 'static' goes on with the settings that it has: staleness 0, not 3."
    assert lines[-1].startswith(f"kvps: error: {other}")
    (here / "static.py").write_text(STATIC.replace("=0.05, every", "=0.04, every"))
    lines = kvps_run(*resume, "-w", "2", *words).stderr
    assert "job 'static' goes on with the settings that it has: optimizer " in lines
    lines = kvps_run("run", "--job", "static", *words).stderr.splitlines()
    assert lines[-1].startswith("kvps: error: job 'static' exists: go on with it (kvps run --resume, "), (
        "before kvps rm"
    )


# -- a terminal that vanishes -------------------------------------------------------------------------------------

ENDS = {
    "a run that can be resumed": (line("static"), os.EX_TEMPFAIL),
    "a run that cannot": (["up", "digits", *LONG_UP], 128 + signal.SIGHUP),
    "one that ignores SIGHUP": (["up", "digits", *TINY, "--report", "report.json"], 0),
}


@pytest.mark.parametrize("kind", ENDS)
def test_a_terminal_vanishes(here: Path, kind: str) -> None:
    command, code = ENDS[kind]
    ignoring = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"]  # nohup would send its output to a file
    with on_a_terminal([*([] if code else ignoring), *KVPS, *command]) as terminal:
        terminal.until("waiting")
        assert terminal.vanish() == code
    if code == os.EX_TEMPFAIL:
        assert len(set(last("static").clock.values())) <= 1, "all copies have ended the same round"
    assert (here / "report.json").exists() == (code == 0), "it has trained to its end"
