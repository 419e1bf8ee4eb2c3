"""Learners of torchft's DiLoCo under the same fire: see `peers/torchft_diloco.py`. Their lighthouse is never killed."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvps.errors import KvpsError
from kvps_bench.crew import ONE_THREAD, free_port
from kvps_bench.paced_learner import Orders
from kvps_bench.progress import Fire, Made, Progress, Window

BATCH = 32
_SCRIPT = Path(__file__).parent / "peers" / "torchft_diloco.py"
_LIGHTHOUSE = (
    "--min_replicas",
    "2",
    "--join_timeout_ms",
    "2000",  # with 200, eight learners did not find each other in two minutes
    "--quorum_tick_ms",
    "50",
    "--heartbeat_timeout_ms",
    "1000",
)
_WATCH_S = 0.05
_PATIENCE_S = 120.0  # PyTorch takes long to load where many processes do at once
_AT_WORK = 3  # syncs after which a fleet is taken to be at work


class TorchftFleet:
    """The processes of one run. `asked` are the options of the script."""

    def __init__(self, environment: Path, asked: Mapping[str, Any], folder: Path) -> None:
        self.kills = 0
        self._folder, self._orders = folder, Orders(folder)
        address = f"127.0.0.1:{free_port()}"
        self._asked = {**asked, "folder": str(folder), "lighthouse": f"http://{address}"}
        self._programs = environment / "bin"
        self._log = (folder / "log").open("w")
        self._lighthouse = self._start("torchft_lighthouse", *_LIGHTHOUSE, "--bind", address)
        self._await_open(address)
        self._learners = {rank: self._learner(rank) for rank in range(asked["workers"])}

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self._programs / program), *arguments]
        return subprocess.Popen(command, env=kept | ONE_THREAD, stdout=self._log, stderr=self._log)

    def _learner(self, rank: int) -> subprocess.Popen[bytes]:
        return self._start("python", str(_SCRIPT), json.dumps({**self._asked, "rank": rank}))

    def _await_open(self, address: str) -> None:
        host, _, port = address.rpartition(":")

        def answers() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex((host, int(port))) == 0

        self._until(answers, supervise=False)

    def _until(self, over: Callable[[], bool], supervise: bool = True, patience_s: float = _PATIENCE_S) -> None:
        """Start again who has ended, until `over`. Raises KvpsError if that takes longer than `patience_s`."""
        deadline = time.monotonic() + patience_s
        while not over():
            if time.monotonic() > deadline:
                raise KvpsError(f"torchft made no progress in {patience_s:g} s")
            time.sleep(_WATCH_S)
            if supervise:
                ended = [rank for rank, learner in self._learners.items() if learner.poll() is not None]
                self._learners |= {rank: self._learner(rank) for rank in ended}

    def await_work(self) -> None:
        """Supervise until all learners are in a sync, and some syncs are made."""
        batch = self._asked["workers"] * self._asked["local_steps"] * BATCH
        self._until(lambda: sum(made.samples == batch for made in self._made().versions) >= _AT_WORK)

    def train(self, seconds: float, fire: Fire | None = None) -> Progress:
        """Supervise for so long, under fire or not; return the syncs of that time."""
        begin, until = int(1000 * time.time()), time.monotonic() + seconds
        if fire:
            self._orders.be_slow()
            for at in fire.kills(until):
                self._watch(at)
                fire.choose(list(self._learners.values())).kill()
                self.kills += 1
        self._watch(until)
        window = Window(begin, int(1000 * time.time()))
        self._until(lambda: self._made().versions[-1].at_ms >= window.end_ms)
        return self._made().within(*window)

    def _watch(self, until: float) -> None:
        """Supervise until this time of `time.monotonic`."""
        self._until(lambda: time.monotonic() >= until, patience_s=math.inf)

    def _made(self) -> Progress:
        """Return all syncs: when the first learner had done it, and the samples of those that were in it."""
        syncs: dict[int, Made] = {}
        for file in self._folder.glob("*.syncs"):
            for line in file.read_text().split("\n")[:-1]:
                at, step, learners = map(int, line.split())
                made = Made(at, learners * self._asked["local_steps"] * BATCH)
                syncs[step] = min(made, syncs.get(step, made))
        return Progress(sorted(syncs.values()))

    def close(self) -> None:
        """End all processes."""
        processes = [*self._learners.values(), self._lighthouse]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        self._log.close()


@contextmanager
def torchft_fleet(environment: Path, asked: Mapping[str, Any]) -> Iterator[TorchftFleet]:
    """Yield a fleet at work, of the torchft that is installed in this virtual environment."""
    with tempfile.TemporaryDirectory(prefix="kvps-torchft-") as folder:
        made = TorchftFleet(environment, asked, Path(folder))
        try:
            made.await_work()
            yield made
        finally:
            made.close()
