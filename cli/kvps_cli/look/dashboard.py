"""`kvps dashboard`: the jobs of a server as pages in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvps.connection.credentials import read_password
from kvps_cli import connect, options

PORT = 5877
"""The port if none is chosen: kvps on the keys of a telephone."""


def dashboard(
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Listen on this address. If other machines reach it, viewers need a token."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Listen on this port; 0 is any that is free.")] = PORT,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            envvar="KVPS_DASHBOARD_TOKEN_FILE",
            metavar="FILE",
            help="Ask viewers for the token in this file.",
            show_default="a new token, if other machines reach the address",
        ),
    ] = None,
    redis: options.Redis = None,
) -> None:
    """Show the jobs of the server in a browser, live: workers, shards, charts, timelines and the log.

    It only reads, and runs until Ctrl-C. It prints the URL to open.
    """
    with options.extra("dashboard", "kvps dashboard needs Starlette and uvicorn", "starlette", "uvicorn"):
        from kvps_monitor.dashboard.server import serve
    token = read_password(token_file, "token") if token_file else ""
    with connect.existing_store(redis) as store:
        serve(store, host, port, token, lambda url: print(f"kvps dashboard: {url}", flush=True))
