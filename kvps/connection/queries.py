"""What a server says of itself: its version, its memory, its run id."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from kvps.connection.server_info import eviction, greeting_as_info, server_name, version_of
from kvps.errors import KvpsError, NotPermitted


class Queries(ABC):
    """Questions to one server, asked by `call`. All raise what that raises."""

    @abstractmethod
    def call(self, *command: Any) -> Any:
        """Return the reply to one command, which is sent again after a cut. Raises ServerLost, ServerError."""

    def memory(self) -> tuple[int, int]:
        """Return the bytes that the server uses, and how many it may use; 0 is no limit. Both are 0 for a user that may
        not ask."""
        with suppress(NotPermitted):
            info = self.call("INFO", "memory")
            return int(info["used_memory"]), int(info["maxmemory"])
        return 0, 0

    def eviction(self) -> str:
        """Return that the server has evicted keys, and what to do about it; "" if it has not, or does not say."""
        with suppress(KvpsError):
            return eviction(self.call("INFO"))
        return ""

    def port(self) -> int:
        """Return the TCP port that the server listens on; 0 if it listens on none."""
        return int(self.call("INFO", "server")["tcp_port"])

    def seconds(self) -> float:
        """Return the server's time, in seconds since 1970."""
        seconds, micros = self.call("TIME")
        return int(seconds) + int(micros) / 1e6

    def run_id(self) -> str:
        """Return the server's run id, Redis's own id of the present run of the server process."""
        return str(self.call("INFO", "server")["run_id"])

    def redis_version(self) -> tuple[int, int]:
        """Return the version of Redis whose commands the server has, as (7, 2)."""
        return version_of(str(self._server().get("redis_version", "")))

    def server_name(self) -> str:
        """Return the server's name and version, as in "Valkey 9.1.2"."""
        return server_name(self._server())

    def _server(self) -> Mapping[str, Any]:
        """Return INFO server; for a user that may not run that, what the greeting says of it."""
        with suppress(NotPermitted):
            return cast(Mapping[str, Any], self.call("INFO", "server"))
        return greeting_as_info(self.call("HELLO", 2))
