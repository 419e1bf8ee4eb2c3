"""The commit log of a job as far as it is in Redis, and how long the training has taken by it."""

from __future__ import annotations

from collections.abc import Iterator

from kvps.connection.client import Client
from kvps.parsing import entry_ms, whole
from kvps.protocol.job_state import Commit, Entry
from kvps.transport.access import JobAccess

_PAGE = 500
_BEFORE_JOIN = 32  # entries, among which the first join is looked for, as in trim.lua


def page_after(client: Client, stream: str, after: str) -> list[Entry]:
    """Return the next page of the entries of a stream after the id `after`, oldest first."""
    return [(id, fields) for id, fields in client.call("XRANGE", stream, f"({after}", "+", "COUNT", _PAGE)]


def entries_after(client: Client, stream: str, after: str) -> Iterator[Entry]:
    """Yield the entries of a stream after the id `after`, oldest first, up to its end as it is when the last page is
    read. A page that is not full is the last: a stream that grows faster than it is read never has an empty one."""
    while True:
        page = page_after(client, stream, after)
        yield from page
        if len(page) < _PAGE:
            return
        after = page[-1][0]


class LogStream:
    """The stream of one job's log. Its first entries may have been moved into a file, or deleted: see
    `kvps.history.commit_log`."""

    def __init__(self, access: JobAccess) -> None:
        self._access = access

    @property
    def job(self) -> str:
        """The job's name."""
        return self._access.keys.job

    def page(self, after: str) -> list[Entry]:
        """Return the next page of the entries after the entry `after`."""
        return page_after(self._access.client, self._access.keys.commits, after)

    def entries(self, after: str = "0-0") -> Iterator[Entry]:
        """Yield the entries after the entry `after`, see `entries_after`."""
        return entries_after(self._access.client, self._access.keys.commits, after)

    def commits(self) -> Iterator[Commit]:
        """Yield the commits, oldest first."""
        return (Commit.of(fields) for _, fields in self.entries() if fields.get("kind") == "commit")

    def newest_commits(self, most: int) -> list[Commit]:
        """Return the commits among so many of the newest entries, the last one first."""
        entries = self._access.client.call("XREVRANGE", self._access.keys.commits, "+", "-", "COUNT", most)
        return [Commit.of(fields) for _, fields in entries if fields.get("kind") == "commit"]

    def training_began(self) -> float | None:
        """Return when the first worker joined since creation or restore, in seconds since 1970 on the server's clock;
        None if none has."""
        began, first = self._access.client.together(
            [
                ("HGET", self._access.keys.version, "began"),  # noted when the first entries are moved into a file
                ("XRANGE", self._access.keys.commits, "-", "+", "COUNT", _BEFORE_JOIN),
            ]
        )
        if not began:
            began = next((entry_ms(*entry) for entry in first if entry[1].get("kind") == "join"), None)
        return whole(began, "the time of the first join") / 1000 if began else None

    def training_seconds(self) -> float:
        """Return seconds from the first join since creation or restore to the last commit, on the server's clock."""
        count = 2 * self._access.config.workers + 1  # all may have left since
        began, before, commits = self.training_began(), "+", self._access.keys.commits
        while began and (page := self._access.client.call("XREVRANGE", commits, before, "-", "COUNT", count)):
            for entry, fields in page:
                if fields.get("kind") == "commit":
                    return entry_ms(entry, fields) / 1000 - began
            before, count = f"({page[-1][0]}", _PAGE
        return 0.0
