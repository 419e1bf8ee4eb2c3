"""A small client for machines without redis-cli: it sends commands and prints each value of a reply on a line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from redis.exceptions import AuthenticationError, RedisError, ResponseError

from kvps.connection.server_errors import no_server, too_many_clients
from kvps.connection.sockets import KINDS, ClientRefused, connection_settings
from kvps.connection.urls import redacted
from kvps.errors import InvalidSetting, KvpsError, NoServer, ServerLost

with suppress(ImportError):
    import readline  # noqa: F401  gives input() a history and line editing


@dataclass
class Options:
    """The options before the command, and the command as `words`."""

    protocol: int = 2
    scan: bool = False
    pattern: str = "*"
    words: list[str] = field(default_factory=list)


def run(url: str, arguments: Sequence[str]) -> None:
    """Send the command in `arguments`, or without one each line of stdin, and print the replies as redis-cli does into
    a pipe: each value is written byte for byte, and a line break after it.

    Raises InvalidSetting for an option that only redis-cli knows, NoServer, ServerLost.
    """
    options = parse(arguments)
    connection = _connected(url, options.protocol)
    try:
        if options.scan:
            for key in _scanned(connection, options.pattern):
                _show(key)
        elif options.words:
            _show(_ask(connection, *options.words))
        else:
            for words in _typed(f"{redacted(url)}> "):
                _show(_ask(connection, *words))
    except (RedisError, OSError) as error:
        raise ServerLost(f"{redacted(url)} has closed the connection ({error})") from None
    finally:
        connection.disconnect()


def parse(arguments: Sequence[str]) -> Options:
    """Parse the options and the command. Raises InvalidSetting for an option that only redis-cli knows."""
    options, rest = Options(), list(arguments)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in ("-2", "-3"):
            options.protocol = int(option[1])
        elif option == "--scan":
            options.scan = True
        elif option == "--pattern" and rest:
            options.pattern = rest.pop(0)
        elif option != "--raw":  # the only form that there is
            raise InvalidSetting(
                f"kvps cli {option} needs redis-cli or valkey-cli on the PATH: install one (apt install redis-tools), "
                f"or use -2, -3, --raw, --scan and --pattern P only"
            )
    options.words = rest
    return options


def _connected(url: str, protocol: int) -> Any:
    """Return redis-py's connection with the URL's password, user, database and certificates."""
    # Not a client name of kvps: the private server must not keep running for a user who only looks.
    settings = connection_settings(url) | {"protocol": protocol, "client_name": "cli", "socket_timeout": None}
    del settings["max_connections"]
    connection = cast(Any, KINDS[url.split(":", 1)[0]](**settings))
    try:
        connection.connect()
    except AuthenticationError as error:
        raise NoServer(f"{redacted(url)} refuses the login: {error}") from None
    except ClientRefused:
        raise too_many_clients(url) from None
    except RedisError as error:
        raise no_server(url, error) from None
    return connection


def _ask(connection: Any, *words: str) -> Any:
    """Return the reply, in Python's types; an error that the server answers is a reply too."""
    connection.send_command(*words)
    try:
        return connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return str(error).encode()


def _scanned(connection: Any, pattern: str) -> Iterator[bytes]:
    """Yield the name of each key that matches. Raises KvpsError if the server answers with an error."""
    cursor = b"0"
    while True:
        reply = _ask(connection, "SCAN", cursor.decode(), "MATCH", pattern, "COUNT", "1000")
        if isinstance(reply, bytes):
            raise KvpsError(f"the server answers: {reply.decode(errors='replace')}")
        cursor, keys = reply
        yield from keys
        if cursor == b"0":
            return


def _typed(prompt: str) -> Iterator[list[str]]:
    """Yield the words of each line of a terminal or a pipe, until they end or a line is quit or exit."""
    while True:
        try:
            words = shlex.split(input(prompt) if sys.stdin.isatty() else input())
        except EOFError:
            return
        except ValueError:
            print("Invalid argument(s)", flush=True)
            continue
        if words and words[0].lower() in ("quit", "exit"):
            return
        if words:
            yield words


def _show(reply: Any) -> None:
    sys.stdout.buffer.write(_line(reply) + b"\n")
    sys.stdout.buffer.flush()


def _line(reply: Any) -> bytes:
    """Return the values of a reply, one a line, and the fields of a map each with its value."""
    if isinstance(reply, dict):
        return b"\n".join(_line(name) + b" " + _line(value) for name, value in reply.items())
    if isinstance(reply, list | tuple | set):
        return b"\n".join(map(_line, reply))
    if isinstance(reply, bytes):
        return reply
    return b"" if reply is None else str(reply).encode()
