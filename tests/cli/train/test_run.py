"""`kvps run`: copies of a user's script as the workers of one job. Real processes, real signals, final weights."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.arrays import assert_same_bits
from helpers.commands import kvps_run, refused
from helpers.harness import check_chain, model, plain_loop
from helpers.waiting import awaited_job, eventually
from kvps_cli.prove.fault_injection import judge

import kvps
from kvps.history.checkpoint_directory import newest
from kvps.server import private_server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]  # each starts whole commands

SCRIPT = """
import subprocess, sys
from helpers.paths import TESTS

import kvps
from helpers.harness import gradient, model

rounds, *words = sys.argv[1:]
stated = {"staleness": 1} if "ssp" in words else {}
with kvps.from_env() as worker:
    optimizer = worker.settings.get("optimizer", kvps.SGD(lr=0.05))
    job = worker.create_job(model(), optimizer=optimizer, **stated)
    if worker.rank == 1 and "early" in words:
        sys.exit(3)
    with job.join(worker.id) as session:
        while session.round < int(rounds):
            if worker.rank == 1 and session.round == 5 and "fail" in words:
                raise RuntimeError("unlucky")
            session.push(gradient(session.pull(), session.rank, session.round), 0.5)
            with open(f"acks-{worker.id}", "a") as file:
                file.write(f"{session.worker} {session.incarnation} {session.sequence}\\n")
    if worker.rank == 0:
        print("finished", job.await_finished(), *sorted(job.state().clock.items()), flush=True)
"""


@pytest.fixture(autouse=True)
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directory, with a script in it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def script(*arguments: object) -> list[str]:
    return ["--", sys.executable, "train.py", *map(str, arguments)]


def test_a_bsp_run_equals_the_plain_loop_bit_for_bit(lasting: kvps.Store, start: Any) -> None:
    """On a terminal, where stdout and stderr are one, the script has the last word: what kvps run says comes before."""
    *before, last = start("run", "-w", "3", "--job", "bits", *script(40)).output().splitlines()
    assert last == "w0: finished True ('w0', 40) ('w1', 40) ('w2', 40)"
    assert before[-1].startswith("120 contributions in 40 versions, ")
    job = lasting.job("bits")
    assert_same_bits(job.snapshot()[1], plain_loop(model(), 3, 40, 0.05))
    assert check_chain(job) == 40


@pytest.mark.parametrize(("lost", "timeout"), [("killed", "60"), ("evicted", "1")])
def test_a_copy_that_is_lost_goes_on_and_everything_counts_once(
    lasting: kvps.Store, here: Path, start: Any, lost: str, timeout: str
) -> None:
    """The job pauses while it is away, so that not a bit may be another than if it had not been lost."""
    patient = ["--worker-timeout", timeout, "--lease", "60"]  # only who knows that its child is dead can be quick
    running = start("run", "-w", "2", "--min-workers", "2", *patient, *script(100))
    job = awaited_job(lasting, "train", 21)
    member = job.state().members["w1"]
    os.kill(member.pid, signal.SIGKILL if lost == "killed" else signal.SIGSTOP)
    if lost == "evicted":
        assert eventually(lambda: job.state().members["w1"].evicted)
        os.kill(member.pid, signal.SIGCONT)
    lines = running.until("200 contributions in 100 versions")
    assert f"w1 (process {member.pid}) was {lost}" in lines
    assert running.wait() == 0
    state = job.state()
    assert state.members["w1"].incarnation.startswith("2-")
    assert state.members["w1"].rank == member.rank
    assert state.clock == {"w0": 100, "w1": 100}
    assert_same_bits(job.snapshot()[1], plain_loop(model(), 2, 100, 0.05))
    verdict = judge(here.glob("acks-*"), job)
    assert (verdict.lost, verdict.twice) == (0, 0)
    assert verdict.acknowledged in (199, 200), "it may have been killed before it wrote down the last"
    check_chain(job)


# -- who is killed, and when ------------------------------------------------------------------------------------

KILLED = """
import atexit, os, sys
from helpers.paths import TESTS

import kvps
from helpers.harness import gradient, model

when, *ranks = sys.argv[1:]

def die(*where):
    if where == (when,) and os.environ["KVPS_RANK"] in ranks:
        os.kill(os.getpid(), 9)

