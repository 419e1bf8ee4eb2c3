"""What every part of an opened job shares."""

from __future__ import annotations

from dataclasses import dataclass

from kvps.arrays.layout import Layout
from kvps.config import JobConfig
from kvps.connection.client import Client
from kvps.protocol.keys import JobKeys
from kvps.protocol.scripts import JobScripts


@dataclass(frozen=True)
class JobAccess:
    """What every part of an opened job needs: its server, and what stays the same of the job."""

    client: Client
    keys: JobKeys
    config: JobConfig
    layout: Layout
    scripts: JobScripts
