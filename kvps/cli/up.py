"""`kvps up`: server, aggregator and workers of one job as processes of this machine, watched until it is trained."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from kvps_aggregator.record import check_directory
from kvps_workers import Task, load_task
from kvps_workers.loop import rounds_of

from kvps.cli import common
from kvps.cli.display import Display
from kvps.cli.parts import parse_slow
from kvps.cli.supervise import Child, Supervisor
from kvps.cli.trial import Trial, replayed
from kvps.config import JobConfig
from kvps.errors import InvalidSetting, KvpsError, TaskFailed
from kvps.job import Job
from kvps.keys import check_name
from kvps.store import Store
from kvps.wire import weights_sha256

_LOOK_S = 0.2
_FINISH_S = 5.0
_MOST_AGGREGATORS = 64


@common.with_settings
def up(
    task: common.TaskName,
    settings: common.Settings,
    job: Annotated[
        str | None, typer.Option("--job", metavar="NAME", help="Name of the job.  (default: the task's)")
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=Nx", help="Slow a worker down, as in w0=5x; may be given several times."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures of the run to FILE as JSON.")
    ] = None,
    aggregators: Annotated[
        int | None,
        typer.Option(metavar="N", help="How many aggregators: all but one stand by.  (default: 1, or 2 when killing)"),
    ] = None,
    kill_every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Kill a worker or aggregator at random about so often, start it again, and prove at the end that "
            "nothing was lost.",
        ),
    ] = None,
    prefetch: common.Prefetch = False,
    record: common.Record = None,
    checkpoint_every: common.CheckpointEvery = None,
    checkpoints: common.CheckpointDirectory = common.DEFAULT_CHECKPOINTS,
    keep: common.Keep = 3,
    redis: common.Redis = None,
    listen: common.Listen = None,
    data_dir: common.DataDir = None,
) -> None:
    """Train a task on this machine: server, aggregator and workers with one command."""
    factors = slow_factors(slow or [], settings.workers)
    if aggregators is not None and not 1 <= aggregators <= _MOST_AGGREGATORS:
        raise InvalidSetting(f"--aggregators must be from 1 to {_MOST_AGGREGATORS}, not {aggregators}")
    if kill_every is not None and not kill_every >= 0.1:
        raise InvalidSetting(f"--kill-every must be 0.1 seconds or more, not {kill_every:g}")
    if job is not None:
        check_name("job", job)
    if report is not None:
        _check_report(report)
    if record is not None:
        record = check_directory(record)
    saving = common.checkpoints_of(checkpoint_every, checkpoints, keep)
    kept = ["--record", str(record)] if record else []
    if saving:
        kept += ["--checkpoint-every", str(saving.every), "--checkpoints", str(saving.directory)]
        kept += ["--keep", str(saving.keep)]
    found = load_task(task)
    config = settings.job_config(task, found)
    if prefetch and not config.staleness:
        raise InvalidSetting("--prefetch is for SSP and ASP (--staleness): in BSP nothing is there to fetch ahead")
    # All that can be asked of the task is asked before anything is started or stored.
    rounds = _rounds(found, config)
    params = found.parameters(config.seed)
    with common.serving_store(redis, listen, data_dir) as store:
        name = job or free_name(store, task.rpartition(":")[2])
        made = store.create_job(name, params, config=config)
        trial = Trial(kill_every, config.seed) if kill_every else None
        ahead = ["--prefetch"] if prefetch else []
        options = {worker: ["--slow", f"{factors.get(worker, 1):g}x", *ahead] for worker in rounds}
        failed = _train(store, made, rounds, options, aggregators or (2 if trial else 1), kept, trial)
        _finish(made, found, report)
        if trial:
            _judge(store, made, trial, saving and saving.directory)
    if len(failed) == config.workers:
        raise KvpsError(f"job {name}: all its workers failed; the figures above are of what they had done by then")
    if failed:
        raise KvpsError(f"job {name}: {', '.join(failed)} failed; the others went on, their figures are above")


def _check_report(report: Path) -> None:
    """Find out before the training whether the report can be written after it."""
    folder = report.resolve().parent
    if not folder.is_dir():
        raise InvalidSetting(f"--report {report}: there is no directory {folder}")
    if report.is_dir():
        raise InvalidSetting(f"--report {report}: that is a directory; give the name of a file")
    if not os.access(report if report.exists() else folder, os.W_OK):
        raise InvalidSetting(f"--report {report}: that cannot be written; give a file of your own")


def _rounds(task: Task, config: JobConfig) -> dict[str, int]:
    """Worker -> how many rounds it will do, or about how many where units are handed out."""
    if config.units:
        return {f"w{rank}": -(-config.units // config.workers) for rank in range(config.workers)}
    samples = [len(task.data(rank, config.workers, np)[0]) for rank in range(config.workers)]
    return {f"w{rank}": rounds_of(n, config.batch_size, config.epochs) for rank, n in enumerate(samples)}


def slow_factors(options: list[str], workers: int) -> dict[str, float]:
    """Worker -> how much to slow it down, of those that the options name. Raises InvalidSetting."""
    factors = {}
    for option in options:
        worker, equals, factor = option.partition("=")
        if not equals or worker not in {f"w{i}" for i in range(workers)}:
            raise InvalidSetting(
                f"--slow wants ID=Nx with an ID from w0 to w{workers - 1}, as in w0=5x, not {option!r}"
            )
        factors[worker] = parse_slow(factor)
    return factors


def free_name(store: Store, task: str) -> str:
    """The task's name, or with a number behind it if jobs of that name are there."""
    taken, base = set(store.jobs()), task[:60]
    return next(n for n in (base if i == 1 else f"{base}-{i}" for i in range(1, len(taken) + 2)) if n not in taken)


