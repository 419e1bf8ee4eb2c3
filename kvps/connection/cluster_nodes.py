"""Which node of a cluster has what, as its map of slots says, and the connections to each node."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from redis.exceptions import ClusterDownError, MovedError, RedisError, ResponseError

from kvps.connection.slots import NAMELESS, Address, SlotMap, slot_of
from kvps.connection.sockets import CONNECTION_CUT, ArrayPool, connection_settings
from kvps.connection.urls import at_node
from kvps.errors import InvalidSetting

_REPLICAS_S = 2.0  # how old a map may be that says which masters have replicas: no error tells of a new one


class ClusterNodes:
    """The nodes of the cluster that `url` is a node of. May be used from several threads."""

    def __init__(self, url: str) -> None:
        settings = connection_settings(url)
        if not url.startswith(("redis:", "rediss:")) or settings.get("db"):
            raise InvalidSetting(
                "a cluster is reached over TCP and has one database, 0: write redis://HOST:PORT of any of its nodes"
            )
        self._url = url
        self._seed = Address(settings.get("host", "localhost"), int(settings.get("port", 6379)))
        self._pools: dict[Address, ArrayPool] = {}
        self._map: SlotMap | None = None
        self._last = SlotMap([])
        self._failed: Address | None = None
        self._asked_at = 0.0
        self._lock = threading.Lock()
        self.closed = False

    # -- the map of slots -------------------------------------------------------------------------------------

    def slot_map(self) -> SlotMap:
        """Return the map of slots, asked anew after anything that an old map may explain. Raises redis-py's errors."""
        with self._lock:
            if self._map is None:
                self._map = self._last = self._asked()
                self._asked_at = time.monotonic()
            return self._map

    def forget_map(self) -> None:
        """Have the map asked anew."""
        self._map = None

    def _asked(self) -> SlotMap:
        """Ask one node after the other; the one that has just failed comes last. One that was taken out of the cluster
        knows of no slots."""
        known = list(dict.fromkeys([*self._last.nodes, self._seed]))
        failure: RedisError = ClusterDownError("no node knows who serves a slot")
        for address in sorted(known, key=lambda node: node == self._failed):
            try:
                (reply,) = self.pool(address).exchange([("CLUSTER SLOTS",)])[0]
            except CONNECTION_CUT as error:
                failure = error
                continue
            if isinstance(reply, ResponseError):
                raise reply
            if (slot_map := SlotMap.of(reply, address)).masters:
                return slot_map
        raise failure

    def master(self, key: str) -> Address:
        """Return the master that has a key. Raises ClusterDownError while there is none."""
        master = self.slot_map().master_of(slot_of(key))
        if master is None:
            self.forget_map()
            raise ClusterDownError("Hash slot not served")
        return master

    def any_master(self) -> Address:
        """Return a master, for what any of them can answer."""
        return self.slot_map().masters[0]

    def by_node(self, keys: Sequence[str | None]) -> dict[Address, list[int]]:
        """Return the numbers of the keys that each master has; what has no key goes to any."""
        numbers: dict[Address, list[int]] = {}
        for number, key in enumerate(keys):
            address = self.any_master() if key is None else self.master(key)
            numbers.setdefault(address, []).append(number)
        return numbers

    def replicas(self, key: str) -> int:
        """Return how many replicas the master that has a key had within the last seconds."""
        if time.monotonic() > self._asked_at + _REPLICAS_S:
            self.forget_map()
        slots = self.slot_map().range_of(slot_of(key))
        return len(slots.replicas) if slots else 0

    # -- connections ------------------------------------------------------------------------------------------

    def pool(self, address: Address) -> ArrayPool:
        """Return the connections to a node."""
        # setdefault: of two threads that make one, both use the same.
        pool = self._pools.get(address) or self._pools.setdefault(address, ArrayPool(at_node(self._url, address)))
        if self.closed:  # one that is made after `close` must not connect either
            pool.close()
        return pool

    @contextmanager
    def using(self, address: Address) -> Iterator[ArrayPool]:
        """Yield the connections to a node. If they are cut, the map may be old."""
        try:
            yield self.pool(address)
        except CONNECTION_CUT:
            self._failed = address
            self.forget_map()
            raise

    def redirected(self, error: ResponseError, asked: Address) -> Address:
        """Return where an error of the node `asked` sends its command. Raises ClusterDownError if it does not say."""
        host, port = error.node_addr  # type: ignore[attr-defined]
        if isinstance(error, MovedError):
            self.forget_map()
        if host == NAMELESS:  # the next try asks for the map, which says its address too
            raise ClusterDownError(f"the node at port {port} announces no name (cluster-announce-hostname)")
        return Address(host or asked.host, int(port))

    def close(self) -> None:
        """Close all connections."""
        self.closed = True
        for pool in list(self._pools.values()):
            pool.close()
