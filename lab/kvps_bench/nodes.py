"""Clusters of masters without replicas, as `kvps host` makes them: on this machine, or of nodes that run on hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvps.connection.slots import Address
from kvps.server import cluster_node
from kvps.server.data_host import DataHost
from kvps_bench.crew import free_port


@contextmanager
def local_nodes(count: int) -> Iterator[list[str]]:
    """Start a cluster of `count` masters on addresses of the loopback (Linux has many); yield their HOST:PORT."""
    port = free_port(most=cluster_node.MOST_PORT)
    nodes = [Address(f"127.78.0.{number + 1}", port) for number in range(count)]
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(cluster_node.started(node, None, None))
        form(nodes)
        yield list(map(str, nodes))


def form(nodes: Sequence[Address]) -> None:
    """Make one cluster of nodes that know nothing of each other yet: masters of equal shares of the slots."""
    first, *others = nodes
    DataHost(first, None).come(None)
    for node in others:
        DataHost(node, None).come(first)
