"""Arrays in Redis: each chunk is the value of a key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import chain

from kvps.arrays.digest import Buffers, digest_of
from kvps.arrays.layout import Array
from kvps.arrays.weight_view import has_view
from kvps.connection.client import Client
from kvps.errors import WrongOrder
from kvps.transport.access import JobAccess
from kvps.transport.base import ChunkUpload, Transport, Uploads
from kvps.transport.host_pull import HostPull
from kvps.transport.prefetch import Prefetch
from kvps.transport.version_reader import VersionReader
from kvps.transport.view_reader import ViewReader
from kvps.transport.weight_reader import WeightReader


class RedisTransport(Transport):
    """The transport of a job whose arrays are in Redis."""

    def __init__(self, access: JobAccess) -> None:
        self._access = access
        self.reader = VersionReader(access)

    def weight_reader(self, memory: Callable[[], Array], prefetch: bool) -> WeightReader:
        access, reader = self._access, self.reader
        wrapped: WeightReader = reader
        if has_view(reader.format):  # each has one of its own
            wrapped = ViewReader(access, reader)
        elif HostPull.pays(access):
            wrapped = HostPull(access, reader)
        return Prefetch(access, reader, wrapped, memory) if prefetch else wrapped

    def uploads(self, worker: str, incarnation: str, sizes: Iterable[int]) -> RedisUploads:
        return RedisUploads(self._access, worker, incarnation)


class RedisUploads(Uploads):
    """The contributions of one incarnation of a worker."""

    overwrites = False

    def __init__(self, access: JobAccess, worker: str, incarnation: str) -> None:
        self._access = access
        self._owner = (worker, incarnation)
        self._whole = access.layout.nbytes <= access.client.small_bytes

    def open(self, seq: int, live: bool, settled: int, in_place: bool, part: str) -> RedisUpload:
        keys, chunks = self._access.keys, chain.from_iterable(self._access.layout.chunks)
        each = {
            number: keys.gradient(c.shard, *self._owner, seq, c.number)
            for number, c in enumerate(chunks)
            if c.in_part(part)
        }
        return RedisUpload(self._access.client, each, live, self._whole)


class _Dropped(Exception):
    """Raised to close a connection in the middle of sending."""


class RedisUpload(ChunkUpload):
    """The upload of one contribution, whose chunks become the values of keys: `key_of` is number -> key. If it is
    `live`, they may be sent without asking first whether it was accepted. A `whole` one is held for the
    command that accepts it."""

    def __init__(self, client: Client, key_of: Mapping[int, str], live: bool, whole: bool) -> None:
        self.keys = list(key_of.values())
        self._key_of = key_of
        self._live = live
        self.immediate = live and not whole
        self._client = client
        self._items: list[tuple[str, Buffers]] = []
        self.held = self._items if whole else ()
        self._stored: set[str] = set()
        self._digests: list[str] = []
        self._sending = ExitStack()
        putting = client.putting(cuts=False, stored=self._stored.add)
        self._put = self._sending.enter_context(putting) if live and not whole else None

    @property
    def missing(self) -> int:
        return len(self.keys) - len(self._stored)

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
