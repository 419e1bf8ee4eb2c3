"""What happens to PyTorch's batch-updating parameter server over RPC when a trainer or the server is killed.

    python tests/chaos/peers/torch_rpc.py [--trainer-kills 10] [--server-kills 3] [--wait 10]

It is PyTorch's own recipe: an asynchronous function adds up one gradient of every trainer, then answers all of them.
Trainers push the gradient 1, so the sum counts the applied gradients; the answer is the acknowledgement. Needs torch
and nothing of kvps. Prints a line of JSON for each kind of fault.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc

TRAINERS = 2
BEFORE = 200  # acknowledgements before the kill


class Server:
    """The server. Its state is in its process; the number of applied gradients is also in a file, for the judge."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder, "applied")
        self._lock = threading.Lock()
        self._waiting, self._applied = 0, 0
        self._answer: Any = torch.futures.Future()

    def push(self) -> Any:
        """Return the answer to all trainers of this round: a future that is set once all have pushed."""
        with self._lock:
            answer = self._answer
            self._waiting += 1
            if self._waiting == TRAINERS:
                self._applied += TRAINERS
                self._file.write_text(str(self._applied))
                self._waiting, self._answer = 0, torch.futures.Future()
                answer.set_result(self._applied)
        return answer


SERVER: Server | None = None


def make(folder: str) -> None:
    """Make this process the server."""
    global SERVER
    SERVER = Server(folder)


@rpc.functions.async_execution
def push() -> Any:
    """Push for a trainer; runs in the server."""
    assert SERVER
    return SERVER.push()


def play(rank: int, port: int, folder: str) -> None:
    """Run one process: rank 0 is the server; a trainer appends a line for each answer, and notes the final error."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    import torch_rpc as me  # so that RPC names functions by a module that can be imported

    rpc.init_rpc(f"p{rank}", rank=rank, world_size=TRAINERS + 1)
    if rank == 0:
        me.make(folder)
        Path(folder, "ready").touch()
        time.sleep(3600)
    while not Path(folder, "ready").exists():
        time.sleep(0.01)
    with Path(folder, f"acks{rank}").open("a", buffering=1) as acks:
        try:
            while True:
                rpc.rpc_sync("p0", me.push)
                acks.write("1\n")
        except Exception as error:
            Path(folder, f"error{rank}").write_text(f"{type(error).__name__}: {error}".splitlines()[0][:80])


def trial(victim: int, wait_s: float) -> dict[str, Any]:
    """Kill one process in the middle of training; return what the others have done `wait_s` later."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=play, args=(rank, port, folder)) for rank in range(TRAINERS + 1)]
        for process in processes:
            process.start()

        def acknowledged() -> int:
            return sum(len(file.read_text().split()) for file in Path(folder).glob("acks*"))

        try:
            deadline = time.monotonic() + 60
            while acknowledged() < BEFORE:
                if time.monotonic() > deadline:
                    raise SystemExit("the trainers did not begin to train within 60 s")
                time.sleep(0.02)
            os.kill(processes[victim].pid or 0, signal.SIGKILL)
            processes[victim].join()
            time.sleep(0.5)  # what was on its way arrives
            before = acknowledged()
            time.sleep(wait_s)
            after = acknowledged()
            errors = sorted(file.read_text() for file in Path(folder).glob("error*"))
            living = sum(process.is_alive() for process in processes[1:])
            applied = int(Path(folder, "applied").read_text())
        finally:
            for process in processes:
                process.kill()
                process.join()
    lost = after if victim == 0 else max(0, after - applied)  # the weights were in the server alone
    return {"went on": after > before, "hangs": living > 0, "errors": errors, "acknowledged": after, "lost": lost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--trainer-kills", type=int, default=10)
    parser.add_argument("--server-kills", type=int, default=3)
    parser.add_argument("--wait", type=float, default=10.0, help="seconds from a kill to the last look")
    arguments = parser.parse_args()
    faults = (
        ("a trainer killed", arguments.trainer_kills, list(range(1, TRAINERS + 1))),
        ("the server killed", arguments.server_kills, [0]),
    )
    for fault, times, victims in faults:
        trials = [trial(random.choice(victims), arguments.wait) for _ in range(times)]
        hang = sum(t["hangs"] and not t["errors"] for t in trials)
        line = {
            "peer": f"torch {torch.__version__}, RPC parameter server",
            "fault": fault,
            "kills": times,
            "went on": sum(t["went on"] for t in trials),
            "acknowledged": sum(t["acknowledged"] for t in trials),
            "lost": sum(t["lost"] for t in trials),
            "twice": 0,
            "how it ended": f"{hang} hang after {arguments.wait:g} s" if hang else f"failed: {said(trials)}",
        }
        print(json.dumps(line), flush=True)


def said(trials: list[dict[str, Any]]) -> str:
    """Return the kinds of errors that were raised."""
    return ", ".join(sorted({error.split(":")[0] for t in trials for error in t["errors"]}))


if __name__ == "__main__":
    main()
