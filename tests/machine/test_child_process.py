"""A wait for a child that is interrupted anywhere, and the next wait."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any

import pytest

from kvps.machine import child_process
from kvps.machine.child_process import ChildProcess

_FILES = (child_process.__file__, subprocess.__file__)


class _InterruptAt:
    """Inside the block, raises KeyboardInterrupt before the bytecode of this number of the functions that wait."""

    def __init__(self, number: int) -> None:
        self.left = number

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in _FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self) -> _InterruptAt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def _deaf() -> Iterator[int]:
    """Interrupt a wait in each of its bytecodes. Yield those behind which another wait does not see the child's end."""
    for number in count(1):
        child = ChildProcess(["sleep", "1000"])
        with suppress(KeyboardInterrupt, subprocess.TimeoutExpired), _InterruptAt(number) as trace:
            child.wait(0.001)
        assert child.poll() is None
        child.terminate()
        try:
            assert child.wait(60) == -signal.SIGTERM
            assert child.poll() == -signal.SIGTERM
        except subprocess.TimeoutExpired:
            yield number
        if trace.left > 0:  # the wait has fewer
            assert number > 10
            return


def test_an_interrupt_of_a_wait_harms_no_other_wait() -> None:
    assert not list(_deaf())


def test_an_interrupt_of_a_wait_for_a_child_that_has_ended_harms_no_other_wait() -> None:
    for number in range(1, 60):
        with ChildProcess(["true"]) as child:
            child.wait()
            with suppress(KeyboardInterrupt), _InterruptAt(number):
                child.wait()
            assert child.wait(60) == 0


def test_all_threads_that_wait_see_the_end() -> None:
    child = ChildProcess(["cat"], stdin=subprocess.PIPE)
    codes = list[int]()
    threads = [threading.Thread(target=lambda: codes.append(child.wait(60))) for _ in range(5)]
    for thread in threads:
        thread.start()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0)
    assert child.poll() is None
    assert child.stdin
    child.stdin.close()
    for thread in threads:
        thread.join(60)
    assert codes == [0] * 5


_AT_THE_END = """
import subprocess
from kvps.machine.child_process import ChildProcess

def generated(kind):
    child = kind(["sleep", "1000"])
    try:
        yield child
    finally:
        child.terminate()
        print(child.wait(60), child.poll())

left = generated(ChildProcess)
next(left)
"""


def test_what_ends_a_child_when_python_ends_does_not_wait_for_ever() -> None:
    """No thread runs any more then, and a generator that was not exhausted ends."""
    done = subprocess.run([sys.executable, "-c", _AT_THE_END], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout in ("-15 -15\n", "0 0\n", "")
