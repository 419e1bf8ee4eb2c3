"""The life of a shard's bytes: versions that may still be read, dead keys, and memory held in reserve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from kvps.errors import ServerFull
from kvps.job import Job
from kvps.protocol.bounds import VERSIONS_KEPT
from kvps.protocol.job_state import State

_LINGER_BYTES = 32 << 20  # of all kept versions of a small job together; of a large job VERSIONS_KEPT
_LINGER_VERSIONS = 64
_CONFIRM_MS = 200  # the longest wait for a replica before dead bytes are kept for the next time
_RESERVE_PART = 64 << 20  # Redis fills this much in some ten milliseconds


class Versions:
    """The versions of a shard whose bytes still exist, each with its staged name.

    A small model commits two versions within a millisecond, and a reader that lost its processor for a moment would
    never catch up. So its old versions stay a little longer.
    """

    def __init__(self, nbytes: int, most: int | None = None) -> None:
        self.names: dict[int, str] = {}
        self._most = max(VERSIONS_KEPT, min(most or _LINGER_VERSIONS, _LINGER_VERSIONS, _LINGER_BYTES // nbytes))

    def begin(self, version: int, name: str, before: str, pinned: tuple[int, str] | None) -> None:
        """Begin with `version` of this name; `before` is the name one version ago, `pinned` what a pin keeps."""
        self.names = {version: name} if before == name else {version - 1: before, version: name}
        if pinned:
            self.names.setdefault(pinned[0], pinned[1])

    def expired(self, newest: int, pinned: int | None) -> list[tuple[int, str]]:
        """Forget the versions that no reader can want any more, and return them."""
        old = [version for version in self.names if version <= newest - self._most and version != pinned]
        return [(version, self.names.pop(version)) for version in old]

    def before(self, newest: int) -> list[tuple[int, str]]:
        """Forget all versions older than `newest`, and return them: their readers read `newest` instead."""
        return [(version, self.names.pop(version)) for version in [v for v in self.names if v < newest]]


class DeadKeys:
    """The keys of one shard's slot that no process will read again, until they are freed under this term."""

    def __init__(self, job: Job, number: int, term: str) -> None:
        self._job = job
        self._number = number
        self._term = term
        self._dead: list[str] = []
        self._reused: list[tuple[str, str]] = []
        self._run_id = self._history = ""

    def __len__(self) -> int:
        return len(self._dead)

    def begin(self, state: State) -> None:
        """Note in which run of the server, and in which history, the committed version was read."""
        # On a cluster the run that counts is not that of the slot's own server: see `_may_be_freed`.
        self._run_id, self._history = "" if self._job.access.client.is_cluster else state.run_id, state.history

    def discard(self, keys: Iterable[str]) -> None:
        """Delete these keys with the next `free`."""
        self._dead += keys

    def reuse(self, keys: Sequence[str], names: Sequence[str]) -> None:
        """With the next `free`, give the memory of dead `keys` to the keys `names`, which are stored next.

        Otherwise Redis's allocator returns large freed stretches of memory to the kernel, and gets them back page by
        page: a round took twice as long.
        """
        self._reused += zip(keys, names, strict=True)

    def free(self) -> None:
        """Free the dead keys. Raises LeaseLost after a change of holder, ServerRestarted if they may be live again."""
        if not (self._dead or self._reused) or not self._may_be_freed():
            return
        dead, reused = self._dead, self._reused
        self._dead, self._reused = [], []
        self._job.access.scripts.free(self._number, self._term, self._run_id, dead, reused)

    def _may_be_freed(self) -> bool:
        """Return whether no failover can bring back a version, or a contribution, whose bytes these are.

        In a cluster what names them is on another server than they are. So all replicas of that server must first know
        that they are dead. A server without a replica that could take its place needs no such care.
        """
        access = self._job.access
        needed = access.client.own_replicas(access.keys.version)
        if access.client.is_cluster:
            needed = max(needed, access.config.replicas)
        if not needed:
            return True
        know = access.scripts.replicas(
            lambda mark: access.client.replicas_with(mark, needed, _CONFIRM_MS), self._history
        )
        return know >= needed


class Reserve:
    """Room for one more version on a server with a memory limit: only commits free what gradients take."""

    def __init__(self, job: Job, number: int, nbytes: int) -> None:
        self._client = job.access.client
        self._nbytes = nbytes
        self.keys = [job.access.keys.reserve(number, part) for part in range(-(-nbytes // _RESERVE_PART))]
        self.limited = bool(job.access.client.memory()[1])
        self.is_given_up = False

    def keep(self) -> None:
        """Take the reserve if there is room for it. Raises nothing if there is none: the next commit tries again."""
        used, limit = self._client.memory()
        self.limited = bool(limit)  # the limit may have been set since
        self.is_given_up = self.limited
        with suppress(ServerFull):
            for part, key in enumerate(self.keys if limit else []):
                size = min(_RESERVE_PART, self._nbytes - part * _RESERVE_PART)
                if self._client.call("EXISTS", key):
                    continue
                if used + 2 * size >= limit:
                    return
                self._client.call("SETRANGE", key, size - 1, "\0")
                used += size
            self.is_given_up = False
