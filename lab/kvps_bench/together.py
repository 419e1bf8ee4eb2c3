"""`python -m kvps_bench.together`: rounds of several workers on one host, whose Redis is on another, with one pull of a
host for all and with one for each, in turns.

The hosts are namespaces of this machine: this needs root, or the right to make user namespaces.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer

from kvps.config import JobConfig
from kvps.errors import InvalidSetting, KvpsError
from kvps.optim import SGD
from kvps_bench.crew import Member, crew, together
from kvps_bench.hosts import Network
from kvps_bench.layouts import LAYOUTS
from kvps_bench.links import Actors, Counter, Keeper
from kvps_bench.roles import LR, Aggregator, Alone, Worker
from kvps_bench.round import check_weights
from kvps_bench.turns import Case, in_turns

_SHARED, _EACH = "one pull a host", "a pull each"
_EXACT = ("fp32", "bf16")  # of the constants that are pushed here


def main(
    mb: Annotated[int, typer.Option(metavar="MB", help="Size of the model.")] = 40,
    workers: Annotated[str, typer.Option(metavar="N,...", help="Workers on the host.")] = "2,4",
    gbit: Annotated[float, typer.Option(metavar="RATE", help="Rate of the link, in Gbit/s, each way.")] = 1,
    turns: Annotated[int, typer.Option(metavar="N", help="Turns of each way.")] = 5,
    formats: Annotated[str, typer.Option(metavar="G,W", help="Formats of gradients and weights.")] = "fp32,fp32",
) -> None:
    """Print the seconds of a round, and the MB that the workers' host receives in it."""
    gradients, _, weights = formats.partition(",")
    settings = {"gradient_format": gradients, "weight_format": weights}
    JobConfig(gradient_format=gradients, weight_format=weights)  # refuses what is no format
    if not re.fullmatch(r"[1-9]\d?(,[1-9]\d?)*", workers):
        raise InvalidSetting(f"--workers must be numbers from 1 to 99 with commas between them, not {workers!r}")
    for count in map(int, workers.split(",")):
        with Network(2, gbit * 1e9) as hosts, LAYOUTS["apart"].opened(hosts) as ground, ExitStack() as stack:
            host, server = hosts
            serving = stack.enter_context(crew((server, Actors)))[0]
            working = stack.enter_context(crew(*[(host, Actors)] * count))
            cases = {
                name: Counter([host], stack.enter_context(_rounds(ground.url, serving, working, make, mb, settings)))
                for name, make in ((_SHARED, Worker), (_EACH, Alone))
            }
            times = in_turns(cases, turns)
            ratio = times[_SHARED].over(times[_EACH])
            for name, case in cases.items():
                received = case.figures()["in_mb"]
                print(f"{count} workers, {name}: {times[name].median:.2f} s a round, {received:g} MB received")
            print(f"{count} workers: {ratio.median:.2f} ({ratio.least:.2f} to {ratio.greatest:.2f})", flush=True)


@contextmanager
def _rounds(
    url: str, serving: Member, working: list[Member], make: type[Worker], mb: int, formats: Mapping[str, str]
) -> Iterator[Case]:
    """Yield a case of two rounds of a job; at its end, check the weights if all bits of a gradient are sent."""
    settings = {"workers": len(working), "transport": "redis", "optimizer": SGD(lr=LR), **formats}
    keeper = secrets.token_hex(4)
    serving("add", keeper, Keeper, url)
    job = serving("ask", keeper, "create", mb * 1_000_000, settings)
    serving("add", job, Aggregator, url, job)
    for rank, member in enumerate(working):
        member("add", job, make, url, job, rank)
    together(working, "ask", job, "rounds", 1)
    yield lambda: together(working, "ask", job, "more_rounds", 2)[0]
    if formats["gradient_format"] in _EXACT:
        near = 2.0**-8 if formats["weight_format"] == "bf16" else 0.0
        check_weights(together(working, "ask", job, "weights"), SGD(lr=LR), len(working), near)


if __name__ == "__main__":
    try:
        typer.run(main)
    except KvpsError as error:
        raise SystemExit(f"together: {error}") from None
