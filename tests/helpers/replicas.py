"""A real server with replicas for tests, on free ports of the loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from helpers.clusters import ClusterNode
from helpers.sentinels import Process
from helpers.servers import free_port, private_directory
from helpers.waiting import eventually

from kvps.machine.paths import server_program


class Replicated:
    """A master and its replicas. All can be killed, and started again."""

    def __init__(self, master: Process, replicas: list[Process]) -> None:
        self.master = master
        self.replicas = replicas

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.master.port}"

    def in_step(self) -> bool:
        """Return whether the master sends its writes to all replicas."""
        info = self.master.ask("INFO", "replication")
        return all(info.get(f"slave{i}", {}).get("state") == "online" for i in range(len(self.replicas)))


def gets(*servers: Process | ClusterNode) -> int:
    """Return how many GETs these servers have answered."""
    return sum(server.ask("INFO", "commandstats").get("cmdstat_get", {}).get("calls", 0) for server in servers)


@contextmanager
def replicated_server(*arguments: str, replicas: int = 2) -> Iterator[Replicated]:
    """Start a server with replicas, and end them all. `arguments` are each server's."""
    with private_directory() as folder, ExitStack() as stack:

        def begin(*more: str) -> Process:
            port = free_port()
            home = folder / str(port)
            home.mkdir()
            command = [server_program(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(home)]
            command += ["--repl-diskless-sync-delay", "0", *arguments, *more]
            started = Process(home, port, command, {})
            stack.callback(started.kill)
            return started

        master = begin()
        found = Replicated(master, [begin("--replicaof", "127.0.0.1", str(master.port)) for _ in range(replicas)])
        assert eventually(found.in_step), "the replicas do not follow"
        yield found
