"""Pulls of the workers of one host from a Redis on another: one of them reads a version, the others copy it from there.

The link carries a version once for each host, and not once for each worker. A worker that is alone on its host makes no
copy. Where Redis is on the worker's own host, there is no link to spare.
"""

from __future__ import annotations

from kvps.arrays.digest import digest_of
from kvps.arrays.layout import Array
from kvps.connection.client import Client
from kvps.machine import process
from kvps.machine.address import is_of_this_host
from kvps.transport.access import JobAccess
from kvps.transport.host_copy import HostCopy, Progress
from kvps.transport.version_reader import SHARED_BYTES
from kvps.transport.weight_reader import PullRequest, WeightReader, Weights


class HostPull:
    """The wrapper of a session's reader, one that `receives`, that has one worker of the host read for the others."""

    receives = True

    def __init__(self, access: JobAccess, reader: WeightReader, whose: str = "workers") -> None:
        """`whose` copies they are: those of workers may be in a format of their own."""
        self._layout = access.layout
        self._reader = reader
        self._copy: HostCopy | None = HostCopy(_name(access.keys.id, whose), access.layout.size)
        self._copy.enter()  # before the first pull, so that the others know

    @staticmethod
    def pays(access: JobAccess) -> bool:
        """Return whether those of one host should share what they read: the model is large, and comes from another
        host."""
        return access.layout.nbytes >= SHARED_BYTES and is_far(access.client)

    def read(self, request: PullRequest) -> Weights:
        """Read for all workers of the host, or take what another one has read. A part of the model is read alone."""
        own: list[Weights] = []  # what this worker has read for all

        def read(shared: Array, progress: Progress) -> tuple[int, str]:
            def arrived(start: int, values: Array) -> None:
                shared[start : start + values.size] = values
                progress()
                if request.arrived:
                    request.arrived(start, values)

            own.append(self._reader.read(request._replace(arrived=arrived)))
            return own[0].version, ",".join(own[0].names)

        copy = None if request.part else self._copy  # `close` may come meanwhile
        copied = copy.exactly(",".join(request.state.names), read) if copy else None
        if own:
            return own[0]
        if not copied:
            return self._reader.read(request)
        version, shared = copied
        for c in self._layout.chunks_in(""):
            values = request.into[c.start : c.stop]
            values[:] = shared[c.start : c.stop]
            if request.arrived:
                request.arrived(c.start, values)
        return Weights(version, request.state.names, request.into)

    def close(self) -> None:
        """Leave the others."""
        self._copy = None
        self._reader.close()


def _name(id: str, whose: str) -> str:
    """Return the name of the copies of a job's workers or watchers. Snapshots have others: their readers may rest.

    Hosts may have one runtime directory in common, in a network file system whose locks hold on all of them. Only
    workers that see each other's processes may meet in one file.
    """
    return f"{id}.{whose}-{digest_of([memoryview(process.space().encode())])}"


def is_far(client: Client) -> bool:
    """Return whether any master is on another host."""
    return not all(map(is_of_this_host, client.hosts()))
