"""The server's clock: the estimate is off by half the delay of the best sample at the most, whatever the others are."""

from __future__ import annotations

import random
import time

import pytest

from kvps.connection.server_clock import ServerClock
from kvps.store import Store


class _Server:
    """A server whose clock is `ahead` of perf_counter. A request takes `out` seconds to it, its answer `back`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
        self.now, self.ahead, self.out, self.back = 1000.0, ahead, 0.0, 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def seconds(self) -> float:
        self.now += self.out
        said = self.now + self.ahead
        self.now += self.back
        return said


def test_before_the_first_sample_nothing_is_known() -> None:
    clock = ServerClock(lambda: 0.0)
    assert clock.micros(1.0) is None
    assert clock.error_s == float("inf")


@pytest.mark.parametrize("seed", range(5))
def test_the_error_is_within_half_the_least_delay(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Also on a path that is slow in one direction only."""
    dice = random.Random(seed)
    server = _Server(monkeypatch, ahead=dice.uniform(-1e9, 1e9))
    clock = ServerClock(server.seconds)
    for _ in range(dice.randint(1, 8)):
        server.out, server.back = dice.uniform(0, 0.2), dice.uniform(0, 0.002)
        clock.sample()
    found = clock.micros(server.now)
    assert found is not None
    assert abs(found / 1e6 - (server.now + server.ahead)) <= clock.error_s + 1e-6


def test_the_sample_of_least_delay_counts_until_eight_newer_ones_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks drift: an old sample says nothing of now."""
    server = _Server(monkeypatch, ahead=5.0)
    clock = ServerClock(server.seconds)
    clock.sample()
    assert clock.error_s == 0
    server.ahead, server.out = 6.0, 0.1
    for number in range(8):
        assert clock.micros(0) == 5_000_000, number
        clock.sample()
    assert clock.micros(0) == pytest.approx(6_050_000, abs=2)


def test_a_real_server(store: Store) -> None:
    clock = ServerClock(store.client.seconds)
    for _ in range(8):
        clock.sample()
    seconds, micros = store.client.call("TIME")
    said = clock.micros(time.perf_counter())
    assert said is not None
    assert said >= 1_000_000 * int(seconds) + int(micros) - 1e6 * clock.error_s - 1
