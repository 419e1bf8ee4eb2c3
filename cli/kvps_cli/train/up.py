"""`kvps up`: starts server, aggregator and workers of one job on this machine, and watches them until the end."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from kvps_monitor.loggers.training_log import TrainingLog
from kvps_workers import Task, load_task
from kvps_workers.rounds import Rounds

from kvps.arrays.digest import weights_sha256
from kvps.errors import InvalidSetting, KvpsError, TaskFailed, counted
from kvps.job import Job
from kvps.machine import launcher
from kvps.machine.files import private
from kvps.protocol.keys import check_new_name
from kvps.server import private_server
from kvps.store import Store
from kvps_cli import connect, options
from kvps_cli.child import Child
from kvps_cli.finished_runs import make_room
from kvps_cli.long_work import LongWork
from kvps_cli.new_job import create_job, parameters_of
from kvps_cli.output import log_options, loss_text, say, start_log
from kvps_cli.prove.fault_injection import FaultInjection, replayed
from kvps_cli.supervise import Care, Supervisor
from kvps_cli.train.after import where_weights_are
from kvps_cli.train.kept_files import KeptFiles
from kvps_cli.train.progress import (
    Display,
    Figures,
    Followed,
    aggregate,
    aggregators_option,
    check_trained,
    finish,
    follow,
)
from kvps_cli.train.scale import Copies
from kvps_cli.train.settings import TaskOptions, check_prefetch


@options.with_shared
def up(
    task: options.TaskName,
    settings: TaskOptions,
    *,
    job: options.NewJobName = None,
    slow: options.Slow = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the figures of the run to FILE as JSON.", rich_help_panel=options.FILES
        ),
    ] = None,
    aggregators: Annotated[int | None, aggregators_option(show_default="1, or 2 with --kill-every")] = None,
    kill_every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Kill a random worker or aggregator about once in so many seconds, but only after a commit since the "
            "last kill. Start it again. At the end, prove that nothing was lost.",
            rich_help_panel="Failures",
        ),
    ] = None,
    prefetch: options.Prefetch = False,
    kept: KeptFiles,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    server: connect.RunServerOptions,
) -> None:
    """Train a task on this machine. One command starts server, aggregator and workers."""
    factors = options.slow_factors(slow or [], settings.most)
    if kill_every is not None and not kill_every >= 0.1:
        raise InvalidSetting(f"--kill-every must be 0.1 seconds or more, not {kill_every:g}")
    if job is not None:
        check_new_name("job", job)
    if report is not None:
        options.check_file("--report", report)
    if kill_every is not None and kept.log_keep is None:
        kept.log_keep = 0  # the proof needs the whole log
    kept.prepare(fresh=True)
    if kill_every is not None and kept.log_keep and not kept.kept_log.directory:
        raise InvalidSetting("--kill-every proves the whole log: give --checkpoints DIR too, or leave out --log-keep")
    loaded = load_task(task)
    launched_by = launcher.this_process("kvps up", settings.most)
    config = settings.job_config(task, loaded, quiet).noting(launched_by=launched_by)
    check_prefetch(prefetch, config)
    # Ask the task for data and parameters before anything is started or stored.
    if not config.units:
        config = config.noting(rounds=max(Rounds(loaded, config, rank, np).total for rank in range(config.workers)))
    quiet = start_log(quiet, verbose)
    params = parameters_of(loaded, config, quiet)
    with connect.serving_store(server, quiet, joinable=False) as store:
        make_room(store, quiet)
        name = job or store.free_name(task.rpartition(":")[2])
        created = create_job(store, name, params, config, quiet)
        if server.listen and config.units and not quiet:
            say(f"join from elsewhere: {private_server.join_line(store.url, server.listen)} --job {name}")
        trial = FaultInjection(kill_every, config.seed) if kill_every else None
        ahead = ["--prefetch"] if prefetch else []
        names = [f"w{rank}" for rank in range(settings.most)]
        arguments = {worker: ["--slow", f"{factors.get(worker, 1):g}x", *ahead] for worker in names}
        supervisor = Supervisor(
            store, launched_by, lambda: [created], Care(not trial, options=tuple(log_options(quiet, verbose)))
        )
        display = Display(created, quiet)
        with kept.logging_to(created, quiet, holds_newest=True) as rows:
            workers = _train(supervisor, created, display, arguments, aggregators or (2 if trial else 1), kept, trial)
            version = _finish(created, loaded, report, rows, quiet)
        if trial:
            with LongWork(quiet) as work, work.stage("replaying the log, to prove that nothing was lost"):
                _judge(store, created, trial, kept)
        if version and not quiet:
            say(where_weights_are(store, name, kept.saving, server))
    check_trained(name, version, workers)


def _train(
    supervisor: Supervisor,
    job: Job,
    display: Display,
    arguments: Mapping[str, Sequence[str]],
    aggregators: int,
    kept: KeptFiles,
    trial: FaultInjection | None,
) -> list[Child]:
    """Run the job's processes until its workers have ended. Return the workers. `arguments` is worker -> options."""
    try:
        serving = aggregate(supervisor, job.name, aggregators, kept.aggregator_options())
        followed = [Followed(job, serving, display)]
        workers = []
        for worker, own in arguments.items():
            acks = ("--acks", str(trial.acks(worker))) if trial else ()
            workers.append(supervisor.start(worker, "worker", "--job", job.name, "--id", worker, *own, *acks))
        with display, trial.killing(supervisor, job) if trial else nullcontext():
            follow(supervisor, lambda: followed, Copies(supervisor, workers, job.config.workers))
        finish(supervisor, followed)
        return workers
    finally:
        supervisor.end()


