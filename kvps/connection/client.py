"""A client of one Redis server: commands that are repeated while it is away, chunks, and waits for stream entries.

redis-py's retries are off. Only what may be repeated blindly goes through `Client.call`: reads, SETs of immutable
names, and scripts that answer a repeat with their first answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvps.arrays.digest import Buffers
from kvps.connection import patience, sentinel
from kvps.connection.patience import Retries
from kvps.connection.queries import Queries
from kvps.connection.replicas import ASK_ATTACHED, NONE, Attached, Copies, in_step
from kvps.connection.resp import Command, granted
from kvps.connection.server_errors import (
    full,
    is_unknown,
    lost,
    no_server,
    not_permitted,
    passing,
    reason,
    refused,
    too_many_clients,
)
from kvps.connection.server_info import EXPIRING_KEY, check_fit, greeting_as_info, policy_of, reply_limit
from kvps.connection.slots import keys_of
from kvps.connection.sockets import (
    CONNECTION_CUT,
    ArrayPool,
    ClientRefused,
    Put,
    ReplyCut,
    Stored,
    Untrusted,
    connection_settings,
)
from kvps.connection.urls import redacted
from kvps.errors import KvpsError, NoServer, ServerError, ServerLost, ServerUnfit, counted
from kvps.machine.fork import ProcessOwner
from kvps.parsing import bytes_text

if TYPE_CHECKING:  # one server's clients do not load it
    from kvps.connection.cluster_pool import ClusterPool

log = logging.getLogger("kvps.server")

WAIT_MS = 1000  # the longest wait before another look at the state
_FIRST_S = 0.2  # for a first connection where nothing may be: the user may have mistyped the URL
_CUTS = 3  # so many replies in a row that are cut off are no accident
_UNLINK_BATCH = 500
_PREFLIGHT = "kvps:preflight"  # written to see whether this user may write
_MULTI, _EXEC = ("MULTI",), ("EXEC",)

# How redis-py shapes the reply of each command. A plain dict: its own type makes a name upper case at each look.
_SHAPES: Mapping[str, Callable[[Any], Any]] = dict(redis.Redis(protocol=2).response_callbacks)
_T = TypeVar("_T")
_E = TypeVar("_E", bound=KvpsError)


class Client(Queries):
    """A client of one server. May be used from several threads, but only in the process that made it: see `owner`."""

    is_cluster = False
    _announced = False  # whether a cluster has named the server, and not the user
    small_bytes = 256 << 10  # arrays up to this size travel in one request with their command

    def __init__(
        self, url: str, patience_s: float | None = None, why_lost: Callable[[str], str] = lambda url: ""
    ) -> None:
        settings = connection_settings(url)
        self.url = url
        self._where = redacted(url)
        self.owner = ProcessOwner(f"the connection to {self._where}")
        self._arrays = self._connections_to(url)  # shared with the clients that `replicating` returns
        self._patience_s = patience.patience_s() if patience_s is None else patience_s
        self._most_connections = int(settings["max_connections"])
        self._why_lost = why_lost  # for a URL: why no server will ever answer there again, or ""
        self._copies = NONE  # which replicas must have what is stored
        self._maxclients: int | None = None  # None until the server says it
        # BLOCK ends well before the socket's timeout: a reply that came just as that expires would be a cut.
        self._block_ms = int(settings["socket_timeout"] * 500)

    def _connections_to(self, url: str) -> ArrayPool | ClusterPool:
        return ArrayPool(url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._where})"

    def replicating(self, copies: Copies) -> Client:
        """Return this client, but one that takes as stored only what the replicas that `copies` asks for have too."""
        client = copy(self)
        client._copies, client.small_bytes = copies, 0  # WAIT is for what its own connection wrote before
        return client

    def twin(self, patience_s: float) -> Client:
        """Return another client of the same server, which gives up after `patience_s`."""
        return type(self)(self.url, patience_s)

    def node(self, key: str) -> Queries:
        """Return the server that has a key."""
        return self

    def on_masters(self, ask: Callable[[Client], _T]) -> list[_T]:
        """Return the answer of each master; one server is the only one."""
        return [ask(self)]

    def hosts(self) -> list[str]:
        """Return the names or addresses of the hosts of all masters; none over a Unix socket."""
        settings = connection_settings(self.url)
        if "sentinels" in settings:
            return [self._repeat(settings["sentinels"].master)[0]]
        return [] if "path" in settings else [settings.get("host", "localhost")]

    def run_ids(self, keys: Sequence[str]) -> list[str]:
        """Return for each key the run id of the server that has it."""
        return [self.run_id()] * len(keys)

    def unevenness(self, keys: Sequence[str]) -> int:
        """Return how many more of these keys one server has than another."""
        return 0

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._arrays.closed

    def close(self) -> None:
        """Close all connections. A call that uses one on another thread raises ServerLost. Does nothing in a fork."""
        if not self.owner.is_here:
            return
        self._arrays.close()

    # -- commands ---------------------------------------------------------------------------------------------

    def call(self, *command: Any) -> Any:
        return self._repeat(lambda: self._once(*command))

    def together(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies to several reads at one instant (MULTI). Raises ServerLost, ServerError."""
        return self._repeat(lambda: shaped(commands, granted(self._ask([_MULTI, *commands, _EXEC])[-1])))

    def each(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one piece and return the reply to each; for a command that is refused, the error that `call`
        would raise. Raises ServerLost."""
        replies = self._repeat(lambda: self._arrays.exchange(commands)[0])
        return [
            self._refused(reply) if isinstance(reply, ResponseError) else shaped([command], [reply])[0]
            for command, reply in zip(commands, replies, strict=True)
        ]

    def call_safely(self, mark: Command | None, *command: Any) -> Any:
        """Return the reply to a command once the replicas have what it wrote, and what `mark` writes behind it.

        Unless the mark answers OK, return its answer. Raises ServerLost if they do not confirm.
        """

        def run() -> Any:
            copies = self._arrays.copies_of(keys_of(command)[0], self._copies)
            marks = [mark] if mark else []
            reply, *replies = self._ask([command, *marks, *copies.asked()])
            if marks and (marked := replies.pop(0))[0] != "OK":
                return marked
            copies.check(replies)
            return reply

        return self._repeat(run)

    def replicas_with(self, mark: Command, replicas: int, ms: int) -> tuple[Any, int]:
        """Run `mark`, and wait for `ms` at most until so many replicas have its write. Return its answer, and how many
        have it."""
        answer, confirmed = self._repeat(lambda: self._ask([mark, ("WAIT", replicas, ms)]))
        return answer, int(confirmed)

    def attached(self) -> Attached:
        """Return which replicas the server has now, and which others could take its place later."""
        replicas = in_step(self._repeat(lambda: self._ask([ASK_ATTACHED])[0]))
        watch = connection_settings(self.url).get("sentinels")
        known = self._repeat(watch.replicas) if watch else replicas
        return Attached(replicas, replicas, max(0, known - replicas))

    def own_replicas(self, key: str) -> int:
        """Return how many replicas could take the place of the server that has a key, while other keys stay where they
        are."""
        return 0

    def gather(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies to several reads, each at an instant of its own. Raises ServerLost, ServerError."""
        return granted(self.each(commands))

    def _once(self, *command: Any) -> Any:
        return shaped([command], self._ask([command]))[0]

    def _ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one piece and return the replies. Raises the first that is an error."""
        return granted(self._arrays.exchange(commands)[0])

    def wait(self, streams: Mapping[str, str], timeout_ms: int = WAIT_MS) -> dict[str, str]:
        """Wait for an entry after the given ids. Return stream -> the newest id now, {} if none came in time.

        Ends after `timeout_ms` at the latest. A caller that waits longer looks at the state in between, because the
        stream only wakes it, and the hashes are the truth.
        """
        return newest_entries(self.call(*self._wait_command(streams, timeout_ms)))

    def wait_and_read(
        self,
        streams: Mapping[str, str],
        commands: Sequence[Command],
        gets: Sequence[tuple[str, memoryview]] = (),
        timeout_ms: int = WAIT_MS,
    ) -> tuple[dict[str, str], list[Any], bool]:
        """Do `wait`, then `together`, then GETs into their buffers, in one request. Return also whether all GETs found
        their values. The server answers when an entry arrives, so that the caller need not ask any more."""
        asked = [self._wait_command(streams, timeout_ms), _MULTI, *commands, _EXEC]

        def run() -> tuple[dict[str, str], list[Any], bool]:
            replies, filled = self._arrays.exchange(asked, gets)
            arrived, *_, read = granted(replies)
            return newest_entries(shaped(asked[:1], [arrived])[0]), shaped(commands, granted(read)), all(filled)

        return self._repeat(run)

    def _wait_command(self, streams: Mapping[str, str], timeout_ms: int) -> Command:
        block = max(1, min(timeout_ms, self._block_ms))
        return ("XREAD", "BLOCK", block, "STREAMS", *streams.keys(), *streams.values())

    def scan(self, pattern: str) -> Iterator[str]:
        """Return the names of keys that match, found without blocking the server."""
        return iter(self._repeat(lambda: list(self._scan(pattern))))  # a cursor does not outlive its server

    def _scan(self, pattern: str) -> Iterator[str]:
        cursor: int | None = None
        while cursor != 0:
            cursor, keys = self._once("SCAN", cursor or 0, "MATCH", pattern, "COUNT", 1000)
            yield from keys

    def unlink(self, keys: Sequence[str]) -> None:
        """Delete keys, some hundreds in each command, so that the server is never blocked for long."""
        for i in range(0, len(keys), _UNLINK_BATCH):
            self.call("UNLINK", *keys[i : i + _UNLINK_BATCH])

    # -- chunks -----------------------------------------------------------------------------------------------

    def put(self, items: Sequence[tuple[str, Buffers]], wait_for_room: bool = True) -> None:
        """SET each key to its pieces of memory, and wait for every OK. Raises ServerLost, ServerFull, ServerError."""
        self._repeat(lambda: self._put_all(items), room=wait_for_room)

    def put_once(self, items: Sequence[tuple[str, Buffers]], stored: Stored | None = None) -> None:
        """Like `put`, but leave a cut to the caller: raises redis-py's ConnectionError or TimeoutError. By then,
        `stored` was called with each key that has arrived."""
        self._repeat(lambda: self._put_all(items, stored), cuts=False)

    def _put_all(self, items: Sequence[tuple[str, Buffers]], stored: Stored | None = None) -> None:
        with self._arrays.putting(stored, self._copies) as put:
            for key, value in items:
                put(key, value)

    def put_and_call(
        self, items: Sequence[tuple[str, Buffers]], *command: Any, cuts: bool = True, wait_for_room: bool = True
    ) -> Any:
        """SET each key and run a command in one step (MULTI): if a SET is refused, so is the command.

        Without `cuts`, a cut is left to the caller, as with `put_once`.
        """
        asked = [_MULTI, *(("SET", key, list(value)) for key, value in items), command, _EXEC]
        return self._repeat(lambda: granted(self._ask(asked)[-1])[-1], cuts, wait_for_room)

    @contextmanager
    def putting(self, wait_for_room: bool = True, cuts: bool = True, stored: Stored | None = None) -> Iterator[Put]:
        """Yield a `Put`, for values of which further ones are still being computed.

        Values must not change until the block is left; then all are stored. Raises what `put` raises, or without `cuts`
        what `put_once` raises; `stored` is as there.
        """
        items: list[tuple[str, Buffers]] = []
        sending = ExitStack()
        send = self._repeat(lambda: sending.enter_context(self._arrays.putting(stored, self._copies)))

        def put(key: str, value: Buffers) -> None:
            self.owner.check()
            items.append((key, value))
            send(key, value)

        inside: BaseException | None = None
        try:
            with sending:
                try:
                    yield Put(put, send.flush)
                except BaseException as error:
                    inside = error
                    raise
        except RedisError as error:
            if error is inside:
                raise
            if isinstance(error, CONNECTION_CUT) and not cuts:
                raise
            self._repeat(lambda: self._put_all(items, stored), cuts, wait_for_room)

    def get(self, items: Sequence[tuple[str, memoryview]]) -> None:
        """GET each key into its buffer. Raises ChunkGone, ServerLost, ServerError."""
        if not items:
            return  # a cluster would look for the nodes of none

        def run() -> None:
            for _ in self._arrays.getting(items):
                pass

        self._repeat(run)

    def getting(self, items: Sequence[tuple[str, memoryview]]) -> Generator[None, None, None]:
        """Like `get`, but yield when each buffer is filled; only then is the next one written to."""
        stream: Generator[None, None, None] | None = None

        def fill(number: int) -> None:
            nonlocal stream
            try:
                stream = stream or self._arrays.getting(items[number:])
                next(stream)
            except BaseException:
                stream = None  # it has closed its connection; after a cut a new one continues here
                raise

        try:
            for number in range(len(items)):
                self._repeat(partial(fill, number))
                yield
            for _ in stream or ():  # gives its connection back
                pass
        finally:
            if stream:
                stream.close()

    # -- failure ----------------------------------------------------------------------------------------------

    def retries(self) -> Retries:
        """Return retries for a caller that repeats something itself, for as long as this client would."""
        return Retries(self._patience_s, self._where)

    def _repeat(self, run: Callable[[], _T], cuts: bool = True, room: bool = True) -> _T:
        """Run until it is answered: again after cuts, and when the server may answer later, as with a full memory."""
        self.owner.check()
        retries, cut, replies_cut = self.retries(), 0, 0
        while True:
            try:
                reply = run()
                retries.over()
                return reply
            except (AuthenticationError, AuthorizationError) as error:
                raise NoServer(f"{self._where} refuses the login: {error}") from None
            except CONNECTION_CUT as error:
                cut, replies_cut = cut + 1, replies_cut + isinstance(error, ReplyCut)
                self._check_usable(cut, replies_cut)
                if not cuts:
                    raise
                if not retries.pause(partial(self._reason, error), isinstance(error, BusyLoadingError)):
                    raise self._lost(error, retries.lasted) from None
            except ResponseError as error:
                may_pass = passing(error) and (room or not full(error))
                if not may_pass or not retries.pause(partial(self._reason, error)):
                    raise self._refused(error, retries.lasted) from None
            except InvalidResponse as error:
                raise ServerError(f"{self._where} answers as no Redis server does: {error}") from None
            except (ValueError, AttributeError):  # what redis-py raises on a socket that another thread has closed
                if not self._arrays.closed:
                    raise
                raise self._closed_here() from None

    def _check_usable(self, cut: int, replies_cut: int) -> None:
        """Raise ServerLost after a cut that no further try can mend, ServerUnfit if a limit of the server cuts its
        clients off. `cut` says how many connections in a row were cut."""
        if self._arrays.closed:
            raise self._closed_here() from None
        if why := self._why_lost(self.url):
            raise ServerLost(why) from None
        if replies_cut == _CUTS and (limit := self._reply_limit()):
            raise ServerUnfit(
                f"{self._where} cuts off clients with more than {bytes_text(limit)} still to read, and a reply here is "
                f"larger: CONFIG SET client-output-buffer-limit 'normal 0 0 0'"
            ) from None
        if cut == _CUTS and (why := self.clients_evicted()):
            raise ServerUnfit(why) from None

    def clients_evicted(self) -> str:
        """Return that the server cuts its clients off because all of them together use much memory, and what to do; ""
        if it never did, or does not say."""
        with suppress(RedisError, ValueError, AttributeError):
            if evicted := int(self._once("INFO", "stats").get("evicted_clients", 0)):
                return (
                    f"{self._where} has cut off {counted(evicted, 'client')}, for all of them together had more to "
                    f"read and to write than its maxmemory-clients: CONFIG SET maxmemory-clients 0"
                )
        return ""

    def _closed_here(self) -> ServerLost:
        return ServerLost(f"the connection to {self._where} was closed here")

    def _reply_limit(self) -> int:
        """Return the least number of bytes still to read with which the server cuts a client off; 0 for no limit, or if
        this user may not know it."""
        try:
            pair = self._once("CONFIG", "GET", "client-output-buffer-limit")
        except (RedisError, ValueError, AttributeError):  # the last two: another thread has closed it
            return 0
        return reply_limit(pair[1]) if pair else 0

    def _reason(self, error: RedisError) -> str:
        """Return for what the server is waited for."""
        return self._loading() if isinstance(error, BusyLoadingError) else reason(error)

    def _lost(self, error: Exception, waited: str) -> ServerLost:
        if isinstance(error, ClientRefused):
            return too_many_clients(self.url, self._maxclients)
        return lost(error, self._where, waited, self._most_connections)

    def _refused(self, error: ResponseError, waited: str = "") -> Exception:
        return refused(error, self._where, waited, self.eviction)

    def _loading(self) -> str:
        """Return how far the server says that it has loaded its data."""
        with suppress(RedisError, KeyError, ValueError, AttributeError):
            info = self._once("INFO", "persistence")
            part, left_s = float(info["loading_loaded_perc"]), int(info["loading_eta_seconds"])
            return f"it loads its data, {part:.0f}% so far and about {left_s} s left,"
        return "it loads its data"

    def lacking(self, error: _E) -> _E:
        """Return an error about a key that must be there and is not. It says so if the server has evicted keys."""
        why = self.eviction()
        return type(error)(f"{error}; {why}") if why else error

    # -- preflight --------------------------------------------------------------------------------------------

    def preflight(self) -> bool:
        """Make sure that kvps can train on this server. Return whether it is a node of a cluster. Raises NoServer or
        ServerUnfit, saying what to do."""
        self.owner.check()
        patient, hasty = self.retries(), Retries(min(self._patience_s, _FIRST_S))
        while True:
            try:
                in_cluster = self._preflight()
                patient.over()
                return in_cluster
            except CONNECTION_CUT as error:
                retries = patient if self._may_answer(error) else hasty
                if not retries.pause(partial(self._reason, error), isinstance(error, BusyLoadingError)):
                    raise no_server(self.url, error, self._announced) from None

    def _may_answer(self, error: Exception) -> bool:
        """Return whether a server is surely there, which has not answered a first request."""
        if sentinel.is_watched(self.url):
            return not isinstance(error, (sentinel.NoMaster, Untrusted))
        silent = isinstance(error, RedisTimeoutError) and not str(error).startswith("Timeout connecting")
        return silent or isinstance(error, BusyLoadingError)

    def _preflight(self) -> bool:
        where = self._where
        fault, advice = "does not let kvps look at it", ""
        try:
            info = self._info()
            self._maxclients = info.get("maxclients")
            check_fit(where, info)
            if (policy := policy_of(info)).startswith(EXPIRING_KEY):
                log.info(
                    "%s deletes keys with a time to live when memory is full (%s): no weights have one", where, policy
                )
            if info.get("cluster_enabled") and not self.is_cluster:
                return True
            fault, advice = "cannot be written", "; give the URL of a primary with room"
            with suppress(NoPermissionError):  # a role may write its job's keys only, or none
                self._once("SET", _PREFLIGHT, "ok", "PX", 1000)
            return self.is_cluster
        except (AuthenticationError, AuthorizationError) as error:
            raise NoServer(f"{where} refuses the login: {error}") from None
        except ClientRefused:
            raise too_many_clients(self.url, self._maxclients) from None
        except ResponseError as error:
            if is_unknown(error) or not_permitted(error):
                raise self._refused(error) from None
            raise ServerUnfit(f"{where} {fault}: {error}{advice}") from None
        except (InvalidResponse, ValueError) as error:  # ValueError: a malformed number or text
            raise NoServer(f"what answers at {where} is no Redis server ({error}): check the URL") from None

    def _info(self) -> Mapping[str, Any]:
        """Return the server's INFO; for a user that may not run that, what the greeting says of it. Such a user may
        read, and run no script."""
        try:
            return cast(Mapping[str, Any], self._once("INFO"))
        except NoPermissionError:
            return greeting_as_info(self._once("HELLO", 2))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):
            self.close()


def newest_entries(reply: Any) -> dict[str, str]:
    """Return the newest id of each stream in which an XREAD found entries."""
    pairs = reply.items() if isinstance(reply, dict) else reply or []
    return {stream: entries[-1][0] for stream, entries in pairs if entries}


def shaped(commands: Sequence[Command], replies: Sequence[Any]) -> list[Any]:
    """Shape replies as redis-py does for these commands: a hash is a dict."""
    return [
        shape(reply) if (shape := _SHAPES.get(command[0])) else reply
        for command, reply in zip(commands, replies, strict=True)
    ]
