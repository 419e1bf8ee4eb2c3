"""An HTTP server for numbers and probes, inside a process that does something else."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvps.errors import KvpsError
from kvps.machine.address import is_address, is_loopback, name_in

MOST_REQUESTS = 64
"""Requests that are answered at once, each by a thread of its own. One more ends the oldest of them."""
_OURS = (".localhost", ".localdomain", ".local", ".internal")
"""The ends of names that no site of the internet has."""


class HttpServer(ThreadingHTTPServer):
    """An HTTP server that prints nothing. It has its port when it is made. `option` is what a message calls it by.

    Who sends a request byte by byte, or reads the answer so, is cut off after `most_s` seconds, and earlier if others
    come: a probe must find an answer however many connections somebody holds open. Raises KvpsError for a port that
    cannot be had.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16
    most_s = 30.0

    def __init__(self, option: str, host: str, port: int, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._began: dict[socket.socket, float] = {}  # the requests that are answered, oldest first
        self._changing = threading.Lock()
        try:
            super().__init__((host, port), handler)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise KvpsError(f"{option}: port {port} of {host} cannot be opened: {why}") from None

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without HTTPServer's search for the name of the host

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own."""
        with self._changing:
            self._cut(len(self._began) - MOST_REQUESTS + 1)
            # Threads of requests that were cut off may not have ended yet.
            crowded = len(self._began) >= 2 * MOST_REQUESTS
            if crowded:
                self.shutdown_request(request)
            else:
                self._began[request] = time.monotonic()
        if crowded:
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # there can be no more threads
            with self._changing:
                del self._began[request]
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changing:
                del self._began[request]

    def knows_name(self, host: str) -> bool:
        """Return whether a request's Host is a name of this server.

        Where only this machine reaches it, a page of another site may have a browser ask under that site's name, which
        leads here (DNS rebinding). A program that is no browser may leave the name out.
        """
        name = name_in(host)
        is_ours = not host or (name and "." not in name) or is_address(name) or name.endswith(_OURS)
        return bool(is_ours) or not is_loopback(str(self.server_address[0]))

    def service_actions(self) -> None:
        """Cut off those that take too long; called between requests, twice a second."""
        late = time.monotonic() - self.most_s
        with self._changing:
            self._cut(sum(began < late for began in self._began.values()))

    def _cut(self, oldest: int) -> None:
        """Cut off so many of the oldest requests; their threads then end."""
        for request, _ in zip(self._began, range(oldest), strict=False):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: the client has closed its connection."""


class Handler(BaseHTTPRequestHandler, ABC):
    """One request. `respond` of a subclass calls `answer`."""

    server: HttpServer

    def do_GET(self) -> None:
        if self.server.knows_name(self.headers.get("Host", "")):
            self.respond()
        else:
            self.answer(421, "text/plain", b"this server does not have that name\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    @abstractmethod
    def respond(self) -> None:
        """Answer the request for `path`."""

    def answer(self, status: int, content_type: str, body: bytes) -> None:
        """Answer GET, or HEAD without the body."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def version_string(self) -> str:
        """Return what the header Server says, without the version of Python."""
        return "kvps"

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: requests come every few seconds."""
