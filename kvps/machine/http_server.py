"""An HTTP server for numbers and probes, inside a process that does something else."""

from __future__ import annotations

import socket
import socketserver
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvps.errors import KvpsError

MOST_REQUESTS = 64
"""Requests that are answered at once, each by a thread of its own. A connection beyond these is closed."""


class HttpServer(ThreadingHTTPServer):
    """An HTTP server that prints nothing. It has its port when it is made. `option` is what a message calls it by.

    Raises KvpsError for a port that cannot be had.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, option: str, host: str, port: int, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.Semaphore(MOST_REQUESTS)
        try:
            super().__init__((host, port), handler)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise KvpsError(f"{option}: port {port} of {host} cannot be opened: {why}") from None

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without HTTPServer's search for the name of the host

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread, if there is one to spare: who holds connections open costs this process no more."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: the client has closed its connection."""


class Handler(BaseHTTPRequestHandler, ABC):
    """One request. `respond` of a subclass calls `answer`."""

    def do_GET(self) -> None:
        self.respond()

    def do_HEAD(self) -> None:
        self.respond()

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
