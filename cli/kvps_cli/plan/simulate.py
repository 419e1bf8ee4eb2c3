"""`kvps simulate`: what a job would do on machines that are not here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from kvps_simulate.settings import TOPOLOGIES, Constants, Setting
from kvps_simulate.units import parse_size, parse_time, seconds, size

from kvps.errors import InvalidSetting, counted
from kvps_cli.long_work import LongWork
from kvps_cli.options import AsJson, Quiet, SharedOptions, check_file, extra, with_shared
from kvps_cli.output import print_json, write_file
from kvps_cli.tables import print_rows

if TYPE_CHECKING:
    from kvps_simulate.job import Job
    from kvps_simulate.result import Result

_HOSTS, _TRAINING, _FAULTS = "Hosts", "Training", "What goes wrong"
_KINDS = (".html", ".svg")
_TIMES = ("latency", "compute", "restart", "failover")


def _option(help: str, panel: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


@dataclass
class SettingOptions(SharedOptions):
    """The options of what is simulated."""

    workers: Annotated[int, _option("How many workers train.", _TRAINING, "--workers", "-w")] = 8
    nodes: Annotated[int, _option("How many data nodes (Redis masters) hold the shards.", _HOSTS)] = 1
    aggregators: Annotated[int, _option("How many aggregators; 0: one for each data node.", _HOSTS)] = 0
    shards: Annotated[int, _option("Into how many parts the model is cut; 0: as many as it must be.", _HOSTS)] = 0
    size: Annotated[str, _option("Of the model in float32, as 10GB.", _TRAINING, metavar="BYTES")] = "40MB"
    bandwidth: Annotated[str, _option("Of each host's link, each way, as 25Gb.", _HOSTS, metavar="BITS")] = "25Gb"
    latency: Annotated[str, _option("From host to host, one way.", _HOSTS, metavar="TIME")] = "50us"
    cores: Annotated[int, _option("Of each host that a data node is on.", _HOSTS)] = 16
    topology: Annotated[
        str, _option("; ".join(f"{name}: {what}" for name, what in TOPOLOGIES.items()), _HOSTS, metavar="NAME")
    ] = "apart"
    staleness: Annotated[int, _option("0 is BSP, N is SSP, -1 is ASP.", _TRAINING, "--staleness", "-s")] = 0
    gradient_format: Annotated[str, _option("As of kvps create.", _TRAINING, metavar="FORMAT")] = "fp32"
    weight_format: Annotated[str, _option("fp32 or bf16.", _TRAINING, metavar="FORMAT")] = "fp32"
    optimizer: Annotated[str, _option("sgd, momentum, adagrad or adam.", _TRAINING, metavar="NAME")] = "sgd"
    compute: Annotated[str, _option("Time in which a worker computes a gradient.", _TRAINING, metavar="TIME")] = "100ms"
    rounds: Annotated[int, _option("How many rounds each worker does.", _TRAINING)] = 20
    jitter: Annotated[float, _option("Sigma of a log-normal factor on each computation.", _FAULTS)] = 0.0
    slow: Annotated[
        str, _option("Part of all computations that take N times as long, as 0.01=5x.", _FAULTS, metavar="PART=Nx")
    ] = "0=5x"
    worker_failures: Annotated[float, _option("Deaths of one worker in an hour.", _FAULTS)] = 0.0
    node_failures: Annotated[float, _option("Failures of one data node in an hour.", _FAULTS)] = 0.0
    restart: Annotated[str, _option("Until a dead worker has joined again.", _FAULTS, metavar="TIME")] = "30s"
    failover: Annotated[str, _option("Until a failed data node has a successor.", _FAULTS, metavar="TIME")] = "15s"
    seed: Annotated[int, _option("Decides all that is random.", _FAULTS)] = 0

    def setting(self) -> Setting:
        """Return it in the units of the simulation. Raises InvalidSetting."""
        given: dict[str, Any] = {name: value for name, value in vars(self).items() if name not in _TIMES}
        given |= {name: parse_size(f"--{name}", given[name]) for name in ("size", "bandwidth")}
        given |= {f"{name}_s": parse_time(f"--{name}", getattr(self, name)) for name in _TIMES}
        given["slow"], given["slow_by"] = _parse_slow(self.slow)
        return Setting(**given)


@with_shared
def simulate(
    what: SettingOptions,
    *,
    constants: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What steps cost.", show_default="measured on one machine")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write a page (.html) or its picture (.svg), with other numbers of hosts.",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Simulate a job: its rounds, its goodput, and what it waits for."""
    if out and out.suffix not in _KINDS:
        raise InvalidSetting(f"--out must end in {' or '.join(_KINDS)}, not {str(out)!r}")
    if out:
        check_file("--out", out)
    _run(what.setting(), Constants.load(constants), out, LongWork(quiet, as_json))


def _parse_slow(text: str) -> tuple[float, float]:
    part, _, factor = text.partition("=")
    try:
        return float(part), float(factor.removesuffix("x"))
    except ValueError:
        raise InvalidSetting(f"--slow must be PART=Nx, as 0.01=5x, not {text!r}") from None


def _run(setting: Setting, constants: Constants, out: Path | None, work: LongWork) -> None:
    with extra("simulate", "kvps simulate needs SimPy", "simpy"):
        from kvps_simulate.page import page, rounds_picture
        from kvps_simulate.result import simulate
        from kvps_simulate.sweep import limits, pairs, sweep
    with work:
        with work.stage("simulating", _cost(setting), "contributions") as stage:

            def watch(job: Job) -> None:
                stage.measure = lambda: job.committed

            result = simulate(setting, constants, watch)
        facts = _facts(result)
        if work.as_json:
            print_json(result.to_dict())
        else:
            print_rows(("", ""), facts)
        if not out:
            return
        with work.stage(f"simulating for {out}", sum(map(_cost, pairs(setting))), "contributions") as stage:
            swept = sweep(setting, constants, seen=lambda done: stage.add(_cost(done.setting)))
    drawn = page(result, swept, limits(swept), facts) if out.suffix == ".html" else rounds_picture(swept)
    write_file("--out", out, drawn)


def _cost(setting: Setting) -> int:
    """Return how many contributions are simulated, as a measure of the time that it takes."""
    return setting.workers * setting.rounds


def _facts(r: Result) -> list[tuple[str, str]]:
    facts = [
        ("mode", r.setting.mode),
        ("round", f"{seconds(r.median_s)} (95%: {seconds(r.p95_s)})"),
        ("computing", f"{r.efficiency:.1%} of the time"),
        ("goodput", f"{r.goodput:.4g} contributions a second, in {counted(r.versions, 'version')}"),
        ("staleness", f"{r.staleness:.2f} versions on average, {r.most_stale} at most"),
        ("busiest", ", ".join(f"{name} {part:.0%}" for name, part in list(r.busy.items())[:3])),
        ("data node, memory", size(r.node_memory)),
        ("data node, link", f"{size(r.node_in)}/s in, {size(r.node_out)}/s out"),
        ("aggregator, memory", size(r.aggregator_memory)),
    ]
    if r.lost or r.failovers:
        facts.append(
            ("failures", f"{counted(r.lost, 'worker')} ({r.evictions} evicted), {counted(r.failovers, 'data node')}")
        )
    return facts + [("not possible", limit) for limit in r.beyond]
