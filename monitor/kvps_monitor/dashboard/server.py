"""Serves the dashboard until Ctrl-C."""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import uvicorn

from kvps.errors import InvalidSetting, KvpsError
from kvps.machine.address import is_loopback, outward_address
from kvps.store import Store
from kvps_monitor.dashboard.access import Access
from kvps_monitor.dashboard.app import application
from kvps_monitor.dashboard.watches import Watches

_MOST_CONNECTIONS = 1024
_REQUEST_S = 10.0  # in which a request must have come
_PATIENCE_S = 2.0  # viewers are told of a server that does not answer, and each look asks again
_GRACE_S = 1  # for answers that are on their way at the end


def serve(store: Store, host: str, port: int, token: str, say: Callable[[str], None]) -> None:
    """Show the jobs of `store` at an address of this machine until SIGINT or SIGTERM, which is raised again at the end.

    `say` is told the URL once the address is bound. If other machines reach the address, viewers must know the token;
    without one a new one is made, and is in the URL. Raises InvalidSetting if the address cannot be had.
    """
    bound = _bind(host, port)
    address, port = bound.getsockname()[:2]
    made = "" if token or is_loopback(address) else secrets.token_urlsafe(24)
    access = Access.of(host, address, port, token or made)
    say(f"http://{_opened(bound, host)}:{port}/{f'?token={made}' if made else ''}")
    quick = Store(store.client.twin(_PATIENCE_S))
    watches = Watches(quick)
    config = uvicorn.Config(
        application(quick, watches, access),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http="h11",
        loop="asyncio",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=_GRACE_S,
    )
    with quick:
        _Server(config, watches).run(sockets=[bound])


class _Server(uvicorn.Server):
    """A server that ends at once: viewers of a job would stay for ever. A connection that has sent no whole request in
    some seconds is closed, or else so many of them would take all room."""

    def __init__(self, config: uvicorn.Config, watches: Watches) -> None:
        super().__init__(config)
        self._watches = watches
        self._since: dict[Any, float] = {}  # since when a connection has sent a part of a request, oldest first

    async def on_tick(self, counter: int) -> bool:
        """Look at the connections, ten times a second."""
        now = time.monotonic()
        connections: set[Any] = set(self.server_state.connections)
        waiting = {(c, c.cycle): c for c in connections if _is_waiting(c)}
        since = {key: self._since.get(key, now) for key in waiting}
        self._since = dict(sorted(since.items(), key=itemgetter(1)))
        crowd = len(connections) - _MOST_CONNECTIONS // 2
        for place, (key, began) in enumerate(self._since.items()):
            if place < crowd or began < now - _REQUEST_S:
                waiting[key].transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._watches.close()
        await super().shutdown(sockets)


def _is_waiting(connection: Any) -> bool:
    """Return whether a connection has sent no whole request, or nothing. Behind an answer uvicorn has a time of its own
    for a connection that sends nothing."""
    if connection.cycle is None:
        return True
    between = connection.timeout_keep_alive_task or connection.transport.get_write_buffer_size()
    return bool(connection.cycle.response_complete) and not between


def _opened(bound: socket.socket, host: str) -> str:
    """Return what a browser calls this machine: `host`, or its own address if the socket is bound to all of them."""
    if ipaddress.ip_address(bound.getsockname()[0]).is_unspecified:
        host = outward_address(bound.family)
    return f"[{host}]" if ":" in host else host


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address. Raises InvalidSetting."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise InvalidSetting(f"--host {host!r} is no name or address of this machine") from None
    family, kind, protocol, _, address = addresses[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise KvpsError(
                f"port {port} of {host} is taken: choose another with --port, or 0 for any that is free"
            ) from None
        raise InvalidSetting(f"cannot listen on port {port} of {host}: {error.strerror}") from None
    return bound
