"""How much of its throughput a job keeps while its processes are killed: windows with kills against windows without.

The job trains the digits under the supervision of `kvps up`, with real processes that take a second of a core to start.
In one run, windows of both kinds take turns in pairs, so that drift affects both. A disturbed window begins with a kill
and lasts one or more whole periods, so that a fault and all its costs fall into the same window. A shared machine
changes its pace by more than a kill costs, so the cost is also read from the seconds right around each kill.
Throughput is what the commit log says: contributions committed, by the server's clock.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvps_cli.prove.fault_injection import judge, replayed
from kvps_cli.supervise import Supervisor
from kvps_workers import load_task

import kvps
from chaos.arena import MODES, Arena
from chaos.report import Result
from chaos.verdict import Verdict
from kvps.config import JobConfig
from kvps.job import Job
from kvps.protocol.plan import Plan
from kvps.store import Store

BAR = 0.977  # of the undisturbed throughput, with a kill every 30 s
_WORKERS = [f"w{number}" for number in range(3)]
_AGGREGATORS = ["aggregator", "aggregator1"]  # one stands by, as under `kvps up --kill-every`
_ENDLESS = 100_000
_NEAR_MS = 5000  # by then a fault and all its costs are over, the start of a new process included
_WARM_S = _NEAR_MS / 1000
SLOW = "4x"  # workers sleep for most of a round, as if each had its own machine and not a share of two cores
_NOTE = """\
The job trains the digits with {workers} workers and {aggregators} aggregators, of which one stands by, under the
supervisor of `kvps up`. Kills hit a worker and the aggregator that holds the weights in turn. Workers are slowed down
({slow}), so that they do not compete for two cores; otherwise the others go faster while one is dead. The seconds lost
per kill are the contributions missing in the 5 s after it, at the pace of the 5 s before it and of the 5 s after those.
The bar is for the throughput kept by this figure. A window with kills is given as a share of the undisturbed window
beside it. It holds all effects of a kill and everything else that the machine did; the spread of undisturbed windows
shows how much the latter is."""


class Course(NamedTuple):
    """Pairs of windows, one of each pair disturbed by `kills` kills, one every `every_s`."""

    every_s: float
    kills: int
    pairs: int
    bar: float = 0.0


COURSES = (Course(30.0, 1, 4, BAR), Course(5.0, 3, 2))


def pace_is_kept(
    arena: Arena, courses: tuple[Course, ...] = COURSES, modes: tuple[str, ...] = ("BSP", "SSP")
) -> Result:
    """Run all courses in each mode, and kill in turn a worker and the holder of the weights."""
    needed = len(modes) * sum(course.kills * course.pairs for course in courses)
    result = Result("pace", "killed under `kvps up`, throughput kept", arena.seed, needed=needed)
    for mode in modes:
        with arena.server() as store, _training(arena, store, mode, result.verdict) as (job, supervisor):
            for course in courses:
                _run(arena, Runner(job, supervisor), mode, course, result)
    result.note = _NOTE.format(workers=len(_WORKERS), aggregators=len(_AGGREGATORS), slow=SLOW)
    return result.close()


@contextmanager
def _training(arena: Arena, store: Store, mode: str, verdict: Verdict) -> Iterator[tuple[Job, Supervisor]]:
    """Yield a job that trains the digits without an end; after the block, end and judge it."""
    task = load_task("digits")
    config = JobConfig(
        task="digits",
        staleness=MODES[mode],
        workers=len(_WORKERS),
        optimizer=kvps.SGD(lr=task.lr),
        batch_size=task.batch_size,
        epochs=_ENDLESS,
    )
    job = store.create_job(f"pace-{mode}", task.parameters(0), config=config)
    acks = {worker: arena.folder / f"{job.name}.{worker}" for worker in _WORKERS}
    supervisor = Supervisor(store, "kvps up", lambda: job, gives_up=False)
    try:
        for name in _AGGREGATORS:
            supervisor.start(name, "aggregator", "start", "--job", job.name)
        for name, file in acks.items():
            supervisor.start(name, "worker", "--job", job.name, "--id", name, "--slow", SLOW, "--acks", str(file))
        yield job, supervisor
        _settle(job, supervisor)
    finally:
        supervisor.end()
    verdict.add(_judged(store, job, [file for file in acks.values() if file.exists()]))
    store.remove_job(job.name)


def _settle(job: Job, supervisor: Supervisor) -> None:
    """Make the workers leave, and wait until all their contributions are committed."""
    for name in _WORKERS:
        supervisor.children[name].process.terminate()
    for name in _WORKERS:
        supervisor.children[name].process.wait()
    deadline = time.monotonic() + 30
    while any(member.state != "gone" for member in job.state().members.values()) and time.monotonic() < deadline:
        time.sleep(0.05)


def _judged(store: Store, job: Job, files: list[Path]) -> Verdict:
    """Return what `kvps up --kill-every` reports: acknowledged, lost, twice, and whether the replay is identical."""
    said = judge(files, job)
    contributions = sum(len(commit.plan.contributions) for commit in job.log())
    problems = [f"{job.name}: {said.lost} lost, {said.twice} twice"] if said.lost or said.twice else []
    if differs := replayed(store, job):
        problems.append(f"{job.name}: {differs}")
    return Verdict(job.state().version, contributions, *said, problems)


class Window(NamedTuple):
    """A stretch of time by the server's clock, in ms, and the share of the processors that other programs had."""

    begin: int
    end: int
    others: float


