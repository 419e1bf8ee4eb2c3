"""The objects that every part of an opened job shares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvps.arrays.layout import Layout
from kvps.config import JobConfig
from kvps.connection.client import Client
from kvps.connection.queries import Queries
from kvps.connection.replica_reader import ReplicaReader
from kvps.connection.replicas import IF_ANY, all_of
from kvps.protocol.answers import ServerRestarted
from kvps.protocol.keys import JobKeys
from kvps.protocol.recovery import await_history
from kvps.protocol.scripts import JobScripts

T = TypeVar("T")


@dataclass(frozen=True)
class JobAccess:
    """The connection to an opened job's server, and everything about the job that does not change. Snapshots are read
    from `replicas` if there is a reader of them."""

    client: Client
    keys: JobKeys
    config: JobConfig
    layout: Layout
    scripts: JobScripts
    storing: Client
    replicas: ReplicaReader | None = None

    @staticmethod
    def of(
        client: Client, keys: JobKeys, config: JobConfig, layout: Layout, replicas: ReplicaReader | None = None
    ) -> JobAccess:
        """Return what a job with these settings is worked on with. Its `client` takes as stored what `durability` asks
        for. Its `storing` is for the bytes of versions, which are on several servers of a cluster: no failover of one
        may lose a part of a version."""
        lasts = config.replicas > 0
        client = client.replicating(all_of(config.replicas)) if lasts else client
        storing = client.replicating(IF_ANY) if client.is_cluster and not lasts else client
        scripts = JobScripts(
            client.call,
            keys,
            layout.shards,
            safely=client.call_safely if lasts else None,
            owns=storing.call_safely if lasts or client.is_cluster else None,
            lacking=client.lacking,
        )
        return JobAccess(client, keys, config, layout, scripts, storing, replicas)

    @property
    def server(self) -> Queries:
        """The server that has the job's version, clock and log."""
        return self.client.node(self.keys.version)

    def is_idle(self) -> bool:
        """Return whether the job needs no aggregator: it has no worker, an empty inbox and no open plan.

        A worker that a restored job awaits does not count: it has given no sign of life yet.
        """
        present, clock, waiting, planned = self.client.together(
            [
                ("ZCARD", self.keys.heartbeat),
                ("ZSCORE", self.keys.heartbeat, ""),
                ("XLEN", self.keys.inbox),
                ("EXISTS", self.keys.plan),
            ]
        )
        return present == (clock is not None) and not waiting and not planned

    def in_present_history(self, call: Callable[[], T]) -> T:
        """Return what `call`, which runs a script, returns; after a restart of the server, in the job's new history."""
        while True:
            with suppress(ServerRestarted):
                return call()
            await_history(self.server, self.scripts, self.keys.job, 0)
