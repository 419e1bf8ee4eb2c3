"""What a round costs in instructions of user code, by valgrind: steadier than any time. Run by `make cost`.

Each process of a job (one worker, BSP, SGD, one tensor) and its server run under `cachegrind --cache-sim=no`, once for
N and once for 3N rounds; the difference is divided by 2N. There is one worker, because with two the aggregator plans
once or twice a round, as they happen to come. An aggregator also does things once a second.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvps
from kvps.connection.client import Client
from kvps.errors import KvpsError
from kvps.machine.paths import server_program
from kvps_bench.crew import ONE_THREAD, free_port

FIGURES = Path(__file__).parent.parent / "instructions.txt"
SLACK = {"worker": 1.02, "server": 1.02, "aggregator": 1.04}  # how much more fails
_QUIET = {"worker_timeout_ms": 3_600_000, "lease_ms": 30_000}  # heartbeats and renewals come by the clock
_START_S, _END_S = 60, 600
# So do traces: on a slow machine each round would take some along, on a quick one few.
_WORKER = """
import sys, numpy as np, kvps, kvps.session.iteration
kvps.session.iteration.SEND_EVERY_S = 3600
url, worker, items, rounds = sys.argv[1:]
with kvps.connect(url) as store, store.job("cost").join(worker) as session:
    gradient = {"a": np.random.default_rng(int(worker[1:])).standard_normal(int(items), np.float32)}
    for _ in range(int(rounds)):
        session.pull()
        session.push(gradient)
"""
_AGGREGATOR = """
import sys, kvps, kvps_aggregator.aggregator, kvps_aggregator.shard.spans
kvps_aggregator.aggregator.WRITE_EVERY_S = kvps_aggregator.shard.spans.WRITE_EVERY_S = 3600
kvps_aggregator.serve(kvps.connect(sys.argv[1]).job('cost'))
"""


class Case(NamedTuple):
    """A size of a model, and how its arrays move."""

    size: str
    items: int
    transport: str
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.size} {self.transport}"


CASES = [
    Case(size, items, transport, rounds)
    for size, items, rounds in (("40KB", 10_000, 40), ("4MB", 1_000_000, 12))
    for transport in ("redis", "shm")
]


def measure(case: Case) -> dict[str, float]:
    """Return role -> millions of instructions a round. Raises KvpsError if a process failed."""
    long, short = (_run(case, rounds) for rounds in (3 * case.rounds, case.rounds))
    return {role: (long[role] - short[role]) / (2 * case.rounds) / 1e6 for role in SLACK}


def _run(case: Case, rounds: int) -> Mapping[str, int]:
    """Return role -> the instructions of its process, from its start to its end, in a job of so many rounds."""
    with tempfile.TemporaryDirectory(prefix="kvps-cost-") as folder, ExitStack() as running:
        port = free_port()
        url = f"redis://127.0.0.1:{port}/0"
        listens = f"--port {port} --bind 127.0.0.1 --dir {folder} --appendonly no --hz 1".split()
        server = running.enter_context(_counted("server", folder, [server_program(), *listens, "--save", ""]))
        with Client(url, patience_s=_START_S) as client:
            client.call("PING")
        with kvps.connect(url) as store:
            settings: dict[str, Any] = {"workers": 1, "transport": case.transport, **_QUIET}
            store.create_job("cost", {"a": np.zeros(case.items, np.float32)}, optimizer=kvps.SGD(lr=0.1), **settings)
            python = [sys.executable, "-c"]
            aggregator = running.enter_context(_counted("aggregator", folder, [*python, _AGGREGATOR, url]))
            words = ["w0", str(case.items), str(rounds)]
            worker = running.enter_context(_counted("worker", folder, [*python, _WORKER, url, *words]))
            if worker.wait(_END_S):
                said = Path(folder, "worker.err").read_text(errors="replace")[-300:]
                raise KvpsError(f"a worker ended with code {worker.returncode}: {said}")
            store.job("cost").await_finished()
        for process in (aggregator, server):  # an aggregator with a long lease seldom looks whether its job is finished
            process.terminate()
            process.wait(_END_S)
        return {role: _instructions(Path(folder, role)) for role in SLACK}


@contextmanager
def _counted(role: str, folder: str, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    counts = ["valgrind", "--tool=cachegrind", "--fair-sched=try", "--cache-sim=no"]
    counts += [f"--cachegrind-out-file={folder}/{role}.out", f"--log-file={folder}/{role}"]
    environment = os.environ | ONE_THREAD | {"PYTHONHASHSEED": "0"}
    with (
        Path(folder, f"{role}.err").open("wb") as said,
        subprocess.Popen([*counts, *command], env=environment, stdout=subprocess.DEVNULL, stderr=said) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _instructions(log: Path) -> int:
    found = re.search(r"I\s+refs:\s+([\d,]+)", log.read_text())
    if not found:
        raise KvpsError(f"valgrind says no number of instructions: {log.read_text()[-300:]}")
    return int(found[1].replace(",", ""))


def known() -> dict[tuple[str, str], float]:
    """Return (case, role) -> the figure that stands in the repository."""
    lines = (line.split() for line in FIGURES.read_text().splitlines() if line and not line.startswith("#"))
    return {(f"{size} {transport}", role): float(figure) for size, transport, role, figure, *_ in lines}


def compared(case: Case, times: int) -> Iterator[tuple[str, float, float]]:
    """Yield (role, millions of instructions a round, the figure that stands in the repository), each the median of so
    many measurements; of three, if one has more than is allowed."""
    figures = {role: known().get((case.name, role), np.inf) for role in SLACK}

    def medians() -> dict[str, float]:
        return {role: statistics.median(each[role] for each in taken) for role in SLACK}

    taken = [measure(case) for _ in range(times)]
    if any(medians()[role] > SLACK[role] * figures[role] for role in SLACK):
        taken += [measure(case) for _ in range(3 - len(taken))]
    return ((role, median, figures[role]) for role, median in medians().items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases, and say what each takes beside what stands in the repository. Return 1 if one takes more."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m kvps_bench.instructions")
    parser.add_argument("--times", type=int, default=3, metavar="N", help="how often; the median counts (3)")
    parser.add_argument("--only", default="", metavar="CASE", help='the cases that have this in their name, as "shm"')
    given, over = parser.parse_args(arguments), 0
    chosen = [case for case in CASES if given.only in case.name]
    if not chosen:
        parser.error(f"no case has {given.only!r} in its name: there are {', '.join(case.name for case in CASES)}")
    if not shutil.which("valgrind"):
        parser.error("valgrind counts the instructions, and is not installed")
    for case in chosen:
        for role, taken, figure in compared(case, given.times):
            more = taken > SLACK[role] * figure
            over += more
            beside = f"{taken / figure:.3f} of {figure}" if np.isfinite(figure) else "no figure"
            beside += f": more than {SLACK[role]}" if more else ""
            print(f"{case.name:10} {role:10} {taken:8.3f}   {beside}", flush=True)
    if over:
        print(f"a round costs more; if that is worth it, {FIGURES.name} gets the new figure and the reason")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
