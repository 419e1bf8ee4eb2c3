"""A publish that fails on the way: nobody knows whether it counts, and what is published next differs from it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.faults import halted_server
from helpers.internals import replaced

import kvps
from kvps.errors import ServerError
from kvps.store import Store


def made(version: int) -> dict[str, np.ndarray]:
    flat = np.arange(5_000, dtype=np.float32)
    flat[version::97] += 1
    return {"w": flat}


@pytest.mark.parametrize("shards", [1, 2])
def test_the_server_does_not_answer_while_a_version_is_published(server_url: str, store: Store, shards: int) -> None:
    with (
        kvps.connect(f"{server_url}?socket_timeout=1") as mine,
        mine.publisher("policy", made(0), shards=shards) as policy,
    ):
        watch = store.watch("policy")
        policy.publish(made(1))
        watch.update()
        with replaced(mine.client, "_patience_s", 0.3), halted_server(store.client), pytest.raises(ServerError):
            policy.publish(made(2))
        assert policy.publish(made(5)) in (2, 3)
        for version in (6, 7):
            policy.publish(made(version))
            watch.update()
            assert watch.arrays["w"].tobytes() == made(version)["w"].tobytes()
        assert watch.traffic.repairs == 0
