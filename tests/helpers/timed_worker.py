"""A worker process that measures its own run: JOB WORKER ROUNDS PAUSE_MS. Its server is KVPS_REDIS_URL.

It prints each round, and at the end how many seconds passed by its own clock from when its first push was acknowledged
until its last one was: what is before that is the time of joining.
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
        began = ended = 0.0
        while session.round < int(rounds):
            params = session.pull()
            time.sleep(int(pause_ms) / 1000)
            session.push(gradient(params, session.rank, session.round), loss=1.0 / (1 + session.round))
            ended = time.perf_counter()
            began = began or ended
            print(f"round {session.round}", flush=True)
        print(ended - began, flush=True)
