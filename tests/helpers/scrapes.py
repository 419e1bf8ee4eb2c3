"""Scrapes metrics over HTTP, as Prometheus does."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager

from helpers.servers import free_port
from helpers.waiting import eventually
from kvps_monitor.metrics import server
from prometheus_client.parser import text_string_to_metric_families

from kvps.store import Store

HERE = "127.0.0.1"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def ask(
    port: int, path: str = "/metrics", accept: str = "", method: str = "GET", host: str = ""
) -> tuple[int, str, str]:
    """Return the status, the content type and the text of one answer."""
    connection = http.client.HTTPConnection(HERE, port, timeout=30)
    try:
        headers = {"Accept": accept, "Host": host}
        connection.request(method, path, headers={name: value for name, value in headers.items() if value})
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        samples = [sample for family in self.families for sample in family.samples]
        self._values = {(s.name, *sorted(s.labels.items())): s.value for s in samples}
        assert len(self._values) == len(samples), "a series is there twice"

    @classmethod
    def of(cls, port: int) -> Scrape:
        status, _, text = ask(port)
        assert status == 200
        return cls(text)

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of one series; None if it is not there."""
        return self._values.get((name, *sorted(labels.items())))

    def series(self, name: str, **labels: str) -> dict[str, float]:
        """Return the series with these labels: the values of their other labels, joined by blanks -> value."""
        wanted, found = set(labels.items()), {}
        for (each, *of_series), value in self._values.items():
            if each == name and wanted <= set(of_series):
                found[" ".join(v for k, v in of_series if k not in labels)] = value
        return found

    def jobs(self) -> set[str]:
        """Return the jobs that have any series."""
        return {dict(of_series)["job"] for _, *of_series in self._values if "job" in dict(of_series)}

    def names(self) -> set[str]:
        """Return the names of all series."""
        return {name for name, *_ in self._values}


class Exported:
    """A server of metrics, and what it has said."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.said: list[str] = []

    def scrape(self) -> Scrape:
        return Scrape.of(self.port)

    def until(self, **wanted: float) -> Scrape:
        """Scrape until the sum of all series of each metric is as wanted."""
        found: list[Scrape] = []

        def reached() -> bool:
            found[:] = [self.scrape()]
            return all(sum(found[0].series(name).values()) == value for name, value in wanted.items())

        assert eventually(reached), {name: found[0].series(name) for name in wanted}
        return found[0]


@contextmanager
def exporting(store: Store, job: str | None = None) -> Iterator[Exported]:
    """Serve the metrics of all jobs of the store, or of one, inside the block."""
    found = Exported(free_port())
    with server.MetricsServer("--port", HERE, found.port) as opened, opened.serving(store, job, found.said.append):
        yield found
