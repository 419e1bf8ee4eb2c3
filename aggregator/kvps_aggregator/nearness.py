"""Which shards an aggregator takes: first those whose bytes are on a node of the cluster near it.

An aggregator without a near node takes every free shard. One with near nodes takes their shards at once, and a shard
that is far away only when it has been free for a lease time, so that a job never stands still because the aggregator
near a shard is missing. When that aggregator comes, it sets a wish, a key that expires, and the holder gives the shard
up. Wishes and nearness only choose which aggregator works (liveness): terms make commits safe, whoever holds a shard.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence

from kvps.connection.client import Client
from kvps.connection.cluster import ClusterClient
from kvps.connection.slots import Address, slot_of
from kvps.errors import InvalidSetting
from kvps.job import Job
from kvps.machine.address import addresses_of, host_and_port, is_of_this_host

log = logging.getLogger("kvps.lease")

AUTO = "auto"


class Near:
    """Nodes of a cluster that are near this process. `nodes` are their HOST:PORT; "auto" stands for all nodes at an
    address of this host. Raises InvalidSetting for text that is neither."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._auto = AUTO in nodes
        self._nodes = [_address(text) for text in nodes if text != AUTO]

    def check(self, client: Client) -> None:
        """Make sure that the server is a cluster, and warn if no node of it is near. Raises InvalidSetting."""
        if not isinstance(client, ClusterClient):
            raise InvalidSetting("--near is for a cluster: this server has the bytes of all shards")
        if not any(map(self._has, client.slot_map().nodes)):  # it may be down, and come back
            log.warning("no node of the cluster is near now: --near names none that serves it")

    def shards(self, job: Job) -> set[int]:
        """Return the shards of a job whose bytes are on a near master now, as the cluster says."""
        assert isinstance(job.access.client, ClusterClient)
        slots = job.access.client.slot_map()
        near = {master for master in slots.masters if self._has(master)}
        return {n for n in range(job.layout.shards) if slots.master_of(slot_of(job.access.keys.slot(n))) in near}

    def _has(self, node: Address) -> bool:
        if node in self._nodes or (self._auto and is_of_this_host(node.host)):
            return True
        return any(mine.port == node.port and addresses_of(mine.host) & addresses_of(node.host) for mine in self._nodes)


def _address(text: str) -> Address:
    return Address(*host_and_port(text, f"--near wants HOST:PORT of a node, or {AUTO}"))


class ShardChoice:
    """Which shards an aggregator of a job tries to take, and which it gives up. `holder` is its name in leases.

    `eligible` are the shards that it may hold. Without `near`, and over shared memory, no shard is nearer than another.
    """

    def __init__(self, job: Job, holder: str, eligible: list[int], near: Near | None) -> None:
        self.eligible = eligible
        self._job = job
        self._holder = holder
        self._near = near if job.config.transport == "redis" else None
        self._lease_s = job.config.lease_ms / 1000
        self._next_choice = 0.0
        self._free_since: dict[int, float] = {}

    def hasten(self) -> None:
        """Have the next choice made at once."""
        self._next_choice = 0.0

    def choose(
        self, held: Collection[int], at_once: bool = False, finishing: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return the shards to try to take, and the `held` shards to give up.

        A choice is made three times in a lease time, or `at_once`; in between both lists are empty. An aggregator that
        is `finishing` the job takes every free shard, wherever its bytes are.
        """
        missing = [number for number in self.eligible if number not in held]
        now = time.monotonic()
        if not (missing or self._near) or (now < self._next_choice and not at_once):
            return [], []
        self._next_choice = now + self._job.config.lease_look_s
        if self._near is None or finishing:
            return missing, []
        return self._by_nearness(self._near.shards(self._job), missing, list(held), now)

    def _by_nearness(
        self, near: set[int], missing: list[int], held: list[int], now: float
    ) -> tuple[list[int], list[int]]:
        keys, shards = self._job.access.keys, [*missing, *held]
        leases, wishes = self._job.access.client.gather(
            [("MGET", *map(keys.lease, shards)), ("MGET", *map(keys.wish, shards))]
        )
        holder, wish = dict(zip(shards, leases, strict=True)), dict(zip(shards, wishes, strict=True))
        wished = [number for number in shards if wish[number] not in (None, self._holder)]
        taken = [number for number in missing if holder[number]]
        self._wish([number for number in taken if number in near])
        self._free_since = {n: self._free_since.get(n, now) for n in missing if n not in taken and n not in wished}
        take = [n for n in missing if n in near or now - self._free_since.get(n, math.inf) >= self._lease_s]
        return take, [number for number in held if number in wished and number not in near]

    def _wish(self, shards: list[int]) -> None:
        """Ask the holders of these shards to give them up, unless they are near them too."""
        lease_ms = self._job.config.lease_ms
        wishes = [("SET", self._job.access.keys.wish(number), self._holder, "PX", lease_ms) for number in shards]
        if wishes:
            self._job.access.client.each(wishes)  # a full server refuses them, and the next choice repeats them
