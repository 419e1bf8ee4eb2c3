"""What tests share: an aggregator on a thread, workers on threads, and judges that read the commit log alone."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from kvps_aggregator import Aggregator

from kvps.job import Job
from kvps.session import Session
from kvps.state import first_head

Params = dict[str, np.ndarray]


@contextmanager
def aggregating(job: Job, shards: list[int] | None = None) -> Iterator[None]:
    """An aggregator serves the job inside the block; what it raises is raised behind it."""
    stop, failures = threading.Event(), []

    def run() -> None:
        try:
            Aggregator(job, stop, shards).run(until_finished=False)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def work(job: Job, rounds: int, step: Callable[[Session, Params, int], Params], workers: int) -> None:
    """Run workers w0, w1, ... on threads; each does `rounds` rounds of ``step(session, params, round)``."""
    together = threading.Barrier(workers)

    def run(number: int) -> None:
        with job.join(f"w{number}") as session:
            together.wait(30)
            for round_ in range(rounds):
                session.push(step(session, session.pull(), round_))

    with ThreadPoolExecutor(workers) as pool:
        for result in [pool.submit(run, number) for number in range(workers)]:
            result.result()


def check_chain(job: Job) -> int:
    """Assert that the commit log is one unbroken chain from version 0 to the job's head; its length."""
    head, version = first_head(job.state().history), 0
    for commit in job.log():
        assert commit.follows(head), f"version {commit.version} does not follow {head}"
        assert commit.version == version + 1
        head, version = commit.head, commit.version
    assert (version, head) == (job.state().version, job.state().head)
    return version


def staleness_used(job: Job, workers: int) -> int:
    """The largest lag of any contribution's weights, from the log: (its round - 1) - the smallest clock they held."""
    clocks: list[Mapping[str, int]] = [defaultdict(int)]
    worst = -1
    for commit in job.log():
        now = defaultdict(int, clocks[-1])
        for c in commit.plan.contributions:
            held = min(clocks[c.base][f"w{i}"] for i in range(workers))
            worst = max(worst, c.round - 1 - held)
            now[c.worker] += 1
            assert now[c.worker] == c.round, "without anyone leaving, rounds are clocks"
        clocks.append(now)
    return worst
