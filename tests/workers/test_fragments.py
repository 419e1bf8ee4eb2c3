"""Tasks whose local steps synchronize fragments of the model in turn, against a plain loop of NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers.digits_job import digits_job, proved, run_workers, training
from kvps_workers import load_task
from kvps_workers.rounds import Rounds

import kvps
from kvps.arrays.parts import fragment_of
from kvps.store import Store

STEPS, FRAGMENTS = 4, 2
LR, MOMENTUM = np.float32(0.5), np.float32(0.9)


def _plain(job: kvps.Job) -> dict[str, np.ndarray]:
    """Each worker goes on from its own weights, but for the fragment that was stepped last."""
    config, task = job.config, load_task("digits")
    main = {name: np.array(array) for name, array in task.parameters(0).items()}
    momentum = {name: np.zeros_like(array) for name, array in main.items()}
    part_of = {p.name: p.part for p in job.layout.parameters}
    rounds = [Rounds(task, config, rank, np) for rank in range(config.workers)]
    mine = [dict(main) for _ in rounds]
    pulled = [dict(main) for _ in rounds]
    total, every = config.epochs * rounds[0].batches_per_epoch, STEPS // FRAGMENTS
    for round_, first in enumerate(range(0, total, every)):
        is_last = first + every >= total
        names = [name for name in main if is_last or part_of[name] == fragment_of(round_, FRAGMENTS)]
        for rank, weights in enumerate(mine):
            for number in range(first, min(first + every, total)):
                _, grads = task.gradient(weights, rounds[rank].samples(rounds[rank].rows(number)), np)
                for name, grad in grads.items():
                    weights[name] = weights[name] - grad * LR
        for name in names:
            came = [pulled[rank][name] - mine[rank][name] for rank in range(config.workers)]
            mean = came[0]
            for each in came[1:]:
                mean = mean + each
            momentum[name] = momentum[name] * MOMENTUM + mean / np.float32(config.workers)
            main[name] = main[name] - momentum[name] * np.float32(1)
            for rank in range(config.workers):
                mine[rank][name] = pulled[rank][name] = main[name]
    return main


def test_a_run_is_a_plain_loops_and_is_replayed_from_a_record(store: Store, tmp_path: Path, transport: str) -> None:
    optimizers = {"optimizer": kvps.SGD(lr=1.0, momentum=0.9), "inner_optimizer": kvps.SGD(lr=0.5)}
    job = digits_job(store, workers=2, local_steps=STEPS, fragments=FRAGMENTS, transport=transport, **optimizers)
    run_workers(job, *training(job, "w0", "w1"), record=tmp_path)
    _, weights = job.snapshot()
    for name, array in _plain(job).items():
        assert weights[name].tobytes() == array.tobytes(), name
    assert {c.part for commit in job.log() for c in commit.plan.contributions} == {"0", "1", ""}
    proof = proved(job, tmp_path)
    assert (proof.by, proof.replayed) == ("recorded", job.state().version)
    assert proved(job).by == ""  # no round can be computed alone
