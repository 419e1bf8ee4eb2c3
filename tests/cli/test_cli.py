"""The command line as a user meets it: real processes, a real server, real signals."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import TINY, kvps_run
from helpers.harness import staleness_used
from helpers.servers import BINARIES, ONE_AND_SLOWLY_ALL
from helpers.waiting import eventually, processes_of

import kvps
from kvps.server import private_server

LONG = ["--epochs", "5000"]


def _store() -> kvps.Store:
    url = private_server.running()
    assert url
    return kvps.connect(url)


@pytest.mark.parametrize("kind", ONE_AND_SLOWLY_ALL)
def test_up_trains_the_digits_and_repeats_itself_bit_for_bit(home: Path, tmp_path: Path, kind: str) -> None:
    reports = []
    for name in ("a.json", "b.json"):
        done = kvps_run("up", "digits", "--report", name, KVPS_REDIS_SERVER=BINARIES[kind])
        assert done.returncode == 0, done.stderr
        assert "test accuracy 0.9" in done.stdout.splitlines()[-1]
        assert "kvps cli" in done.stderr
        reports.append(json.loads((tmp_path / name).read_text()))
    first, second = reports
    assert first["accuracy"] >= 0.95
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["clock"] == {"w0": first["version"], "w1": first["version"], "w2": first["version"]}
    wanted = "job task workers staleness shards optimizer version clock steps_per_s wall_s"
    wanted += " loss accuracy figures weights_sha256"
    assert list(first) == wanted.split()
    assert private_server.running() is None, "the server ended with the command"


@pytest.mark.parametrize("mode", ["1", "-1"])
def test_up_in_the_other_modes_with_a_straggler(home: Path, tmp_path: Path, mode: str) -> None:
    patient = ["--worker-timeout", "60"]  # an eviction on a busy machine would leave rounds to one worker alone
    done = kvps_run("up", "digits", "-s", mode, "--slow", "w0=3x", "--shards", "2", *patient, "--report", "r.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["accuracy"] >= 0.95, done.stdout + done.stderr
    assert report["staleness"] == int(mode)


def test_the_log_of_processes_tells_the_modes_apart(home: Path) -> None:
    """`--slow w0=5x` under each bound: the lag of the weights that contributions were computed on, from the log."""
    assert kvps_run("server", "start").returncode == 0
    try:
        with _store() as store:
            for staleness in (0, 1, 3, -1):
                name = f"s{staleness}".replace("-", "m")
                options = ["--job", name, "-s", str(staleness), "--slow", "w0=5x", "--epochs", "6"]
                assert kvps_run("up", "digits", *options).returncode == 0
                used = staleness_used(store.job(name), 3)
                assert used == staleness if staleness >= 0 else used > 3
    finally:
        assert kvps_run("server", "stop").returncode == 0


def test_the_seed_decides_the_weights(home: Path, tmp_path: Path) -> None:
    digests = set()
    for seed in ("1", "2"):
        assert kvps_run("up", "digits", *TINY, "--seed", seed, "--report", "r.json").returncode == 0
        digests.add(json.loads((tmp_path / "r.json").read_text())["weights_sha256"])
    assert len(digests) == 2


def test_the_parts_by_hand_in_the_unlikeliest_order(home: Path, start: Any) -> None:
    """A worker first, which starts the server and waits; then another, the job, and at last an aggregator."""
    first = start("worker")
    first.until("waiting for a job")
    second = start("worker")
    second.until("waiting for a job")
    assert kvps_run("create", "digits", "--job", "mine", "--workers", "2", *TINY).returncode == 0
    assert eventually(lambda: len(_store().job("mine").state().members) == 2)
    status = kvps_run("status", "mine")
    assert "waits for an aggregator" in status.stdout
    aggregator = start("aggregator", "start", "--job", "mine")
    aggregator.until("finished")
    assert [aggregator.wait(), first.wait(), second.wait()] == [0, 0, 0]


def test_create_waits_for_a_server_and_an_aggregator_serves_every_job(home: Path, start: Any) -> None:
    create = start("create", "digits", "--job", "early", "--workers", "1", *TINY)
    create.until("no private server runs yet")
    server = start("aggregator", "start")
    create.until("job early")
    assert create.wait() == 0
    assert kvps_run("worker").returncode == 0
    assert kvps_run("create", "digits", "--job", "late", "--workers", "1", *TINY).returncode == 0
    assert kvps_run("worker", "--job", "late").returncode == 0
    listed = kvps_run("jobs").stdout
    assert eventually(lambda: kvps_run("jobs").stdout.count("finished") == 2), listed
    assert server.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_ended_leaves_and_another_goes_on(home: Path, start: Any, number: int) -> None:
    aggregator = start("aggregator", "start")
    aggregator.until("serving")
    assert kvps_run("create", "digits", "--job", "long", "--workers", "2", *LONG).returncode == 0
    workers = [start("worker", "--id", f"w{i}") for i in range(2)]
    job = _store().job("long")
    assert eventually(lambda: job.state().version > 20)
    assert workers[1].end(number) == 128 + number
    left = job.state().members["w1"]
    assert left.state in ("gone", "draining")
    assert not left.finished
    before = job.state().version
    assert eventually(lambda: job.state().version > before + 20), "the others go on at once"
    again = start("worker")
    again.until("job long")
    assert eventually(lambda: job.state().members["w1"].state == "active")
    member = job.state().members["w1"]
    assert (member.rank, member.incarnation[0]) == (left.rank, "2")
    assert eventually(lambda: job.state().clock["w1"] > left.clock + 20)


def test_ending_up_ends_all_of_it(home: Path, start: Any) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        running = start("up", "digits", *LONG)
        running.until("version")
        assert eventually(lambda: len(processes_of(home)) >= 7)  # up, guard, server, aggregator, three workers
        assert running.end(number) == code
        assert eventually(lambda: processes_of(home) == []), processes_of(home)
        assert private_server.running() is None


def test_a_worker_that_fails_is_named_and_the_others_go_on(home: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK + "\n    def data(self, rank, workers, xp):\n        return DATA[rank]\n")
    done = kvps_run("up", "mine:Task", "--workers", "2", "--epochs", "3")
    assert done.returncode == 1
    assert "w1: kvps: error: task 'mine:Task' failed: RuntimeError: unlucky (mine.py, line 15" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("kvps: error: job Task: w1 failed; the others went on")


TASK = """
import numpy as np

