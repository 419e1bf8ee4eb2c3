"""Ways to place servers and aggregators on hosts, and the bytes that each must send over a link at least."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvps.connection.slots import Address
from kvps.machine.paths import server_program
from kvps_bench.crew import crew
from kvps_bench.hosts import Host, NoHosts
from kvps_bench.nodes import form

_PORT, _NODE_PORT = 6400, 6402


class Ground(NamedTuple):
    """A layout's servers, and the hosts of its aggregators: a job has as many shards, and each aggregator one. On a
    cluster each has the shard of the node at `near`, on the same host."""

    url: str
    aggregators: Sequence[Host]
    near: Sequence[str] = ()


@dataclass(frozen=True)
class Layout:
    """A way to place servers and aggregators on hosts. `opened` starts the servers; the last host has no worker.

    least   workers, bytes of a gradient, bytes of the weights -> the bytes that must come in and go out over the link
            that carries most
    limits  whether the limits of the settings are for this layout
    """

    opened: Callable[[Sequence[Host]], Any]
    least: Callable[[int, float, float], tuple[float, float]]
    limits: bool = False


@contextmanager
def _apart(hosts: Sequence[Host]) -> Iterator[Ground]:
    with _server(hosts[-1]) as url:
        yield Ground(url, hosts[-1:])


@contextmanager
def _beside(hosts: Sequence[Host]) -> Iterator[Ground]:
    with _server(hosts[0]) as url:
        yield Ground(url, hosts[:-1])


@contextmanager
def _cluster(hosts: Sequence[Host]) -> Iterator[Ground]:
    nodes = hosts[:-1]
    with ExitStack() as stack:
        for host in nodes:
            own = ["--cluster-enabled", "yes", "--cluster-announce-ip", host.address]
            stack.enter_context(_server(host, _NODE_PORT, *own))
        (founder,) = stack.enter_context(crew((nodes[0], Founder)))
        founder("form", [host.address for host in nodes], _NODE_PORT)
        near = [f"{host.address}:{_NODE_PORT}" for host in nodes]
        yield Ground(f"redis://{near[0]}", nodes, near)


def _least_apart(workers: int, gradient: float, weights: float) -> tuple[float, float]:
    return max(workers * gradient, weights), max(workers * weights, gradient)  # at the server, or at a worker


def _least_beside(workers: int, gradient: float, weights: float) -> tuple[float, float]:
    """All is in the first worker's server. The other workers push there, and their aggregators fetch a part of each
    gradient and store a part of the weights."""
    others = (workers - 1) / workers
    servers = others * (workers * gradient + weights), others * workers * (gradient + weights)
    anothers = gradient + weights, gradient + weights / workers
    return max(servers[0], anothers[0]), max(servers[1], anothers[1])


def _least_cluster(workers: int, gradient: float, weights: float) -> tuple[float, float]:
    """A host has an equal part of the shards: the others' gradients and weights of that pass, and its own of theirs."""
    each = (workers - 1) / workers * (gradient + weights)
    return each, each


LAYOUTS: Mapping[str, Layout] = {
    # server and aggregator on a host of their own; or the server beside the first worker, and an aggregator of one
    # shard beside each worker; or beside each worker a node of a cluster, and an aggregator near that
    "apart": Layout(_apart, _least_apart),
    "beside": Layout(_beside, _least_beside, limits=True),
    "cluster": Layout(_cluster, _least_cluster, limits=True),
}


@contextmanager
def _server(host: Host, port: int = _PORT, *arguments: str) -> Iterator[str]:
    """Start a server on a host, for all hosts; yield its URL."""
    with tempfile.TemporaryDirectory(prefix="kvps-bench-") as folder:
        command = [server_program(), "--bind", host.address, "--port", str(port), "--protected-mode", "no"]
        command += ["--save", "", "--dir", folder, *arguments]
        process = host.start(*command, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        for line in process.stdout:
            if "Ready to accept connections" in line:
                break
        else:
            raise NoHosts(f"the server on {host.name} ended with {process.wait()}")
        process.stdout.close()  # a server that says more, and whom nobody reads, would wait for ever
        try:
            yield f"redis://{host.address}:{port}"
        finally:
            host.signal(process, signal.SIGTERM)
            process.wait()


class Founder:
    """Makes one cluster of the nodes on hosts, which only a process on a host can reach."""

    def form(self, addresses: Sequence[str], port: int) -> None:
        """See `kvps_bench.nodes.form`."""
        form([Address(address, port) for address in addresses])
