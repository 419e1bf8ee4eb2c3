"""A small client for machines without redis-cli: it sends commands and prints the replies as redis-cli does.

On a terminal, strings are quoted and lists numbered. Into a pipe or a file, the values are written byte for byte.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from redis.exceptions import AuthenticationError, RedisError

from kvps.connection.resp import packed
from kvps.connection.sockets import KINDS, ClientRefused, connection_settings, no_server, redacted, too_many_clients
from kvps.errors import InvalidSetting, KvpsError, NoServer, ServerLost

with suppress(ImportError):
    import readline  # noqa: F401  gives input() a history and line editing

_EMPTY = {"*": "(empty array)", "~": "(empty set)", "%": "(empty hash)", ">": "(empty push)"}
_MARKS = {"*": ")", "~": "~", "%": "#", ">": ")"}
_BOOLEANS = {b"t": "(true)", b"f": "(false)"}
_NUMBERS = {":": "(integer) ", "(": "(integer) ", ",": "(double) "}
_ESCAPED = {**{byte: f"\\x{byte:02x}" for byte in range(256)}, **{byte: chr(byte) for byte in range(32, 127)}}
_ESCAPED |= {ord(char): f"\\{name}" for char, name in zip('\\"\n\r\t\a\b', '\\"nrtab', strict=True)}
_STREAMED = ("MONITOR", "SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE")  # these send replies without end


@dataclass(frozen=True)
class Reply:
    """One RESP reply: `kind` is its first byte ("_" for null), `items` are the elements of a list, set or map."""

    kind: str
    value: bytes = b""
    items: Sequence[Reply] = ()


@dataclass
class Options:
    """The options before the command, and the command as `words`. With `raw` None, only a terminal is not raw."""

    protocol: int = 2
    raw: bool | None = None
    scan: bool = False
    pattern: str = "*"
    words: list[str] = field(default_factory=list)


def run(url: str, arguments: Sequence[str]) -> None:
    """Send the command in `arguments`, or without one each line of stdin, and print the replies.

    Raises InvalidSetting for an option that only redis-cli knows, NoServer, ServerLost.
    """
    options = parse(arguments)
    raw = not sys.stdout.isatty() if options.raw is None else options.raw
    with closing(_Connection(url, options.protocol)) as connection:
        if options.scan:
            for key in connection.scan(options.pattern):
                _show(key, raw)
        elif options.words:
            _ask(connection, options.words, raw)
        else:
            for line in _typed(f"{redacted(url)}> "):
                _ask_line(connection, line, raw)


def parse(arguments: Sequence[str]) -> Options:
    """Parse the options and the command. Raises InvalidSetting for an option that only redis-cli knows."""
    options, rest = Options(), list(arguments)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in ("-2", "-3"):
            options.protocol = int(option[1])
        elif option in ("--raw", "--no-raw"):
            options.raw = option == "--raw"
        elif option == "--scan":
            options.scan = True
        elif option == "--pattern" and rest:
            options.pattern = rest.pop(0)
        else:
            raise InvalidSetting(
                f"kvps cli {option} needs redis-cli or valkey-cli on the PATH: install one (apt install redis-tools), "
                f"or use -2, -3, --raw, --no-raw, --scan and --pattern P only"
            )
    options.words = rest
    return options


class _Connection:
    """One connection. redis-py opens it with the URL's password, user, database and certificates."""

    def __init__(self, url: str, protocol: int) -> None:
        # Not a client name of kvps: the private server must not keep running for a user who only looks.
        settings = connection_settings(url) | {"protocol": protocol, "client_name": "cli", "socket_timeout": None}
        del settings["max_connections"]
        self._url = url
        self._connection = cast(Any, KINDS[url.split(":", 1)[0]](**settings))
        try:
            self._connection.connect()
        except AuthenticationError as error:
            raise NoServer(f"{redacted(url)} refuses the login: {error}") from None
        except ClientRefused:
            raise too_many_clients(url) from None
        except RedisError as error:
            raise no_server(url, error) from None
        self._stream: BinaryIO = self._connection._sock.makefile("rb")

    def ask(self, *words: str) -> Iterator[Reply]:
        """Yield the reply to a command, or each reply to a command that streams. Raises ServerLost."""
        try:
            self._connection.send_packed_command([packed(words)])
            yield read(self._stream)
            while words[0].upper() in _STREAMED:
                yield read(self._stream)
        except (RedisError, OSError) as error:
            raise ServerLost(f"{redacted(self._url)} has closed the connection ({error})") from None

    def scan(self, pattern: str) -> Iterator[Reply]:
        """Yield the name of each key that matches. Raises KvpsError if the server answers with an error."""
        cursor = "0"
        while True:
            (reply,) = self.ask("SCAN", cursor, "MATCH", pattern, "COUNT", "1000")
            if reply.kind != "*":
                raise KvpsError(f"{redacted(self._url)} answers: {reply.value.decode(errors='replace')}")
            yield from reply.items[1].items
            cursor = reply.items[0].value.decode()
            if cursor == "0":
                return

    def close(self) -> None:
        self._stream.close()
        self._connection.disconnect()


