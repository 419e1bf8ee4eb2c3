"""The jobs as `kvps run` and `kvps up` train them, while copies of the script, workers and aggregators are killed."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from chaos.arena import Arena
from helpers.commands import KVPS, Started, kvps_run
from helpers.servers import running_server
from helpers.torch_process import TorchPopen
from helpers.waiting import awaited_job

from kvps.connection.client import Client
from kvps.store import Store
from same_bits.job import BATCH, EPOCHS, LR, MOMENTUM, Kind
from same_bits.ways import COUNTS, Run
from same_bits.workers import DIGITS

_SCRIPT = Path(__file__).with_name("script.py")
_UNIT_S = 0.05


def run(
    arena: Arena, kind: Kind = DIGITS, counts: Sequence[int] = COUNTS[1:], number: int = 6, kills: int = 4
) -> Iterator[Run]:
    """Train with copies of a script under `kvps run`, of which some are killed, and aggregators too."""
    with running_server() as url, Store(Client(url)) as store:
        for n in range(number):
            name, count, place = f"run-{n}", arena.random.choice(counts), ("redis", "shm")[n % 2]
            script = [sys.executable, str(_SCRIPT), kind.name, str(_UNIT_S), str(arena.seed + n)]
            environment = os.environ | {"KVPS_REDIS_URL": url}
            command = [*KVPS, "run", "-w", str(count), "--job", name, "--transport", place, "--", *script]
            started = Started(command, environment, TorchPopen)
            killed = _killed(arena, store, name, kills)
            output = started.process.communicate(timeout=300)[0]
            # It says so if a copy was killed after its last round, which changes no weights.
            ended = started.process.returncode == 0 or "the weights are complete" in output
            found = [] if ended else [f"kvps run failed: {output[-2000:]}"]
            those = f"{killed['worker']} copies, {killed['aggregator']} aggregators"
            did = f"kvps run -w {count}: {place}, killed: {those}"
            yield Run(did, kind, found or kind.problems(store.job(name)), killed)


def up(arena: Arena, number: int = 4) -> Iterator[Run]:
    """Train with `kvps up --kill-every 0.5`, which says how often it killed."""
    optimizer = f"sgd:lr={LR},momentum={MOMENTUM}"
    with running_server() as url, Store(Client(url)) as store:
        for n in range(number):
            name, count = f"up-{n}", arena.random.choice(COUNTS[:4])
            slow = [word for rank in range(count) for word in ("--slow", f"w{rank}=60x")]
            sizes = ["--epochs", str(EPOCHS), "--batch-size", str(BATCH), "--optimizer", optimizer]
            where = ["--job", name, "--redis", url, "-w", str(count), "--kill-every", "0.5"]
            done = kvps_run("up", "digits", *where, *sizes, *slow)
            told = re.search(r"^(\d+) kills, .*0 lost, 0 twice, replay identical$", done.stdout, re.MULTILINE)
            found = [] if done.returncode == 0 and told else [f"kvps up failed: {done.stdout}{done.stderr[-2000:]}"]
            killed = int(told[1]) if told else 0
            did = f"kvps up --kill-every 0.5: {count} workers, {killed} kills"
            yield Run(did, DIGITS, found or DIGITS.problems(store.job(name)), Counter({"worker or aggregator": killed}))


def _killed(arena: Arena, store: Store, name: str, most: int) -> Counter[str]:
    """Kill copies of the script and aggregators at random, at most so many; return how many of which were killed before
    the job was over."""
    job, killed = awaited_job(store, name), Counter[str]()
    while killed.total() < most:
        time.sleep(arena.random.uniform(0.2, 0.6))
        state = job.state()
        if state.units_done == job.config.units:
            break
        at_work = [("worker", member.pid) for member in state.members.values() if member.state == "active"]
        at_work += [("aggregator", int(holder.split(":")[1])) for holder in job.access.reader.holders() if holder]
        if at_work:
            role, pid = arena.random.choice(at_work)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed[role] += 1
    return killed