def _judge(store: Store, job: Job, trial: FaultInjection, kept: KeptFiles) -> None:
    """Print the verdict. Raise KvpsError if a contribution was lost or counted twice, or the replay differs."""
    checkpoints = kept.kept_log.directory
    verdict = trial.judge(job, checkpoints)
    differs = replayed(store, job, checkpoints)
    replay = "differs" if differs else "identical"
    trial.close()
    print(
        f"{counted(trial.kills, 'kill')}, {verdict.acknowledged} acknowledged, {verdict.lost} lost, "
        f"{verdict.twice} twice, replay {replay}"
    )
    if verdict.lost or verdict.twice or differs:
        raise KvpsError(f"job {job.name}: {differs or 'gradients were lost or counted twice'}; please report this")


def _finish(job: Job, task: Task, report: Path | None, rows: TrainingLog, quiet: bool) -> int:
    """Print the figures of the training, log them, write the report, and only then raise TaskFailed. Return the
    version.

    For untrained weights (version 0), print nothing and write a report without figures.
    """
    version, params = job.snapshot()
    figures: Mapping[str, float] = {}
    failed: TaskFailed | None = None
    try:
        with LongWork(quiet) as work, work.stage("testing the weights"):
            figures = task.evaluate(params, np) if version else {}
    except TaskFailed as error:
        failed = error
    rows.tested(version, figures)
    took = Figures.of(job, job.state())
    if version:
        tested = f"test loss {loss_text(figures['loss'])}" if figures else f"version {version}, not tested"
        print(f"{took}, {tested}")
    for name, value in figures.items():
        if name != "loss":
            print(f"test {name} {value:{'.4f' if name == 'accuracy' else '.6g'}}")
    if report is not None:
        weights = np.concatenate([array.reshape(-1) for array in params.values()])
        _write(report, job, took, figures, weights_sha256(weights) if version else None)
    if failed:
        raise failed
    return version


def _write(report: Path, job: Job, took: Figures, figures: Mapping[str, float], sha256: str | None) -> None:
    config = job.config
    reported = {name: value if math.isfinite(value) else None for name, value in figures.items()}  # JSON has no NaN
    result = {
        "job": job.name,
        "task": config.metadata.task,
        "workers": config.workers,
        "staleness": config.staleness,
        "shards": config.shards,
        "optimizer": config.optimizer.to_json(),
        "version": took.version,
        "contributions": took.contributions,
        "clock": dict(job.state().clock),
        "seconds": took.seconds,
        "contributions_per_s": took.contributions_per_s,
        "loss": reported.get("loss"),
        "accuracy": reported.get("accuracy"),
        "figures": reported,
        "weights_sha256": sha256,
    }
    try:
        with open(report, "w", opener=private) as file:
            file.write(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise KvpsError(f"--report {report} could not be written: {error.strerror}") from error
