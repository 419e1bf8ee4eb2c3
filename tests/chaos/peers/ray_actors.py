"""What happens to Ray's parameter-server actor when a worker or the server is killed, with and without retries.

    python tests/chaos/peers/ray_actors.py [--kills 10]

Workers push the gradient 1 and the server adds it up, so its sum counts the applied gradients. The server's answer is
the acknowledgement, and the worker then appends a line to a file. `restarts and retries` is how Ray is told to survive:
max_restarts=-1 and max_task_retries=-1 for all actors. Needs ray and nothing of kvps. Prints a line of JSON for each
kind of fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}

import ray

WORKERS = 2
PUSHES = 300  # of each worker
PATIENCE_S = 60.0
SURVIVE = {"max_restarts": -1, "max_task_retries": -1}


class Server:
    """The server. Its state is in its process, as in Ray's own example of a parameter server."""

    def __init__(self) -> None:
        self._applied = 0

    def pid(self) -> int:
        return os.getpid()

    def push(self) -> int:
        self._applied += 1
        return self._applied

    def total(self) -> int:
        return self._applied


class Worker:
    """A worker. Its state is its progress, which is lost with its process."""

    def pid(self) -> int:
        return os.getpid()

    def train(self, server: Any, pushes: int, acks: str) -> None:
        """Push `pushes` times, and write a line to the file `acks` for each answer."""
        with open(acks, "a", buffering=1) as file:
            for _ in range(pushes):
                ray.get(server.push.remote())
                file.write("1\n")


def trial(victim: str, options: dict[str, int], folder: Path) -> dict[str, Any]:
    """Have two workers push, kill one process in the middle, and return what was applied in the end."""
    server = ray.remote(num_cpus=0.5, **options)(Server).remote()
    workers = [ray.remote(num_cpus=0.5, **options)(Worker).remote() for _ in range(WORKERS)]
    pids = ray.get([actor.pid.remote() for actor in (server, *workers)])
    acks = [folder / f"acks{number}" for number in range(WORKERS)]
    tasks = [worker.train.remote(server, PUSHES, str(file)) for worker, file in zip(workers, acks, strict=True)]
    moment = random.randint(100, PUSHES)
    while ray.get(server.total.remote()) < moment:
        time.sleep(0.001)
    os.kill(pids[0 if victim == "server" else 1], signal.SIGKILL)
    errors = {error for task in tasks if (error := failure(task))}
    applied = 0  # if the server is gone, its sum is gone with it
    with suppress(Exception):
        applied = ray.get(server.total.remote(), timeout=PATIENCE_S)
    for actor in (server, *workers):
        ray.kill(actor)
    return {"acknowledged": sum(len(f.read_text().split()) for f in acks), "applied": applied, "errors": errors}


def failure(task: Any) -> str:
    """Return the name of the error that a task ends with, or ""."""
    try:
        ray.get(task, timeout=PATIENCE_S)
    except Exception as error:
        return type(error).__name__
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    arguments = parser.parse_args()
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", object_store_memory=1 << 28
    )
    for options in ({}, SURVIVE):
        for victim in ("worker", "server"):
            trials = []
            for _ in range(arguments.kills):
                with tempfile.TemporaryDirectory() as folder:
                    trials.append(trial(victim, options, Path(folder)))
            errors = sorted(set().union(*(t["errors"] for t in trials)))
            line = {
                "peer": f"Ray {ray.__version__} actors{', restarts and retries' if options else ''}",
                "fault": f"{'the' if victim == 'server' else 'a'} {victim} killed",
                "kills": len(trials),
                "went on": sum(not t["errors"] for t in trials),
                "acknowledged": sum(t["acknowledged"] for t in trials),
                "lost": sum(max(0, t["acknowledged"] - t["applied"]) for t in trials),
                "twice": sum(max(0, t["applied"] - WORKERS * PUSHES) for t in trials),
                "how it ended": f"failed: {', '.join(errors)}" if errors else "went to its end",
            }
            print(json.dumps(line), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
