"""`kvps metrics`, and `--metrics-port` of other commands: numbers about jobs, for Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from kvps.store import Store
from kvps_cli import connect, options
from kvps_cli.output import say
from kvps_cli.ports import host_of, port_of

if TYPE_CHECKING:
    from kvps_monitor.metrics.server import MetricsServer

PORT = 9478
_SERVES = "Serve metrics for Prometheus on this TCP port, as kvps metrics does."
_OPEN = "There is no password on it."
_ADDRESS = f"The address of the port. By default only this machine reaches it. {_OPEN}"

Port = Annotated[int | None, port_of("metrics", _SERVES, without="no metrics")]
Host = Annotated[str | None, host_of("metrics", _OPEN)]


def metrics(
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="The TCP port to answer on.")] = PORT,
    host: Annotated[str, typer.Option(metavar="HOST", help=_ADDRESS)] = options.LOOPBACK,
    redis: options.Redis = None,
) -> None:
    """Serve metrics of all jobs of the server for Prometheus, at /metrics, until Ctrl-C.

    Redis is read about twice a second, whoever asks. If it is lost, kvps_up is 0 until it is back. Rounds and versions
    are exact. What is counted from logs and traces (staleness, seconds, bytes, joins, evictions) begins, when this
    command starts, with what Redis still has of them.
    """
    with server_of("--port", host, port) as server, connect.existing_store(redis) as store:
        say(f"metrics of all jobs at http://{f'[{host}]' if ':' in host else host}:{port}/metrics; Ctrl-C ends it")
        with server.serving(store, None, say):
            threading.Event().wait()


@contextmanager
def serving(server: MetricsServer | None, store: Store, job: str | None) -> Iterator[None]:
    """Serve metrics of all jobs, or of one, inside the block; nothing without a server."""
    with server.serving(store, job, say) if server else nullcontext():
        yield


def server_of(option: str, host: str, port: int) -> MetricsServer:
    """Return the server, which has its port. Raises KvpsError for one that cannot be had."""
    with options.extra("metrics", "metrics need prometheus-client", "prometheus_client"):
        from kvps_monitor.metrics import server
    return server.MetricsServer(option, host, port)
