"""A worker that a test starts on a host, for a job without a task: JOB WORKER ROUNDS. Its server is KVPS_REDIS_URL."""

from __future__ import annotations

import os
import sys

from helpers.harness import work_on

import kvps

if __name__ == "__main__":
    name, worker, rounds = sys.argv[1:]
    with kvps.connect(os.environ["KVPS_REDIS_URL"]) as store:
        work_on(store.job(name), worker, int(rounds))
