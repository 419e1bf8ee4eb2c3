"""The objects that every part of an opened job shares."""

from __future__ import annotations

from dataclasses import dataclass

from kvps.arrays.layout import Layout
from kvps.config import JobConfig
from kvps.connection.client import Client
from kvps.protocol.keys import JobKeys
from kvps.protocol.scripts import JobScripts


@dataclass(frozen=True)
class JobAccess:
    """The connection to an opened job's server, and everything about the job that does not change."""

    client: Client
    keys: JobKeys
    config: JobConfig
    layout: Layout
    scripts: JobScripts
