"""A worker that a test starts as a process, for a job without a task: JOB WORKER SECONDS. It computes for so many
seconds a round, until it is evicted or killed. Its server is KVPS_REDIS_URL."""

from __future__ import annotations

import os
import sys
import time

from helpers.harness import gradient

import kvps


def main() -> None:
    name, worker, seconds = sys.argv[1:]
    with kvps.connect(os.environ["KVPS_REDIS_URL"]) as store, store.job(name).join(worker) as session:
        while True:
            params = session.pull()
            time.sleep(float(seconds))  # it stands for a gradient that takes as long
            loss = 1 / (1 + session.round)
            session.push(gradient(params, session.rank, session.round), loss=loss)


if __name__ == "__main__":
    try:
        main()
    except kvps.WorkerEvicted:
        print("evicted", flush=True)
