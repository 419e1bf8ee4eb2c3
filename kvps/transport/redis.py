"""Arrays in Redis: each chunk is the value of a key."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain

from kvps.arrays.digest import Buffers, digest_of
from kvps.arrays.formats import format_of
from kvps.arrays.layout import Array
from kvps.arrays.weight_view import has_view
from kvps.connection.client import Client
from kvps.errors import WrongOrder
from kvps.protocol.job_state import RoundState
from kvps.protocol.lua_scripts import Call
from kvps.transport.access import JobAccess
from kvps.transport.base import Transport
from kvps.transport.host_pull import HostPull
from kvps.transport.prefetch import Prefetch, Pull
from kvps.transport.shared_memory import WritableSegment
from kvps.transport.version_reader import Arrived, VersionReader
from kvps.transport.view_reader import ViewReader


class RedisTransport(Transport):
    """The transport of a job whose arrays are in Redis."""

    kind = "redis"

    def __init__(self, access: JobAccess) -> None:
        self._access = access
        self.reader = VersionReader(access)

    def weight_source(self, memory: Callable[[], Array], prefetch: bool) -> RedisWeightSource:
        return RedisWeightSource(self._access, self.reader, memory, prefetch)

    def uploads(self, worker: str, incarnation: str, sizes: Iterable[int]) -> RedisUploads:
        return RedisUploads(self._access, worker, incarnation)


class RedisWeightSource:
    """Weights received into one array in host memory; with `prefetch` into another too, while the worker computes."""

    def __init__(self, access: JobAccess, reader: VersionReader, memory: Callable[[], Array], prefetch: bool) -> None:
        self._reader = reader
        self._format = format_of(access.config.weight_format)
        self._shared = HostPull(access, reader, self._format) if HostPull.pays(access, self._format) else None
        self._pull = self._shared.weights if self._shared else weights_pull(access, reader)
        self._flat = memory()
        self._prefetch = Prefetch(access, reader, memory(), self._pull) if prefetch else None
        if self._prefetch:
            weakref.finalize(self, self._prefetch.close)  # if a session is dropped without leaving

    @property
    def inline_buffer(self) -> Array | None:
        return None if self._prefetch or self._format.lossy else self._flat

    def weights(
        self,
        state: RoundState,
        inline: bool,
        rounds_done: int,
        newest: Callable[[], RoundState],
        arrived: Arrived | None,
        part: str,
    ) -> tuple[int, Array]:
        if inline:
            return state.version, self._flat
        if part and not has_view(self._format):  # what was fetched ahead, or by another process, is the whole model
            if self._prefetch:
                self._prefetch.drop()
            return self._reader.weights(state, self._flat, self._format, arrived, part), self._flat
        fetched = self._prefetch.take(self._flat) if self._prefetch else None
        if fetched:
            version, self._flat = fetched
        else:
            version = self._pull(state, self._flat, arrived)
        if self._prefetch:
            self._prefetch.begin(rounds_done + 1, version)
        return version, self._flat

    def close(self) -> None:
        if self._prefetch:
            self._prefetch.close()
        if self._shared:
            self._shared.close()


def weights_pull(access: JobAccess, reader: VersionReader) -> Pull:
    """Return the function that pulls in the job's format, for one session."""
    format_ = format_of(access.config.weight_format)
    if has_view(format_):
        return ViewReader(access, reader).weights
    return lambda state, flat, arrived: reader.weights(state, flat, format_, arrived)


class RedisUploads:
    """The contributions of one incarnation of a worker."""

    overwrites = False

    def __init__(self, access: JobAccess, worker: str, incarnation: str) -> None:
        self._access = access
        self._who = (worker, incarnation)
        self._whole = access.layout.nbytes <= access.client.small_bytes

    def buffer(self, seq: int, settled: int) -> WritableSegment | None:
        return None

    def open(self, seq: int, live: bool, settled: int, in_place: bool, part: str) -> RedisUpload:
        keys, chunks = self._access.keys, chain.from_iterable(self._access.layout.chunks)
        each = {
            number: keys.gradient(c.shard, *self._who, seq, c.number)
            for number, c in enumerate(chunks)
            if c.in_part(part)
        }
        return RedisUpload(self._access.client, each, live, self._whole)

    def release(self, settled: int) -> None:
        pass


class _Dropped(Exception):
    """Raised to close a connection in the middle of sending."""


class RedisUpload:
    """The upload of one contribution, whose chunks become the values of keys: `key_of` is number -> key. If it is
    `live`, they may be sent without asking first whether it was accepted. A `whole` one is sent together with the
    command that accepts it."""

    def __init__(self, client: Client, key_of: Mapping[int, str], live: bool, whole: bool) -> None:
        self.keys = list(key_of.values())
        self._key_of = key_of
        self._live, self._whole = live, whole
        self.immediate = live and not whole
        self._client = client
        self._items: list[tuple[str, Buffers]] = []
        self._stored: set[str] = set()
        self._digests: list[str] = []
        self._sending = ExitStack()
        putting = client.putting(cuts=False, stored=self._stored.add)
        self._put = self._sending.enter_context(putting) if live and not whole else None

    @property
    def missing(self) -> int:
        return len(self.keys) - len(self._stored)

    @property
    def with_command(self) -> Call | None:
        return partial(self._client.put_and_call, self._items, cuts=False) if self._whole else None

    def send(self, number: int, value: Buffers) -> str:
        self._digests.append(digest_of(value))
        self._items.append((self._key_of[number], value))
        if self._put:
            self._put(*self._items[-1])
        return self._digests[-1]

    def flush(self) -> None:
        if self._put:
            self._put.flush()

    def end(self) -> bool:
        self._sending.close()
        return self._live

    def resend(self) -> None:
        todo = [
            (item, digest)
            for item, digest in zip(self._items, self._digests, strict=True)
            if item[0] not in self._stored
        ]
        if any(digest_of(value) != digest for (_, value), digest in todo):
            raise WrongOrder(
                "a gradient was changed after it was put, and it must be sent again: push the same one, or leave, and "
                "join again"
            )
        self._client.put_once([item for item, _ in todo], self._stored.add)

    def drop(self) -> None:
        self._sending.__exit__(_Dropped, _Dropped(), None)  # closes the connection, which may hold half a chunk
