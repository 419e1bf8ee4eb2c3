"""Chooses a job's transport: the only module here that knows both."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Protocol

from kvps.transport.access import JobAccess
from kvps.transport.base import Transport
from kvps.transport.redis import RedisTransport
from kvps.transport.shm import ShmTransport
from kvps.transport.version_reader import VersionReader


def open_transport(access: JobAccess) -> Transport:
    """Return the transport that the job was created with."""
    return ShmTransport(access) if access.config.transport == "shm" else RedisTransport(access)


@dataclass(frozen=True, kw_only=True)
class OpenedJob(JobAccess):
    """The access to a job together with its transport: all that a session, an aggregator or a screen works with."""

    transport: Transport

    @classmethod
    def over(cls, access: JobAccess, transport: Transport) -> OpenedJob:
        """Return the access together with a transport that was opened for it."""
        return cls(**{field.name: getattr(access, field.name) for field in fields(JobAccess)}, transport=transport)

    @property
    def reader(self) -> VersionReader:
        """The reader of whole versions of the job."""
        return self.transport.reader

    def moved(self, memory: str) -> OpenedJob:
        """Return the access to the job after it was moved to another shared memory."""
        access = replace(self, config=self.config.noting(memory=memory))
        return replace(access, transport=self.transport.moved(access))


class Following(Protocol):
    """Who has a job open: `kvps.job.Job`."""

    access: OpenedJob


def find_transport(job: Following) -> Transport:
    """Return the present transport: a job whose shared memory was lost continues in another shared memory."""
    access = job.access
    if access.config.metadata.memory:
        memory = access.client.call("HGET", access.keys.config, "memory")
        if memory and memory != access.config.metadata.memory:
            job.access = access.moved(memory)
    return job.access.transport
