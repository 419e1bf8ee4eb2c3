"""Stale contributions, held against a plain loop on random arrivals, through takeovers and a replay."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.digits_job import proved
from helpers.harness import Params, abandoned, gradient, model
from helpers.internals import held_by
from helpers.slowly import slowly
from helpers.waiting import eventually
from kvps_aggregator import Outcome
from kvps_aggregator.step.clipping import scale_of, square_sum
from kvps_cli.prove.verify import proof_of

import kvps
from kvps.config import JobConfig
from kvps.job import Job
from kvps.protocol.job_state import Commit
from kvps.session.session import Session
from kvps.staleness import admits
from kvps.store import Store

LR = 0.05
Gradients = dict[tuple[str, int], np.ndarray]
"""What a worker pushed in a round, flat."""

# -- the same in a plain loop over the log ---------------------------------------------------------------------------


def flat(params: Params) -> np.ndarray:
    return np.concatenate([np.asarray(value).reshape(-1) for value in params.values()])


def scaled(gradient: np.ndarray, config: JobConfig, stale: int) -> np.ndarray:
    factor = {"none": 1.0, "inverse": 1 / (1 + stale), "inverse-sqrt": (1 + stale) ** -0.5}[config.staleness_scaling]
    return gradient * np.float32(factor)


def reduced(config: JobConfig, workers: list[str], rows: list[np.ndarray]) -> np.ndarray:
    """As kvps promises; a worker's weight is its rank + 1, and all workers are members."""
    if config.reduction == "median":
        return np.median(np.stack(rows), axis=0).astype(np.float32)
    shares = [int(worker[1:]) + 1 if config.reduction == "weighted" else 1 for worker in workers]
    total = rows[0] * np.float32(shares[0])
    for row, share in zip(rows[1:], shares[1:], strict=True):
        total = total + row * np.float32(share)
    members = len(rows) if config.quorum else config.workers
    divisor = {"mean": members, "sum": 1, "weighted": sum(shares)}[config.reduction]
    return total / np.float32(divisor)


def sequential(config: JobConfig, first: np.ndarray, commits: list[Commit], pushed: Gradients) -> list[np.ndarray]:
    """The weights of each version, by plain SGD with momentum."""
    versions, momentum = [first], np.zeros_like(first)
    for commit in commits:
        counted = commit.plan.contributions
        rows = [scaled(pushed[c.worker, c.round], config, len(versions) - 1 - c.base) for c in counted]
        total = reduced(config, [c.worker for c in counted], rows)
        if config.optimizer.clip_norm:
            total = total * scale_of(config.optimizer.clip_norm, [square_sum(total)])
        if config.optimizer.momentum:
            total = momentum = momentum * np.float32(config.optimizer.momentum) + total
        versions.append(versions[-1] - total * np.float32(LR))
    return versions


# -- random arrivals -------------------------------------------------------------------------------------------------


class Fleet:
    """Workers that pull and push in a random order, and an aggregator that is killed now and then. A standby follows
    it, and knows only what Redis or shared memory has."""

    def __init__(self, job: Job, seed: int, record: Path | None = None) -> None:
        self.pushed: Gradients = {}
        self._job = job
        self._record = record
        self._random = np.random.default_rng(seed)
        self._pulled: dict[str, Params] = {}
        self._held = ExitStack()
        self._begin()
        self._sessions = [job.join(f"w{rank}") for rank in range(job.config.workers)]

    def _begin(self) -> None:
        self._aggregator = self._held.enter_context(abandoned(self._job, record=self._record))
        shards = set(range(self._job.layout.shards))
        assert eventually(lambda: [self._aggregator.hold(at_once=True), held_by(self._aggregator)][1] == shards)

    def run(self, steps: int) -> None:
        turns = [self._sessions[0], *self._sessions[1:] * 3, None, None, None]  # the first worker is slow
        for _ in range(steps):
            session = turns[self._random.integers(len(turns))]
            if session:
                self._act(session)
            else:
                self.commit()

    def kill(self) -> None:
        self._held.close()
        self._begin()

    def commit(self) -> None:
        while self._aggregator.work() is not Outcome.IDLE:
            pass

    def _act(self, session: Session) -> None:
        """Let a worker push what it has computed; or pull, if its bound and its contributions that wait let it."""
        members, config = self._job.state().members, self._job.config
        if params := self._pulled.pop(session.worker, None):
            grads = gradient(params, session.rank, session.round)
            self.pushed[session.worker, session.round + 1] = flat(grads)
            session.push(grads, weight=session.rank + 1 if config.reduction == "weighted" else None)
        elif members[session.worker].pending < config.max_pending and (
            config.quorum or admits(session.round, [m.round for m in members.values()], config.staleness)
        ):
            self._pulled[session.worker] = {name: np.array(value) for name, value in session.pull().items()}

    def end(self) -> None:
        self.commit()
        for session in self._sessions:
            session.leave(finished=False)
        self._held.close()


def check(job: Job, pushed: Gradients) -> int:
    """Assert that all is as the plain loop makes it; return how stale the stalest contribution was."""
    commits = list(job.log())
    versions = sequential(job.config, flat(model()), commits, pushed)
    assert len(versions) == len(commits) + 1 > 10
    assert job.checkpoint().weights.tobytes() == versions[-1].tobytes()
    return max(commit.version - 1 - c.base for commit in commits for c in commit.plan.contributions)


MOMENTUM = kvps.SGD(lr=LR, momentum=0.9, clip_norm=3.0)


@pytest.mark.parametrize(
    ("staleness", "shards", "settings"),
    [
        (-1, 2, {"reduction": "sum", "staleness_scaling": "inverse", "optimizer": MOMENTUM}),
        (2, 3, {"reduction": "weighted", "optimizer": MOMENTUM}),
        *slowly(
            [
                (-1, 1, {"reduction": "weighted", "staleness_scaling": "inverse-sqrt"}),
                (-1, 1, {"reduction": "median", "staleness_scaling": "inverse"}),
            ]
        ),
        (-1, 1, {"transport": "shm", "reduction": "sum"}),
        (0, 2, {"quorum": 1, "staleness_scaling": "inverse"}),
    ],
)
def test_random_arrivals_count_as_in_a_sequential_loop(
    store: Store, tmp_path: Path, staleness: int, shards: int, settings: dict[str, Any]
) -> None:
    """The holder is killed twice and a standby goes on. The record replays to the same bits."""
    settings = {"optimizer": kvps.SGD(lr=LR), "lease_ms": 200} | settings
    job = store.create_job(
        "job", model(), workers=4, staleness=staleness, shards=shards, worker_timeout_ms=60_000, **settings
    )
    fleet = Fleet(job, staleness + 10 * shards, tmp_path)
    fleet.run(45)
    fleet.kill()
    middle = job.checkpoint()
    fleet.run(45)
    fleet.kill()
    fleet.run(45)
    fleet.end()
    assert check(job, fleet.pushed) > 1
    assert proved(job, tmp_path).by == "recorded"
    _, proof = proof_of(job, tmp_path, None, middle)
    assert (proof.differs, proof.replayed) == ("", proof.commits - middle.version)
    assert middle.version > 3
