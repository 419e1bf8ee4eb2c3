"""Jobs of the digits, for hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvps_workers import load_task

import kvps
from kvps.job import Job
from kvps.store import Store


@pytest.fixture
def digits(store: Store, monkeypatch: pytest.MonkeyPatch, home: Path) -> Callable[..., Job]:
    """Jobs of the digits on the test's server, which is that of all commands."""
    monkeypatch.setenv("KVPS_REDIS_URL", store.url)
    task = load_task("digits")

    def make(name: str, **settings: Any) -> Job:
        chosen = {"task": "digits", "batch_size": 48, "epochs": 2, "optimizer": kvps.SGD(lr=0.5)} | settings
        return store.create_job(name, task.parameters(0), **chosen)

    return make
