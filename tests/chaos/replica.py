"""A lagging replica is promoted: what it never got is a loss, which must be detected, reported and done again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from helpers.faults import MortalServer
from helpers.servers import free_port, private_directory

from chaos.arena import Arena, shared_out
from chaos.processes import Processes
from chaos.report import Result
from chaos.servers import PATIENT, Losses, state_in
from kvps.connection.client import Client
from kvps.store import Store


def replicas_are_promoted(arena: Arena, promotions: int = 20, lag_s: float = 0.3) -> Result:
    """Cut the link to the replica, let the primary run for a moment, kill it, and promote the replica."""
    result = Result("replica", "a lagging replica promoted", arena.seed, needed=promotions)
    rolled_back = 0
    for mode, staleness, share in shared_out(promotions, arena.seed):
        door = free_port()
        with ExitStack() as servers, Store(Client(f"redis://127.0.0.1:{door}")) as store:
            primary = _Server(arena.processes, servers)
            gate = _proxied(arena.processes, door, primary.port)
            job = arena.job(store, staleness=staleness, **PATIENT)
            losses = Losses(job)
            with arena.crew(job) as crew:
                crew.start_all(3, 2, log=True)
                for _ in range(share):
                    replica = _Server(arena.processes, servers, primary)
                    with replica.looking() as there:
                        crew.until(lambda t=there: t.client.call("INFO", "replication")["master_link_status"] == "up")
                        crew.wait(lag_s)
                        arena.processes.kill(replica.link)
                        crew.wait(lag_s * arena.random.uniform(0.2, 1.5))
                        primary.server.kill()
                        arena.processes.kill(gate)
                        there.client.call("REPLICAOF", "NO", "ONE")
                        after = there.job(job.name).state()
                    losses.note(crew, state_in(primary.server.folder, job.name), after)
                    primary, gate = replica, _proxied(arena.processes, door, replica.port)
                    crew.until(lambda j=job, h=after.history: j.state().history != h)
                crew.finish()
                result.problems += losses.unsaid(arena.processes.log)
                result.verdict.add(arena.judge(store, crew, frozenset(losses.lost)))
            arena.processes.kill(gate)
        rolled_back += losses.versions
        result.faults[mode] = share
        arena.say(f"{mode}: {share} promotions, {losses.versions} versions rolled back")
    result.figures["versions that the replicas never got, all reported"] = rolled_back
    return result.close()


class _Server:
    """A server on a TCP port; with `primary`, a replica of that server, over a link that can be cut."""

    def __init__(self, processes: Processes, stack: ExitStack, primary: _Server | None = None) -> None:
        self.port, self.link = free_port(), 0
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--repl-diskless-sync-delay", "0"]
        if primary:
            port = free_port()
            self.link = _proxied(processes, port, primary.port)
            options += ["--replicaof", "127.0.0.1", str(port)]
        folder = stack.enter_context(private_directory())
        self.server = stack.enter_context(MortalServer(folder, *options))

    @contextmanager
    def looking(self) -> Iterator[Store]:
        """Yield a store on this server."""
        with Store(Client(self.server.url)) as store:
            yield store


def _proxied(processes: Processes, port: int, target: int) -> int:
    """Start a proxy that forwards everything, and return its pid; killing it cuts its connections."""
    spec: dict[str, Any] = {"role": "proxy", "listen": port, "target": target, "notes": ""}
    return processes.fork(spec)[0]
