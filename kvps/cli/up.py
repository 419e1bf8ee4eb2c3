"""`kvps up`: server, aggregator and workers of one job as processes of this machine, watched until it is trained."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from kvps_workers import Task, load_task
from kvps_workers.loop import rounds_of
from kvps_workers.task import blamed

from kvps.cli import common
from kvps.cli.display import Display
from kvps.cli.parts import parse_slow
from kvps.errors import InvalidSetting, KvpsError
from kvps.job import Job
from kvps.keys import check_name
from kvps.store import Store
from kvps.wire import weights_sha256

_LOOK_S = 0.2
_END_S = 10.0


def up(
    task: common.TaskName,
    workers: common.Workers = 3,
    staleness: common.Staleness = 0,
    shards: common.Shards = 1,
    optimizer: common.OptimizerName = "sgd",
    lr: common.LearningRate = None,
    batch_size: common.BatchSize = None,
    epochs: common.Epochs = None,
    seed: common.Seed = 0,
    reduction: common.Reduction = "mean",
    nonfinite: common.NonFinite = "reject",
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
    redis: common.Redis = None,
    listen: common.Listen = None,
) -> None:
    """Train a task on this machine: server, aggregator and workers with one command."""
    factors = _slow_factors(slow or [], workers)
    if job is not None:
        check_name("job", job)
    if report is not None and not report.resolve().parent.is_dir():
        raise InvalidSetting(f"--report {report}: there is no directory {report.resolve().parent}")
    found = load_task(task)
    config = common.job_config(
        task,
        found,
        workers=workers,
        staleness=staleness,
        shards=shards,
        optimizer=optimizer,
        lr=lr,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        reduction=reduction,
        nonfinite=nonfinite,
    )
    with common.serving_store(redis, listen) as store:
        name = job or _free_name(store, task.rpartition(":")[2])
        made = common.create_job(store, name, found, config)
        failed = _train(store, made, found, factors)
        _finish(made, found, report)
    if failed:
        raise KvpsError(f"job {name}: {', '.join(failed)} failed; the others went on, their figures are above")


def _slow_factors(options: list[str], workers: int) -> dict[str, float]:
    factors = {}
    for option in options:
        worker, equals, factor = option.partition("=")
        if not equals or worker not in {f"w{i}" for i in range(workers)}:
            raise InvalidSetting(
                f"--slow wants ID=Nx with an ID from w0 to w{workers - 1}, as in w0=5x, not {option!r}"
            )
        factors[worker] = parse_slow(factor)
    return factors


def _free_name(store: Store, task: str) -> str:
    """The task's name, or with a number behind it if jobs of that name are there."""
    taken, base = set(store.jobs()), task[:60]
    return next(n for n in (base if i == 1 else f"{base}-{i}" for i in range(1, len(taken) + 2)) if n not in taken)


@dataclass
class _Child:
    """A process of the job; its lines go to a queue, behind its name."""

    name: str
    process: subprocess.Popen[str]
    reader: threading.Thread


class _Children:
    """The processes of a job: started with the server's URL in their environment, ended with this one."""

    def __init__(self, store: Store) -> None:
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.all: list[_Child] = []
        # Gradients of several workers at once: one thread each, or their thread pools fight for the cores.
        self._environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | os.environ
        self._environment |= {"KVPS_REDIS_URL": store.url, "KVPS_PARENT_PID": str(os.getpid())}

    def start(self, name: str, *arguments: str) -> None:
        # A session of its own, so that Ctrl-C comes to the children once, from here. -P, for a redis.py or random.py
        # that lies in the user's directory is not meant.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvps", *arguments, "--quiet"],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read, args=(name, process), daemon=True)
        reader.start()
        self.all.append(_Child(name, process, reader))

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.put(f"{name}: {line.rstrip()}")

    def said(self) -> list[str]:
        """The lines that came since the last call."""
        out = []
        while not self.lines.empty():
            out.append(self.lines.get())
        return out

    def end(self) -> None:
        """End what still runs: asked first, made to after a while."""
        for child in self.all:
            if child.process.poll() is None:
                child.process.terminate()
        for child in self.all:
            try:
                child.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.reader.join()
            if child.process.stdout:
                child.process.stdout.close()


def _train(store: Store, job: Job, task: Task, factors: dict[str, float]) -> list[str]:
    """Run the job's processes until its workers have ended; the names of those that failed."""
    children = _Children(store)
    workers = [f"w{i}" for i in range(job.config.workers)]
    with blamed(job.config.task):
        samples = {worker: len(task.data(rank, len(workers), np)[0]) for rank, worker in enumerate(workers)}
    rounds = {worker: rounds_of(n, job.config.batch_size, job.config.epochs) for worker, n in samples.items()}
    try:
        children.start("aggregator", "aggregator", "start", "--job", job.name)
        for worker in workers:
            children.start(
                worker, "worker", "--job", job.name, "--id", worker, "--slow", f"{factors.get(worker, 1):g}x"
            )
        aggregator, *others = children.all
        with Display(job, rounds) as display:
            while any(child.process.poll() is None for child in others) or not _settled(job):
                _wait_for_any(children)
                for line in children.said():
                    display.message(line)
                state = job.state()
                display.show(state, job.traces())
                if never := [c.name for c in others if c.process.poll() and c.name not in state.members]:
                    raise KvpsError(f"job {job.name} ends: {', '.join(never)} failed before it had joined")
                if aggregator.process.poll():
                    aggregator.reader.join()
                    said = (
                        " ".join(children.said()) or f"its aggregator ended with code {aggregator.process.returncode}"
                    )
                    raise KvpsError(f"job {job.name} ends: {said}")
            children.end()
            for line in children.said():
                display.message(line)
            display.show(job.state(), job.traces(), last=True)
        return [child.name for child in others if child.process.returncode]
    finally:
        children.end()


def _settled(job: Job) -> bool:
    """Whether all workers have gone and all that they pushed is committed."""
    members = job.state().members.values()
    return all(m.state == "gone" for m in members)


def _wait_for_any(children: _Children) -> None:
    """Until a process ends, or it is time to look again."""
    running = [c.process for c in children.all if c.process.poll() is None]
    if running:
        try:
            running[-1].wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            return


def _finish(job: Job, task: Task, report: Path | None) -> None:
    version, params = job.snapshot()
    with blamed(job.config.task):
        figures = task.evaluate(params, np)
    seconds = job.training_seconds()
    config = job.config
    steps_per_s = version / seconds if seconds else 0.0
    print(f"{version} steps in {seconds:.1f} s, {steps_per_s:.0f} steps/s, test loss {figures['loss']:.4f}")
    if "accuracy" in figures:
        print(f"test accuracy {figures['accuracy']:.4f}")
    if report is None:
        return
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
        "loss": figures["loss"],
        "accuracy": figures.get("accuracy"),
        "weights_sha256": weights_sha256(np.concatenate([array.reshape(-1) for array in params.values()])),
    }
    report.write_text(json.dumps(result, indent=2) + "\n")
