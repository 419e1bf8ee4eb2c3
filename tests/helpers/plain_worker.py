"""A worker process of a job without a task: JOB WORKER ROUNDS SECONDS. Its server is KVPS_REDIS_URL.

It computes for so many seconds a round, to its end or until it is evicted.
"""

from __future__ import annotations

import os
import sys
import time

from helpers.harness import gradient

import kvps


def main(name: str, worker: str, rounds: int, seconds: float) -> None:
    with kvps.connect(os.environ["KVPS_REDIS_URL"]) as store, store.job(name).join(worker) as session:
        while session.round < rounds:
            params = session.pull()
            time.sleep(seconds)  # it stands for a gradient that takes as long
            session.push(gradient(params, session.rank, session.round), loss=1.0 / (1 + session.round))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:3], int(sys.argv[3]), float(sys.argv[4]))
    except kvps.WorkerEvicted:
        print("evicted", flush=True)
