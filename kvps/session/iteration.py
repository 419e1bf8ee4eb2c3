"""Measures how long the phases of a worker's iterations take, and says what the worker does now."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import cache, partial

from kvps.arrays.formats import encoded_size, format_of
from kvps.connection.server_clock import ServerClock
from kvps.errors import KvpsError
from kvps.protocol.phases import OTHER, WORKER_PHASES
from kvps.transport.access import JobAccess

SEND_EVERY_S = 0.1
"""Seconds between two pushes that take traces along. The rounds between them pay nothing for that."""


class IterationTimer:
    """The timer of one session. Its session's thread enters phases; any thread may ask for the `activity`."""

    def __init__(self, clock: ServerClock, moved: Callable[[str], tuple[int, int]]) -> None:
        """`moved` returns how many bytes a pull and a push of a part of the model move."""
        self.clock = clock
        self._moved = cache(moved)
        self._traces: list[str] = []
        self._next_sending = 0.0
        self._now = (OTHER, time.perf_counter())
        self._began = self._now[1]
        self._ms = dict.fromkeys(WORKER_PHASES, 0.0)

    def enter(self, phase: str) -> None:
        """Note that a phase begins now, and ends the one before."""
        before, since = self._now
        self._now = (phase, time.perf_counter())
        self._ms[before] += 1000 * (self._now[1] - since)

    @property
    def activity(self) -> str:
        """The present phase, and when it began by the server's clock: microseconds since 1970; "" if not known."""
        phase, since = self._now
        began = self.clock.micros(since)
        return f"{phase} {began}" if began else ""

    @property
    def traces(self) -> list[str]:
        """The traces of all iterations that are not sent yet, "field value field value ..." each."""
        return self._traces

    def due(self) -> list[str]:
        """Return the traces that the next push takes along. With small rounds, only now and then there are some."""
        return self._traces if time.perf_counter() >= self._next_sending else []

    def sent(self, traces: list[str]) -> None:
        """Note that these traces, from the oldest on, were sent."""
        if traces:
            self._traces = self._traces[len(traces) :]
            self._next_sending = time.perf_counter() + SEND_EVERY_S

    def pushed(self, round_: int, clock: int, version: int, unit: int | None, part: str, loss: float | None) -> None:
        """Note that the iteration ends now. Its push was acknowledged as this round and `clock`."""
        self.enter(OTHER)
        pulled, pushed = self._moved(part)
        at = self.clock.micros(self._began)
        self._traces.append(
            f"round {round_} version {version} clock {clock} pulled {pulled} pushed {pushed}"
            + ("" if at is None else f" at {at}")
            + ("" if unit is None else f" unit {unit}")
            + "".join([f" {phase}_ms {milliseconds:.3f}" for phase, milliseconds in self._ms.items()])
            + ("" if loss is None else f" loss {loss:.6g}")
        )
        self._began = self._now[1]
        self._ms = dict.fromkeys(WORKER_PHASES, 0.0)


def iteration_timer(access: JobAccess) -> IterationTimer:
    """Return the timer of a session of this job."""
    clock = ServerClock(access.server.seconds)
    with contextlib.suppress(KvpsError):  # the next call raises it too; the heartbeat asks again
        clock.sample()
    return IterationTimer(clock, partial(_moved, access))


def _moved(access: JobAccess, part: str) -> tuple[int, int]:
    """Return the bytes of the weights and of the gradient of a part of the model, in the formats they are sent in."""
    config, layout = access.config, access.layout
    pulled, pushed = (encoded_size(layout, format_of(f), part) for f in (config.weight_format, config.gradient_format))
    return pulled, pushed
