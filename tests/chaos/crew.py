"""The children of one job, started again under the same name when they die, until the job is finished."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvps_aggregator.shard import mirror
from kvps_cli.supervise import release_dead

from chaos import points
from chaos.processes import Processes
from chaos.roles import FULL
from chaos.verdict import Ack
from kvps.arrays import layout
from kvps.job import Job

_ENDLESS = 10**9
_MOST_KILLS = 4


class Stuck(Exception):
    """Raised when a job makes no progress, though kvps promises that it does."""


@dataclass
class Child:
    """One child; it stays the same Child when it is started again."""

    name: str
    spec: dict[str, Any]
    pid: int = 0
    mark: str = ""
    ended: bool = False
    armed: tuple[str, int] | None = None  # the point at which the child is killed, and at which passage
    lives: int = 0


@dataclass
class Crew:
    """The processes that run `job`, with their files in `folder`.

    arms      role -> the points at which the next children of that role are killed: (point, passage)
    at_once   whether deaths are reported at once, as by `kvps up`; otherwise timeouts find them
    forgiven  acknowledged contributions that a server or a host took with it
    kills     role -> how many children of it were killed
    refusals  how often a child ended because the server was full
    """

    processes: Processes
    folder: Path
    job: Job
    url: str
    at_once: bool = True
    arms: dict[str, deque[tuple[str, int]]] = field(default_factory=dict)
    mutants: tuple[str, ...] = ()
    children: dict[str, Child] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)
    forgiven: set[Ack] = field(default_factory=set)
    kills: Counter[str] = field(default_factory=Counter)
    refusals: int = 0

    @property
    def acks(self) -> list[Path]:
        """The files in which workers note acknowledged contributions."""
        return sorted(self.folder.glob(f"{self.job.name}.acks.*"))

    @property
    def notes(self) -> Path:
        """The file in which children note the points at which they die."""
        return self.folder / f"{self.job.name}.notes"

    @property
    def _over(self) -> Path:
        return self.folder / f"{self.job.name}.over"

    def start(self, label: str, role: str, **more: Any) -> Child:
        """Start a child of that role. A worker joins under its label, unless `more` has another name."""
        spec = {"role": role, "name": label, "url": self.url, "job": self.job.name, "mutants": self.mutants}
        spec |= {"acks": str(self.folder / f"{self.job.name}.acks.{label}"), "notes": str(self.notes)}
        spec |= {"over": str(self._over), "rounds": _ENDLESS}
        spec |= {"chunk_items": layout.CHUNK_ITEMS, "mirror_s": mirror.EVERY_S} | more
        child = self.children[label] = Child(label, spec)
        self.fork(child)
        return child

    def start_all(self, workers: int, shards: int, rounds: int = _ENDLESS, per_shard: int = 1, **more: Any) -> None:
        """Start `workers` workers and, for each shard, `per_shard` aggregators (with 2, one stands by). Without
        `rounds` the workers train until `finish`."""
        for shard in range(shards):
            for number in range(per_shard):
                self.start(f"a{shard}{'b' * number}", "aggregator", shards=[shard], log=more.get("log", False))
        for number in range(workers):
            self.start(f"w{number}", "worker", rounds=rounds, seed=number, **more)

    def finish(self) -> None:
        """Make the workers of a job without units leave as if all their rounds were done, and wait for all children."""
        self._over.touch()
        self.run()
        self._over.unlink()

    def fork(self, child: Child) -> None:
        """Start a child, for the first time or again."""
        queue, child.armed = self.arms.get(child.spec["role"]), None
        spec = child.spec | {"seed": child.spec.get("seed", 0) + 97 * child.lives}
        if queue and "arm" not in spec:
            child.armed = queue.popleft()
            spec |= {"arm": {"point": child.armed[0], "nth": child.armed[1], "signal": signal.SIGKILL}}
        child.pid, child.mark = self.processes.fork(spec)
        child.lives += 1

    @property
    def running(self) -> list[Child]:
        return [child for child in self.children.values() if not child.ended]

    def kill(self, child: Child, number: int = signal.SIGKILL) -> bool:
        """Send a running child a signal; return False if it had died already."""
        sent = not child.ended and self.processes.kill(child.pid, number)
        self.kills[child.spec["role"]] += sent and number == signal.SIGKILL
        return sent

    def kill_all(self, order: random.Random) -> list[Child]:
        """Kill all running children, in any order, without replacing them; return those to be started again."""
        for child in order.sample(self.running, len(self.running)):
            self.kill(child)
        left = {child.pid: child for child in self.running}
        while left:
            for death in self.processes.deaths(1):
                if child := left.pop(death.pid, None):
                    child.ended = not death.signal
        return self.running

    def step(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a death; start killed children again. Raises RuntimeError if a child failed."""
        deaths = {death.pid: death for death in self.processes.deaths(timeout_s)}
        dead = [child for child in self.running if child.pid in deaths]
        killed = []
        for child in dead:
            death = deaths[child.pid]
            if death.signal:
                killed.append(child)
                continue
            if child.armed:  # it did not reach its point: the next child may
                self.arms[child.spec["role"]].append(child.armed)
            if death.code == 0:
                child.ended = True
            elif death.code == FULL:
                self.refusals += 1
                killed.append(child)
            else:
                raise RuntimeError(f"{child.name} failed:\n{self.processes.log.read_text()[-3000:]}")
        if killed and self.at_once:
            release_dead(self.job, {child.mark for child in killed})
        for child in killed:
            self.fork(child)

    def wait(self, seconds: float) -> None:
        """Let the children work for `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.step(left)

    def until(self, holds: Callable[[], bool], limit_s: float = 90.0) -> None:
        """Let the children work until `holds()`. Raises Stuck after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not holds():
            self.step(0.01)
            if time.monotonic() > deadline:
                raise Stuck(f"the awaited state does not come: {self.job.state()} {self.job.access.reader.holders()}")

    def run(self, killing: random.Random | None = None, every_s: float = 0.0, limit_s: float = 120.0) -> None:
        """Run until all have ended; with `killing`, kill a random child about every `every_s`. Raises Stuck.

        Between two commits no more than `_MOST_KILLS` are killed: where children start more slowly than they are
        killed, no version would be committed again.
        """
        version, since, kills = -1, time.monotonic(), 0
        due = time.monotonic() + every_s
        while self.running:
            may_kill = killing if kills < _MOST_KILLS else None
            if may_kill and time.monotonic() >= due:
                kills += self.kill(may_kill.choice(self.running))
                due = time.monotonic() + may_kill.uniform(0.2, 1.8) * every_s
            self.step(max(0.0, min(0.2, due - time.monotonic())) if may_kill else 0.2)
            now = self.job.state().version
            if now != version:
                version, since, kills = now, time.monotonic(), 0
            if time.monotonic() - since > limit_s:
                state = self.job.state()
                names = [child.name for child in self.running]
                raise Stuck(f"version {version} stands for {limit_s:g} s with {names} running: {state.members}")
        self.count()

    def count(self) -> None:
        """Count the points at which children killed themselves."""
        if self.notes.exists():
            self.fired += Counter(self.notes.read_text().splitlines())
            self.notes.unlink()

    def end(self) -> None:
        """Kill the children that still run."""
        for child in self.running:
            self.processes.kill(child.pid, signal.SIGCONT)
            self.processes.kill(child.pid)
        left = {child.pid for child in self.running}
        deadline = time.monotonic() + 10
        while left and time.monotonic() < deadline:
            left -= {death.pid for death in self.processes.deaths(0.2)}
        for child in self.running:
            child.ended = True
        self.count()


def shuffled(rng: random.Random, names: list[str], each: int, most: int) -> deque[tuple[str, int]]:
    """Return every point `each` times in random order, each with a random passage at which the child dies."""
    arms = [(name, rng.randint(1, points.passages(name, most))) for name in names for _ in range(each)]
    rng.shuffle(arms)
    return deque(arms)
