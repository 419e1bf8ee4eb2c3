"""The HTTP server that Prometheus scrapes: /metrics, and nothing else."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvps.errors import KvpsError
from kvps.store import Store
from kvps_monitor.metrics.collector import JobsCollector
from kvps_monitor.metrics.exporter import Exporter

PATH = "/metrics"
_REQUEST_S = 10.0  # who sends or reads nothing for so long is cut off


class MetricsServer(ThreadingHTTPServer):
    """The HTTP server. It has its port when it is made, and answers while it is `serving`.

    Raises OSError for a port that cannot be had.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry = CollectorRegistry()
        super().__init__((host, port), _Scrape)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without HTTPServer's search for the name of the host

    @contextmanager
    def serving(self, store: Store, job: str | None, log: Callable[[str], None]) -> Iterator[None]:
        """Read all jobs of a server, or one, and answer, each on a thread, until the block ends. `log` gets one line
        for each thing that cannot be read."""
        exporter = Exporter(store, job, log)
        collector = JobsCollector(exporter)
        self.registry.register(collector)
        exporter.start()
        thread = threading.Thread(target=self.serve_forever, name="kvps-metrics-http", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            thread.join()
            exporter.stop()
            self.registry.unregister(collector)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: the scraper has closed its connection."""


class _Scrape(BaseHTTPRequestHandler):
    """One request."""

    server: MetricsServer
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._answer(404, "text/plain", f"there is {PATH}\n".encode())
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        self._answer(200, content_type, encode(self.server.registry))

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
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
        """Print nothing: scrapes come every few seconds."""


@contextmanager
def opened(option: str, host: str, port: int) -> Iterator[MetricsServer]:
    """Open a port, and close it behind the block. Raises KvpsError, which names the `option`, for a port that cannot be
    had."""
    try:
        server = MetricsServer(host, port)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise KvpsError(f"{option}: port {port} of {host} cannot be opened: {why}") from None
    with server:
        yield server
