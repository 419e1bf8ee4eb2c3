"""The jobs of finished runs on a private server that stays: how many of them it holds, and for how long."""

from __future__ import annotations

import os
from contextlib import suppress

from kvps.errors import JobNotFound, KvpsError
from kvps.job import Job
from kvps.parsing import entry_ms
from kvps.protocol.job_state import State
from kvps.run_jobs import names_of
from kvps.store import Store
from kvps_cli.output import say

_MOST = 8  # jobs of finished runs that a server holds when the next run begins
_SHARE = 4  # they have this part of the machine's memory at the most


def make_room(store: Store, quiet: bool, spared: str = "") -> None:
    """Remove the oldest jobs of finished runs from a private server that stays, if it has more than a few or they are
    large. Never removes a job that is at work, or of the run `spared`, or one of a server that keeps its data or
    lasts."""
    if not store.ends_unused or not store.stays_s or store.keeps_data:
        return
    each = store.read_jobs(_ended, lambda *_: None)
    ended = sorted(found for found in each if found and not names_of(spared, found[2:3]))
    while len(ended) >= _MOST or sum(nbytes for _, nbytes, *_ in ended) > _room():
        _, _, name, id = ended.pop(0)
        with suppress(JobNotFound):  # another run makes room too
            store.remove_job(name, id)
            if not quiet:
                say(f"job {name} of a finished run is removed, to make room")


def may_stay(store: Store) -> bool:
    """Return whether a server has jobs to look at, and they leave most of the memory to others."""
    with suppress(KvpsError):
        each = list(store.read_jobs(lambda job, _: _bytes_of(job), lambda *_: 0))
        return len(each) > 0 and sum(each) <= 2 * _room()
    return False


def _ended(job: Job, state: State) -> tuple[int, int, str, str] | None:
    """Return when the job last changed, its bytes, name and id; None unless a command launched it that has ended."""
    launched = job.config.metadata.launcher
    if not launched or state.active or not launched.is_dead:
        return None
    return entry_ms(state.last_entry, {}), _bytes_of(job), job.name, job.id


def _bytes_of(job: Job) -> int:
    """Return about how many bytes a job has that nobody trains: two versions, with the state of its optimizer."""
    return 2 * job.layout.nbytes * (1 + len(job.config.slots))


def _room() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _SHARE
