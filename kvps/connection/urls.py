"""What a server's URL may look like, how it is shown, and that of another node. No part of a password is taken for
something else. Pure."""

from __future__ import annotations

import re

from kvps.connection.slots import Address

_LOGIN = r"(?:[^/?#]*@)?"  # the last @ before a / ends it
_OPTIONS = r"(?:\?[^@#]*)?"
_FORMS = {
    "redis": rf"{_LOGIN}[^@/?#]*(?:/\d*)?{_OPTIONS}",
    "unix": rf"{_LOGIN}/[^?#]*{_OPTIONS}",
    "sentinel": rf"{_LOGIN}[^@/?#]*/[^@/?#]+(?:/\d*)?{_OPTIONS}",
}


def check_form(url: str) -> None:
    """Raise ValueError for a URL with characters that end one of its parts where the user meant a password, as # does.

    urllib would take the rest for a path, an option or a fragment, and what stands before it for a host and a port.
    """
    scheme, _, rest = url.partition("://")
    kind = "sentinel" if scheme.endswith("+sentinel") else scheme.replace("rediss", "redis")
    if kind not in _FORMS or not re.fullmatch(_FORMS[kind], rest) or not url.isprintable():
        raise ValueError("not the form of a Redis URL")


def redacted(url: str) -> str:
    """Return the URL without its password, for messages. It may hide too much: the last @ ends the password."""
    shown = re.sub(r"(://[^:/?]*):.*@", r"\1:***@", url)
    return re.sub(r"(password=)[^&]*", r"\1***", shown)


def at_node(url: str, address: Address) -> str:
    """Return the URL of another node of the cluster that `url` is a node of."""
    scheme, user, rest = re.fullmatch(r"(\w+://)([^/?]*@)?[^/?]*(.*)", url).groups("")  # type: ignore[union-attr]
    return f"{scheme}{user}{address}{rest}"