class Runner:
    """The driver of a course: it lets the job run, kills, and reads from the log what was committed meanwhile."""

    def __init__(self, job: Job, supervisor: Supervisor) -> None:
        self._job = job
        self._supervisor = supervisor
        self.kills: list[int] = []  # when, by the server's clock, in ms

    def warm(self) -> None:
        """Run until all workers have joined and a version is committed, and `_WARM_S` longer."""
        while not (state := self._job.state()).members.keys() >= set(_WORKERS) or not state.version:
            self.watch(0.1)
        self.watch(_WARM_S)

    def watch(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._supervisor.watch(left)
            self._supervisor.new_lines()

    def window(self, course: Course, disturbed: bool) -> Window:
        begin, began, others = self._now(), time.monotonic(), _others()
        for _ in range(course.kills):
            due = time.monotonic() + course.every_s
            if disturbed:
                self._kill()
            self.watch(due - time.monotonic())
        used = (_others() - others) / (time.monotonic() - began) / (os.cpu_count() or 1)
        return Window(begin, self._now(), used)

    def rate(self, window: Window) -> float:
        """Return the contributions per second that were committed in a window."""
        entries = self._job.access.client.call("XRANGE", self._job.access.keys.commits, window.begin, window.end - 1)
        plans = [Plan.from_json(fields["plan"]) for _, fields in entries if fields["kind"] == "commit"]
        done = sum(len(plan.contributions) + len(plan.rejected) for plan in plans)
        return done / (window.end - window.begin) * 1000

    def lost(self, kill: int) -> float:
        """Return the seconds of work that a kill cost: what is missing after it, at the pace right around it."""
        after = Window(kill, kill + _NEAR_MS, 0)
        beside = [Window(kill - _NEAR_MS, kill, 0), Window(after.end, after.end + _NEAR_MS, 0)]
        return (1 - self.rate(after) / statistics.mean(map(self.rate, beside))) * _NEAR_MS / 1000

    def _now(self) -> int:
        seconds, micros = self._job.access.client.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def _kill(self) -> None:
        done = len(self.kills)
        victim = self._holder() if done % 2 else _WORKERS[done // 2 % len(_WORKERS)]
        child = self._supervisor.children[victim]
        assert child.running
        self.kills.append(self._now())
        child.process.kill()

    def _holder(self) -> str:
        """Return the aggregator that holds the weights. A kill of the other one, which stands by, costs nothing."""
        while True:
            mark = self._job.holders()[0].rpartition(":")[0]
            for name in _AGGREGATORS:
                if self._supervisor.children[name].mark == mark:
                    return name
            self.watch(0.05)


def _run(arena: Arena, runner: Runner, mode: str, course: Course, result: Result) -> None:
    runner.warm()
    pairs = []
    for number in range(course.pairs):
        order = (False, True) if number % 2 == 0 else (True, False)  # so that a steady drift affects both kinds alike
        windows = {disturbed: runner.window(course, disturbed) for disturbed in order}
        pairs.append((windows[False], windows[True]))
    quiet = [runner.rate(window) for window, _ in pairs]
    kept = [runner.rate(window) / rate for rate, (_, window) in zip(quiet, pairs, strict=True)]
    others = max(0.0, *(window.others for pair in pairs for window in pair))
    near = course.every_s * 1000 >= 2 * _NEAR_MS  # then no other kill falls into these seconds
    lost = [runner.lost(kill) for kill in runner.kills] if near else []
    by_kill = 1 - statistics.median(lost) / course.every_s if near else 1.0
    row: dict[str, float | int | str] = {
        "mode": mode,
        "a kill every": f"{course.every_s:g} s",
        "kills": len(runner.kills),
        "pairs of windows": f"{course.pairs} of {course.every_s * course.kills:g} s",
        "contributions/s undisturbed": f"{statistics.median(quiet):.0f} ({min(quiet):.0f} to {max(quiet):.0f})",
        "seconds lost per kill": f"{statistics.median(lost):.2f} ({min(lost):.2f} to {max(lost):.2f})" if near else "",
        "kept, from these seconds": f"{by_kill:.1%}" if near else "",
        "bar": f"{course.bar:.1%}" if course.bar else "",
        "kept in windows, median": f"{statistics.median(kept):.1%}",
        "least": f"{min(kept):.1%}",
        "most": f"{max(kept):.1%}",
        "processors used by others": f"at most {others:.0%}",
    }
    result.rows.append(row)
    result.faults[f"{mode}, every {course.every_s:g} s"] = len(runner.kills)
    if by_kill < course.bar:
        what = f"{by_kill:.1%} kept with a kill every {course.every_s:g} s"
        result.problems.append(f"{mode}: {what}, while others had at most {others:.0%} of the processors")
    arena.say(", ".join(f"{what} {entry}" for what, entry in row.items() if entry))


def _others() -> float:
    """Return the seconds of processor time of all processes except this one and its children, so far (Linux)."""
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    ours = sum(os.times()[:4])
    for pid in children:
        with suppress(OSError):  # the child has ended meanwhile
            ours += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / tick
    return (user + nice + system + sum(more)) / tick - ours
