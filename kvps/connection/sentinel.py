"""Finds the master of servers that Sentinels watch: the URL `redis+sentinel://HOST,HOST,HOST/NAME`.

A new connection asks the Sentinels where the master is, and the server whether it is one, as Sentinel's guideline for
clients says. So after a failover, which cuts the connections, the next ones lead to the new master.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError
from redis.retry import Retry

SCHEMES = ("redis+sentinel", "rediss+sentinel")
_PORT = 26379
_ANSWER_S = 1.0  # a Sentinel that is silent for longer is passed over
_OWN = {"sentinel_username": "username", "sentinel_password": "password"}


class NoMaster(RedisConnectionError):
    """No Sentinel answers, or none knows a master of that name: no failover is under way that would change this."""


def is_watched(url: str) -> bool:
    """Return whether a URL names Sentinels, and not a server."""
    return url.split(":", 1)[0] in SCHEMES


def split(url: str) -> tuple[str, Sentinels]:
    """Return the plain URL with a Sentinel URL's login, database and options; and its Sentinels.

    Raises ValueError for one that is malformed.
    """
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    name, _, database = parts.path.removeprefix("/").partition("/")
    if not name or not hosts:
        raise ValueError("a Sentinel URL has hosts and the name of a master")
    query = parse_qsl(parts.query, keep_blank_values=True)
    own = {_OWN[option]: value for option, value in query if option in _OWN}
    sentinels = Sentinels([_place(host) for host in hosts.split(",")], unquote(name), own)
    kept = urlencode([pair for pair in query if pair[0] not in _OWN])
    return f"{parts.scheme.removesuffix('+sentinel')}://{login}{at}sentinel/{database}?{kept}", sentinels


def _place(text: str) -> tuple[str, int]:
    """Return host and port. Raises ValueError."""
    place = urlsplit(f"//{text}")
    if not place.hostname:
        raise ValueError("a Sentinel has a host")
    return place.hostname, place.port or _PORT


class Sentinels:
    """The Sentinels of one URL. May be used from several threads; keeps no connection.

    redis-py's own class for this does not tell a name that no Sentinel knows from Sentinels that do not answer.
    """

    def __init__(self, places: list[tuple[str, int]], name: str, login: Mapping[str, str]) -> None:
        self.places = places
        self._name = name
        self._settings: dict[str, Any] = {
            "socket_timeout": _ANSWER_S,
            "socket_connect_timeout": _ANSWER_S,
            "protocol": 2,
            "decode_responses": True,
            "retry": Retry(NoBackoff(), 0),
            **login,
        }

    def __str__(self) -> str:
        return f"{self._name} of {_listed(self.places)}"

    def trust(self, settings: Mapping[str, Any]) -> None:
        """Ask over TLS, with the files that `settings` name for the server."""
        tls = {name: value for name, value in settings.items() if name.startswith("ssl_")}
        self._settings |= {"ssl": True, **tls}

    def master(self) -> tuple[str, int]:
        """Return where the master is, as the first Sentinel says that answers. Raises NoMaster."""
        host, port = self._reply("SENTINEL GET-MASTER-ADDR-BY-NAME")
        return str(host), int(port)

    def replicas(self) -> int:
        """Return how many replicas a Sentinel knows, also those that do not answer now. Raises NoMaster."""
        return len(self._reply("SENTINEL REPLICAS"))

    def _reply(self, command: str) -> Any:
        """Return what the first Sentinel answers that knows the master."""
        asked, ignorant, silent = list(self.places), [], ""
        for place in asked:
            try:
                with redis.Redis(host=place[0], port=place[1], **self._settings) as sentinel:
                    reply = cast(Any, sentinel).execute_command(command, self._name)
            except RedisError as error:
                silent = str(error)
                continue
            if reply is not None:
                # The next connection asks this one first, and does not wait again for those that are silent.
                self.places = [place, *(other for other in asked if other != place)]
                return reply
            ignorant.append(place)
        if ignorant:
            raise NoMaster(f"no Sentinel knows a master named {self._name!r} at {_listed(ignorant)}")
        raise NoMaster(f"no Sentinel answers at {_listed(asked)}: {silent}")


def _listed(places: list[tuple[str, int]]) -> str:
    return ", ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in places)


class ToMaster:
    """Mixed into a kind of connection: it connects to the present master, wherever that is."""

    host: str
    port: int
    _sock: Any

    def __init__(self, sentinels: Sentinels, **settings: Any) -> None:
        self._sentinels = sentinels
        super().__init__(**settings)

    def connect(self) -> None:
        """Ask for the master, connect to it, and make sure that it is one. Raises NoMaster, and redis-py's errors."""
        if self._sock is not None:
            return
        self.host, self.port = self._sentinels.master()
        below = cast(Any, super())
        below.connect()
        below.send_command("HELLO")  # every user may greet; INFO is a right
        if b"master" not in self.read_response():
            below.disconnect()
            raise self._demoted()

    def read_response(self, *args: Any, **named: Any) -> Any:
        try:
            return cast(Any, super()).read_response(*args, **named)
        except ReadOnlyError:  # the master has become a replica behind this connection
            raise self._demoted() from None

    def _error(self, line: str) -> RedisError:
        error: RedisError = cast(Any, super())._error(line)
        if isinstance(error, ReadOnlyError) or "-READONLY " in line:
            raise self._demoted()
        return error

    def _demoted(self) -> RedisConnectionError:
        return RedisConnectionError(f"{self.host}:{self.port} is a replica, and no master takes its place yet")
