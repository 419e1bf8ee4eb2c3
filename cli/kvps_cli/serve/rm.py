"""`kvps rm`: removes a job."""

from __future__ import annotations

from kvps.errors import CorruptData, JobNotFound, counted, printable
from kvps_cli import connect, options
from kvps_cli.long_work import LongWork
from kvps_cli.output import say


def rm(
    job: options.JobName,
    yes: options.Yes = False,
    quiet: options.Quiet = False,
    redis: options.Redis = None,
) -> None:
    """Remove a job and all its data."""
    id: str | None = None  # unknown if the job is damaged
    with connect.existing_store(redis) as store:
        try:
            opened, state = connect.read_job(store, job)
            id = opened.id
            inside = f"with {counted(state.active, 'worker')} in it"
            if opened.config.metadata.publishes:
                holder = printable(opened.access.reader.holders()[0] or "")
                inside = f"which {holder} publishes" if holder else "which no learner publishes now"
            what = f"job {job} at version {state.version}, {inside}"
        except CorruptData:
            what = f"job {job}, which is damaged"
        except JobNotFound:
            what, yes = f"job {job}", True  # a removal came before; only if it was interrupted is anything left
        options.confirm("kvps rm", f"Remove {what}", yes)
        with LongWork(quiet) as work, work.stage(f"removing job {job}"):
            store.remove_job(job, id)
    if not quiet:
        say(f"job {job}: removed")
