"""`kvps_bench goodput`: how many samples count while learners are killed, slowed down and stopped.

Learners take local steps (DiLoCo). Each case trains undisturbed and then under fire, with rounds that wait for all, and
with rounds of a quorum. A local step is mostly sleep: see `paced_learner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvps.config import AUTO
from kvps.optim import SGD, AdamW
from kvps_bench.crew import Place
from kvps_bench.fleet import AGGREGATORS, End, fleet
from kvps_bench.paced_learner import TASK, Pace
from kvps_bench.progress import Fire, Progress
from kvps_bench.result import Bar, Figures, Result, Row, machine
from kvps_bench.turns import Ratio, Times

_BAR = 17
_GOODPUT, _RATE = 0.88, 0.9
_STOPPED_WORKERS = 4
_WORKER_TIMEOUT_MS = 60_000  # longer than a learner is stopped: what is shown is not the eviction
_MANY_EPOCHS = 10**6  # more than there is time for
OUTER = SGD(lr=0.7, momentum=0.9, nesterov=True)
INNER = AdamW(lr=0.003)


class Rule(NamedTuple):
    """When a round is over. One that is `timed` takes as long as its steps do at full speed, and each learner takes as
    many steps as it has time for."""

    quorum: bool
    late: str = "next"
    timed: bool = False


RULES = {
    "lock-step": Rule(False),
    "next": Rule(True, "next"),
    "drop": Rule(True, "drop"),
    "timed-lock-step": Rule(False, timed=True),
    "timed-next": Rule(True, "next", timed=True),
    "timed-drop": Rule(True, "drop", timed=True),
}
_STOPPED = ("lock-step", "drop")


@dataclass(frozen=True)
class Setting:
    """The fleet and the fire.

    step_ms   what a local step takes
    slow      how many times as long a step of the slow learner takes; another learner is slow after `kill_every_s`
    seconds   how long a fleet is under fire; undisturbed, a third of it
    """

    workers: int
    quorum: int
    grace_ms: int
    local_steps: int
    step_ms: float
    kill_every_s: float
    slow: float
    seconds: float

    @property
    def round_s(self) -> float:
        return self.local_steps * self.step_ms / 1000

    @property
    def pace(self) -> Pace:
        """The pace of learners."""
        return Pace(self.step_ms, self.slow, self.kill_every_s)

    def job(self, rule: Rule, workers: int, quorum: int) -> dict[str, Any]:
        """Return the settings of a job of so many workers."""
        settings: dict[str, Any] = {"workers": workers, "transport": "redis", "reduction": "weighted"}
        settings |= {"optimizer": OUTER, "inner_optimizer": INNER, "local_steps": self.local_steps}
        settings |= {"batch_size": 32, "worker_timeout_ms": _WORKER_TIMEOUT_MS}
        if rule.timed:
            settings |= {"local_steps": AUTO, "round_ms": round(1000 * self.round_s), "epochs": _MANY_EPOCHS}
        if rule.quorum:
            settings |= {"quorum": quorum, "grace_ms": self.grace_ms, "late": rule.late}
        return settings


class Run(NamedTuple):
    """One turn of a case: the versions of its time, and what became of the job."""

    progress: Progress
    kills: int
    aggregator_kills: int
    end: End


class Stop(NamedTuple):
    """The versions before a learner was stopped, and while it was."""

    before: Progress
    meanwhile: Progress

    @property
    def ratio(self) -> float:
        return self.meanwhile.versions_per_s / self.before.versions_per_s


class Turns:
    """What was measured: case -> a run a turn, undisturbed and under fire; and of the jobs with a stopped learner."""

    def __init__(self, place: Place, setting: Setting) -> None:
        self.calm: dict[str, list[Run]] = {}
        self.fired: dict[str, list[Run]] = {}
        self.stops: dict[str, list[Stop]] = {}
        self._place, self._setting = place, setting

    def take(self, name: str, turn: int, say: Callable[[str], None]) -> None:
        """Run a case undisturbed and under fire."""
        setting = self._setting
        calm = self._run(name, setting.seconds / 3, None)
        fired = self._run(name, setting.seconds, Fire(setting.kill_every_s, turn))
        self.calm.setdefault(name, []).append(calm)
        self.fired.setdefault(name, []).append(fired)
        both = [f"{each.progress.samples_per_s:.0f} samples/s" for each in (calm, fired)]
        say(f"turn {turn + 1}, {name}: {both[0]} undisturbed, {both[1]} under fire with {fired.kills} kills")

    def stop_one(self, name: str, turn: int, say: Callable[[str], None]) -> None:
        """Stop one of four learners for a while."""
        setting, rule = self._setting, RULES[name]
        settings = setting.job(rule, _STOPPED_WORKERS, _STOPPED_WORKERS - 1)
        with fleet(self._place.store, setting.pace, settings) as made:
            before = made.train(setting.seconds / 4)
            with made.stopped(0):
                made.train(setting.round_s)  # the round that it may have pushed before
                meanwhile = made.train(setting.seconds / 4)
            stop = Stop(made.progress(before), made.progress(meanwhile))
            made.end()
        self.stops.setdefault(name, []).append(stop)
        say(f"turn {turn + 1}, {name}: {stop.ratio:.2f} of the versions/s while one learner is stopped")

    def _run(self, name: str, seconds: float, fire: Fire | None) -> Run:
        setting, rule = self._setting, RULES[name]
        settings = setting.job(rule, setting.workers, setting.quorum)
        with fleet(self._place.store, setting.pace, settings) as made:
            progress = made.progress(made.train(seconds, fire))
            return Run(progress, made.kills, made.aggregator_kills, made.end())


def measure(
    place: Place, setting: Setting, rules: Sequence[str], turns: int, say: Callable[[str], None] = lambda _: None
) -> Result:
    """Run each case undisturbed and under fire, in turns; then stop one of four learners, with each kind of round."""
    taken = Turns(place, setting)
    for turn in range(turns):
        for name in rules:
            taken.take(name, turn, say)
        for name in _STOPPED:
            taken.stop_one(name, turn, say)
    rows = [row for name in rules for row in _rows(setting, name, taken)]
    bars = [_goodput_bar(name, taken) for name in rules]
    bars += [_stopped_bar(name, stops) for name, stops in taken.stops.items()]
    return Result("goodput", turns, rows, bars, machine(place.store.client), _notes(setting))


def _rows(setting: Setting, name: str, taken: Turns) -> list[Row]:
    out = []
    for state, runs in (("undisturbed", taken.calm[name]), ("under fire", taken.fired[name])):
        settings: Figures = {
            "state": state,
            "workers": setting.workers,
            "quorum": setting.quorum if RULES[name].quorum else "all",
            "round_s": setting.round_s,
        }
        times = Times(tuple(tuple(run.progress.intervals()) for run in runs))
        ends = [run.end for run in runs]
        more: dict[str, float | int | str] = {
            "samples_per_s": round(sum(run.progress.samples_per_s for run in runs) / len(runs)),
            "kills": sum(run.kills for run in runs),
            "of_aggregators": sum(run.aggregator_kills for run in runs),
            "acknowledged": sum(end.verdict.acknowledged for end in ends),
            "lost": sum(end.verdict.lost for end in ends),
            "twice": sum(end.verdict.twice for end in ends),
            "replay": next((end.differs for end in ends if end.differs), "identical"),
            "accuracy": round(ends[-1].accuracy, 3),
        }
        out.append(Row(name, "unix", settings, times, more))
    return out


def _goodput_bar(name: str, taken: Turns) -> Bar:
    pairs = zip(taken.calm[name], taken.fired[name], strict=True)
    ratio = Ratio.of([fired.progress.samples_per_s / calm.progress.samples_per_s for calm, fired in pairs])
    limit = _GOODPUT if RULES[name].quorum else None
    return Bar(_BAR, f"goodput, {name}: samples/s under fire over undisturbed", False, limit, ratio)


def _stopped_bar(name: str, stops: Sequence[Stop]) -> Bar:
    what = f"versions/s while one of {_STOPPED_WORKERS} learners is stopped over those before, {name}"
    limit = _RATE if RULES[name].quorum else None
    return Bar(_BAR + 1, what, False, limit, Ratio.of([stop.ratio for stop in stops]))


def _notes(setting: Setting) -> tuple[str, ...]:
    workers, slow = setting.workers, setting.slow
    return (
        f"A learner computes a real step on the {TASK}, and sleeps until the step has taken {setting.step_ms:g} ms, as "
        f"if it had a device of its own. A round of {setting.local_steps} steps takes {setting.round_s:g} s. So this "
        f"measures the protocol and the recovery, not the cores.",
        f"Under fire a random learner is killed every {setting.kill_every_s:g} s on average, which is "
        f"{setting.kill_every_s / setting.round_s:.0f} rounds, and with every third one the aggregator that works; "
        f"there are {AGGREGATORS}. All are started again. One learner is {slow:g} times as slow, and after "
        f"{setting.kill_every_s:g} s it is the next one.",
        f"Slowness alone leaves at most {(workers - 1 + 1 / slow) / workers:.3f} of the samples, and "
        f"{(workers - 1) / workers:.3f} if all that the slow learner does is dropped.",
        f"timed: a learner takes as many steps as it has time for until {setting.round_s:g} s after the last commit, "
        f"and its weight is the number of its samples. Others always take {setting.local_steps} steps.",
    )