atexit.register(die, "exit")
with kvps.from_env() as worker:
    job = worker.create_job(model(), optimizer=kvps.SGD(lr=0.05))
    with job.join(worker.id) as session:
        while session.round < 30:
            session.push(gradient(session.pull(), session.rank, session.round))
    die("left")
    if worker.rank == 0:
        print("finished", job.await_finished(), flush=True)
"""


@pytest.mark.parametrize(("when", "ranks"), [("exit", "0 1"), ("left", "1")])
def test_a_copy_that_is_killed_when_its_worker_has_finished_is_not_started_again(
    lasting: kvps.Store, here: Path, when: str, ranks: str
) -> None:
    (here / "killed.py").write_text(KILLED)
    done = kvps_run("run", "-w", "2", "--", sys.executable, "killed.py", when, *ranks.split())
    job = lasting.job("killed")
    state = job.state()
    assert state.clock == {"w0": 30, "w1": 30}
    assert state.finished(job.config)
    assert {member.incarnation[:2] for member in state.members.values()} == {"1-"}
    assert_same_bits(job.snapshot()[1], plain_loop(model(), 2, 30, 0.05))
    assert "60 contributions in 30 versions" in done.stderr
    assert done.returncode == 1
    words = f"killed after the last round: {', '.join(f'w{rank} (SIGKILL)' for rank in ranks.split())}; the weights are"
    assert done.stderr.splitlines()[-1].startswith(f"kvps: error: job killed: {words}"), done.stderr


TWICE = """
import time
from helpers.paths import TESTS

import kvps
from helpers.harness import gradient, model

with kvps.from_env() as worker:
    job = worker.create_job(model(), optimizer=kvps.SGD(lr=0.05))
    for _ in range(2):
        with job.join(worker.id) as session:
            for _ in range(5):
                session.push(gradient(session.pull(), session.rank, session.round))
        assert job.await_finished()
        while any(job.access.reader.holders()):  # the aggregator sweeps up, and ends
            time.sleep(0.05)
"""


def test_a_job_that_goes_on_after_its_aggregator_has_ended_gets_another(lasting: kvps.Store, here: Path) -> None:
    """The script joins a second time when all have finished, and pushes more."""
    (here / "twice.py").write_text(TWICE)
    done = kvps_run("run", "-w", "1", "--", sys.executable, "twice.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert lasting.job("twice").state().clock == {"w0": 10}


def test_a_copy_that_fails_is_named_and_the_others_go_on(here: Path) -> None:
    """It is named at once, and the last version is in a file, as the last line says, though the job is not finished."""
    done = kvps_run("run", "-w", "2", "--worker-timeout", "1", "--checkpoint-every", "1000", *script(30, "fail"))
    assert done.returncode == 1
    assert re.search(r"^w1 \(process \d+\) ended with code 1: not started again$", done.stderr, re.M)
    found = newest(here / "checkpoints", "train")
    assert found
    assert found.checkpoint.clock == {"w0": 30, "w1": 5}
    assert "w1: RuntimeError: unlucky\n" in done.stderr
    assert "w0: finished False ('w0', 30) ('w1', 5)" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("kvps: error: job train: w1 failed; the others went on")


WITHOUT_ITS_FILES = """
import shutil
from pathlib import Path

import kvps
from helpers.harness import gradient, model

with kvps.from_env() as worker:
    job = worker.create_job(model())
    with job.join(worker.id) as session:
        session.push(gradient(session.pull(), 0, 0))
        params = session.pull()  # of version 1: the aggregator has begun
        shutil.rmtree("checkpoints")
        Path("checkpoints").touch()
        session.push(gradient(params, 0, 1))
"""


def test_a_last_version_that_could_not_be_written_is_an_error_and_the_last_line_says_where_it_is(here: Path) -> None:
    (here / "train.py").write_text(WITHOUT_ITS_FILES)
    done = kvps_run("run", "-w", "1", "--checkpoint-every", "9", "--server-stays", "1", *script())
    assert done.returncode == 1
    *_, stays, error = done.stderr.splitlines()
    lost = f"the last version is in no file of {here}/checkpoints; the weights and the log stay for 1 second:"
    assert stays.startswith(lost)
    assert error == f"kvps: error: job train: its last version, 2, could not be written to {here}/checkpoints"


FAILING = """
import os, sys, time
from pathlib import Path

import kvps
from helpers.harness import gradient, model

with kvps.from_env() as worker:
    if worker.rank == 1 and not Path("began").exists():
        Path("began").touch()
        sys.exit(4)
    job = worker.create_job(model(), optimizer=kvps.SGD(lr=0.05))
    with job.join(worker.id) as session:
        while session.clock < 20:
            params = session.pull()
            if worker.rank == 1 and session.clock == 5 and len(list(Path().glob("failed-*"))) < 2:
                Path(f"failed-{os.getpid()}").touch()
                raise RuntimeError("unlucky")
            session.push(gradient(params, session.rank, session.clock))
    if worker.rank == 1 and "late" in sys.argv:
        sys.exit(5)
"""


def test_copies_that_end_with_an_error_of_their_own_are_started_again_so_many_times(
    lasting: kvps.Store, here: Path
) -> None:
    """Before it has joined, in the middle of its rounds, but not after the last one, as after a kill."""
    (here / "failing.py").write_text(FAILING)
    words = ["-w", "2", "--", sys.executable, "failing.py"]
    done = kvps_run("run", "--max-restarts", "3", "--min-workers", "2", *words)
    assert done.returncode == 0, done.stderr
    again = re.findall(r"^w1 \(process \d+\) ended with code (\d): .*again as process \d+ \((.*)\)$", done.stderr, re.M)
    assert again == [("4", "restart 1 of 3"), ("1", "restart 2 of 3"), ("1", "restart 3 of 3")]
    assert lasting.job("failing").state().clock == {"w0": 20, "w1": 20}
    assert_same_bits(lasting.job("failing").snapshot()[1], plain_loop(model(), 2, 20, 0.05))

    for path in here.glob("failed-*"):
        path.unlink()
    done = kvps_run("run", "--max-restarts", "1", *words)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("kvps: error: job failing-2: w1 failed; the others went on")
    done = kvps_run("run", "--max-restarts", "9", *words, "late")
    assert (done.returncode, "again as process" in done.stderr) == (1, False)


STUBBORN = """
import signal, time, kvps
from helpers.harness import model

signal.signal(signal.SIGTERM, signal.SIG_IGN)
with kvps.from_env() as worker:
    job = worker.create_job(model())
    with job.join(worker.id):
        print("joined", flush=True)
        time.sleep(600)
"""


def test_a_copy_that_does_not_end_is_killed_after_the_grace_and_named(home: Path, here: Path, start: Any) -> None:
    (here / "stubborn.py").write_text(STUBBORN)
    running = start("run", "-w", "1", "--stop-grace", "0.5", "--", sys.executable, "stubborn.py")
    running.until("joined")
    running.process.send_signal(signal.SIGINT)
    rest = running.output(128 + signal.SIGINT)
    assert re.search(r"^w0 \(process \d+\) did not end within 0.5 s and was killed \(SIGKILL\)$", rest, re.M)


BARS = r"""
import sys, time
for done in range(50):
    sys.stderr.write(f"\r{2 * done}%|bar")
    sys.stderr.flush()
