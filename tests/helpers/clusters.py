"""Real clusters for tests: masters and replicas of a server program on free ports of the loopback."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from helpers.certificates import tls_options, tls_program
from helpers.servers import ServerProcess, private_directory
from helpers.waiting import eventually

from kvps.store import Store

SLOTS = 16384
_BUS = 10_000  # a node's bus listens on its port and this


class ClusterNode(ServerProcess):
    """One server process of a cluster. It comes back with its cluster's configuration."""

    def start(self, *options: str) -> None:
        super().start(*options)
        self.id = str(self.ask("CLUSTER", "MYID"))

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def is_master(self) -> bool:
        return bool(self.ask("INFO", "replication")["role"] == "master")


def cluster_node(parent: Path, port: int, *arguments: str, certificate: Sequence[Path] = ()) -> ClusterNode:
    """Return a node in a new folder, which is in no cluster yet."""
    given = ["--save", "", "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", *arguments]
    if not certificate:
        return ClusterNode.on_port(parent, *given, port=port)
    given += [*tls_options(port, certificate), "--tls-cluster", "yes"]
    login: dict[str, Any] = {"program": tls_program(), "ssl": True, "ssl_cert_reqs": "none"}
    return ClusterNode.on_port(parent, *given, port=port, **login)


class Cluster:
    """Nodes, of which the first `masters` begin as masters."""

    def __init__(self, nodes: list[ClusterNode], masters: int) -> None:
        self.nodes = nodes
        self.size = masters
        self._replicas = max(1, (len(nodes) - masters) // masters)  # of each master, once it is whole

    @property
    def url(self) -> str:
        return self.living[0].url

    @property
    def living(self) -> list[ClusterNode]:
        return [node for node in self.nodes if node.process.poll() is None]

    @property
    def masters(self) -> list[ClusterNode]:
        """The masters that serve slots, as a living node sees it."""
        ports = {int(shard[2][1]) for shard in self.slots()}
        return [node for node in self.living if node.port in ports]

    def slots(self, node: ClusterNode | None = None) -> list[Any]:
        """Return the reply to CLUSTER SLOTS of a node, or of any that lives."""
        return list((node or self.living[0]).ask("CLUSTER", "SLOTS"))

    def master_of(self, key: str) -> ClusterNode:
        """Return the master that serves a key."""
        port = self._port_of(int(self.living[0].ask("CLUSTER", "KEYSLOT", key)))
        return next(node for node in self.nodes if node.port == port)

    def other_than(self, master: ClusterNode) -> ClusterNode:
        """Return another master."""
        return next(node for node in self.masters if node is not master)

    def replica_of(self, master: ClusterNode) -> ClusterNode:
        """Return a living replica of a master."""
        return self.replicas_of(master)[0]

    def replicas_of(self, master: ClusterNode) -> list[ClusterNode]:
        """Return all living replicas of a master."""
        lines = [(node, line.split()) for node in self.living for line in node.ask("CLUSTER", "NODES").splitlines()]
        return [node for node, words in lines if "myself" in words[2] and words[3] == master.id]

    def is_whole(self, replicas: bool = True) -> bool:
        """Return whether all living nodes agree that every slot is served, and that every master has its replicas,
        which are in step."""
        with suppress(redis.RedisError, IndexError, KeyError):
            for node in self.living:
                info = node.ask("CLUSTER INFO")
                if info["cluster_state"] != "ok" or int(info["cluster_known_nodes"]) != len(self.nodes):
                    return False
                if replicas and not all(len(found) >= 3 + self._replicas for found in self.slots(node)):
                    return False
            masters = self.masters
            others = [node.ask("INFO", "replication") for node in self.living if node not in masters]
            if not replicas:
                return True
            loaded = all(info["master_link_status"] == "up" for info in others)  # one in step may not have its copy yet
            return loaded and all(node.replicas_in_step() >= self._replicas for node in masters)
        return False

    def migrate(self, slot: int, target: ClusterNode) -> None:
        """Move a slot the old way: key by key, while it is in use."""
        with self.migrating(slot, target):
            pass

    @contextmanager
    def migrating(self, slot: int, target: ClusterNode, *first: str) -> Iterator[None]:
        """Begin to move a slot, and move the keys `first`; after the block move the others. Nothing moves to where the
        slot is already."""
        source = next(node for node in self.nodes if node.port == self._port_of(slot))
        if source is target:
            yield
            return
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)

        def move(keys: Sequence[str]) -> None:
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "REPLACE", "KEYS", *keys)

        try:
            if first:
                move(first)
            yield
        finally:
            while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 10):
                move(keys)
            for node in (target, source, *self.masters):
                with suppress(redis.RedisError):
                    node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)

    def _port_of(self, slot: int) -> int:
        return next(int(found[2][1]) for found in self.slots() if found[0] <= slot <= found[1])


def node_ports(count: int) -> list[int]:
    """Return free ports whose buses' ports are free too. All lie below those that Linux gives to clients."""
    found: list[int] = []
    while len(found) < count:
        port = 12_000 + secrets.randbelow(10_000)
        with suppress(OSError), socket.socket() as one, socket.socket() as bus:
            one.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + _BUS))
            if port not in found and port - _BUS not in found and port + _BUS not in found:
                found.append(port)
    return found


@contextmanager
def running_cluster(
    *arguments: str, masters: int = 3, replicas: int = 3, certificate: Sequence[Path] = ()
) -> Iterator[Cluster]:
    """Start a cluster, and end it with all its nodes. `arguments` are each server's.

    With `certificate`, the files of one, of its key and of its authority, all of them speak TLS only.
    """
    with private_directory() as folder, ExitStack() as stack:
        given = ["--cluster-node-timeout", "1500", "--repl-diskless-sync-delay", "0", *arguments]
        ports = node_ports(masters + replicas)
        begun = [cluster_node(folder, port, *given, certificate=certificate) for port in ports]
        nodes = [stack.enter_context(node) for node in begun]
        for number, node in enumerate(nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number:
                nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port)
        for number, node in enumerate(nodes[:masters]):
            first, end = SLOTS * number // masters, SLOTS * (number + 1) // masters
            node.ask("CLUSTER", "ADDSLOTS", *range(first, end))
        cluster = Cluster(nodes, masters)
        assert eventually(lambda: cluster.is_whole(replicas=False)), "the cluster does not form"
        for number, node in enumerate(nodes[masters:]):
            assert eventually(lambda node=node, number=number: _follows(node, nodes[number % masters]))
        assert eventually(lambda: cluster.is_whole(replicas >= masters)), "the replicas do not follow"
        yield cluster


def _follows(node: ClusterNode, master: ClusterNode) -> bool:
    """Return whether a node has become a replica of a master, which it must have met before."""
    with suppress(redis.RedisError):
        node.ask("CLUSTER", "REPLICATE", master.id)
        return True
    time.sleep(0.05)
    return False


def empty(store: Store) -> None:
    """Delete all keys of a server or a cluster."""
    masters = store.client.call("CLUSTER SLOTS") if store.client.is_cluster else []
    for _, _, (host, port, *_), *_ in masters:
        with redis.Redis(host=host, port=port, protocol=2) as node:
            node.flushall()
    if not masters:
        store.client.call("FLUSHALL")
