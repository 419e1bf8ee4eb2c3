"""Reads bytes from replicas, so that many readers do not load the masters.

A replica applies the writes of its master in their order, but later. If it lacks a key, the master has it. But a key
that it has may still hold other bytes: an aggregator renames dead keys to those of the next version, and then stores
that in them (`free.lua`). So each read names a mark: a key that is stored after all others of its version. A replica
that has the mark has the version.

This order holds within one replication id. If a replica follows another master meanwhile, the read is made again there.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from kvps.connection import sentinel
from kvps.connection.client import Client
from kvps.connection.cluster import ClusterClient
from kvps.connection.resp import granted
from kvps.connection.slots import SLOTS, Address, Range, SlotMap, slot_of
from kvps.connection.sockets import ArrayPool, ChunkGone
from kvps.connection.urls import at_node, redacted
from kvps.errors import InvalidSetting

log = logging.getLogger("kvps.replicas")

_ANSWER_S = 1.0  # a replica that is silent for longer is passed over
_PASSED_OVER_S = 10.0
_KNOWN_S = 5.0  # how old a list of replicas may be
_PAUSES_S = (0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1)  # between two looks at whether the mark has come
_READONLY = ("READONLY",)  # without it, a replica in a cluster sends every GET to its master
_INFO = ("INFO", "replication")
_REPLICATION_ID = re.compile(r"^master_replid:(\w+)", re.MULTILINE)

Progress = Callable[[], None]


class SlotItems(NamedTuple):
    """Keys of one slot with their buffers, and their mark: the key that was stored last; "" if each has its name for
    the first time, so that no other bytes can be there."""

    mark: str
    items: Sequence[tuple[str, memoryview]]


class _Unfit(RedisError):
    """The replica cannot be read now."""


class ReplicaReader:
    """Reads from the replicas of a client's servers. May be used from several threads."""

    def __init__(self, client: Client) -> None:
        """Raises InvalidSetting for a Unix socket, whose server's replicas would be reached in another way."""
        if client.url.startswith("unix:"):
            raise InvalidSetting(
                f"read_replicas is for servers reached over TCP, and {redacted(client.url)} is a Unix socket: give "
                f"redis://HOST:PORT, or leave read_replicas out"
            )
        self._client = client
        self._url = sentinel.split(client.url)[0] if sentinel.is_watched(client.url) else client.url
        self._seed = secrets.token_hex(8)  # by which this process prefers another replica than others do
        self._pools: dict[Address, ArrayPool] = {}
        self._passed_over: dict[Address, float] = {}  # until when, by the monotonic clock
        self._warned: set[Address] = set()
        self._map = SlotMap([])
        self._asked_at = -math.inf
        self._lock = threading.Lock()

    def read(self, slots: Sequence[SlotItems], progress: Progress = lambda: None) -> list[tuple[str, memoryview]]:
        """GET the keys of each slot from a replica into their buffers, and call `progress` after each.

        Return the items that have to be read from the master. Raises what the client raises when it is asked which
        replicas there are.
        """
        by_replica: dict[Address, list[SlotItems]] = {}
        left: list[SlotItems] = []
        for slot in slots:
            replica = self._replica_of(slot)
            (by_replica.setdefault(replica, []) if replica else left).append(slot)

        def missed(replica: Address) -> list[SlotItems]:
            mine = by_replica[replica]
            return [] if self._has_read(replica, mine, progress) else mine

        if len(by_replica) > 1:
            with ThreadPoolExecutor(len(by_replica), "kvps-replica") as threads:
                missing = list(threads.map(missed, by_replica))
        else:
            missing = [missed(replica) for replica in by_replica]
        return [item for slot in sum(missing, left) for item in slot.items]

    def close(self) -> None:
        """Close all connections."""
        for pool in list(self._pools.values()):
            pool.close()

    # -- the choice -------------------------------------------------------------------------------------------

    def _replica_of(self, slot: SlotItems) -> Address | None:
        """Return the replica that this process reads a slot from; None if there is none, or all are passed over."""
        slots = self._replicas().range_of(slot_of(slot.items[0][0]))
        now = time.monotonic()
        usable = [r for r in slots.replicas if self._passed_over.get(r, 0.0) <= now] if slots else []
        return min(usable, key=lambda replica: hash((self._seed, replica)), default=None)

    def _replicas(self) -> SlotMap:
        """Return the map of slots with their replicas. One server has all slots."""
        with self._lock:
            if time.monotonic() > self._asked_at + _KNOWN_S:
                self._map = self._asked()
                self._asked_at = time.monotonic()
            return self._map

    def _asked(self) -> SlotMap:
        if isinstance(self._client, ClusterClient):
            return self._client.slot_map()
        info = self._client.call(*_INFO)
        rows = [row for name, row in info.items() if re.fullmatch(r"slave\d+", name) and isinstance(row, dict)]
        replicas = tuple(Address(str(row["ip"]), int(row["port"])) for row in rows if row.get("state") == "online")
        return SlotMap([Range(0, SLOTS - 1, Address("", 0), replicas)])

    def _pass_over(self, replica: Address, why: object) -> None:
        """Read from others for a while. Warn of it once, until the replica answers again."""
        self._passed_over[replica] = time.monotonic() + _PASSED_OVER_S
        self._asked_at = -math.inf
        with self._lock:
            level = logging.DEBUG if replica in self._warned else logging.WARNING
            self._warned.add(replica)
        log.log(
            level,
            "replica %s is not read for %g s at a time, but others or the master: %s",
            replica,
            _PASSED_OVER_S,
            why,
        )

    # -- one replica ------------------------------------------------------------------------------------------

    def _has_read(self, replica: Address, slots: Sequence[SlotItems], progress: Progress) -> bool:
        """Read all items of these slots, and return True; False if the replica does not have them now."""
        try:
            self._read(replica, slots, progress)
        except ChunkGone:  # it was freed, as it is on the master by now: that is no fault of the replica
            return False
        except (RedisError, ValueError, AttributeError) as error:  # the last two: another thread has closed it
            self._pass_over(replica, error)
            return False
        if self._warned:
            self._warned.discard(replica)
        return True

    def _read(self, replica: Address, slots: Sequence[SlotItems], progress: Progress) -> None:
        items = [item for slot in slots for item in slot.items]
        with self._pool(replica).using() as connection:
            begun = self._await([slot.mark for slot in slots if slot.mark], connection)
            for _ in connection.getting(items):
                progress()
            if _replication_id(granted(connection.exchange([_INFO], ())[0])[0]) != begun:
                raise _Unfit("it went over to another master")

    def _await(self, marks: Sequence[str], connection: Any) -> str:
        """Wait for a moment until the replica has all marks. Return its replication id."""
        greeting = [_READONLY] if self._client.is_cluster else []
        asked = [*greeting, _INFO, *(("EXISTS", mark) for mark in marks)]
        for pause_s in (*_PAUSES_S, 0.0):
            info, *there = granted(connection.exchange(asked, ())[0])[len(greeting) :]
            if all(there):
                return _replication_id(info)
            time.sleep(pause_s)
        raise _Unfit(f"it is more than {sum(_PAUSES_S):.1f} s behind its master")

    def _pool(self, replica: Address) -> ArrayPool:
        if replica not in self._pools:
            url = at_node(self._url, replica)
            # setdefault: of two threads that make one, both use the same.
            self._pools.setdefault(replica, ArrayPool(url, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S))
        return self._pools[replica]


def _replication_id(info: str) -> str:
    """Return the id of the history that a server's data are of. Raises _Unfit if it says none."""
    if not (match := _REPLICATION_ID.search(info)):
        raise _Unfit("it does not say whose replica it is")
    return match[1]
