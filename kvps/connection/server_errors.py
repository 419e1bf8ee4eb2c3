"""What the errors of a server mean: which of them pass, what is waited for, and how they are said to a user."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis.exceptions import (
    AskError,
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvps.connection import sentinel
from kvps.connection.credentials import CA, CERTIFICATE, over_tls, tls_context
from kvps.connection.replicas import NotReplicated
from kvps.connection.sockets import CONNECTION_CUT, ClientRefused, ReplyCut, Untrusted, connection_settings
from kvps.connection.urls import redacted
from kvps.errors import (
    CorruptData,
    NoServer,
    NotPermitted,
    ServerError,
    ServerFull,
    ServerLost,
    ServerUnfit,
    TooManyClients,
    shown,
    some_of,
)

_UNKNOWN = re.compile(r"unknown command [`']?([\w|]+)|Unknown (?:Redis )?command called from")
_REFUSED = re.compile(r"run the '([\w|]+)' command")
_IN_SCRIPT = re.compile("ACL failure in script|The user executing the script can't")
_PROBE_S = 1.0
_PASSING = ("BUSY ", "NOREPLICAS", "MISCONF", "UNBLOCKED ")  # the last: its master became a replica meanwhile
_PASSING_ERRORS = (ClusterDownError, TryAgainError, AskError)  # a MasterDownError and a MovedError too


def reason(error: RedisError) -> str:
    """Return for what a server is waited for that has met a call with this error."""
    if isinstance(error, NotReplicated):
        return str(error)
    if isinstance(error, ClientRefused):
        return "it takes no more clients"
    if isinstance(error, ReplyCut):
        return "it cuts replies off"
    if isinstance(error, Untrusted):
        return "it does not prove that it is this server"
    if isinstance(error, CONNECTION_CUT):
        return "all connections are in use" if _no_connection_left(error) else "no answer"
    return "its memory is full" if full(error) else f"it answers {shown(str(error))}"


def too_many_clients(url: str, allowed: int | None = None) -> TooManyClients:
    """Return the error that users get for ClientRefused. `allowed` is the server's maxclients, if that is known."""
    has = (
        "as many clients as its maxclients allows"
        if allowed is None
        else f"as many clients as its maxclients, {allowed}"
    )
    return TooManyClients(
        f"{redacted(url)} refused one more connection: it has {has}; raise that (CONFIG SET maxclients N), or end "
        f"processes that use it"
    )


def no_server(url: str, error: Exception, announced: bool = False) -> ServerError:
    """Return the error that users get if a first connection fails. `announced`: to an address that a cluster named."""
    where, why = redacted(url), str(error)
    scheme, places = url.partition(":")[0], _places(url)
    if isinstance(error, Untrusted) and "mismatch" in why and (names := _certified(error.place, url)):
        return _misnamed(url, error.place[0], some_of(names), announced)
    if over_tls(url) and _speaks_plainly(places):
        return NoServer(f"what answers at {where} does not speak TLS: write {scheme.replace('rediss', 'redis')}://")
    if not over_tls(url) and not isinstance(error, RedisTimeoutError) and _speaks_tls(places):
        return NoServer(f"what answers at {where} speaks TLS: write {scheme.replace('redis', 'rediss')}://")
    if untrusted := re.search(r"certificate verify failed: (.*?)\.? \(_ssl", why):
        return NoServer(
            f"{where} does not prove that it is this server ({untrusted[1]}): it needs a valid certificate for the "
            f"host name in the URL, of an authority that this machine or --tls-ca ({CA}) trusts"
        )
    advice, path = "start it, or check the URL", connection_settings(url).get("path")
    if path and not Path(path).parent.is_dir():
        advice = (
            f"{Path(path).parent} is not there. If it was deleted, who is connected goes on, but nobody else can join"
        )
    if over_tls(url) and "ssl_certfile" not in connection_settings(url):
        advice += f"; if it asks for a client certificate, name one with --tls-cert ({CERTIFICATE})"
    return NoServer(f"no Redis server answers at {where} ({why}): {advice}")


def _misnamed(url: str, host: str, names: str, announced: bool) -> ServerError:
    """Return the error for a server whose certificate has other names than the one that it was reached by."""
    where, fact = redacted(url), f"its certificate is for {names}, and not for {host}"
    other = f"or give it a certificate for {host} too"
    if announced:
        return ServerUnfit(
            f"{where} is where the cluster says that a node is, but {fact}: have each node announce the name of its "
            f"certificate (cluster-announce-hostname NAME, cluster-preferred-endpoint-type hostname), {other}"
        )
    if sentinel.is_watched(url):
        return ServerUnfit(
            f"the Sentinels at {where} name the master {host}, but {fact}: have them know all servers by their names "
            f"(resolve-hostnames yes, announce-hostnames yes, replica-announce-ip NAME), {other}"
        )
    return NoServer(f"{where} does not prove that it is this server: {fact}: write such a name in the URL, {other}")


