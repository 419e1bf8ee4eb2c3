"""`kvps status`: shows one job."""

from __future__ import annotations

from typing import Any

from kvps_monitor import palette
from kvps_monitor.jobs import summary
from kvps_monitor.live import JobWatch
from kvps_monitor.spans import Iteration, Traces
from kvps_monitor.views import WorkerView
from rich.text import Text

from kvps.errors import counted, printable
from kvps.job import Job
from kvps.protocol.job_state import Member, State
from kvps_cli import connect, options
from kvps_cli.output import loss_text, print_json
from kvps_cli.tables import plain_console, print_rows

_COLUMNS = ("worker", "rank", "state", "clock", "round", "loss", "waiting", "device", "process")
_OF_MEMBER = ("rank", "incarnation", "state", "clock", "round", "accepted", "pending", "finished")
_OF_PROCESS = ("device", "host", "pid")
_LAST = 200  # iterations of each worker


def status(job: options.AnyJobName = None, as_json: options.AsJson = False, redis: options.Redis = None) -> None:
    """Show one job: its version, vector clock and workers, and which aggregators hold its shards."""
    with connect.existing_job(redis, job) as opened:
        state = opened.state()
        if as_json:
            print_json(_as_dict(opened, state))
            return
        view = JobWatch(opened).look()
        missing, kept = _without_holder(opened, state), opened.access.transport.safe_version(view.version)
    console, c = plain_console(), opened.config
    does = Text(
        printable(palette.job_does(view.state, view.waits_for, view.why)), palette.STYLES[palette.tone(view.state)]
    )
    task = c.metadata.task or "made in Python"
    console.print(Text.assemble((opened.name, "bold"), "  ", does, f"  {task}  {c.mode}  {c.stepped_by}"))
    what = f"loss {loss_text(view.loss)}" if view.published_by else f"{counted(view.backlog, 'contribution')} waiting"
    console.print(f"version {view.version:,}  head {view.head[:12]}  {what}")
    if view.units_text:
        console.print(view.units_text)
    if view.rollouts:
        console.print(f"rollouts {palette.experience(view.rollouts.brief)}")
    if view.evaluation_text:
        console.print(printable(view.evaluation_text), soft_wrap=True)
    if c.transport == "shm":
        console.print(f"arrays in the shared memory of {c.metadata.host}; Redis has version {kept:,}")
    for shard in view.shards:
        console.print(f"shard {shard.shard}  {shard.holder or missing}")
    if view.published_by:
        console.print(view.published_by)
    elif view.workers:
        print_rows(_COLUMNS, map(_row, view.workers), least=("process", "device", "rank"))
    else:
        start = "" if c.metadata.launched_by else f"; start {connect.start_of(opened)}"
        console.print(f"no worker has joined{start}")


def _by_rank(state: State) -> list[Member]:
    return sorted(state.members.values(), key=lambda member: member.rank)


def _row(w: WorkerView) -> list[str]:
    waiting = f"{w.shares['wait']:.0%}" if w.shares else "-"
    counts = f"{w.clock:,}", f"{w.committed:,}", loss_text(w.loss)
    return [w.worker, f"{w.rank:,}", palette.doing(w), *counts, waiting, w.device, f"{w.host}:{w.pid}"]


def _without_holder(job: Job, state: State) -> str:
    """Return the text for a shard that no aggregator holds. A finished, idle or published job needs no aggregator."""
    if state.finished(job.config) or job.config.metadata.publishes:
        return "-"
    return "idle until a worker joins" if job.access.is_idle() else "no aggregator: kvps aggregator start"


def _as_dict(job: Job, state: State) -> dict[str, Any]:
    c, told, last = job.config, job.evaluation(), Traces(job, _LAST).read(state.members)[0]
    return summary(job, state) | {
        "shards": c.shards,
        "transport": c.transport,
        "optimizer": None if c.metadata.publishes else c.optimizer.to_json(),
        "head": state.head,
        "lr": state.lr,
        "clock": dict(state.clock),
        "pending": int(job.access.client.call("XLEN", job.access.keys.inbox)),
        "holders": job.access.reader.holders(),
        "evaluation": told and told._asdict(),
        "members": {member.worker: _member(member, last[member.worker]) for member in _by_rank(state)},
    }


def _member(member: Member, last: list[Iteration]) -> dict[str, Any]:
    """Return a worker as one JSON object, with its last loss and the share of its time that it spent waiting in its
    `last` iterations."""
    losses, spent = [i.loss for i in last if i.loss is not None], sum(i.milliseconds for i in last)
    waiting = sum(i.phases["wait"] for i in last) / spent if spent else 0.0
    known = {name: getattr(member, name) for name in _OF_MEMBER + _OF_PROCESS}
    return known | {"loss": losses[-1] if losses else None, "waiting": waiting}
