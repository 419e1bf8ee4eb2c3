"""How old a version is, by the clock of the server that has its commit logged: clocks of hosts are never compared."""

from __future__ import annotations

from itertools import count

from kvps.parsing import Fields, entry_ms, whole
from kvps.transport.access import JobAccess

_PAGES = (1, 8, 64, 512)  # entries to read: the newest one is nearly always the commit that is meant


def version_age_s(access: JobAccess, version: int) -> float:
    """Return how many seconds ago a version was committed, or a new history began with it; 0 for a version that no
    commit made, and while the time of its commit lies in the future. One request, unless other entries follow the
    commit. Raises CorruptData, ServerLost."""
    end = "+"
    for page in count():
        size = _PAGES[min(page, len(_PAGES) - 1)]
        time, entries = access.client.together([("TIME",), ("XREVRANGE", access.keys.commits, end, "-", "COUNT", size)])
        for entry, fields in entries:
            made = fields.get("kind") in ("commit", "recover")
            if made and Fields(fields, "an entry of the log").whole("version") <= version:
                seconds, microseconds = time
                now_ms = 1000 * whole(seconds, "the server's time") + whole(microseconds, "the server's time") // 1000
                return max(0, now_ms - entry_ms(entry, fields)) / 1000
        if len(entries) < size:
            break
        end = f"({entries[-1][0]}"
    return 0.0