def _train(
    store: Store,
    job: Job,
    rounds: dict[str, int],
    options: dict[str, list[str]],
    aggregators: int,
    kept: list[str],
    trial: Trial | None,
) -> list[str]:
    """Run the job's processes until its workers have ended; the names of those that failed."""
    supervisor = Supervisor(store, job, gives_up=trial is None)
    try:
        for number in range(aggregators):
            supervisor.start(f"aggregator{number or ''}", "aggregator", "start", "--job", job.name, *kept)
        serving = list(supervisor.children.values())
        for worker in rounds:
            acks = ("--acks", str(trial.acks(worker))) if trial else ()
            supervisor.start(worker, "worker", "--job", job.name, "--id", worker, *options[worker], *acks)
        workers = [supervisor.children[worker] for worker in rounds]
        with Display(job, rounds) as display, trial.killing(supervisor) if trial else nullcontext():
            while any(child.running for child in workers) or not _settled(job):
                supervisor.watch(_LOOK_S)
                for line in supervisor.said():
                    display.message(line)
                failed = [child.name for child in workers if child.failed]  # first: who fails may have joined
                state = job.state()
                display.show(state, job.traces())
                if never := [name for name in failed if name not in state.members]:
                    raise KvpsError(f"job {job.name} ends: {', '.join(never)} failed before it had joined")
                _check_served(job, serving, supervisor)
            display.show(job.state(), job.traces(), last=True)
        if job.state().finished(job.config):
            supervisor.await_end([child.name for child in serving], _FINISH_S)  # they sweep up first
        supervisor.end()
        for line in supervisor.said():
            display.message(line)
        return [child.name for child in workers if child.failed]
    finally:
        supervisor.end()


def _check_served(job: Job, serving: list[Child], supervisor: Supervisor) -> None:
    """Raise what the aggregators said last, if none is left."""
    if not all(child.failed for child in serving):
        return
    for child in serving:
        child.reader.join()
    said = " ".join(supervisor.said()) or f"its aggregator ended with code {serving[0].process.returncode}"
    raise KvpsError(f"job {job.name} ends: {said}")


def _settled(job: Job) -> bool:
    """Whether all workers have gone and all that they pushed is committed."""
    members = job.state().members.values()
    return all(m.state == "gone" for m in members)


def _judge(store: Store, job: Job, trial: Trial, checkpoints: Path | None) -> None:
    """Say that nothing was lost or counted twice, however many were killed; or raise that it was."""
    verdict, differs = trial.judge(job, checkpoints), replayed(store, job, checkpoints)
    trial.close()
    print(
        f"{trial.kills} kills, {verdict.acknowledged} acknowledged, {verdict.lost} lost, {verdict.twice} twice, "
        f"replay {'differs' if differs else 'identical'}"
    )
    if verdict.lost or verdict.twice or differs:
        raise KvpsError(f"job {job.name}: {differs or 'gradients were lost or counted twice'}; please report this")


def _finish(job: Job, task: Task, report: Path | None) -> None:
    """Say what came out of the training, and write the report. Raises TaskFailed, but only then."""
    version, params = job.snapshot()
    figures: Mapping[str, float] = {}
    failed: TaskFailed | None = None
    try:
        figures = task.evaluate(params, np)
    except TaskFailed as error:
        failed = error
    seconds = job.training_seconds()
    config = job.config
    steps_per_s = version / seconds if seconds else 0.0
    tested = f"test loss {figures['loss']:.4f}" if figures else f"version {version}, not tested"
    print(f"{version} steps in {seconds:.1f} s, {steps_per_s:.0f} steps/s, {tested}")
    if "accuracy" in figures:
        print(f"test accuracy {figures['accuracy']:.4f}")
    if report is not None:
        result = {
            "job": job.name,
            "task": config.task,
            "workers": config.workers,
            "staleness": config.staleness,
            "shards": config.shards,
            "optimizer": config.optimizer.to_json(),
            "version": version,
            "clock": job.clock(),
            "steps_per_s": steps_per_s,
            "wall_s": seconds,
            "loss": figures.get("loss"),
            "accuracy": figures.get("accuracy"),
            "weights_sha256": weights_sha256(np.concatenate([array.reshape(-1) for array in params.values()])),
        }
        try:
            report.write_text(json.dumps(result, indent=2) + "\n")
        except OSError as error:
            raise KvpsError(f"--report {report} could not be written: {error.strerror}") from error
    if failed:
        raise failed
