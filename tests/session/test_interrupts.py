"""Ctrl-C at each single step of what makes the segment of a push: the same push may be made again, and counts once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, check_chain
from helpers.internals import segments_of

import kvps
from kvps.session.session import Session
from kvps.store import Store
from kvps.transport import shared_memory
from kvps.transport.shared_memory import Segments, WritableSegment
from kvps.transport.shm import ShmUploads

ZEROS = {"x": np.zeros(1000, np.float32)}
_LOOKED_AT = {
    function.__code__
    for function in (
        *(ShmUploads.buffer, Segments.make, Segments.unlink),
        *(WritableSegment.__init__, WritableSegment.renamed, WritableSegment.unlink, shared_memory._inode),
    )
}


def _interrupted(number: int, call: Callable[[], object]) -> bool:
    """Run `call`, with a KeyboardInterrupt before the `number`-th bytecode looked at; False if there are fewer."""
    left = number

    def step(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        left -= event == "opcode"
        if event == "opcode" and not left:
            raise KeyboardInterrupt
        return step

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = frame.f_code in _LOOKED_AT
        return step if frame.f_trace_opcodes else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def _round(session: Session, value: float, number: int = 0) -> bool:
    """Push a gradient, interrupted at a step, and again if it was; whether it was."""
    gradient = {"x": np.full(1000, value, np.float32)}
    session.pull()
    clock = session.clock
    interrupted = _interrupted(number, lambda: session.push(gradient))
    if interrupted:
        session.push(gradient)
    assert session.clock == clock + 1
    return interrupted


@pytest.mark.parametrize("renamed", [False, True], ids=["made", "renamed"])
def test_an_interrupted_push_is_made_again(store: Store, renamed: bool) -> None:
    """The first pushes of a session make segments, and later ones rename them."""
    job = store.create_job("job", ZEROS, optimizer=kvps.SGD(lr=1.0), transport="shm", worker_timeout_ms=60_000)
    number, interrupted, first = 0, True, 4 if renamed else 0
    with aggregating(job):
        session = job.join("w0")
        for _ in range(first):
            _round(session, 0)
        while interrupted:
            number += 1
            interrupted = _round(session, number, number)
            if not renamed:
                session.leave(finished=False)
                session = job.join("w0")
        session.pull()
        assert number > 100, f"{number} steps"
        if renamed:  # else a sweep takes what the sessions before have left
            gradients = [name for name in segments_of(job).names() if name.startswith("g:")]
            assert len(gradients) <= 3, "none is left behind"
        assert check_chain(job) == first + number
        session.leave()
    assert (job.snapshot()[1]["x"] == -sum(range(number + 1))).all()
