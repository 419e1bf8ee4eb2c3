"""Looking at jobs and removing them."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from kvps_aggregator.aggregator import is_idle
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvps.cli import common, options
from kvps.errors import CorruptData, InvalidSetting, JobNotFound
from kvps.job import Job, readable
from kvps.protocol.job_state import State


def jobs(redis: options.Redis = None) -> None:
    """List the jobs of the server."""
    table = Table("job", "task", "mode", "workers", "version", "state", box=None, pad_edge=False)
    passed_over = set[str]()
    with common.existing_store(redis) as store:
        for job, state in common.all_jobs(store, passed_over):
            c = job.config
            active = f"{_active(state)}/{c.workers}"
            table.add_row(job.name, c.task or "-", c.mode, active, str(state.version), _word(job, state))
    if table.row_count:
        plain_console().print(table)
    elif not passed_over:
        print("no jobs: kvps up digits, or kvps create TASK --job NAME", file=sys.stderr)


def status(
    job: options.JobName,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    redis: options.Redis = None,
) -> None:
    """Show one job: version, vector clock, workers, who holds its shards."""
    with common.existing_store(redis) as store, readable(job):
        found = store.job(job)
        state, holders, traces = found.state(), found.holders(), found.traces()
        waiting, kept = found.client.call("XLEN", found.keys.inbox), found.kept(state.version)
        missing = _why_nobody_holds(found, state)
    if as_json:
        print(json.dumps(_as_dict(found, state, holders, waiting)))
        return
    console, c = plain_console(), found.config
    rest = f"  {_word(found, state)}  {c.task or 'made in Python'}  {c.mode}  {c.optimizer}"
    console.print(Text.assemble((job, "bold"), rest))
    console.print(f"version {state.version}  head {state.head[:12]}  {waiting} contributions waiting")
    if c.transport == "shm":
        console.print(f"arrays in the shared memory of {c.host}; Redis has version {kept}")
    for shard, holder in enumerate(holders):
        console.print(f"shard {shard}  {holder or missing}")
    table = Table(
        "worker", "rank", "state", "clock", "round", "loss", "waiting", "device", "process", box=None, pad_edge=False
    )
    for m in sorted(state.members.values(), key=lambda m: m.rank):
        trace = traces.get(m.worker)
        loss = f"{trace.loss:.4f}" if trace and trace.loss is not None else "-"
        share = f"{trace.waiting:.0%}" if trace else "-"
        table.add_row(
            m.worker, str(m.rank), m.state, str(m.clock), str(m.round), loss, share, m.device, f"{m.host}:{m.pid}"
        )
    start = "" if c.launched_by else f": kvps worker --job {job}"
    console.print(table if state.members else f"no worker has joined{start}")


def rm(
    job: options.JobName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    redis: options.Redis = None,
) -> None:
    """Remove a job and all its bytes."""
    id: str | None = None  # of a damaged job it is not known
    with common.existing_store(redis) as store:
        try:
            found, state = common.read_job(store, job)
            id = found.id
            what = f"job {job} at version {state.version}, with {_active(state)} workers in it"
        except CorruptData:
            what = f"job {job}, which is damaged"
        except JobNotFound:
            yes = True  # it was removed before; only if that was cut short is there anything left of it
        if not yes:
            if not sys.stdin.isatty():
                raise InvalidSetting(f"kvps rm asks before it removes job {job!r}: give --yes where nobody can answer")
            typer.confirm(f"Remove {what}?", abort=True)
        store.remove_job(job, id)
    common.say(f"job {job}: removed")


def plain_console() -> Console:
    """A console for what stands in Redis: names in brackets are no markup, `:100:` is no emoji."""
    return Console(markup=False, emoji=False)


def _active(state: State) -> int:
    return sum(1 for m in state.members.values() if m.state == "active")


def _why_nobody_holds(job: Job, state: State) -> str:
    """What is said of a shard without an aggregator: while nobody is in the job it needs none."""
    if state.finished(job.config):
        return "-"
    return "idle until a worker joins" if is_idle(job) else "no aggregator: kvps aggregator start"


def _word(job: Job, state: State) -> str:
    if state.finished(job.config):
        return "finished"
    if len(state.members) < job.config.workers or is_idle(job):
        return "waits for workers"
    return "runs" if any(job.holders()) else "waits for an aggregator"


def _as_dict(job: Job, state: State, holders: list[str], waiting: int) -> dict[str, Any]:
    c = job.config
    return {
        "job": job.name,
        "task": c.task,
        "state": _word(job, state),
        "mode": c.mode,
        "staleness": c.staleness,
        "workers": c.workers,
        "shards": c.shards,
        "transport": c.transport,
        "optimizer": c.optimizer.to_json(),
        "version": state.version,
        "head": state.head,
        "clock": dict(state.clock),
        "waiting_contributions": waiting,
        "holders": holders,
        "members": {
            m.worker: {
                "rank": m.rank,
                "state": m.state,
                "round": m.round,
                "device": m.device,
                "host": m.host,
                "pid": m.pid,
            }
            for m in state.members.values()
        },
    }
