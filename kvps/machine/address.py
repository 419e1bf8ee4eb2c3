"""The addresses of machines: the one at which others reach this one, and whose an address is."""

from __future__ import annotations

import ipaddress
import re
import socket

from kvps.errors import InvalidSetting

_ELSEWHERE = {
    socket.AF_INET: "192.0.2.1",
    socket.AF_INET6: "2001:db8::1",
}  # kept for documentation: no machine has them
_HOST = re.compile(r"(?:([A-Za-z0-9._-]+)|\[([0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?)\])(?::[0-9]{1,5})?", re.ASCII)
"""A Host as a browser sends it: a name or an IPv4 address, or an IPv6 address in brackets; then a port. It is no URL:
a parser of URLs finds 127.0.0.1 in `evil.com@127.0.0.1` and in `127.0.0.1#.evil.com`."""


def outward_address(family: socket.AddressFamily = socket.AF_INET) -> str:
    """Return this machine's address on the way to other networks; its name if no way leads there.

    The kernel is asked for the way, and nothing is sent. A name is only the second choice: others may not know it.
    """
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_ELSEWHERE[family], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def addresses_of(host: str) -> set[str]:
    """Return the IP addresses of a host's name, or of an IP address itself; none for a name that is unknown."""
    try:
        return {str(where[0]) for *_, where in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()


def host_and_port(text: str, wanted: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of HOST:PORT. Raises InvalidSetting, which says what is
    `wanted`."""
    host, _, port = text.rpartition(":")
    if not host or re.search(r"\s", host) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise InvalidSetting(f"{wanted}, not {text!r}")
    return host.strip("[]"), int(port)


def name_in(host: str) -> str:
    """Return the name, or the address, in the Host of an HTTP request, in lower case; "" if there is none."""
    match = _HOST.fullmatch(host)
    return (match[1] or match[2]).rstrip(".").lower() if match else ""


def is_address(name: str) -> bool:
    """Return whether this is an IP address: no site can give its pages such a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches an IP address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_of_this_host(host: str) -> bool:
    """Return whether a name or an IP address is this host's: whether the kernel lets a socket listen there."""
    return any(map(_is_bindable, addresses_of(host)))


def _is_bindable(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    except OSError:
        return False
