"""The command line as a whole: usage errors, help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from helpers.commands import kvps_run, refused

from kvps.store import Store


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "digits", "--workers", "many"], "--workers"),
        (["up", "digits", "--optimizer", "sdg"], "did you mean sgd? use one of adadelta, adagrad,"),
        (["up"], "TASK is missing: digits, or MODULE:ATTRIBUTE of a module in this directory"),
        (["upp", "digits"], "upp"),
        (["simulate", "--workers", "2"], "there is no kvps simulate any more: python -m kvps_simulate"),
        (["up", "digits", "--no-such"], "--no-such"),
        (["up", "digits", "--units-per-roun", "4"], "--units-per-round"),
        (["run", "--topology", "bsp", "--", "true"], "there is no --topology any more: give the settings"),
        (["up", "digits", "--redis", "localhost:6379"], "did you mean redis://localhost:6379?"),
        (["run", "--gpu", "0", "--", "true"], "; kvps worker, kvps aggregator start have it"),
        (["worker", "-q", "-v"], "--quiet and --verbose exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.slow
def test_usage_errors_are_one_line_and_exit_2(home: Path, arguments: list[str], words: str) -> None:
    assert words in refused(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("loads", ["typer", "numpy"])
def test_ctrl_c_while_libraries_load_is_no_traceback(loads: str) -> None:
    """Those of the command line, and those of the command. Python itself says which it has loaded."""
    command = [sys.executable, "-X", "importtime", "-m", "kvps", "jobs"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr
        assert any(loads in line for line in started.stderr)
        started.send_signal(signal.SIGINT)
        rest = started.stderr.read()
    assert started.returncode == 128 + signal.SIGINT
    assert "Traceback" not in rest


def test_version(home: Path) -> None:
    done = kvps_run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvps {metadata.version('kvps')}\n", "")


_PACKAGES = {"kvps_aggregator", "kvps_workers", "kvps_monitor", "numpy", "redis", "rich", "rq"}
_PACKAGES |= {"textual", "starlette", "sklearn", "matplotlib", "ml_dtypes", "cupy", "torch"}
_EACH = {"numpy", "redis", "ml_dtypes"}  # what talks to a server, in arrays
_LOADED = {
    "worker": _EACH | {"kvps_workers"},
    "aggregator": _EACH | {"kvps_aggregator", "kvps_monitor"},
    "jobs": _EACH | {"kvps_monitor", "rich"},
    "top": _EACH | {"kvps_monitor", "rich"},
    "submit": _EACH | {"kvps_workers", "rich", "rq"},
    "server": _EACH,
}


def _loaded(code: str) -> set[str]:
    shown = f"{code}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code", ["import kvps", "import kvps_cli\ntry: kvps_cli.app(['--version'])\nexcept SystemExit: pass"]
)
@pytest.mark.slow
def test_what_uses_no_array_and_no_server_loads_no_library_for_them(code: str) -> None:
    assert not _loaded(code) & (_PACKAGES | ({"typer"} if code == "import kvps" else set()))


@pytest.mark.parametrize("command", _LOADED)
@pytest.mark.slow
def test_a_command_loads_what_it_needs_and_nothing_of_the_others(command: str) -> None:
    code = f"import kvps_cli, typer; typer.main.get_command(kvps_cli.app).get_command(None, {command!r})"
    assert _loaded(code) & _PACKAGES == _LOADED[command]


WITHOUT = """
import sys
from kvps_cli import app
for library, *command in (
    ("prometheus_client", "metrics"), ("starlette", "dashboard"), ("uvicorn", "dashboard"),
    ("textual", "top"), ("pynvml", "top"), ("matplotlib", "timeline", "j", "-o", "run.svg"),
    ("perfetto", "timeline", "j", "-o", "run.svg"),
):
    sys.modules[library] = None
    try:
        app(command, standalone_mode=False)
    except Exception as error:
        print(library, type(error).__name__, error)
    del sys.modules[library]
"""


@pytest.mark.slow
def test_without_an_extra_a_command_says_what_to_install(store: Store) -> None:
    environment = os.environ | {"KVPS_REDIS_URL": store.url}
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, env=environment)
    printed = done.stdout.replace(" in a clone of kvps", "").splitlines()
    assert printed == [
        "prometheus_client InvalidSetting metrics need prometheus-client: pip install '.[metrics]'",
        "starlette InvalidSetting kvps dashboard needs Starlette and uvicorn: pip install '.[dashboard]'",
        "uvicorn InvalidSetting kvps dashboard needs Starlette and uvicorn: pip install '.[dashboard]'",
        "textual InvalidSetting kvps top needs Textual and NVML: pip install '.[top]'",
        "pynvml InvalidSetting kvps top needs Textual and NVML: pip install '.[top]'",
        "matplotlib InvalidSetting kvps timeline needs more libraries: pip install '.[timeline]'",
        "perfetto InvalidSetting kvps timeline needs more libraries: pip install '.[timeline]'",
    ], done.stderr


TWO_SIGNALS = """
import signal, threading
import kvps_cli, typer
from kvps.connection import patience

class Ending:
    lock = threading.Lock()

    def set(self):
        with self.lock:
            signal.raise_signal(signal.SIGINT)

patience.ending = Ending()
app = typer.Typer()
app.command()(lambda: signal.raise_signal(signal.SIGTERM))
kvps_cli.main(app)
"""


def test_a_signal_that_comes_while_another_is_handled_does_not_hang() -> None:
    """An aggregator that was sent SIGTERM twice, by its supervisor and because that died, stayed for ever."""
    done = subprocess.run([sys.executable, "-c", TWO_SIGNALS], timeout=60)
    assert done.returncode == 128 + signal.SIGTERM


AT_ONCE = """
import signal
import kvps_cli

handle = signal.signal

def handle_and_be_sent(number, handler):
    handle(number, handler)
    if number == signal.SIGTERM and callable(handler):
        signal.raise_signal(number)

signal.signal = handle_and_be_sent
kvps_cli.main()
"""


def test_a_signal_that_comes_as_soon_as_it_has_its_handler_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", AT_ONCE], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