sys.stderr.write("\r        \r100%|bar\n")
print("a line", end="\r\n")
print()
print("no end", end="")
"""


def test_a_progress_bar_of_a_copy_is_one_line(home: Path, here: Path) -> None:
    (here / "bars.py").write_text(BARS)
    done = kvps_run("run", "-w", "1", "bars.py")
    assert done.stdout == "w0: a line\nw0: \nw0: no end\n"
    assert [line for line in done.stderr.splitlines() if line.startswith("w0:")] == ["w0: 100%|bar"]


def test_a_file_is_run_by_this_python_and_what_follows_is_its_own(home: Path, here: Path) -> None:
    (here / "plain.py").write_text("import sys; print(sys.executable, *sys.argv[1:])\n")
    for words in (["plain.py"], ["--", "plain.py"], ["./plain.py"]):
        done = kvps_run("run", "-w", "1", *words, "-w", "7", "--help")
        assert done.stdout == f"w0: {sys.executable} -w 7 --help\n", done.stderr
    done = kvps_run("run", "nothing.py")
    assert (done.returncode, done.stderr) == (2, "kvps: error: there is no file 'nothing.py' to run\n")


def test_a_single_copy_computes_with_all_threads_and_is_told_if_that_decides_the_bits(
    home: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    (here / "units.py").write_text(
        "import os, kvps; from helpers.harness import model; print(os.environ.get('OMP_NUM_THREADS', 'their'))\n"
        "with kvps.from_env() as worker: worker.create_job(model(), units=8, units_per_round=4)\n"
    )
    for workers, threads in (("1", "their"), ("2", "1")):
        done = kvps_run("run", "-w", workers, "--", sys.executable, "units.py")
        assert {line.split()[-1] for line in done.stdout.splitlines()} == {threads}, done.stderr
        assert ("set OMP_NUM_THREADS=1" in done.stderr) == (threads == "their"), done.stderr


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (script(30, "early"), "job train ends: w1 failed before it had joined"),
        (["--", "sh", "-c", "exit $((3 * KVPS_RANK))"], "the run ends: w1 failed before a job was made"),
        (["--", "sh", "-c", "kill -9 $$"], r"the run ends: w\d was killed 5 times in a row by signal 9 \(SIGKILL\) .*"),
    ],
)
def test_a_run_that_cannot_begin_ends_and_says_why(command: list[str], why: str) -> None:
    done = kvps_run("run", "-w", "2", *command)
    assert done.returncode == 1
    assert re.fullmatch(f"kvps: error: {why}", done.stderr.splitlines()[-1])


def test_a_run_that_makes_no_job_says_so_and_what_a_copy_leaves_running_ends_with_it() -> None:
    """A process that is left holds the pipe, too: a wait for the end of the pipe would last for ever. Copies that end
    well have done what they were asked for, as with --help."""
    done = kvps_run("run", "-w", "2", "--", "sh", "-c", "sleep 1000 & echo here")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["w0: here", "w1: here"]
    said = "all copies ended, and no job of workers was made: a script that trains calls"
    assert done.stderr.splitlines()[-1].startswith(said)
    done = kvps_run("run", "-w", "2", "--stop-grace", "1", "--", "sh", "-c", "[ $KVPS_RANK = 0 ] || exec sleep 1000")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("kvps: error: the first copy ended, and no job of workers was made")


SAMPLES = """
import kvps
from helpers.harness import gradient, model

with kvps.from_env() as worker:
    job = worker.create_job(model(), samples=16, batch_size=4, epochs=3)
    with job.join(worker.id) as session:
        while (unit := session.next_unit()) is not None:
            session.push(gradient(session.pull(), 0, unit))
"""


def test_what_the_line_says_goes_with_what_the_script_says(lasting: kvps.Store, here: Path) -> None:
    """The line alone would be refused: its rounds of units need the units. So does the line that resumes the run."""
    (here / "samples.py").write_text(SAMPLES)
    line = ["run", "-w", "2", "--units-per-round", "3", "--redis", lasting.url, "--resume"]
    done = kvps_run(*line, "--", sys.executable, "samples.py")
    assert done.returncode == 0, done.stderr
    config = lasting.job("samples").config
    assert (config.units, config.units_per_round) == (12, 3)
    assert "nothing is left to train" in kvps_run(*line, "--", sys.executable, "samples.py").stderr
    (here / "samples.py").write_text(SAMPLES.replace("samples=16, batch_size=4, epochs=3", ""))
    done = kvps_run("run", "-w", "1", "--units-per-round", "3", "--", sys.executable, "samples.py")
    assert (
        "w0: kvps: error: units_per_round makes rounds of units: set units too, in a script as samples" in done.stderr
    )
    assert "--lease must be" in refused("run", "--lease", "0.01", "--", sys.executable, "samples.py")
    assert refused("run", "--shards", "0", "--", "python").startswith("shards must be")


STREAMS = """
import sys, traceback
for stream in (sys.stdout, sys.stderr):
    print("\\x1b[1;32mgreen\\x1b[0m\\tand \\x1b[2J\\x1b]0;title\\x07\\x9b2J", file=stream)
try:
    input()
except EOFError:
    traceback.print_exc()
