"""`kvps rollouts`: the experience of a job that a learner publishes, and the actors that send it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from kvps.config.rollouts import Rollouts
from kvps.errors import InvalidSetting, counted, printable
from kvps.history.rollouts import ActorNow, ItemFate, RolloutsNow
from kvps.parsing import bytes_text
from kvps_cli import connect, options
from kvps_cli.long_work import duration
from kvps_cli.output import print_json
from kvps_cli.tables import plain_console, print_rows

_COLUMNS = ("actor", "items", "items/s", "version", "prompt", "silent", "host")
_BAR, _FULL = 40, "█"  # columns of the longest bar of the histogram
_BARS = 12  # of which there are no more


def rollouts(
    job: options.AnyJobName = None,
    fates: Annotated[
        bool, typer.Option("--fates", help="Print what became of each item instead, a line for each.")
    ] = False,
    checkpoints: Annotated[
        Path | None,
        options.existing_directory("With --fates: also read the part of the log that was moved to this directory."),
    ] = None,
    as_json: options.AsJson = False,
    redis: options.Redis = None,
) -> None:
    """Show the experience that actors send to the learner of a job: items, prompts, staleness, and each actor.

    Items wait, are taken by the learner, or are on their way, until a version is trained on them, or they are too old,
    or rejected. Items a second are those of an actor that ended so, as the last 50 entries of the log say.
    """
    if checkpoints and not fates:
        raise InvalidSetting("--checkpoints is for --fates")
    with connect.existing_job(redis, job) as opened:
        settings = opened.rollouts.settings
        if fates:
            for fate in opened.rollouts.fates(checkpoints):
                if as_json:
                    print_json(fate._asdict())
                else:
                    print(printable(_fate(fate)))
            return
        now, rates, name = opened.rollouts.now(), opened.rollouts.per_second(), opened.name
    if as_json:
        facts = now.facts
        actors = [each | {"items_per_s": rates.get(each["name"], 0.0)} for each in facts["actors"]]
        bounds = {n: getattr(settings, n) for n in ("capacity", "capacity_bytes", "max_staleness", "group", "units")}
        print_json({"job": name} | facts | {"actors": actors, "settings": bounds})
    else:
        _print(name, settings, now, rates)


def _print(name: str, s: Rollouts, now: RolloutsNow, rates: Mapping[str, float]) -> None:
    console = plain_console()
    there = f"{now.waiting:,} waiting, {now.taken:,} taken, {now.offered:,} on their way"
    room = f"{now.waiting + now.taken + now.offered:,} of {counted(s.capacity, 'item')}"
    console.print(f"{name}  {there}: {room}, {bytes_text(now.nbytes)} of {bytes_text(s.capacity_bytes)}")
    console.print(f"{now.trained:,} trained, {now.stale:,} stale, {now.rejected:,} rejected")
    if s.units:
        console.print(f"prompts: {now.handed_out:,} of {s.units:,} handed out, {now.closed:,} done")
    if now.staleness:
        bound = "no bound" if s.max_staleness is None else f"at most {s.max_staleness:,}"
        console.print(f"staleness of what is there, if the next version is trained on it ({bound})")
        bars = _bars(now.staleness)
        most = max(bars.values())
        for label, items in bars.items():
            console.print(f"{label:>12}  {items:>9,}  {_FULL * math.ceil(_BAR * items / most)}".rstrip())
    if now.actors:
        print_rows(_COLUMNS, (_row(actor, rates) for actor in now.actors), least=("host", "silent"))
    else:
        console.print("no actor is there")


def _bars(staleness: Mapping[int, int]) -> dict[str, int]:
    """Return label -> items of a histogram of a few bars, all as wide."""
    low, high = min(staleness), max(staleness)
    width = math.ceil((high - low + 1) / _BARS)
    firsts = range(low, high + 1, width)
    bars = dict.fromkeys((f"{n:,}" if width == 1 else f"{n:,} to {n + width - 1:,}" for n in firsts), 0)
    labels = list(bars)
    for late, items in staleness.items():
        bars[labels[(late - low) // width]] += items
    return bars


def _row(actor: ActorNow, rates: Mapping[str, float]) -> list[str]:
    version = "-" if actor.version is None else f"{actor.version:,}"
    prompt = "-" if actor.unit is None else f"{actor.unit:,}"
    rate = f"{rates.get(actor.name, 0.0):,.2f}"
    return [actor.name, f"{actor.items:,}", rate, version, prompt, duration(actor.silent_s), actor.host]


def _fate(fate: ItemFate) -> str:
    prompt = "" if fate.unit is None else f"prompt {fate.unit:,}"
    where = "" if fate.version is None else f"{'in' if fate.fate == 'trained' else 'after'} version {fate.version:,}"
    return "  ".join(filter(None, [fate.id, fate.fate, where, prompt, fate.reason]))
