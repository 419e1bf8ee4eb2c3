"""`kvps status`: shows one job."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from kvps.job import Job, Trace
from kvps.protocol.job_state import Member, State
from kvps_cli import connect, options
from kvps_cli.look.jobs import job_state, summary
from kvps_cli.output import loss_text, print_json
from kvps_cli.tables import plain_console, print_rows

_COLUMNS = ("worker", "rank", "state", "clock", "round", "loss", "waiting", "device", "process")
_OF_MEMBER = ("rank", "incarnation", "state", "clock", "round", "accepted", "pending", "finished")
_OF_PROCESS = ("device", "host", "pid")


def status(job: options.JobName, as_json: options.AsJson = False, redis: options.Redis = None) -> None:
    """Show one job: its version, vector clock and workers, and which aggregators hold its shards."""
    with connect.existing_job(redis, job) as opened:
        state, holders, traces = opened.state(), opened.holders(), opened.traces()
        pending, kept = int(opened.access.client.call("XLEN", opened.access.keys.inbox)), opened.kept(state.version)
        missing = _without_holder(opened, state)
        if as_json:
            print_json(_as_dict(opened, state, holders, traces, pending))
            return
        doing = job_state(opened, state)
    console, c = plain_console(), opened.config
    console.print(Text.assemble((job, "bold"), f"  {doing}  {c.task or 'made in Python'}  {c.mode}  {c.optimizer}"))
    console.print(f"version {state.version}  head {state.head[:12]}  {pending} contributions waiting")
    if c.transport == "shm":
        console.print(f"arrays in the shared memory of {c.host}; Redis has version {kept}")
    for shard, holder in enumerate(holders):
        console.print(f"shard {shard}  {holder or missing}")
    if state.members:
        print_rows(_COLUMNS, [_row(member, traces.get(member.worker)) for member in _by_rank(state)])
    else:
        start = "" if c.launched_by else f"; start one with kvps worker --job {job}"
        console.print(f"no worker has joined{start}")


def _by_rank(state: State) -> list[Member]:
    return sorted(state.members.values(), key=lambda member: member.rank)


def _row(member: Member, trace: Trace | None) -> list[str]:
    loss = loss_text(trace.loss if trace else None)
    waiting = f"{trace.waiting:.0%}" if trace else "-"
    own = (member.worker, member.rank, member.state, member.clock, member.round, loss, waiting, member.device)
    return [*map(str, own), f"{member.host}:{member.pid}"]


def _without_holder(job: Job, state: State) -> str:
    """Return the text for a shard that no aggregator holds. A finished or idle job needs no aggregator."""
    if state.finished(job.config):
        return "-"
    return "idle until a worker joins" if job.access.is_idle() else "no aggregator: kvps aggregator start"


def _as_dict(job: Job, state: State, holders: list[str], traces: dict[str, Trace], pending: int) -> dict[str, Any]:
    c = job.config
    return summary(job, state) | {
        "shards": c.shards,
        "transport": c.transport,
        "optimizer": c.optimizer.to_json(),
        "head": state.head,
        "clock": dict(state.clock),
        "pending": pending,
        "holders": holders,
        "members": {member.worker: _member(member, traces.get(member.worker)) for member in _by_rank(state)},
    }


def _member(member: Member, trace: Trace | None) -> dict[str, Any]:
    """Return a worker as one JSON object, with its last loss and the share of its time that it spent waiting."""
    known = {name: getattr(member, name) for name in _OF_MEMBER + _OF_PROCESS}
    return known | {"loss": trace and trace.loss, "waiting": trace and trace.waiting}
