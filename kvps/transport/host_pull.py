"""Pulls of the workers of one host from a Redis on another: one of them reads a version, the others copy it from there.

The link carries a version once for each host, and not once for each worker. A worker that is alone on its host makes no
copy. Where Redis is on the worker's own host, there is no link to spare.
"""

from __future__ import annotations

from kvps.arrays.digest import digest_of
from kvps.arrays.formats import Format
from kvps.arrays.layout import Array
from kvps.arrays.weight_view import has_view
from kvps.connection.client import Client
from kvps.machine import process
from kvps.machine.address import is_of_this_host
from kvps.protocol.job_state import RoundState
from kvps.transport.access import JobAccess
from kvps.transport.host_copy import HostCopy, Progress
from kvps.transport.version_reader import SHARED_BYTES, Arrived, VersionReader


class HostPull:
    """The pulls of one session. One thread at a time uses it."""

    def __init__(self, access: JobAccess, reader: VersionReader, format: Format) -> None:
        self._layout = access.layout
        self._reader = reader
        self._format = format
        self._copy: HostCopy | None = HostCopy(_name(access.keys.id), access.layout.size)
        self._copy.enter()  # before the first pull, so that the others know

    @staticmethod
    def pays(access: JobAccess, format: Format) -> bool:
        """Return whether workers of one host should share what they pull: the model is large, they pull whole versions,
        and these come from another host."""
        return access.layout.nbytes >= SHARED_BYTES and not has_view(format) and is_far(access.client)

    def weights(self, state: RoundState, flat: Array, arrived: Arrived | None) -> int:
        """Read the weights of `state`, or of a newer version, into `flat`, as `VersionReader.weights` does."""
        mine: list[int] = []  # the version, if this worker has read Redis for all

        def read(shared: Array, progress: Progress) -> tuple[int, str]:
            def take(start: int, part: Array) -> None:
                shared[start : start + part.size] = part
                progress()
                if arrived:
                    arrived(start, part)

            version, names = self._reader.named_weights(state, flat, self._format, take)
            mine.append(version)
            return version, ",".join(names)

        copy = self._copy  # `close` may come meanwhile
        found = copy.exactly(",".join(state.names), read) if copy else None
        if mine:
            return mine[0]
        if not found:
            return self._reader.weights(state, flat, self._format, arrived)
        version, shared = found
        for c in (c for shard in self._layout.chunks for c in shard):
            flat[c.start : c.stop] = shared[c.start : c.stop]
            if arrived:
                arrived(c.start, flat[c.start : c.stop])
        return version

    def close(self) -> None:
        """Leave the others."""
        self._copy = None


def _name(id: str) -> str:
    """Return the name of the copies of a job's workers. Readers have others: they may rest, and workers may not.

    Hosts may have one runtime directory in common, in a network file system whose locks hold on all of them. Only those
    who see each other's processes may meet in one file.
    """
    return f"{id}.workers-{digest_of([memoryview(process.space().encode())])}"


def is_far(client: Client) -> bool:
    """Return whether any master is on another host."""
    return not all(map(is_of_this_host, client.hosts()))
