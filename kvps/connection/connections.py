"""What a client needs of its connections, whether they are to one server or to all masters of a cluster."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvps.arrays.digest import Buffers
from kvps.connection.resp import Command
from kvps.connection.sockets import Put, Stored


class Connections(Protocol):
    """Connections of one URL. May be used from several threads. `ArrayPool` says what each method does."""

    closed: bool

    def put(self, items: Iterable[tuple[str, Buffers]], stored: Stored | None = None, replicas: int = 0) -> None: ...

    def putting(self, stored: Stored | None = None, replicas: int = 0) -> AbstractContextManager[Put]: ...

    def get(self, items: Sequence[tuple[str, memoryview]]) -> None: ...

    def getting(self, items: Sequence[tuple[str, memoryview]]) -> Generator[None, None, None]: ...

    def exchange(
        self, commands: Sequence[Command], gets: Sequence[tuple[str, memoryview]] = ()
    ) -> tuple[list[Any], list[bool]]: ...

    def replicas_of(self, key: str, replicas: int) -> int: ...

    def close(self) -> None: ...
