"""What a server's URL may look like, so that no part of a password is taken for something else."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress

_LOGIN = r"(?:[^/?#]*@)?"  # the last @ before a / ends it
_OPTIONS = r"(?:\?[^@#]*)?"
_FORMS = {
    "redis": rf"{_LOGIN}[^@/?#]*(?:/\d*)?{_OPTIONS}",
    "unix": rf"{_LOGIN}/[^?#]*{_OPTIONS}",
    "sentinel": rf"{_LOGIN}[^@/?#]*/[^@/?#]+(?:/\d*)?{_OPTIONS}",
}
_PROBE_S = 1.0


def check_form(url: str) -> None:
    """Raise ValueError for a URL with characters that end one of its parts where the user meant a password, as # does.

    urllib would take the rest for a path, an option or a fragment, and what stands before it for a host and a port.
    """
    scheme, _, rest = url.partition("://")
    kind = "sentinel" if scheme.endswith("+sentinel") else scheme.replace("rediss", "redis")
    if kind not in _FORMS or not re.fullmatch(_FORMS[kind], rest) or not url.isprintable():
        raise ValueError("not the form of a Redis URL")


def speaks_plainly(places: Iterable[tuple[str, int]]) -> bool:
    """Return whether a Redis server answers at one of these places without TLS."""
    for place in places:
        with suppress(OSError), socket.create_connection(place, _PROBE_S) as plain:
            plain.sendall(b"PING\r\n")
            return plain.recv(1) in (b"+", b"-")
    return False


def speaks_tls(places: Iterable[tuple[str, int]]) -> bool:
    """Return whether a server that answers at one of these places answers a TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent, and nothing believed
    for place in places:
        try:
            with socket.create_connection(place, _PROBE_S) as plain, context.wrap_socket(plain):
                return True
        except ssl.SSLError as error:
            return "ALERT" in str(error)  # a server that asks for a client certificate
        except OSError:
            continue
    return False