def _certified(place: tuple[str, int], url: str) -> Sequence[str]:
    """Return the names and addresses that the certificate of a server is for; none if no authority proves it."""
    context = tls_context(connection_settings(url))
    context.load_default_certs()
    context.check_hostname = False  # nothing is sent
    with suppress(OSError), socket.create_connection(place, _PROBE_S) as plain, context.wrap_socket(plain) as proved:
        certificate: dict[str, Any] = proved.getpeercert() or {}
        return [name for _, name in certificate.get("subjectAltName", ())]
    return []


def _places(url: str) -> Sequence[tuple[str, int]]:
    """Return the places of a URL that are reached over TCP."""
    settings = connection_settings(url)
    if "path" in settings:
        return []
    sentinels = settings.get("sentinels")
    return sentinels.places if sentinels else [(settings.get("host", "localhost"), int(settings.get("port", 6379)))]


def _speaks_plainly(places: Iterable[tuple[str, int]]) -> bool:
    """Return whether a Redis server answers at one of these places without TLS."""
    for place in places:
        with suppress(OSError), socket.create_connection(place, _PROBE_S) as plain:
            plain.sendall(b"PING\r\n")
            return plain.recv(1) in (b"+", b"-")
    return False


def _speaks_tls(places: Iterable[tuple[str, int]]) -> bool:
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


def lost(error: Exception, where: str, waited: str, most_connections: int) -> ServerLost:
    """Return the error that users get when a server has not answered for so long."""
    if isinstance(error, NotReplicated):
        return ServerLost(
            f"{error} (at {where}, for {waited}): {error.remedy}; or go on in a new job (kvps checkpoint restore)"
        )
    if _no_connection_left(error):
        return ServerLost(
            f"all connections to {where} that max_connections={most_connections} in its URL allows were in "
            f"use for {waited}: raise that, or have fewer sessions in one process"
        )
    if isinstance(error, ReplyCut):
        return ServerLost(
            f"{where} has cut replies off for {waited}: have its administrator look at client-output-buffer-limit, "
            f"which must let a client have much to read (normal 0 0 0), and at the network in between"
        )
    return ServerLost(
        f"no answer from {where} for {waited} ({error}): what was acknowledged is as safe as that server's data"
    )


def refused(error: ResponseError, where: str, waited: str, eviction: Callable[[], str]) -> Exception:
    """Return the error that users get for one that the server has answered, if it still does after so long. `eviction`
    returns what a server that has evicted keys has done, else ""."""
    if isinstance(error, NoScriptError):
        return error
    if full(error):
        remedy = eviction() or "raise its maxmemory, or remove jobs (kvps rm)"
        return ServerFull(f"{where} is out of memory and refused it: {remedy}")
    if isinstance(error, TryAgainError):
        return ServerError(
            f"{where} is still moving a slot to another node after {waited}: have that ended (redis-cli --cluster fix)"
        )
    if _read_only(error):
        return ServerError(f"{where} is a replica and cannot be written: give the URL of its primary")
    if not_permitted(error):
        return NotPermitted(f"{where} does not let this user {_right(error)}")
    if unknown := _UNKNOWN.search(str(error)):
        command = unknown[1].upper() if unknown[1] else "a command of its scripts"
        return ServerUnfit(
            f"{where} does not know {command}, which kvps needs: it is renamed or disabled there "
            f"(rename-command in redis.conf), or this is another server than Redis or Valkey"
        )
    if _in_script(error) and (why := eviction()):
        return CorruptData(f"a script at {where} does not find a key that must be there: {why}")
    return ServerError(f"{where} answers: {error}")


def _no_connection_left(error: Exception) -> bool:
    return str(error) == "Too many connections"  # redis-py before 6.3 has no class for it


def passing(error: ResponseError) -> bool:
    """Return whether the same command may be answered later: when memory is freed, or a failover or a script ends."""
    if isinstance(error, _PASSING_ERRORS):
        return True
    return full(error) or _read_only(error) or str(error).startswith(_PASSING)


# Redis 6.2 wraps the refusal of a command inside a script in an error of the script: hence the search in the text.


def full(error: RedisError) -> bool:
    """Return whether the server's memory is full."""
    return isinstance(error, OutOfMemoryError) or "-OOM " in str(error)


def not_permitted(error: ResponseError) -> bool:
    """Return whether this user may not do that."""
    return isinstance(error, NoPermissionError) or bool(_IN_SCRIPT.search(str(error)))


def _right(error: ResponseError) -> str:
    """Return what a user may not do, and which right it needs."""
    if command := _REFUSED.search(str(error)):
        return f"run {command[1].upper()}: use a user whose role may (kvps acl), or give it +{command[1]}"
    if isinstance(error, NoPermissionError):
        return f"do that ({error}): use a user whose role may (kvps acl)"
    return "run every command of kvps's scripts: use a user whose role may (kvps acl), or give it +info, which all run"


def is_unknown(error: ResponseError) -> bool:
    """Return whether the server does not know a command."""
    return bool(_UNKNOWN.search(str(error)))


def _in_script(error: ResponseError) -> bool:
    return "user_script" in str(error)


def _read_only(error: ResponseError) -> bool:
    return isinstance(error, ReadOnlyError) or "-READONLY " in str(error)
