"""The HTTP server that Prometheus scrapes: /metrics, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvps.machine.http_server import Handler, HttpServer
from kvps.store import Store
from kvps_monitor.metrics.collector import JobsCollector
from kvps_monitor.metrics.exporter import Exporter

PATH = "/metrics"
_REQUEST_S = 10.0  # who sends or reads nothing for so long is cut off


class MetricsServer(HttpServer):
    """The HTTP server. It answers while it is `serving`; the end of a `with` block closes its port."""

    def __init__(self, option: str, host: str, port: int) -> None:
        """Raises KvpsError, which names the `option`, for a port that cannot be had."""
        self.registry = CollectorRegistry()
        super().__init__(option, host, port, _Scrape)

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


class _Scrape(Handler):
    """One request."""

    server: MetricsServer
    timeout = _REQUEST_S

    def respond(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.answer(404, "text/plain", f"there is {PATH}\n".encode())
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        self.answer(200, content_type, encode(self.server.registry))
