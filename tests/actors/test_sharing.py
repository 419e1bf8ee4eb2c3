"""Watchers of one host: one of them reads a large model from another host, and the others copy from its memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvps.actors.watch import Watch
from kvps.store import Store
from kvps.transport import host_pull

ITEMS, VERSIONS, WATCHERS = 1_000_000, 6, 4


def made(version: int) -> dict[str, np.ndarray]:
    flat = np.arange(ITEMS, dtype=np.int32).view(np.float32)
    flat = np.nan_to_num(flat)
    flat[version::101] += np.float32(1)
    return {"w": flat}


@pytest.mark.usefixtures("runtime")
def test_each_version_is_read_once_for_all_watchers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pull, "is_far", lambda client: True)
    with store.publisher("policy", made(0)) as policy, ThreadPoolExecutor(WATCHERS) as actors:
        watches = [store.watch("policy") for _ in range(WATCHERS)]
        assert list(actors.map(Watch.update, watches)) == [0] * WATCHERS
        for version in range(1, VERSIONS):
            policy.publish(made(version))
            assert list(actors.map(Watch.update, watches)) == [version] * WATCHERS
            assert all(watch.arrays["w"].tobytes() == made(version)["w"].tobytes() for watch in watches)
        assert sum(watch.traffic.wholes for watch in watches) == 1
        assert sum(watch.traffic.differences for watch in watches) == VERSIONS - 1
        for watch in watches:
            watch.close()


def test_on_the_hosts_own_server_each_reads_for_itself(store: Store, runtime: Path) -> None:
    with store.publisher("policy", made(0)) as policy:
        watches = [store.watch("policy") for _ in range(2)]
        policy.publish(made(1))
        for watch in watches:
            assert watch.update() == 1
        assert [watch.traffic.wholes for watch in watches] == [1, 1]
        assert not list(runtime.rglob("*watchers*"))
