"""The identity of a process: what says that it is certainly gone, and what does not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvps.machine import process

_SAY = """
import json, sys
from kvps.machine.process import identity
print(json.dumps(identity()), flush=True)
sys.stdin.read()
"""


def test_a_process_whose_clock_is_shifted_is_not_taken_for_a_dead_one() -> None:
    """Its start, which `identity` says, is in the time of its own namespace, in which it is a day later."""
    shifted = ["unshare", "--time", "--boottime", "86400", "--fork", "--kill-child"]
    if subprocess.run([*shifted, "true"], capture_output=True).returncode:
        pytest.skip("no right to make a namespace of time")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*shifted, sys.executable, "-c", _SAY], text=True, **pipes) as other:  # type: ignore[call-overload]
        its = json.loads(other.stdout.readline())
        assert its["pid"] != process.identity()["pid"]
        assert not process.is_dead(its)
        other.stdin.close()


def test_a_process_that_has_ended_is_dead_and_one_of_another_boot_is_not_known() -> None:
    done = subprocess.run([sys.executable, "-c", _SAY], input="", capture_output=True, text=True, check=True)
    its = json.loads(done.stdout)
    assert process.is_dead(its)
    assert process.is_dead(its | {"start": ""}), "what no process of kvps says of itself"
    assert not process.is_dead(its | {"space": "another boot/pid:[1]"})
    assert not process.is_dead(process.identity())
