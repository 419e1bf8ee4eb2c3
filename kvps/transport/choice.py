"""Chooses how the arrays of a new job travel: through Redis, or through the shared memory of one host."""

from __future__ import annotations

import logging
from dataclasses import replace

from kvps.arrays.formats import format_of
from kvps.arrays.layout import Layout
from kvps.config import JobConfig
from kvps.connection.client import Client
from kvps.connection.sockets import connection_settings
from kvps.errors import CorruptData, InvalidSetting, ServerFull, ServerUnfit
from kvps.parsing import bytes_text
from kvps.protocol.keys import MEMORY
from kvps.transport import shared_memory
from kvps.transport.memory_identity import Memory

log = logging.getLogger("kvps.store")

_WORTH_SHARING = 1 << 20  # bytes; a round of a smaller model costs only calls to Redis, and these remain
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MORE_ROOM = "make room there (in a container: docker run --shm-size), or choose transport 'redis'"


def with_transport(client: Client, config: JobConfig, layout: Layout, job: str) -> JobConfig:
    """Return the settings with a transport in place of "auto", and with the shared memory that the job uses.

    Raises what `_shared_memory` raises if the settings ask for "shm"; with "auto", that is a warning.
    """
    shares = config.transport == "shm" or (
        config.transport == "auto" and not client.is_cluster and is_local(client) and layout.nbytes >= _WORTH_SHARING
    )
    if shares:
        try:
            return replace(config.noting(memory=_shared_memory(client, config, layout, job)), transport="shm")
        except (InvalidSetting, ServerFull, ServerUnfit, CorruptData) as error:
            if config.transport == "shm":
                raise
            log.warning("job %s: arrays go through Redis, and not through memory, which is faster: %s", job, error)
    return replace(config, transport="redis")


def _shared_memory(client: Client, config: JobConfig, layout: Layout, job: str) -> str:
    """Return the shared memory for a job. With "auto" it must have twice the room that the job needs, and must be
    that of the server's other jobs.

    Raises ServerFull if it has no room, InvalidSetting if there is none or the job cannot use it, ServerUnfit if
    its directory is another user's, CorruptData if another program wrote the server's note of it.
    """
    auto, root = config.transport == "auto", shared_memory.ROOT
    if client.is_cluster:
        raise InvalidSetting(
            "transport shm needs a server of its own on this host, and this is a cluster: leave it out"
        )
    if config.shards > 1 or config.weight_format != "fp32":  # only with "auto": `JobConfig` refuses it with "shm"
        raise InvalidSetting(
            "shared memory is for shards=1 and weight_format='fp32'; choose these, or transport 'redis'"
        )
    if not shared_memory.available():
        raise InvalidSetting(f"{root} is not there, or cannot be written to: {_MORE_ROOM}")
    needs, room = _shared_bytes(config, layout), shared_memory.free_bytes()
    if needs * (2 if auto else 1) > room:
        asked = f"{bytes_text(needs)}{' and as much again' if auto else ''}"
        raise ServerFull(f"{root} has {bytes_text(room)} left, and the job needs {asked}: {_MORE_ROOM}")
    memory, first = _memories(client)
    if not shared_memory.sees(first):
        if auto:
            raise ServerUnfit("this process does not see the shared memory of this server's other jobs")
        log.warning(
            "other jobs of this server are in a shared memory of %s that this process does not see. Job %s is in "
            "the one here, of %s: only processes that see the one here can work on it",
            Memory.of(first).host,
            job,
            Memory.of(memory).host,
        )
    return memory


def _memories(client: Client) -> tuple[str, str]:
    """Return this process's shared memory for this server, and the one that was noted first since it started.

    A note of an earlier run does not count: that memory may be lost with the host on which the server ran. Raises
    ServerUnfit if the directory of the first is another user's.
    """
    memory, run_id = shared_memory.memory_of(client.url), client.run_id()
    _, first = client.together([("HSETNX", MEMORY, run_id, memory), ("HGET", MEMORY, run_id)])
    return memory, str(first)


def is_local(client: Client) -> bool:
    """Return whether the server can be reached from this host only."""
    return client.url.startswith("unix:") and not client.port()


def is_near(client: Client) -> bool:
    """Return whether the server is on this host, and its URL does not show that other hosts use it."""
    return is_local(client) or connection_settings(client.url).get("host") in _LOOPBACK


def _shared_bytes(config: JobConfig, layout: Layout) -> int:
    """Return how many bytes of shared memory a job needs at its peak."""
    # Versions: the present one, the one before, the one being staged, and one that a slow reader holds.
    versions = 4 * layout.nbytes * (1 + len(config.slots))
    gradients = config.most_contributions * format_of(config.gradient_format).nbytes(layout.size)
    slow = (
        config.workers if config.staleness or config.quorum or config.unit_rounds else 0
    )  # each may hold a version of its own
    return versions + gradients + slow * layout.nbytes
