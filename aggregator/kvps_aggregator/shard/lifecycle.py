"""What becomes of a shard's bytes: versions that may still be read, keys that died, room that is held in reserve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from kvps.errors import ServerFull
from kvps.job import Job

_LINGER_BYTES = 32 << 20  # what the versions of a small job may take together; of a large one two are kept
_LINGER_VERSIONS = 64
_RESERVE_PART = 64 << 20  # Redis fills this much in some ten milliseconds


class Versions:
    """The versions of a shard whose bytes are still there, each with its staged name.

    A small model is two versions further within a millisecond, and a reader that lost its processor for a moment would
    chase it: its old versions stay a little longer.
    """

    def __init__(self, nbytes: int, most: int = _LINGER_VERSIONS) -> None:
        self.names: dict[int, str] = {}
        self._most = max(2, min(most, _LINGER_BYTES // nbytes))

    def begin(self, version: int, name: str, before: str, pinned: tuple[int, str] | None) -> None:
        """Go on from `version` of this name; `before` is the name one version ago, `pinned` what a slow
        reader holds."""
        self.names = {version: name} if before == name else {version - 1: before, version: name}
        if pinned:
            self.names.setdefault(pinned[0], pinned[1])

    def expired(self, newest: int, pinned: int | None) -> list[tuple[int, str]]:
        """Forget the versions that no reader can want any more, and return them."""
        old = [version for version in self.names if version <= newest - self._most and version != pinned]
        return [(version, self.names.pop(version)) for version in old]

    def before(self, newest: int) -> list[tuple[int, str]]:
        """Forget all versions older than the newest, and return them: their readers read that one then."""
        return [(version, self.names.pop(version)) for version in [v for v in self.names if v < newest]]


class DeadKeys:
    """Keys of one shard's slot that nobody will read any more, until they are freed under this term."""

    def __init__(self, job: Job, number: int, term: str) -> None:
        self._job = job
        self._number = number
        self._term = term
        self._dead: list[str] = []
        self._reused: list[tuple[str, str]] = []
        self.run_id = ""  # the server's, when what is committed was read

    def bury(self, keys: Iterable[str]) -> None:
        """Have keys deleted with the next `free`."""
        self._dead += keys

    def reuse(self, keys: Sequence[str], names: Sequence[str]) -> None:
        """Have the memory of keys given to those that are stored next, under these names.

        Redis's allocator returns memory to the kernel that is freed in large stretches, and gets it back page by page:
        a round took twice as long.
        """
        self._reused += zip(keys, names, strict=True)

    def free(self) -> None:
        """Delete what died.

        Raises LeaseLost if another may do that now, ServerRestarted if it may live again.
        """
        dead, reused = self._dead, self._reused
        self._dead, self._reused = [], []
        self._job.scripts.free(self._number, self._term, self.run_id, dead, reused)


class Reserve:
    """Room for one version more on a server whose memory is limited: only commits free what gradients take."""

    def __init__(self, job: Job, number: int, nbytes: int) -> None:
        self._client = job.client
        self._nbytes = nbytes
        self.keys = [job.keys.reserve(number, part) for part in range(-(-nbytes // _RESERVE_PART))]
        self.limited = bool(job.client.memory()[1])
        self.is_given_up = False

    def keep(self) -> None:
        """Hold it, if there is room for it. Raises nothing if there is none."""
        with suppress(ServerFull):
            self.is_given_up = False
            used, limit = self._client.memory()
            self.limited = bool(limit)  # it may have been set since
            for part, key in enumerate(self.keys if limit else []):
                size = min(_RESERVE_PART, self._nbytes - part * _RESERVE_PART)
                if used + 2 * size < limit and not self._client.call("EXISTS", key):
                    self._client.call("SETRANGE", key, size - 1, "\0")
