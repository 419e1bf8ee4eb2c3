"""What Redis has of the state that a learner keeps with its versions: masters, moments, random state."""

from __future__ import annotations

from typing import Any

from kvps.arrays.digest import Buffers
from kvps.arrays.given import Given
from kvps.job import Job
from kvps.transport.kept_state import kept_items


class StateStorage:
    """The states of the versions of one job, beside shard 0. Those that an earlier holder has stored are swept."""

    def __init__(self, job: Job, given: Given) -> None:
        self._keys = job.access.keys
        self._given = given
        self._small_bytes = job.access.client.small_bytes
        self._sizes: dict[str, int] = {}  # staged name -> bytes
        self.about: dict[str, Any] = {}  # what the manifest of the next version says of it

    @property
    def is_large(self) -> bool:
        """Whether the next state is no part of a small request."""
        return len(self._given.state) > self._small_bytes

    def items(self, name: str) -> list[tuple[str, Buffers]]:
        """Return the keys and values of the state that comes with the next version, staged as `name`."""
        self._sizes[name] = len(self._given.state)
        items, self.about = kept_items(self._keys, name, self._given.state)
        return items

    def drop(self, name: str) -> list[str]:
        """Return the keys of the state of a version that this holder has staged, and forget it."""
        return self._keys.kept_state(name, self._sizes.pop(name, 0))