def read(stream: BinaryIO) -> Reply:
    """Read the next reply, in RESP2 or RESP3. Raises ConnectionError if the stream ends first."""
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("in the middle of a reply")
    kind, rest = chr(line[0]), line[1:-2]
    if rest == b"-1" and kind in "$*":
        return Reply("_")
    if kind in "$=!":
        value = stream.read(int(rest) + 2)[:-2]
        if len(value) < int(rest):
            raise ConnectionError("in the middle of a reply")
        return Reply("-" if kind == "!" else kind, value[4:] if kind == "=" else value)
    if kind in _EMPTY:
        count = int(rest) * (2 if kind == "%" else 1)
        return Reply(kind, items=[read(stream) for _ in range(count)])
    return Reply(kind, rest)


def pretty(reply: Reply, indent: int = 0) -> str:
    """Format a reply as redis-cli does on a terminal. Lines after the first are indented by `indent` columns."""
    text = reply.value.decode(errors="backslashreplace")
    if reply.kind == "$":
        return f'"{"".join(_ESCAPED[byte] for byte in reply.value)}"'
    if reply.kind == "-":
        return f"(error) {text}"
    if reply.kind == "_":
        return "(nil)"
    if reply.kind == "#":
        return _BOOLEANS[reply.value]
    if reply.kind in _EMPTY:
        return _numbered(reply, indent) if reply.items else _EMPTY[reply.kind]
    return f"{_NUMBERS.get(reply.kind, '')}{text}"


def _numbered(reply: Reply, indent: int) -> str:
    step = 2 if reply.kind == "%" else 1
    width, lines = len(str(len(reply.items) // step)), list[str]()
    for number, at in enumerate(range(0, len(reply.items), step), 1):
        head = f"{number:>{width}}{_MARKS[reply.kind]} "
        inside = indent + len(head)
        entry = pretty(reply.items[at], inside)
        if step == 2:
            value = reply.items[at + 1]
            entry += f" => \n{' ' * inside}" if value.items else " => "
            entry += pretty(value, inside)
        lines.append(head + entry)
    return f"\n{' ' * indent}".join(lines)


def raw_bytes(reply: Reply) -> bytes:
    """Format a reply as redis-cli does into a pipe: the values alone, one a line."""
    if reply.kind == "#":
        return _BOOLEANS[reply.value].encode()
    if reply.kind == "%":
        pairs = zip(reply.items[::2], reply.items[1::2], strict=True)
        return b"\n".join(b" ".join(map(raw_bytes, pair)) for pair in pairs)
    return b"\n".join(map(raw_bytes, reply.items)) if reply.kind in _EMPTY else reply.value


def _typed(prompt: str) -> Iterator[str]:
    """Yield the lines of a terminal or a pipe, until they end or one is quit or exit."""
    while True:
        try:
            line = input(prompt) if sys.stdin.isatty() else input()
        except EOFError:
            return
        if line.strip().lower() in ("quit", "exit"):
            return
        yield line


def _ask_line(connection: _Connection, line: str, raw: bool) -> None:
    try:
        words = shlex.split(line)
    except ValueError:  # an unclosed quote
        print("Invalid argument(s)", flush=True)
        return
    if words:
        _ask(connection, words, raw)


def _ask(connection: _Connection, words: Sequence[str], raw: bool) -> None:
    for reply in connection.ask(*words):
        _show(reply, raw)


def _show(reply: Reply, raw: bool) -> None:
    output = cast(BinaryIO, sys.stdout.buffer)
    output.write((raw_bytes(reply) if raw else pretty(reply).encode()) + b"\n")
    output.flush()
