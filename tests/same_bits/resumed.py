"""The jobs as `kvps run --resume` trains them: the whole run is ended again and again, and the same line goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from chaos.arena import Arena
from helpers.commands import KVPS
from helpers.servers import private_directory
from helpers.waiting import pids_of

from kvps.history.checkpoint_directory import newest
from same_bits.job import VERSIONS, Kind, sha256_of
from same_bits.ways import COUNTS, Run
from same_bits.workers import DIGITS

_SCRIPT = Path(__file__).with_name("script.py")
_UNIT_S = 0.15  # a run that is to be ended ten times must not be over before
_WAYS = _SIGTERM, _COMMAND, _ALL, _SERVER = "SIGTERM", "the command", "all its processes", "the server"


def resumed(
    arena: Arena, kind: Kind = DIGITS, counts: Sequence[int] = COUNTS[:4], number: int = 3, ends: int = 10
) -> Iterator[Run]:
    """End each run so many times, each time with another number of workers. The server keeps its data, or nothing."""
    for n in range(number):
        with private_directory() as home, private_directory() as here:
            keeps = ["--data-dir", str(here / "data")] if n % 2 else []
            line = [*KVPS, "run", "--job", "r", "--resume"]
            line += ["--checkpoints", str(here / "kept"), "--checkpoint-every", "1"]
            script = [sys.executable, str(_SCRIPT), kind.name, str(_UNIT_S), str(arena.seed + n)]
            environment = os.environ | {"KVPS_RUNTIME_DIR": str(home), "KVPS_SERVER_STAYS": "0", "KVPS_PATIENCE": "5"}
            ended, workers, output = Counter[str](), list[int](), ""
            try:
                while "nothing is left to train" not in output and len(workers) < 3 * ends:
                    workers.append(arena.random.choice(counts))
                    command = [*line, *keeps, "-w", str(workers[-1]), "--", *script]
                    # Not from the zygote: its processes are not found by their environment.
                    process = subprocess.Popen(
                        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                    )
                    output = ""
                    if ended.total() < ends:
                        output, trains = _until_it_trains(process)
                        if trains:
                            time.sleep(arena.random.uniform(0.1, 1.0))
                            ended[_end(process, home, arena.random.choice(_WAYS))] += 1
                    output += process.communicate(timeout=300)[0]
            finally:
                _kill(home)
            did = f"kvps run --resume, {'a server with its data' if keeps else 'a new server'} each time: {workers}"
            yield Run(did, kind, _problems(here / "kept", kind, output), ended)


def _until_it_trains(process: subprocess.Popen[str]) -> tuple[str, bool]:
    """Return what a run says until it says how far it is, and whether it did: when all was done, it ends before."""
    assert process.stdout
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("version "):
            return output, True
    return output, False


def _end(process: subprocess.Popen[str], home: Path, how: str) -> str:
    """End a run in one of the ways; return which."""
    if how == _SERVER:
        _kill(home, "redis.sock")
    process.send_signal(signal.SIGTERM if how in (_SIGTERM, _SERVER) else signal.SIGKILL)
    if how == _ALL:
        _kill(home)
    return how


def _kill(home: Path, words: str = "") -> None:
    """Kill the processes of a runtime directory that have these words in their command lines."""
    for pid, command in pids_of(home).items():
        if words in command:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _problems(kept: Path, kind: Kind, output: str) -> list[str]:
    """Return what is not as promised in the last checkpoint of a run that is over."""
    last = newest(kept, "r")
    if "nothing is left to train" not in output or last is None:
        return [f"it did not come to its end: {output[-2000:]}"]
    found, weights = [], last.checkpoint.layout.views(last.checkpoint.weights)
    if last.checkpoint.version != VERSIONS:
        found.append(f"it ended with version {last.checkpoint.version}, not {VERSIONS}")
    if (sha256 := sha256_of(weights)) != kind.expected():
        found.append(f"the weights are {sha256[:12]}, not {kind.expected()[:12]}")
    return found
