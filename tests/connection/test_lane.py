"""Arrays that leave on a thread for each node: what an interrupt of the caller leaves, and what a flush is for."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from helpers.clusters import Cluster
from helpers.waiting import eventually

from kvps.arrays.digest import Buffers, view
from kvps.connection.cluster import ClusterClient
from kvps.connection.sockets import _Bulk


def _items(client: ClusterClient, value: float, nbytes: int = 1 << 20) -> list[tuple[str, Buffers]]:
    """Return one item for each master of three."""
    masters: dict[object, str] = {}
    for number in range(200):
        (address,) = client._arrays.nodes.by_node([f"lane:{number}"])
        masters.setdefault(address, f"lane:{number}")
    assert len(masters) == 3
    return [(key, [view(np.full(nbytes // 4, value, np.float32))]) for key in masters.values()]


def _none_sends() -> bool:
    """Return whether no thread sends any more. One that has told its end may live for an instant."""
    return eventually(lambda: not any(thread.name == "kvps-put" for thread in threading.enumerate()), 0.2)


@pytest.mark.slow
def test_an_interrupt_at_the_end_stops_every_thread(cluster: Cluster, client: ClusterClient) -> None:
    """Or one of them sends what the caller has changed meanwhile, over what it has sent again."""
    items = _items(client, 1)
    client.put(items)
    paused = cluster.nodes[0]
    paused.ask("CLIENT", "PAUSE", 4_000, "WRITE")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may have them ignore it
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            client.put(items)
    finally:
        signal.signal(signal.SIGINT, before)
    assert _none_sends()
    paused.ask("CLIENT", "UNPAUSE")
    client.put(items)


def test_an_interrupt_between_two_values_stops_every_thread(client: ClusterClient) -> None:
    def send() -> None:
        with client.putting() as put:
            for key, value in _items(client, 2):
                put(key, value)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send()
    assert _none_sends()


def test_after_a_flush_the_caller_may_change_its_arrays(client: ClusterClient) -> None:
    arrays = {key: np.full(1 << 20, 3, np.float32) for key, _ in _items(client, 3)}
    with client.putting() as put:
        for key, array in arrays.items():
            put(key, [view(array)])
        put.flush()
        for array in arrays.values():
            array.fill(4)
    found = [np.zeros_like(array) for array in arrays.values()]
    client.get(list(zip(arrays, (view(array) for array in found), strict=True)))
    assert {float(value) for array in found for value in np.unique(array)} == {3.0}
    client.unlink(list(arrays))


def test_a_flush_does_not_wait_for_a_thread_that_has_failed(
    client: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has failed is said at the end, as on one server."""
    flushed = []

    def send() -> None:
        with client.putting() as put:
            for key, value in _items(client, 5):
                put(key, value)
            put.flush()
            flushed.append(True)

    with monkeypatch.context() as patch:
        patch.setattr(_Bulk, "write_set", lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
        with pytest.raises(ZeroDivisionError):
            send()
    assert flushed
    assert _none_sends()