ones = np.ones(8, np.float32)
DATA = {0: (ones,), 1: (13 * ones,)}

class Task:
    batch_size, epochs, lr = 4, 2, 0.5

    def parameters(self, seed):
        return {"x": np.zeros(3, np.float32)}

    def gradient(self, params, batch, xp):
        if batch[0][0] == 13:
            raise RuntimeError("unlucky")
        return 0.0, {"x": params["x"] - batch[0].mean()}

    def evaluate(self, params, xp):
        return {"loss": float(((params["x"] - 1) ** 2).mean())}
"""


def test_a_task_of_the_user(home: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        TASK + "\nclass Good(Task):\n    def data(self, r, w, xp):\n        return (ones,)\n"
    )
    done = kvps_run("up", "mine:Good", "--epochs", "20")
    assert done.returncode == 0, done.stderr
    assert "test loss 0.0000" in done.stdout
    for name, words in [
        ("mine:Missing", "has no 'Missing'"),
        ("mine:DATA", "lacks"),
        ("os:system", "no module 'os' in"),
        ("json:dumps", "no module 'json' in"),
        ("digit", "built in are digits"),
        ("a/b:c", "names a file"),
    ]:
        done = kvps_run("up", name)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert words in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "digits", "--staleness", "-2"], "staleness"),
        (["up", "digits", "--workers", "0"], "workers"),
        (["up", "digits", "--workers", "many"], "--workers"),
        (["up", "digits", "--epochs", "0"], "--epochs"),
        (["up", "digits", "--optimizer", "sdg"], "sgd, adagrad, adam, adamw"),
        (["up", "digits", "--optimizer", "sgd:momentum"], "name=number"),
        (["up", "digits", "--optimizer", "sgd:momentun=0.9"], "momentun"),
        (["up", "digits", "--optimizer", "adam", "--lr", "-1"], "lr"),
        (["up", "digits", "--slow", "w7=5x"], "w2"),
        (["up", "digits", "--slow", "w0=fast"], "factor"),
        (["up", "digits", "--job", "a b"], "1 to 64"),
        (["up", "digits", "--report", "no/where.json"], "no directory"),
        (["up", "digits", "--listen", "6379"], "HOST:PORT"),
        (["up", "digits", "--redis", "http://x"], "redis://"),
        (["up"], "TASK"),
        (["upp", "digits"], "upp"),
        (["up", "digits", "--no-such"], "--no-such"),
        (["worker", "--gpu", "-1"], "--gpu"),
        (["worker", "--slow", "0x"], "factor"),
        (["worker", "--id", "a/b"], "1 to 64"),
        (["create", "digits"], "--job"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_usage_errors_are_one_line_and_exit_2(home: Path, arguments: list[str], words: str) -> None:
    done = kvps_run(*arguments)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert last.startswith("kvps: error: ")
    assert words in last
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed here")
def test_a_gpu_without_cupy_is_refused_in_one_line(home: Path) -> None:
    done = kvps_run("worker", "--gpu", "0")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "kvps[cuda12]" in done.stderr


def test_other_errors_are_one_line_and_exit_1(home: Path) -> None:
    for arguments in (["jobs"], ["status", "x"], ["rm", "x"], ["cli"], ["server", "stop"], ["server", "status"]):
        done = kvps_run(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert "no private server runs" in done.stderr
    done = kvps_run("jobs", "--redis", "redis://:hush@127.0.0.1:1")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "hush" not in done.stderr


def test_a_lasting_server_and_looking_at_jobs(home: Path) -> None:
    assert kvps_run("server", "start").returncode == 0
    try:
        assert "no jobs" in kvps_run("jobs").stderr
        assert kvps_run("up", "digits", *TINY).returncode == 0
        assert kvps_run("up", "digits", *TINY).returncode == 0, "a second run takes the next free name"
        assert [line.split()[0] for line in kvps_run("jobs").stdout.splitlines()[1:]] == ["digits", "digits-2"]
        exists = kvps_run("create", "digits", "--job", "digits")
        assert (exists.returncode, exists.stderr.count("\n")) == (1, 1)
        assert "kvps rm digits" in exists.stderr
        status = json.loads(kvps_run("status", "digits", "--json").stdout)
        assert status["version"] == status["clock"]["w0"] == 20
        assert status["state"] == "finished"
        assert "w2" in kvps_run("status", "digits").stdout
        missing = kvps_run("status", "nothing")
        assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
        assert kvps_run("cli", "hget", "kvps:{digits}:clock", "w1").stdout == "20\n"
        assert kvps_run("rm", "digits").returncode == 2, "nobody to ask"
        assert kvps_run("rm", "digits", "--yes").returncode == 0
        assert kvps_run("rm", "digits-2", "-y").returncode == 0
        assert kvps_run("cli", "keys", "*").stdout.split() in ([], ["kvps:preflight"])
        assert kvps_run("server", "start").returncode == 1, "it runs already"
    finally:
        assert kvps_run("server", "stop").returncode == 0
    assert kvps_run("server", "status").returncode == 1


def test_workers_join_from_elsewhere_over_tcp(home: Path, start: Any) -> None:
    """--listen opens a port behind a password, and prints the line to type elsewhere."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    aggregator = start("aggregator", "start", "--listen", f"127.0.0.1:{port}")
    line = aggregator.until("join from elsewhere").splitlines()[-1].partition(": ")[2]
    url = line.split()[0].removeprefix("KVPS_REDIS_URL=")
    password = url.split("@")[0].rpartition(":")[2]
    assert len(password) > 20
    assert line.endswith("kvps worker")
    with pytest.raises(kvps.NoServer, match="login"):
        kvps.connect(f"redis://127.0.0.1:{port}")
    assert kvps_run("create", "digits", "--job", "far", "--workers", "1", *TINY).returncode == 0
    assert kvps_run("worker", KVPS_REDIS_URL=url).returncode == 0
    assert kvps_run("cli", "hget", "kvps:{far}:clock", "w0").stdout == "60\n"
    assert kvps_run("cli", "--redis", url, "hget", "kvps:{far}:clock", "w0").stdout == "60\n"
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        assert password not in _read(entry), "the password stands in no command line"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_commands_begun_together_share_one_server(home: Path, start: Any) -> None:
    workers = [start("worker") for _ in range(4)]
    for worker in workers:
        worker.until("waiting for a job")
    assert sum("redis-server" in line and "watchdog.py" not in line for line in processes_of(home)) == 1


def test_a_runtime_directory_open_to_others_is_refused(home: Path) -> None:
    home.chmod(0o755)
    done = kvps_run("worker")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "0700" in done.stderr
    home.chmod(0o700)


@pytest.mark.parametrize(
    "command",
    [
        "",
        "up",
        "run",
        "create",
        "aggregator",
        "worker",
        "submit",
        "queue",
        "cancel",
        "jobs",
        "status",
        "verify",
        "rm",
        "server",
        "cli",
    ],
)
def test_help(home: Path, command: str) -> None:
    done = kvps_run(*command.split(), "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout
