"""The HTTP server of `kvps aggregator start --health-port`, which answers the probes of Kubernetes and its like.

It knows one time: when Redis last answered the loop that watches all jobs. The loop asks about twice a second. The
answers are fixed words and a number of seconds, so that whoever reaches the port learns nothing about jobs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Annotated

from kvps.connection.patience import patience_s
from kvps.machine.http_server import Handler, HttpServer
from kvps_cli.ports import host_of, port_of

READY_S = 5.0
"""/ready answers 503 if Redis has not answered for so long."""
HANGS_S = 20.0
"""/live answers 503 if the loop has made no turn for so long after its patience (KVPS_PATIENCE) ran out. A loop that
waits for Redis gives up then, and the command ends: a longer silence is a hang, which nothing but a restart ends."""
_REQUEST_S = 2.0  # a probe that sends or reads nothing for so long is cut off

_PORT = (
    "Answer HTTP probes on this TCP port: /live with 200 while jobs are watched, /ready with 200 while Redis answers; "
    "with 503 otherwise."
)
_HOST = "The probes of Kubernetes come to the address of the pod: give that one there."
Port = Annotated[int | None, port_of("health", _PORT, without="no probes")]
Host = Annotated[str | None, host_of("health", _HOST)]


class Probes(HttpServer):
    """The HTTP server, which answers after `begin`. Raises KvpsError for a port that cannot be had."""

    def __init__(self, option: str, host: str, port: int) -> None:
        self._last_turn: Callable[[], float] = time.monotonic
        self._answering = False
        self._live_s = patience_s() + HANGS_S
        super().__init__(option, host, port, _Probe)

    def begin(self, last_turn: Callable[[], float]) -> None:
        """Begin to answer on a thread. `last_turn` returns the time (time.monotonic) of the loop's last turn."""
        self._last_turn, self._answering = last_turn, True
        threading.Thread(target=self.serve_forever, name="kvps-health", daemon=True).start()

    def server_close(self) -> None:
        if self._answering:
            self.shutdown()
        super().server_close()

    def state(self, path: str) -> tuple[int, str]:
        """Return the HTTP status of a path, and one line of text."""
        silent_s = time.monotonic() - self._last_turn()
        if path == "/live":
            return (200, "live") if silent_s < self._live_s else (503, f"no turn of the loop for {silent_s:.0f} s")
        if path == "/ready":
            return (200, "ready") if silent_s < READY_S else (503, f"no answer from Redis for {silent_s:.0f} s")
        return 404, "there are /live and /ready"


class _Probe(Handler):
    """One request."""

    server: Probes
    timeout = _REQUEST_S

    def respond(self) -> None:
        status, text = self.server.state(self.path)
        self.answer(status, "text/plain", f"{text}\n".encode())
