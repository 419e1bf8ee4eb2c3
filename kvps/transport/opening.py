"""Chooses a job's transport: the only module here that knows both."""

from __future__ import annotations

from kvps.transport.access import JobAccess
from kvps.transport.base import Transport
from kvps.transport.redis import RedisTransport
from kvps.transport.shm import ShmTransport


def open_transport(access: JobAccess) -> Transport:
    """Return the transport that the job was created with."""
    return ShmTransport(access) if access.config.transport == "shm" else RedisTransport(access)
