"""The children of one job: started again under the same name when they die, until the job is done."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos import points
from chaos.roles import FULL
from chaos.zygote import Zygote
from kvps.arrays import layout
from kvps.cli.supervise import bury
from kvps.job import Job

_ENDLESS = 10**9


class Stuck(Exception):
    """A job that makes no progress: what was promised is that it goes on."""


@dataclass
class Child:
    """One child; the same one when it is started again."""

    name: str
    spec: dict[str, Any]
    pid: int = 0
    mark: str = ""
    ended: bool = False
    armed: tuple[str, int] | None = None  # the point at which it will be killed, and at which passage
    lives: int = 0


@dataclass
class Crew:
    """Runs `job` with the zygote's children, out of `folder`.

    arms      points at which those who are started next are killed, by role: (point, passage)
    at_once   whether the dead are buried at once, as by `kvps up`; else timeouts find them
    refusals  how often a child ended because the server was full
    """

    zygote: Zygote
    folder: Path
    job: Job
    url: str
    at_once: bool = True
    arms: dict[str, deque[tuple[str, int]]] = field(default_factory=dict)
    mutants: tuple[str, ...] = ()
    children: dict[str, Child] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    refusals: int = 0

    @property
    def acks(self) -> list[Path]:
        """The files of what was acknowledged."""
        return sorted(self.folder.glob(f"{self.job.name}.acks.*"))

    @property
    def notes(self) -> Path:
        """The file in which children note the points at which they die."""
        return self.folder / f"{self.job.name}.notes"

    @property
    def _over(self) -> Path:
        return self.folder / f"{self.job.name}.over"

    def start(self, label: str, role: str, **more: Any) -> Child:
        """Start a child of that role; a worker joins under its label, unless `more` has another name for it."""
        spec = {"role": role, "name": label, "url": self.url, "job": self.job.name, "mutants": self.mutants}
        spec |= {"acks": str(self.folder / f"{self.job.name}.acks.{label}"), "notes": str(self.notes)}
        spec |= {"over": str(self._over), "rounds": _ENDLESS, "chunk_items": layout.CHUNK_ITEMS} | more
        child = self.children[label] = Child(label, spec)
        self._fork(child)
        return child

    def start_all(self, workers: int, shards: int, rounds: int = _ENDLESS, per_shard: int = 1, **more: Any) -> None:
        """`workers` workers, and for each shard an aggregator of its own (with 2 per shard, one stands by).

        Without `rounds` they work until `finish`.
        """
        for shard in range(shards):
            for number in range(per_shard):
                self.start(f"a{shard}{'b' * number}", "aggregator", shards=[shard], log=more.get("log", False))
        for number in range(workers):
            self.start(f"w{number}", "worker", rounds=rounds, seed=number, **more)

    def finish(self) -> None:
        """Have the workers of a job without units leave as if they had done all their rounds, and wait for all."""
        self._over.touch()
        self.run()
        self._over.unlink()

    def _fork(self, child: Child) -> None:
        queue, child.armed = self.arms.get(child.spec["role"]), None
        spec = child.spec | {"seed": child.spec.get("seed", 0) + 97 * child.lives}
        if queue and "arm" not in spec:
            child.armed = queue.popleft()
            spec |= {"arm": {"point": child.armed[0], "nth": child.armed[1], "signal": signal.SIGKILL}}
        child.pid, child.mark = self.zygote.fork(spec)
        child.lives += 1

    @property
    def running(self) -> list[Child]:
        return [child for child in self.children.values() if not child.ended]

    def kill(self, child: Child, number: int = signal.SIGKILL) -> bool:
        """Send a running child a signal; False if it had died already."""
        sent = not child.ended and self.zygote.kill(child.pid, number)
        self.kills += sent and number == signal.SIGKILL
        return sent

    def kill_all(self, order: random.Random) -> list[Child]:
        """Kill all that run, in any order, with nobody in their place: those to be started again."""
        for child in order.sample(self.running, len(self.running)):
            self.kill(child)
        left = {child.pid: child for child in self.running}
        while left:
            for death in self.zygote.deaths(1):
                if child := left.pop(death.pid, None):
                    child.ended = not death.signal
        return self.running

    def start_again(self, child: Child) -> None:
        """Start one that was killed with all."""
        self._fork(child)

    def step(self, timeout_s: float) -> None:
        """Wait for a death, not longer than `timeout_s`; who was killed is started again. Raises RuntimeError."""
        deaths = {death.pid: death for death in self.zygote.deaths(timeout_s)}
        dead = [child for child in self.running if child.pid in deaths]
        killed = []
        for child in dead:
            death = deaths[child.pid]
            if death.signal:
                killed.append(child)
                continue
            if child.armed:  # it was not to be killed: the next may be
                self.arms[child.spec["role"]].append(child.armed)
            if death.code == 0:
                child.ended = True
            elif death.code == FULL:
                self.refusals += 1
                killed.append(child)
            else:
                raise RuntimeError(f"{child.name} failed:\n{self.zygote.log.read_text()[-3000:]}")
        if killed and self.at_once:
            bury(self.job, {child.mark for child in killed})
        for child in killed:
            self._fork(child)

    def wait(self, seconds: float) -> None:
        """Let them work for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.step(left)

    def until(self, holds: Callable[[], bool], limit_s: float = 30.0) -> None:
        """Let them work until it comes to hold. Raises Stuck."""
        deadline = time.monotonic() + limit_s
        while not holds():
            self.step(0.01)
            if time.monotonic() > deadline:
                raise Stuck(f"it does not come to hold: {self.job.state()} {self.job.holders()}")

    def run(self, killing: random.Random | None = None, every_s: float = 0.0, limit_s: float = 120.0) -> None:
        """Until all have ended; with `killing` a random child is killed about every so often. Raises Stuck."""
        version, since = -1, time.monotonic()
        due = time.monotonic() + every_s
        while self.running:
            if killing and time.monotonic() >= due:
                self.kill(killing.choice(self.running))
                due = time.monotonic() + killing.uniform(0.2, 1.8) * every_s
            self.step(max(0.0, min(0.2, due - time.monotonic())) if killing else 0.2)
            now = self.job.state().version
            if now != version:
                version, since = now, time.monotonic()
            if time.monotonic() - since > limit_s:
                state = self.job.state()
                names = [child.name for child in self.running]
                raise Stuck(f"version {version} stands for {limit_s:g} s with {names} running: {state.members}")
        self.count()

    def count(self) -> None:
        """Count the points at which children were killed by themselves."""
        if self.notes.exists():
            self.fired += Counter(self.notes.read_text().splitlines())
            self.notes.unlink()

    def end(self) -> None:
        """Kill what still runs."""
        for child in self.running:
            self.zygote.kill(child.pid, signal.SIGCONT)
            self.zygote.kill(child.pid)
        left = {child.pid for child in self.running}
        deadline = time.monotonic() + 10
        while left and time.monotonic() < deadline:
            left -= {death.pid for death in self.zygote.deaths(0.2)}
        for child in self.running:
            child.ended = True
        self.count()


def shuffled(rng: random.Random, names: list[str], each: int, most: int) -> deque[tuple[str, int]]:
    """Every point `each` times, in any order, each to be passed a few times before."""
    arms = [(name, rng.randint(1, points.passages(name, most))) for name in names for _ in range(each)]
    rng.shuffle(arms)
    return deque(arms)
