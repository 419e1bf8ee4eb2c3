"""`kvps log`: what has happened to a job, a line for each event."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any

import typer
from kvps_monitor.loggers.targets import Target
from kvps_monitor.views import event_json

from kvps.arrays.number_ranges import numbers_in
from kvps.errors import InvalidSetting, KvpsError, counted, printable
from kvps.history.evaluations import figures_text
from kvps.history.events import Event, EventLog
from kvps.job import Job
from kvps_cli import connect, options, training_log
from kvps_cli.output import print_json, say, start_log

_POLL_S = 0.5
_OLDER = "the aggregator moved them to its --checkpoints DIR, or had none and deleted them"
_OLDER_PUBLISHED = "the learner moved them to its checkpoints, or had none and deleted them"
_KIND = 9  # columns, as wide as the longest word
_WORDS_AT = len(f"2026-01-31 23:59:59.999  {'commit':{_KIND}}  ")

Facts = Mapping[str, Any]


def log(
    job: options.AnyJobName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with each event as it happens.")] = False,
    last: Annotated[
        int,
        typer.Option("--last", "-n", metavar="N", min=0, help="Begin with the last N events; 0 is all that Redis has."),
    ] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each event.")] = False,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar=training_log.METAVAR,
            help="Write loss, learning rate and staleness of each version there instead, after the last version that "
            "is there; with --follow until the job is finished. May be given several times.",
        ),
    ] = None,
    checkpoints: Annotated[
        Path | None,
        options.existing_directory("With --to: also read the part of the log that was moved to this directory."),
    ] = None,
    redis: options.Redis = None,
) -> None:
    """Show what has happened to a job.

    Its events are: workers that joined, left or were evicted, each version with its contributions, what was rejected,
    evaluations, units that were handed out a second time, and which aggregator took over which shard.

    Times are the server's, shown in this machine's time zone. Redis has the newest part of the log (--log-keep of
    kvps aggregator start).
    """
    if checkpoints and not to:
        raise InvalidSetting("--checkpoints is for --to")
    targets = training_log.targets_of(to, "--to")
    with connect.existing_job(redis, job) as opened:
        if targets:
            _write_rows(opened, targets, follow, checkpoints)
            return
        events = EventLog(opened.access.client, opened.access.keys)
        newest = events.newest(last)
        if (moved := opened.state().moved) and (len(newest) < last or not last):
            who = _OLDER_PUBLISHED if opened.config.metadata.publishes else _OLDER
            say(f"versions before {moved:,} are not in Redis any more: {who}")
        _print(newest, as_json)
        if follow:
            _print(events.later(opened.state), as_json)


def _write_rows(job: Job, targets: Sequence[Target], follow: bool, checkpoints: Path | None) -> None:
    """Write rows until the job is finished; without `follow` only those that are ready. Raises KvpsError."""
    start_log(quiet=False, verbose=0)
    with training_log.logging_to(targets, job, quiet=False, checkpoints=checkpoints) as rows:
        while follow and not rows.ended and not rows.over:
            time.sleep(_POLL_S)
    if rows.failures:
        raise KvpsError(rows.failures[-1])


def _print(events: Iterable[Event], as_json: bool) -> None:
    for event in events:
        if as_json:
            print_json(event_json(event))
        else:
            print(_folded(printable(_line(event))), flush=True)


def _folded(line: str) -> str:
    """Return a line for stdout. What a terminal has no room for goes on below the words, which a terminal would cut."""
    if not sys.stdout.isatty():
        return line
    width = get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent=" " * min(_WORDS_AT, width // 2), break_on_hyphens=False)


def _line(event: Event) -> str:
    """Return an event as a person reads it."""
    local = datetime.fromtimestamp(event.at_ms / 1000).astimezone()
    when = f"{local:%Y-%m-%d %H:%M:%S}.{event.at_ms % 1000:03}"
    return f"{when}  {event.kind:{_KIND}}  {_WORDS[event.kind](event.facts)}"


def _commit(facts: Facts) -> str:
    if "by" in facts:
        loss = "" if facts["loss"] is None else f", loss {facts['loss']:.6g}"
        on = f", trained on {counted(facts['trained'], 'item')}" if "trained" in facts else ""
        return f"version {facts['version']:,}: published by {facts['by']}{loss}{on}"
    made_of = ", ".join(map(_contribution, facts["contributions"])) or "no contribution"
    out = ", ".join(f"{c['worker']} round {c['round']:,}" for c in facts["rejected"])
    return f"version {facts['version']:,}: {made_of}{f'; without {out}' if out else ''}"


def _contribution(c: Facts) -> str:
    """Return the worker, its round or unit, and what is not the ordinary case."""
    done = f"round {c['round']:,}" if c["unit"] is None else f"unit {c['unit']:,}"
    notes = [f"part {c['part']}"] if c["part"] else []
    notes += [f"weight {c['weight']:,}"] if c["weight"] > 1 else ["counts as zeros"] if not c["weight"] else []
    notes += [f"staleness {c['staleness']:,}"] if c["staleness"] else []
    notes += [f"lacks {counted(len(numbers_in(c['lacks'])), 'parameter')}"] if "lacks" in c else []
    return f"{c['worker']} {done}" + (f" ({', '.join(notes)})" if notes else "")


def _asked(facts: Facts) -> str:
    """Return who has asked for a stop or the like, and why."""
    last = f"all workers end with round {facts['round']:,}" if facts.get("round") else ""
    return ", ".join(filter(None, [last, facts["by"] and f"by {facts['by']}", facts["reason"]])) or "no reason given"


def _set(facts: Facts) -> str:
    lr = "the optimizer's own again" if facts["lr"] is None else f"{facts['lr']:g}"
    return ", ".join(filter(None, [f"learning rate {lr}", facts["by"] and f"by {facts['by']}", facts["reason"]]))


_AGAIN = {"again": ": the prompts are handed out again", "drop": ""}
_WORDS: dict[str, Callable[[Facts], str]] = {
    "create": lambda f: f"version {f['version']:,}",
    "restore": lambda f: (
        f"version {f['version']:,}, from a checkpoint of job {f['job']}"
        + "".join(f", {name} {before} to {now}" for name, (before, now) in f.get("settings", {}).items())
    ),
    "adopt": lambda f: f"resumed by {f['by']}",
    "join": lambda f: f"{f['worker']}, rank {f['rank']:,}, clock {f['clock']:,}",
    "leave": lambda f: f"{f['worker']}",
    "evict": lambda f: ": ".join(filter(None, [f["worker"], f["reason"]])),
    "commit": _commit,
    "reject": lambda f: f"{f['worker']} round {f['round']:,}: {f['reason']}",
    "backup": lambda f: f"unit {f['unit']:,} to {f['worker']} too: {f['of']} has had it for {f['out_ms'] / 1000:.2f} s",
    "duplicate": lambda f: f"unit {f['unit']:,} of {f['worker']}: another worker had pushed it before",
    "recover": lambda f: f"version {f['version']:,}: the server has lost {counted(f['lost'], 'version')}",
    "take": lambda f: f"shard {f['shard']} by {f['holder']} (term {f['term']:,})",
    "release": lambda f: f"by {f['holder']} (term {f['term']:,})",
    "evaluate": lambda f: f"version {f['version']:,}: {figures_text(f['figures'])}, by {f['by']}",
    **dict.fromkeys(("stop", "suspend", "pause", "resume"), _asked),
    "set": _set,
    "stale": lambda f: f"{counted(f['items'], 'item')}, too old after version {f['version']:,}{_AGAIN[f['then']]}",
    "rejected": lambda f: f"{counted(f['items'], 'item')} after version {f['version']:,}: {f['reason']}",
    "gone": lambda f: f"actor {f['actor']}: {f['reason']}",
    "scale": lambda f: f"from {f['before']:,} to {counted(f['workers'], 'worker')}",
}