breakpoint()
"""


def test_streams_stay_apart_and_a_copy_cannot_command_the_terminal(here: Path) -> None:
    """And a copy that asks for input is told why it gets none."""
    (here / "streams.py").write_text(STREAMS)
    done = kvps_run("run", "-w", "1", "--", sys.executable, "streams.py")
    shown = "w0: \x1b[1;32mgreen\x1b[0m\tand \\x1b[2J\\x1b]0;title\\x07\\x9b2J\x1b[0m"
    err = done.stderr.splitlines()
    assert (done.stdout.splitlines()[0], shown in err) == (shown, True)
    hint = "w0: kvps: it has no terminal to read from: for input() and breakpoint(), run the script without kvps run"
    for last in ("w0: EOFError: EOF when reading a line", "w0: bdb.BdbQuit"):
        assert err[err.index(last) + 1] == hint


def test_the_options_are_those_of_the_job_unless_the_script_says_otherwise(lasting: kvps.Store) -> None:
    options = ["-w", "2", "--optimizer", "adam:beta1=0.8", "--lr", "0.01", "--lease", "2"]
    done = kvps_run("run", *options, *script(3, "ssp"))
    assert done.returncode == 0, done.stdout + done.stderr
    c = lasting.job("train").config
    assert (c.workers, c.lease_ms, c.optimizer) == (2, 2000, kvps.Adam(lr=0.01, beta1=0.8))
    assert c.staleness == 1, "what is not said here the script may say"
    done = kvps_run("run", "-w", "1", "-s", "0", *script(3, "ssp"))  # the default, but said
    assert done.returncode == 1
    words = "kvps: error: staleness: the script says 1 and kvps run says 0: let only one of them say it"
    assert f"w0: {words} (train.py, line 12; KVPS_TRACEBACK=1 shows all of it)" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "kvps run -w 4 train.py"),
        (["--", "no-such-program", "x"], "no program 'no-such-program'"),
        (["--min-workers", "-1", "--", "true"], "min_workers"),
        (["--epochs", "3", "--", "true"], "--epochs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_usage_errors_are_one_line_and_start_nothing(here: Path, arguments: list[str], words: str) -> None:
    assert words in refused("run", *arguments)


def test_a_job_that_another_run_has_just_made_is_not_taken_either(
    lasting: kvps.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvps.launch import of_copy

    for name, value in of_copy(1, 2, "mine", "00000000", {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KVPS_REDIS_URL", lasting.url)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    lasting.create_job("mine", model())
    with kvps.from_env() as worker, pytest.raises(kvps.JobExists, match="its own name, kvps run --job"):
        worker.create_job(model())


# -- without kvps run ---------------------------------------------------------------------------------------------


def test_a_script_alone_serves_itself(here: Path) -> None:
    done = subprocess.run([sys.executable, "train.py", "20"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("finished True ('w0', 20)\n", "")


def test_alone_it_is_one_worker(home: Path) -> None:
    with kvps.from_env() as worker:
        assert (worker.rank, worker.workers, worker.id, worker.settings) == (0, 1, "w0", {})
        with pytest.raises(kvps.InvalidSetting, match="kvps run -w 4 -- python "):
            worker.create_job(model(), workers=4)
        with pytest.raises(kvps.InvalidSetting, match="epoch"):
            worker.create_job(model(), epoch=4)
        job = worker.create_job(model(), optimizer=kvps.SGD(lr=0.05))
        other = worker.create_job(model())  # at once, as the two models of a GAN
        for each in (job, other):
            with each.join(worker.id) as session:
                params = session.pull()
                session.push({name: np.ones_like(array) for name, array in params.items()})
            assert each.await_finished()
            assert each.snapshot()[0] == 1
    assert private_server.running() is None


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("KVPS_RANK", "1")
    others = "KVPS_WORKERS, KVPS_JOB, KVPS_JOB_ID, KVPS_SETTINGS"
    advice = "use kvps run, which sets it, or unset KVPS_RANK to run alone"
    with pytest.raises(kvps.InvalidSetting, match=f"^KVPS_RANK is set, and {others} not: {advice}$"):
        kvps.from_env()
    for name in others.split(", "):
        monkeypatch.setenv(name, "x")
    with pytest.raises(kvps.InvalidSetting, match=rf"are not as kvps run sets them \(invalid .*\): {advice}$"):
        kvps.from_env()
