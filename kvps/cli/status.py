"""`kvps status`: one job."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from kvps_aggregator.aggregator import is_idle
from rich.table import Table
from rich.text import Text

from kvps.cli import connect, options
from kvps.cli.jobs import job_state
from kvps.cli.output import plain_console
from kvps.job import Job, readable
from kvps.protocol.job_state import State


def status(
    job: options.JobName,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    redis: options.Redis = None,
) -> None:
    """Show one job: version, vector clock, workers, who holds its shards."""
    with connect.existing_store(redis) as store, readable(job):
        found = store.job(job)
        state, holders, traces = found.state(), found.holders(), found.traces()
        waiting, kept = found.client.call("XLEN", found.keys.inbox), found.kept(state.version)
        missing = _why_nobody_holds(found, state)
    if as_json:
        print(json.dumps(_as_dict(found, state, holders, waiting)))
        return
    console, c = plain_console(), found.config
    rest = f"  {job_state(found, state)}  {c.task or 'made in Python'}  {c.mode}  {c.optimizer}"
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


def _why_nobody_holds(job: Job, state: State) -> str:
    """What is said of a shard without an aggregator: while nobody is in the job it needs none."""
    if state.finished(job.config):
        return "-"
    return "idle until a worker joins" if is_idle(job) else "no aggregator: kvps aggregator start"


def _as_dict(job: Job, state: State, holders: list[str], waiting: int) -> dict[str, Any]:
    c = job.config
    return {
        "job": job.name,
        "task": c.task,
        "state": job_state(job, state),
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
