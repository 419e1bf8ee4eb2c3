"""Real Sentinels for tests: three of them, that watch a master and its replicas on free ports of the loopback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from helpers.certificates import tls_options, tls_program
from helpers.servers import ServerProcess, free_port, private_directory
from helpers.waiting import eventually

NAME = "mymaster"
_WHERE = "SENTINEL GET-MASTER-ADDR-BY-NAME"


class Watched:
    """Servers, one of which is the master, and the Sentinels that watch it. `password` is the servers'."""

    def __init__(self, password: str = "", sentinel_password: str = "") -> None:
        self.servers: list[ServerProcess] = []
        self.sentinels: list[ServerProcess] = []
        self._password = password
        self._option = f"?sentinel_password={sentinel_password}" if sentinel_password else ""

    def watch(self, sentinel: ServerProcess) -> None:
        """Have a Sentinel watch the master. It sees within a second that the master is dead."""
        named = self.master if len(self.sentinels) > 1 else self.servers[0]
        sentinel.ask("SENTINEL MONITOR", NAME, "127.0.0.1", named.port, 2)
        settings = {"down-after-milliseconds": 1000, "failover-timeout": 1000}
        for name, value in (settings | ({"auth-pass": self._password} if self._password else {})).items():
            sentinel.ask("SENTINEL SET", NAME, name, value)
        # A Sentinel looks every 10 s at servers, and gives one that comes back as a master 8 s: tests wait less.
        # It asks each second whether they live: if down-after is no longer, a master just promoted counts as dead.
        sentinel.ask("SENTINEL DEBUG", "ping-period", 100, "info-period", 300, "publish-period", 300)

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        login = f":{self._password}@" if self._password else ""
        return f"redis+sentinel://{login}{places}/{NAME}{self._option}"

    @property
    def master(self) -> ServerProcess:
        """The master that a living Sentinel names."""
        living = [sentinel for sentinel in self.sentinels if sentinel.process.poll() is None]
        port = next(int(named[1]) for sentinel in living if (named := sentinel.ask(_WHERE, NAME)))
        return next(server for server in self.servers if server.port == port)

    def failed_over(self, dead: ServerProcess) -> bool:
        """Return whether all living Sentinels name another master than `dead`, and it says that it is one."""
        with suppress(redis.RedisError):
            for sentinel in self.sentinels:
                if sentinel.process.poll() is None and int(sentinel.ask(_WHERE, NAME)[1]) == dead.port:
                    return False
            return self.master.ask("ROLE")[0] == "master"
        return False

    def priorities(self, replica: ServerProcess) -> set[int]:
        """Return the priorities of a replica that the living Sentinels know."""
        living = [sentinel for sentinel in self.sentinels if sentinel.process.poll() is None]
        rows = [_pairs(row) for sentinel in living for row in sentinel.ask("SENTINEL SLAVES", NAME)]
        return {int(row["slave-priority"]) for row in rows if int(row["port"]) == replica.port}

    def is_whole(self) -> bool:
        """Return whether all other living servers follow the master, and all living Sentinels know that and each other.
        Only then does the next failover find a replica and a majority."""
        with suppress(redis.RedisError):
            others = [server for server in self.servers if server.process.poll() is None and server is not self.master]
            links = [server.ask("INFO", "replication") for server in others]
            living = [sentinel for sentinel in self.sentinels if sentinel.process.poll() is None]
            return (
                self.master.ask("ROLE")[0] == "master"
                and all(link.get("master_port") == self.master.port for link in links)
                and all(link.get("master_link_status") == "up" for link in links)
                and all(self._sees(sentinel, {server.port for server in others}) for sentinel in living)
            )
        return False

    def _sees(self, sentinel: ServerProcess, replicas: set[int]) -> bool:
        found = [_pairs(row) for row in sentinel.ask("SENTINEL SLAVES", NAME)]
        known = {int(row["port"]) for row in found if row["flags"] == "slave" and row["master-link-status"] == "ok"}
        of_master = _pairs(sentinel.ask("SENTINEL MASTER", NAME))
        others = int(of_master["num-other-sentinels"])
        return replicas <= known and others == len(self.sentinels) - 1 and of_master["flags"] == "master"


def _pairs(row: Any) -> dict[str, str]:
    """Return a row of a Sentinel's answer as a dict, whichever way redis-py has shaped it."""
    if isinstance(row, dict):
        flags = row["flags"]
        return row | {"flags": flags if isinstance(flags, str) else ",".join(sorted(flags))}
    return dict(zip(row[::2], row[1::2], strict=True))


@contextmanager
def watched_servers(
    *arguments: str,
    password: str = "",
    sentinel_password: str = "",
    certificate: Sequence[Path] = (),
    replicas: int = 1,
) -> Iterator[Watched]:
    """Start a master, its replicas and three Sentinels, and end them all. `arguments` are each server's.

    With `certificate`, the files of one, of its key and of its authority, all of them speak TLS only.
    """
    program = tls_program() if certificate else ""
    with private_directory() as folder, ExitStack() as stack:
        found = Watched(password, sentinel_password)

        def begin(command: list[str], secret: str) -> ServerProcess:
            port = free_port()
            login: dict[str, Any] = {"password": secret} if secret else {}
            whole = [*command, "--requirepass", secret] if secret else list(command)
            if certificate:
                whole += tls_options(port, certificate)
                login |= {"ssl": True, "ssl_cert_reqs": "none"}
            return stack.enter_context(ServerProcess.on_port(folder, *whole, port=port, program=program, **login))

        given = ["--save", "", "--repl-diskless-sync-delay", "0", *arguments]
        given += ["--masterauth", password] if password else []
        found.servers.append(begin(given, password))
        for _ in range(replicas):
            found.servers.append(begin([*given, "--replicaof", "127.0.0.1", str(found.servers[0].port)], password))
        for _ in range(3):
            sentinel = begin(["--sentinel"], sentinel_password)
            found.sentinels.append(sentinel)
            found.watch(sentinel)
        assert eventually(found.is_whole), "the Sentinels do not find each other"
        yield found
