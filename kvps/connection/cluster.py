"""A client of a Redis or Valkey cluster: a `Client` whose keys are on several servers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from kvps.connection.client import WAIT_MS, Client, newest_entries, shaped
from kvps.connection.cluster_pool import ClusterPool
from kvps.connection.queries import Queries
from kvps.connection.replicas import Attached
from kvps.connection.resp import Command, granted
from kvps.connection.slots import Address, SlotMap, keys_of, slot_of
from kvps.connection.urls import at_node
from kvps.errors import KvpsError, NoServer, ServerLost

_T = TypeVar("_T")
_NODE_S = 1.0  # for one node: after that it is asked of the cluster anew which are its masters
_LOOK_S, _MOST_LOOK_S = 0.01, 0.1  # between two looks at streams that no single command can wait for


class ClusterClient(Client):
    """A client of all nodes of a cluster. `url` is that of any node.

    Keys of one job's control are in one slot, and so are the bytes of one shard. What a `Client` does at one instant is
    about such keys, and here goes to their node.
    """

    is_cluster = True
    small_bytes = 0  # arrays are never in the slot of the command that accepts them
    _arrays: ClusterPool

    def _connections_to(self, url: str) -> ClusterPool:
        return ClusterPool(url)

    def node(self, key: str) -> Queries:
        return _Node(self, key)

    def call_at(self, key: str, *command: Any) -> Any:
        """Return the reply to a command without keys, of the master that has `key`."""
        return self._repeat(lambda: shaped([command], granted(self._arrays.exchange([command], key=key)[0]))[0])

    def slot_map(self) -> SlotMap:
        """Return which nodes have which slots, asked of the cluster anew. Raises ServerLost, ServerError."""

        def ask() -> SlotMap:
            self._arrays.nodes.forget_map()
            slots: SlotMap = self._arrays.nodes.slot_map()
            return slots

        return self._repeat(ask)

    def unevenness(self, keys: Sequence[str]) -> int:
        slot_map = self._repeat(self._arrays.nodes.slot_map)
        held = Counter(dict.fromkeys(slot_map.masters, 0))
        held.update(master for key in keys if (master := slot_map.master_of(slot_of(key))))
        return max(held.values()) - min(held.values())

    def memory(self) -> tuple[int, int]:
        """Return the bytes that all masters use, and how many they may use; 0 is no limit."""
        used, limits = zip(*self.on_masters(Client.memory), strict=True)
        return sum(used), sum(limits) if all(limits) else 0

    def eviction(self) -> str:
        with suppress(KvpsError):
            return next(filter(None, self.on_masters(Client.eviction)), "")
        return ""

    def attached(self) -> Attached:
        counts = [each.fewest for each in self.on_masters(Client.attached)]
        flags = [node["flags"].split(",") for node in self.call("CLUSTER NODES").values()]
        known = sum("slave" in each or "fail" in each for each in flags)
        return Attached(min(counts), max(counts), max(0, known - sum(counts)))

    def own_replicas(self, key: str) -> int:
        return self._repeat(lambda: self._arrays.nodes.replicas(key))

    def hosts(self) -> list[str]:
        return [node.host for node in self._repeat(self._arrays.nodes.slot_map).masters]

    def run_ids(self, keys: Sequence[str]) -> list[str]:
        slot_map = self._repeat(self._arrays.nodes.slot_map)
        masters = [slot_map.master_of(slot_of(key)) for key in keys]
        known = {master: self.node(key).run_id() for master, key in dict(zip(masters, keys, strict=True)).items()}
        return [known[master] for master in masters]

    def preflight(self) -> bool:
        """Make sure that kvps can train on every master. Raises NoServer or ServerUnfit, saying what to do."""
        self.on_masters(Client.preflight)
        return super().preflight()

    def on_masters(self, ask: Callable[[Client], _T]) -> list[_T]:
        retries = self.retries()
        while True:
            try:
                replies = [self._on(master, ask) for master in self._repeat(self._arrays.nodes.slot_map).masters]
                retries.over()
                return replies
            except (NoServer, ServerLost) as error:  # a master has died, and its replica has not taken its place yet
                if not retries.pause(lambda: "one of its masters does not answer"):
                    raise type(error)(f"{error} (asked again for {retries.lasted})") from None
                self._arrays.nodes.forget_map()

    def _on(self, node: Address, ask: Callable[[Client], _T]) -> _T:
        with _Master(at_node(self.url, node), min(_NODE_S, self._patience_s)) as client:
            return ask(client)

    def _scan(self, pattern: str) -> Iterator[str]:
        # A slot that moves meanwhile may be seen twice, or not at all; who must see every key scans again.
        yield from dict.fromkeys(key for keys in self.on_masters(lambda node: list(node.scan(pattern))) for key in keys)

    def unlink(self, keys: Sequence[str]) -> None:
        slots: dict[int, list[str]] = {}
        for key in keys:
            slots.setdefault(slot_of(key), []).append(key)
        for together in slots.values():
            super().unlink(together)

    def wait(self, streams: Mapping[str, str], timeout_ms: int = WAIT_MS) -> dict[str, str]:
        if _in_one_slot(streams):
            return super().wait(streams, timeout_ms)
        # No command waits for streams of several slots.
        deadline, look_s = time.monotonic() + timeout_ms / 1000, _LOOK_S
        reads = [("XREAD", "STREAMS", stream, last) for stream, last in streams.items()]
        while True:
            arrived: dict[str, str] = {}
            for reply in self.gather(reads):
                arrived |= newest_entries(reply)
            if arrived or time.monotonic() + look_s > deadline:
                return arrived
            time.sleep(look_s)
            look_s = min(2 * look_s, _MOST_LOOK_S)

    def wait_and_read(
        self,
        streams: Mapping[str, str],
        commands: Sequence[Command],
        gets: Sequence[tuple[str, memoryview]] = (),
        timeout_ms: int = WAIT_MS,
    ) -> tuple[dict[str, str], list[Any], bool]:
        if _in_one_slot([*streams, *(key for command in commands for key in keys_of(command))]):
            return super().wait_and_read(streams, commands, gets, timeout_ms)
        return self.wait(streams, timeout_ms), self.together(commands), not gets


def _in_one_slot(keys: Iterable[str]) -> bool:
    return len({slot_of(key) for key in keys}) == 1


class _Master(Client):
    """A client of one master, at the address that the cluster says."""

    _announced = True


class _Node(Queries):
    """The master that has `key`, whichever that is at the time of a call."""

    def __init__(self, cluster: ClusterClient, key: str) -> None:
        self._cluster = cluster
        self._key = key

    def call(self, *command: Any) -> Any:
        return self._cluster.call_at(self._key, *command)


def open_client(url: str, why_lost: Callable[[str], str] = lambda url: "") -> Client:
    """Return a client of the server at `url`, or of the cluster that it is a node of. Raises NoServer, ServerUnfit."""
    client = Client(url, why_lost=why_lost)
    try:
        if client.preflight():
            client.close()
            client = ClusterClient(url, why_lost=why_lost)
            client.preflight()
    except BaseException:
        client.close()
        raise
    return client
