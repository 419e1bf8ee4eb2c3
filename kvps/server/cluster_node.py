"""One node of a cluster on this host: a server process that begins with `started` and ends with its block.

The server reads its settings from its standard input, so that the password stands in no command line and no file. The
kernel ends the server when this process ends in any way (Linux).
"""

from __future__ import annotations

import ipaddress
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from kvps.connection.client import Client
from kvps.connection.slots import Address
from kvps.connection.sockets import connection_settings
from kvps.connection.urls import redacted
from kvps.errors import InvalidSetting, NoServer, ServerError
from kvps.machine import process
from kvps.machine.address import addresses_of, host_and_port
from kvps.machine.child_process import ChildProcess
from kvps.machine.paths import private_directory, server_program
from kvps.server.server_process import LOAD_S, START_S, comes_true, last_lines, launched, quoted

MOST_PORT = 55_535
"""The highest port of a node: its bus, over which nodes talk to each other, has the port 10,000 above."""
_BUS = 10_000
_NODES = "nodes.conf"  # in which a node keeps what it knows of its cluster
_LEAST_PORT = 20_000  # of the ports from which a free one is chosen
_END_S = 60.0
_CONNECT_S = 5.0


def parse_listen(text: str) -> Address:
    """Return the address that --listen names. Raises InvalidSetting."""
    host, port = host_and_port(text, "--listen wants HOST:PORT, as in 10.0.0.1:6379")
    if port > MOST_PORT:
        raise InvalidSetting(
            f"--listen wants a port from 1 to {MOST_PORT}, because nodes use the port 10,000 above too"
        )
    addresses = sorted(addresses_of(host))
    if not addresses or ipaddress.ip_address(addresses[0]).is_unspecified:
        raise InvalidSetting(f"--listen wants the address by which other hosts reach this one, not {host}")
    return Address(addresses[0], port)


def check_free(address: Address) -> None:
    """Raise InvalidSetting if a node cannot listen at this address."""
    if why := _refusal(address):
        raise InvalidSetting(
            f"nothing can listen at {address} and on the port 10,000 above: {why}; give another address"
        )


def address_towards(other: Address) -> Address:
    """Return the address by which this host reaches a node, with that node's port if it is free, or any free port."""
    try:
        with socket.create_connection(other, timeout=_CONNECT_S) as probe:
            host = str(probe.getsockname()[0])
    except OSError as error:
        raise NoServer(f"no node answers at {other} ({error}): give the address with --listen HOST:PORT") from None
    for port in (min(other.port, MOST_PORT), *random.sample(range(_LEAST_PORT, MOST_PORT), 100)):
        if not _refusal(address := Address(host, port)):
            return address
    raise InvalidSetting(f"{host} has no free port for a node: give one with --listen {host}:PORT")


def is_in_cluster(data_dir: Path | None) -> bool:
    """Return whether a node that has kept its files there knows other nodes."""
    try:
        lines = (data_dir / _NODES).read_text().splitlines() if data_dir else []
    except OSError:
        return False
    return sum("@" in line for line in lines) > 1


def url_of(address: Address, password: str | None) -> str:
    """Return the URL of a node."""
    login = f":{quote(password, safe='')}@" if password else ""
    return f"redis://{login}{address}"


@contextmanager
def started(address: Address, password: str | None, data_dir: Path | None) -> Iterator[ChildProcess]:
    """Start a node, and end it after the block. With `data_dir` it comes back with its slots and its data.

    Raises NoServer if it does not start.
    """
    check_free(address)
    if data_dir:
        private_directory(data_dir, ", or give --data-dir another")
    folder = data_dir.resolve() if data_dir else Path(tempfile.mkdtemp(prefix="kvps-host-"))
    try:
        node = _started(address, password, folder, keeps=bool(data_dir))
        try:
            if not comes_true(lambda: _answers(url_of(address, password)), LOAD_S if data_dir else START_S, node):
                raise NoServer(f"the node could not be started: {last_lines(folder / 'log') or 'it does not answer'}")
            yield node
        finally:
            _end(node)
    finally:
        if not data_dir:
            shutil.rmtree(folder, ignore_errors=True)


def _started(address: Address, password: str | None, folder: Path, keeps: bool) -> ChildProcess:
    settings = {
        "bind": address.host,
        "port": str(address.port),
        "cluster-enabled": "yes",
        "cluster-config-file": _NODES,
        "cluster-announce-ip": address.host,
        "cluster-allow-replica-migration": "no",  # a master that has given all its slots would become a replica
        "save": '""',
        "appendonly": "yes" if keeps else "no",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "dir": quoted(str(folder)),
        "daemonize": "no",
    }
    if password:
        settings |= {"requirepass": quoted(password), "masterauth": quoted(password)}
    else:
        settings["protected-mode"] = "no"  # it is at a loopback address
    return launched(process.ending_with_this([server_program(), "-"]), settings, folder / "log")


def _answers(url: str) -> bool:
    with suppress(ServerError), Client(url, patience_s=0.0) as client:
        return bool(client.call("PING"))
    return False


def _end(node: ChildProcess) -> None:
    node.terminate()
    try:
        node.wait(_END_S)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()


def _refusal(address: Address) -> str:
    """Return why nothing can listen at an address and at its bus; "" if something can."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    for port in (address.port, address.port + _BUS):
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            try:
                probe.bind((address.host, port))
            except OSError as error:
                return str(error.strerror).lower()
    return ""


def of_url(url: str, password: str | None) -> tuple[Address, str | None]:
    """Return the address of the node that --join names, and the password: the URL's own, or else `password`.

    Raises InvalidSetting for a URL that names no node over TCP, or a host that is unknown.
    """
    settings = connection_settings(url)
    if not url.startswith("redis://") or settings.get("db") or settings.get("username"):
        raise InvalidSetting(
            f"--join wants redis://HOST:PORT of a node, not {redacted(url)}: nodes are joined over TCP without TLS, "
            f"with the password of the default user"
        )
    host = str(settings.get("host", "localhost"))
    addresses = sorted(addresses_of(host))
    if not addresses:
        raise InvalidSetting(f"--join {redacted(url)}: the host {host} is unknown")
    return Address(addresses[0], int(settings.get("port", 6379))), settings.get("password") or password
