"""`kvps aggregator start`: the process that averages gradients and commits weights."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Annotated

import typer
from kvps_aggregator import AggregatorOptions, serve
from kvps_aggregator.job_watcher import JobWatcher
from kvps_aggregator.nearness import Near

from kvps.device.base import open_device
from kvps.errors import InvalidSetting
from kvps.optim import user_code
from kvps.protocol.keys import check_name
from kvps.store import Store
from kvps_cli import completion, connect, options, ports
from kvps_cli.look import metrics
from kvps_cli.output import say, start_log
from kvps_cli.serve import health
from kvps_cli.train.kept_files import KeptFiles

app = typer.Typer(
    help="The process that averages gradients and commits weights.", no_args_is_help=True, add_completion=False
)


@app.callback()
def _aggregator() -> None:
    """The process that averages gradients and commits weights."""


@app.command("start")
@options.with_shared
def start(
    *,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="NAME",
            help="Serve this job until it is finished.",
            show_default="every job",
            autocompletion=completion.jobs,
        ),
    ] = None,
    kept: KeptFiles,
    gpu: Annotated[
        int | None,
        typer.Option(metavar="N", help="Reduce and step on this CUDA device, with CuPy.", show_default="NumPy"),
    ] = None,
    memory_lost: Annotated[
        bool,
        typer.Option(
            "--memory-lost",
            help="With --job: continue the job on this host from the version that Redis has. Use this only if the host "
            "or container whose shared memory held the job's arrays was restarted or is gone.",
            hidden=True,
        ),
    ] = False,
    near: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="On a cluster: take the shards whose bytes are on this node first, and others only when nobody else "
            "holds them. Repeat it for more nodes; auto means the nodes of this host.",
            show_default="all shards alike",
            hidden=True,
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Without --job: serve jobs with this optimizer or reduction of their user's own too, and import it "
            "from this directory. Repeat it for more.",
            show_default="those of kvps alone",
        ),
    ] = None,
    health_port: health.Port = None,
    health_host: health.Host = None,
    metrics_port: metrics.Port = None,
    metrics_host: metrics.Host = None,
    server: connect.ServerOptions,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Serve one job until it is finished, or without --job every job until stopped.

    You may start several: one works on each shard, and the others stand by and take over if it dies.
    """
    if job is not None:
        check_name("job", job)
    elif memory_lost:
        raise InvalidSetting("--memory-lost is for one job, whose memory is surely lost: give its name with --job")
    if job is not None and health_port is not None:
        raise InvalidSetting("--health-port is for an aggregator that serves every job: leave out --job")
    if job is None and kept.log:
        raise InvalidSetting("--log is for one job: give its name with --job")
    if job is not None and allow:
        raise InvalidSetting(
            "--allow is for an aggregator that serves every job: a job named by --job may use its code"
        )
    for name in allow or ():
        user_code.load("code", name, InvalidSetting)  # what cannot be loaded is the operator's mistake: fail now
    kept.prepare()
    device, nodes = open_device(gpu), Near(near) if near else None
    quiet = start_log(quiet, verbose)
    with (
        ports.opened("health", health.Probes, health_port, health_host) as probes,
        ports.opened("metrics", metrics.server_of, metrics_port, metrics_host) as scraped,
        connect.serving_store(server, quiet) as store,
        metrics.serving(scraped, store, job),
    ):
        if job is None:
            serving = AggregatorOptions(kept.record, kept.saving, device, near=nodes, log=kept.kept_log)
            _serve_all(store, serving, quiet, probes, allow or ())
        else:
            opened = connect.wait_for_job(store, job, quiet)
            connect.announce(opened, quiet)
            with kept.logging_to(opened, quiet):
                serve(
                    opened,
                    record=kept.record,
                    checkpoints=kept.saving,
                    device=device,
                    memory_lost=memory_lost,
                    near=nodes,
                    log_kept=kept.kept_log,
                )
            if not quiet:
                say(f"job {opened.name}: finished")


def _serve_all(
    store: Store, serving: AggregatorOptions, quiet: bool, probes: health.Probes | None, allow: Collection[str]
) -> None:
    if not quiet:
        say("serving every job of this server; Ctrl-C ends it")
    announce = partial(connect.announce, quiet=quiet)
    watcher = JobWatcher(store, say, announce, serving, allow)
    if probes:
        probes.begin(lambda: watcher.last_turn)
    watcher.run()
