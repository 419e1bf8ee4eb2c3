"""One node of a cluster on this host: a server process that begins with `started` and ends with its block.

The server reads its settings from its standard input, so that the password stands in no command line and no file. The
kernel ends the server when this process ends in any way (Linux).
"""

from __future__ import annotations

import ipaddress
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from kvps.connection.client import Client
from kvps.connection.slots import Address
from kvps.connection.sockets import connection_settings, redacted
from kvps.errors import InvalidSetting, NoServer, ServerError
from kvps.machine import process
from kvps.machine.address import addresses_of
from kvps.machine.files import private
from kvps.machine.paths import private_directory, server_program

MOST_PORT = 55_535
"""The highest port of a node: its bus, over which nodes talk to each other, has the port 10,000 above."""
_BUS = 10_000
_NODES = "nodes.conf"  # in which a node keeps what it knows of its cluster
_LEAST_PORT = 20_000  # of the ports from which a free one is chosen
_START_S = 15.0
_LOAD_S = 600.0  # a server with data loads it first
_END_S = 60.0
_CONNECT_S = 5.0
_LOOK_AGAIN_S = 0.02


def parse_listen(text: str) -> Address:
    """Return the address that --listen names. Raises InvalidSetting."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or any(c.isspace() for c in host):
        raise InvalidSetting(f"--listen wants HOST:PORT, as in 10.0.0.1:6379, not {text!r}")
    if not 0 < int(port) <= MOST_PORT:
        raise InvalidSetting(
            f"--listen wants a port from 1 to {MOST_PORT}, because nodes use the port 10,000 above too"
        )
    found = sorted(addresses_of(host.strip("[]")))
    if not found or ipaddress.ip_address(found[0]).is_unspecified:
        raise InvalidSetting(f"--listen wants the address by which other hosts reach this one, not {host}")
    return Address(found[0], int(port))


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
        if not _refusal(found := Address(host, port)):
            return found
    raise InvalidSetting(f"{host} has no free port for a node: give one with --listen {host}:PORT")


def is_in_cluster(data_dir: Path | None) -> bool:
    """Return whether a node that has kept its files there knows other nodes."""
    try:
        lines = (data_dir / _NODES).read_text().splitlines() if data_dir else []
    except OSError:
        return False
    return sum("@" in line for line in lines) > 1


def is_loopback(address: Address) -> bool:
    """Return whether only this host reaches the address."""
    return ipaddress.ip_address(address.host).is_loopback


def url_of(address: Address, password: str | None) -> str:
    """Return the URL of a node."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    login = f":{quote(password, safe='')}@" if password else ""
    return f"redis://{login}{host}:{address.port}"


@contextmanager
def started(address: Address, password: str | None, data_dir: Path | None) -> Iterator[subprocess.Popen[bytes]]:
    """Start a node, and end it after the block. With `data_dir` it comes back with its slots and its data.

    Raises NoServer if it does not start.
    """
    check_free(address)
    if data_dir:
        private_directory(data_dir, ", or give --data-dir another")
    folder = data_dir.resolve() if data_dir else Path(tempfile.mkdtemp(prefix="kvps-host-"))
    try:
        node = _launched(address, password, folder, keeps=bool(data_dir))
        try:
            _await_answer(node, url_of(address, password), folder / "log", _LOAD_S if data_dir else _START_S)
            yield node
        finally:
            _end(node)
    finally:
        if not data_dir:
            shutil.rmtree(folder, ignore_errors=True)


def _launched(address: Address, password: str | None, folder: Path, keeps: bool) -> subprocess.Popen[bytes]:
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
        "dir": _quoted(str(folder)),
        "daemonize": "no",
    }
    if password:
        settings |= {"requirepass": _quoted(password), "masterauth": _quoted(password)}
    else:
        settings["protected-mode"] = "no"  # it is at a loopback address
    text = "".join(f"{name} {value}\n" for name, value in settings.items()).encode()
    command = process.ending_with_this([server_program(), "-"])
    with open(folder / "log", "w", opener=private) as log:
        # In a session of its own: Ctrl-C in the terminal must reach the server only when it has given up its slots.
        node = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, umask=0o077
        )
    assert node.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, and its log says why
        node.stdin.write(text)
        node.stdin.close()
    return node


def _quoted(text: str) -> str:
    """Return a text as one word of the server's configuration; a control character would end the line."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'


def _await_answer(node: subprocess.Popen[bytes], url: str, log: Path, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    with Client(url, patience_s=_LOOK_AGAIN_S) as client:
        while node.poll() is None and time.monotonic() < deadline:
            with suppress(ServerError):
                client.call("PING")
                return
            time.sleep(_LOOK_AGAIN_S)
    raise NoServer(f"the node could not be started: {last_words(log) or 'it does not answer'}")


def last_words(log: Path) -> str:
    """Return the last lines of a server's log, as one line."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "; ".join(re.sub(r"^\d+:.*? [#*-] ", "", line).strip() for line in lines[-2:] if line.strip())


def _end(node: subprocess.Popen[bytes]) -> None:
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
    found = sorted(addresses_of(host))
    if not found:
        raise InvalidSetting(f"--join {redacted(url)}: the host {host} is unknown")
    return Address(found[0], int(settings.get("port", 6379))), settings.get("password") or password
