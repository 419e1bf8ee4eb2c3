"""A TCP port on which a command answers what others ask of it: the options --WHAT-port and --WHAT-host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from kvps.errors import InvalidSetting
from kvps_cli.options import LOOPBACK

if TYPE_CHECKING:
    from kvps.machine.http_server import HttpServer

_Server = TypeVar("_Server", bound="HttpServer")


def port_of(what: str, help: str, without: str) -> Any:
    """Return the option --WHAT-port."""
    name, panel = f"--{what}-port", what.title()
    return typer.Option(name, metavar="N", min=1, max=65535, help=help, show_default=without, rich_help_panel=panel)


def host_of(what: str, help: str) -> Any:
    """Return the option --WHAT-host: the address of that port."""
    help = f"The address of --{what}-port. By default only this machine reaches it. {help}"
    name, panel = f"--{what}-host", what.title()
    return typer.Option(name, metavar="HOST", help=help, show_default=LOOPBACK, rich_help_panel=panel, hidden=True)


@contextmanager
def opened(
    what: str, server: Callable[[str, str, int], _Server], port: int | None, host: str | None
) -> Iterator[_Server | None]:
    """Open the port of --WHAT-port, and close it behind the block; yield None without a port.

    Raises KvpsError for a port that cannot be had, InvalidSetting for a host without a port.
    """
    if port is not None:
        with server(f"--{what}-port", host or LOOPBACK, port) as found:
            yield found
    elif host is not None:
        raise InvalidSetting(f"--{what}-host is the address of --{what}-port: give that too")
    else:
        yield None
