"""A process that is forked from a zygote is as a fresh one, as far as it, its parent and /proc can see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import KVPS, Started, run
from helpers.waiting import eventually
from helpers.zygote import Popen

SHOW = r"""
import atexit, json, os, signal, sys
def proc(name):
    return open(f"/proc/self/{name}", "rb").read().rstrip(b"\0").decode().split("\0")
print(json.dumps({
    "main": [__name__, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals()],
    "place": [os.getcwd(), os.umask(0), os.getppid(), os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "environment": dict(os.environ),
    "proc": [proc("cmdline"), sorted(proc("environ"))],
    "signals": [repr(signal.getsignal(number)) for number in signal.valid_signals()],
    "blocked": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "files": [fd for fd in range(3, 100) if os.path.exists(f"/proc/self/fd/{fd}")],
    "threads": len(os.listdir("/proc/self/task")),
    "streams": [(s.isatty(), s.encoding, s.errors, s.fileno()) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "stdin": sys.stdin.read(),
}))
atexit.register(print, "the end")
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_a_forked_process_sees_what_a_fresh_one_sees(kind: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOW)
    code = {"-c": ["-c", SHOW], "-m": ["-m", "shown"], "script": [str(tmp_path / "shown.py")]}[kind]
    read, write = os.pipe()
    options = {"cwd": tmp_path, "env": os.environ | {"ONE": "1\n2"}, "umask": 0o27, "start_new_session": kind == "-m"}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    outputs = []
    for popen in (Popen, subprocess.Popen):
        process = popen([sys.executable, *code, "a", "b c"], **options, **streams, text=True, pass_fds=[write])
        output, errors = process.communicate("to read")
        assert (process.returncode, errors) == (0, "")
        shown, end = output.splitlines()
        outputs.append((json.loads(shown), end))
    os.close(read)
    os.close(write)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit",
        "raise SystemExit(3)",
        "raise SystemExit('why')",
        "1 / 0",
        "raise KeyboardInterrupt",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getpid(), 15)",
        "import os; os._exit(7)",
        "import threading; threading.Timer(0.1, print, ['late']).start()",
        "import sys; sys.stdout.write('no newline'); sys.exit(True)",
    ],
)
def test_a_forked_process_ends_as_a_fresh_one_ends(code: str) -> None:
    command = [sys.executable, "-c", code]
    forked, fresh = run(command), subprocess.run(command, capture_output=True, text=True)
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout)
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


PARENT = """
import subprocess, sys, time
from kvps.machine.process import ending_with_this
child = subprocess.Popen(ending_with_this([sys.executable, "-c", "import time; time.sleep(1000)"]))
print(type(child).__module__, child.pid, flush=True)
time.sleep(1000)
"""


def test_a_forked_process_forks_its_own_and_they_end_with_it() -> None:
    parent = Started([sys.executable, "-c", PARENT])
    module, child = parent.until("helpers").split()
    assert module == "helpers.zygote"
    assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1] == str(parent.process.pid)
    assert parent.end(signal.SIGKILL) == -signal.SIGKILL
    assert eventually(lambda: not Path(f"/proc/{child}/exe").exists())


def test_a_signal_that_comes_at_once_is_not_lost() -> None:
    for _ in range(10):
        started = Started([*KVPS, "aggregator", "start"], os.environ | {"KVPS_RUNTIME_DIR": "/nonexistent"})
        assert started.end() in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_what_is_read_when_an_interpreter_starts_makes_a_fresh_one() -> None:
    code = "import sys, os; print('kvps' in sys.modules, sys.flags.optimize)"
    assert run([sys.executable, "-c", code]).stdout == "True 0\n"
    assert run([sys.executable, "-O", "-c", code]).stdout == "False 1\n"
    assert run([sys.executable, "-c", code], env=os.environ | {"PYTHONOPTIMIZE": "1"}).stdout == "False 1\n"
