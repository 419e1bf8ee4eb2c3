"""`kvps_bench goodput`: how many samples count while learners are killed, slowed down and stopped.

Learners take local steps (DiLoCo). Each case trains undisturbed and then under fire, with rounds that wait for all, and
with rounds of a quorum. A local step is mostly sleep: see `paced_learner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvps.optimizers import SGD, AdamW
from kvps_bench.crew import Place
from kvps_bench.fleet import AGGREGATORS, End, Fire, Progress, fleet
from kvps_bench.paced_learner import TASK, Pace
from kvps_bench.result import Bar, Figures, Result, Row, machine
from kvps_bench.turns import Ratio, Times

_BAR = 17
_GOODPUT, _RATE = 0.88, 0.9
_STOPPED_WORKERS = 4
_WORKER_TIMEOUT_MS = 60_000  # longer than a learner is stopped: what is shown is not the eviction
OUTER = SGD(lr=0.7, momentum=0.9, nesterov=True)
INNER = AdamW(lr=0.003)


class Rule(NamedTuple):
    """When a round is over, and with how many steps: see `Pace.timed`."""

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
_JUDGED = ("next", "drop", "timed-next", "timed-drop")


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

    def pace(self, rule: Rule) -> Pace:
        """Return the pace of learners under this rule."""
        return Pace(self.step_ms, rule.timed, self.slow, self.kill_every_s)

    def job(self, rule: Rule, workers: int, quorum: int) -> dict[str, Any]:
        """Return the settings of a job of so many workers."""
        settings: dict[str, Any] = {"workers": workers, "transport": "redis", "reduction": "weighted"}
        settings |= {"optimizer": OUTER, "inner_optimizer": INNER, "local_steps": self.local_steps}
        settings |= {"batch_size": 32, "worker_timeout_ms": _WORKER_TIMEOUT_MS}
        if rule.quorum:
            settings |= {"quorum": quorum, "grace_ms": self.grace_ms, "late": rule.late}
        return settings


class Run(NamedTuple):
    """One turn of a case: the versions of its time, and what became of the job."""

    progress: Progress
    end: End
    kills: int
    aggregator_kills: int


class Stop(NamedTuple):
    """Versions in equal times: before a learner was stopped, and while it was."""

    before: int
    meanwhile: int
    seconds: float


def measure(
    place: Place, setting: Setting, rules: Sequence[str], turns: int, say: Callable[[str], None] = lambda _: None
) -> Result:
    """Run each case undisturbed and under fire, in turns; then stop one of four learners, with each kind of round."""
    calm: dict[str, list[Run]] = {name: [] for name in rules}
    fired: dict[str, list[Run]] = {name: [] for name in rules}
    stops: dict[str, list[Stop]] = {"lock-step": [], "drop": []}
    for turn in range(turns):
        for name in rules:
            calm[name].append(_run(place, setting, RULES[name], None))
            fired[name].append(_run(place, setting, RULES[name], Fire(setting.kill_every_s, turn)))
            say(f"turn {turn + 1}, {name}: {_said(calm[name][-1])} undisturbed, {_said(fired[name][-1])} under fire")
        for name, stop in stops.items():
            stop.append(_stopped(place, setting, RULES[name]))
            say(f"turn {turn + 1}, {name}: {stop[-1].before} versions, {stop[-1].meanwhile} with one learner stopped")
    rows = [row for name in rules for row in _rows(setting, name, calm[name], fired[name])]
    bars = [_goodput_bar(name, calm[name], fired[name]) for name in rules]
    bars += [_stopped_bar(name, stop) for name, stop in stops.items()]
    return Result("goodput", turns, rows, bars, machine(place.store.client), _notes(setting, stops))


def _run(place: Place, setting: Setting, rule: Rule, fire: Fire | None) -> Run:
    settings = setting.job(rule, setting.workers, setting.quorum)
    with fleet(place.store, setting.pace(rule), settings) as made:
        progress = made.train(setting.seconds if fire else setting.seconds / 3, fire)
        return Run(progress, made.end(), made.kills, made.aggregator_kills)


def _stopped(place: Place, setting: Setting, rule: Rule) -> Stop:
    settings, seconds = setting.job(rule, _STOPPED_WORKERS, _STOPPED_WORKERS - 1), setting.seconds / 4
    with fleet(place.store, setting.pace(rule), settings) as made:
        before = made.versions_in(seconds)
        with made.stopped(0):
            made.versions_in(setting.round_s + 0.1)  # the round that it may still be in
            meanwhile = made.versions_in(seconds)
        made.end()
        return Stop(before, meanwhile, seconds)


def _said(run: Run) -> str:
    return f"{run.progress.samples_per_s:.0f} samples/s"


def _rows(setting: Setting, name: str, calm: Sequence[Run], fired: Sequence[Run]) -> list[Row]:
    out = []
    for state, runs in (("undisturbed", calm), ("under fire", fired)):
        verdicts = [run.end.verdict for run in runs]
        times = Times(tuple(tuple(run.progress.intervals()) for run in runs))
        more: Figures = {
            "samples_per_s": round(sum(run.progress.samples_per_s for run in runs) / len(runs)),
            "kills": sum(run.kills for run in runs),
            "of_aggregators": sum(run.aggregator_kills for run in runs),
            "acknowledged": sum(verdict.acknowledged for verdict in verdicts),
            "lost": sum(verdict.lost for verdict in verdicts),
            "twice": sum(verdict.twice for verdict in verdicts),
            "replay": next((run.end.differs for run in runs if run.end.differs), "identical"),
            "accuracy": round(runs[-1].end.accuracy, 3),
        }
        settings: Figures = {
            "state": state,
            "workers": setting.workers,
            "quorum": setting.quorum if RULES[name].quorum else "all",
            "round_s": setting.round_s,
        }
        out.append(Row(name, "unix", settings, times, more))
    return out


def _goodput_bar(name: str, calm: Sequence[Run], fired: Sequence[Run]) -> Bar:
    each = [f.progress.samples_per_s / c.progress.samples_per_s for c, f in zip(calm, fired, strict=True)]
    limit = _GOODPUT if name in _JUDGED else None
    return Bar(_BAR, f"goodput, {name}: samples/s under fire over undisturbed", False, limit, Ratio.of(each))


def _stopped_bar(name: str, stops: Sequence[Stop]) -> Bar:
    ratio = Ratio.of([stop.meanwhile / stop.before for stop in stops])
    what = f"versions while one of {_STOPPED_WORKERS} learners is stopped over those before, {name}"
    return Bar(_BAR + 1, what, False, _RATE if RULES[name].quorum else None, ratio)


def _notes(setting: Setting, stops: dict[str, list[Stop]]) -> tuple[str, ...]:
    workers, slow = setting.workers, setting.slow
    counts = "; ".join(
        f"{name}: {', '.join(f'{s.before}, then {s.meanwhile}' for s in each)}" for name, each in stops.items()
    )
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
        f"Versions in {stops['drop'][0].seconds:g} s, and in as many while a learner is stopped: {counts}.",
    )
