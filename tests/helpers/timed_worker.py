"""A worker process that measures its own run: JOB WORKER ROUNDS PAUSE_MS. Its server is KVPS_REDIS_URL.

It prints each round, and at the end the least and the most seconds, by its own clock, from when its first push was
acknowledged until its last one was: without these two pushes, and with them.
"""

from __future__ import annotations

import os
import sys
import time

from helpers.harness import gradient

import kvps

if __name__ == "__main__":
    name, worker, rounds, pause_ms = sys.argv[1:]
    with kvps.connect(os.environ["KVPS_REDIS_URL"]) as store, store.job(name).join(worker) as session:
        print("joined", flush=True)
        times = []
        while session.round < int(rounds):
            params = session.pull()
            time.sleep(int(pause_ms) / 1000)
            times.append(time.perf_counter())
            session.push(gradient(params, session.rank, session.round), loss=1.0 / (1 + session.round))
            times.append(time.perf_counter())
            print(f"round {session.round}", flush=True)
        print(times[-2] - times[1], times[-1] - times[0], flush=True)
