"""A job that trains the digits, its workers, and the proof of its log."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
from kvps_aggregator import serve
from kvps_aggregator.verify.replay import Proof
from kvps_cli.prove.verify import proof_of
from kvps_workers import load_task
from kvps_workers.contributions import Contributions
from kvps_workers.training_loop import train

from kvps.device.base import open_device
from kvps.job import Job
from kvps.session.session import Session
from kvps.store import Store

Params = dict[str, np.ndarray]
WORKERS, ROUNDS = 3, 15  # 479 samples or 480, 96 a batch, 3 epochs


def digits_job(store: Store, **settings: Any) -> Job:
    settings = {"workers": WORKERS, "task": "digits", "batch_size": 96, "epochs": 3} | settings
    return store.create_job("digits", load_task("digits").parameters(0), **settings)


def run_workers(job: Job, *workers: Callable[[], None], record: Path | None = None) -> None:
    """Run workers, and an aggregator, until the job is finished."""
    stop = threading.Event()
    served = in_thread(lambda: serve(job, stop=stop, record=record))
    running = [in_thread(worker) for worker in workers]
    try:
        for worker in running:
            worker.result()
        served.result()
    finally:
        stop.set()
        wait([served, *running])


def in_thread(call: Callable[[], None]) -> Future[None]:
    """Call something in a thread of its own. What a thread of a ThreadPoolExecutor forks ends with exit code 1, because
    Python wants to join the pool there, and a DataLoader that sees it fails."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


def training(job: Job, *workers: str) -> list[Callable[[], None]]:
    return [lambda worker=worker: train(job, open_device(None), worker) for worker in workers]


def _contributions(job: Job, session: Session) -> Contributions:
    return Contributions(job.config, job.layout, load_task(job.config.metadata.task), session.rank)


def task_gradient(job: Job, session: Session) -> Params:
    """Return the gradient that the task's own worker would push next."""
    weights = session.pull()  # first: with a quorum it says which round is open
    return dict(_contributions(job, session).compute(weights, session.round).grads)


def task_weight(job: Job, session: Session) -> int | None:
    """Return the weight of that gradient, after the pull."""
    return _contributions(job, session).weight(session.round)


def proved(job: Job, record: Path | None = None) -> Proof:
    """Return the proof of a job; assert that nothing differs."""
    state, proof = proof_of(job, record)
    assert proof.differs == ""
    assert (proof.commits, proof.head) == (state.version, state.head)
    assert proof.contributions == sum(state.clock.values())
    assert proof.replayed == (state.version if proof.by else 0)
    return proof
