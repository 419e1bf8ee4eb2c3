"""Private places for tests of transports: a runtime directory, and another /dev/shm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kvps_aggregator.shard import mirror

from kvps.job import Job
from kvps.store import Store
from kvps.transport import shared_memory


@pytest.fixture
def seldom_mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have aggregators of this process give Redis a version only when they end, or when the test says so."""
    monkeypatch.setattr(mirror, "EVERY_S", 1e6)


@pytest.fixture
def see_elsewhere(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Job]:
    """A function that returns the job of a name as a process with another /dev/shm has it."""
    path = tmp_path / "another"
    path.mkdir()

    def see(name: str) -> Job:
        with monkeypatch.context() as patch:
            patch.setattr(shared_memory, "ROOT", path)
            return store.job(name)

    return see
