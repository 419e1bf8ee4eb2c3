"""Logs that were forged, with a chain made anew: each forgery is named, in every mode, though no gradient is computed
again. Honest logs pass."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, gradient, log_entries, model
from helpers.internals import fall_silent
from kvps_aggregator.verify.replay import Proof, prove

import kvps
from kvps.arrays.layout import DTYPE
from kvps.errors import ContributionLate
from kvps.history.commit_log import Log
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.protocol.job_state import Entry, Member, State, chained
from kvps.protocol.plan import Contribution
from kvps.store import Store

MODES: dict[str, dict[str, Any]] = {
    "BSP": {},
    "SSP": {"staleness": 2},
    "ASP": {"staleness": -1},
    "quorum": {"quorum": 1, "staleness": 0},
    "late ones dropped": {"quorum": 1, "late": "drop"},
    "units": {"units": 24, "units_per_epoch": 12, "staleness": -1},
    "rounds of units": {"units": 24, "units_per_epoch": 12, "units_per_round": 2},
    "open rounds of units": {"units": 24, "units_per_epoch": 12, "units_per_round": 2, "staleness": 1},
    "local steps": {"local_steps": 3, "optimizer": kvps.SGD(lr=0.7, momentum=0.9)},
    "weighted": {"reduction": "weighted", "staleness_scaling": "inverse", "staleness": -1},
}


def _honest(store: Store, **settings: Any) -> Job:
    """Train 12 versions or more with two workers, in turns, of which one leaves and comes back, one is evicted, and the
    last contribution of one is rejected; the learning rate is set behind version 4."""
    job = store.create_job("job", model(), workers=2, worker_timeout_ms=60_000, **settings)
    with aggregating(job) as serving:
        sessions = [job.join("w0"), job.join("w1")]
        for turn in range(13):
            for number in range(2):
                if turn == 6 and number == 1:
                    sessions[1].leave(finished=False)
                    sessions[1] = job.join("w1")
                if turn == 9 and number == 0 and not job.config.unit_rounds:
                    fall_silent(sessions[0])
                    assert job.access.scripts.evict("w0", sessions[0].incarnation, "for a test").workers == ["w0"]
                    sessions[0] = job.join("w0")
                _one(job, sessions[number], turn)
            _settle(job)
            if turn == 4:
                job.set_lr(0.01, reason="a test")
        for session in sessions:
            session.leave()
        del serving
    return job


def _one(job: Job, session: Any, turn: int) -> None:
    if job.config.units and (job.state().units_done >= job.config.units or session.next_unit() is None):
        return
    weight = 1 + turn if job.config.reduction == "weighted" else None
    try:
        session.push(gradient(session.pull(), session.rank, turn), weight=weight)
    except ContributionLate:
        return


def _settle(job: Job) -> None:
    """Wait until all that was pushed is committed, where no version waits for all workers or a whole round of units."""
    config = job.config
    waits = config.unit_rounds or (config.staleness == 0 and not config.quorum)
    while not waits and any(member.pending for member in job.state().members.values()):
        time.sleep(0.01)


class Forged(LogStream):
    """A log and the state of its job, to be changed. `plans` are those of its commits."""

    job = "job"

    def __init__(self, entries: list[Entry], state: State) -> None:
        self.log = [(id, dict(fields)) for id, fields in entries]
        self.state = state
        self.commits = [fields for _, fields in self.log if fields["kind"] == "commit"]
        self.plans = [json.loads(fields["plan"]) for fields in self.commits]

    def page(self, after: str) -> list[Entry]:
        return [entry for entry in self.log if _place(entry[0]) > _place(after)]

    def entries(self) -> Iterator[Entry]:
        return iter(self.log)

    def drop(self, number: int) -> None:
        """Leave out a commit."""
        self.log.remove(next(entry for entry in self.log if entry[1] is self.commits[number]))

    def contribution(self, number: int, place: int = 0) -> Contribution:
        return Contribution.from_text(self.plans[number]["contributions"][place])

    def change(self, number: int, place: int = 0, **values: Any) -> None:
        text = self.contribution(number, place)._replace(**values).text
        self.plans[number]["contributions"][place] = text

    def made_anew(self) -> Forged:
        """Make the chain anew, with the progress and the clocks that its plans have."""
        head, progress = self.state.begin.head, 0
        clock = Counter(dict.fromkeys(self.state.clock, 0))
        for fields, before in zip(self.commits, self.plans, strict=True):
            plan = before | {"head": head, "progress": progress + before.get("more_progress", 0)}
            progress += len(plan["contributions"])
            clock.update(text.split()[0] for text in plan["contributions"])
            fields["plan"] = json.dumps(plan, separators=(",", ":"))
            fields["head"] = head = chained(head, fields["plan"], tuple(fields["shards"].split(",")))
        self.state = replace(self.state, head=head, clock=clock)
        return self


def _place(id: str) -> tuple[int, ...]:
    return tuple(map(int, id.split("-")))


def _proof(job: Job, forged: Forged) -> Proof:
    flat = np.empty(job.layout.size, DTYPE)
    version = job.access.reader.fetch(job.state(), flat).version
    return prove(Log(forged, forged.state), forged.state, job.config, job.layout, (version, flat), None)


# -- forgeries: each changes a log, and returns the words that name it; None where the mode has no such thing ----------

BROKEN = "commit 5: the chain is broken"
Forgery = Callable[[Forged, Any], str | None]


def _later_of(f: Forged, c: Contribution, after: int) -> list[tuple[int, int]]:
    """Return the places of later contributions of the same incarnation."""
    places = [(n, p) for n in range(after + 1, len(f.plans)) for p in range(len(f.plans[n]["contributions"]))]
    return [place for place in places if f.contribution(*place)[:2] == c[:2]]


def _followed(f: Forged) -> int:
    """Return the first plan from number 3 on whose first contribution has a later one of its incarnation. Where late
    contributions are dropped, it depends on the machine which worker has one."""
    return next(n for n in range(3, len(f.plans)) if _later_of(f, f.contribution(n), n))


def unit_twice(f: Forged, config: Any) -> str | None:
    if config.units:
        f.change(4, unit=f.contribution(1).unit)
        return "unit"
    return None


def unit_missing(f: Forged, config: Any) -> str | None:
    """With sequence numbers and rounds that leave nothing out."""
    if not config.units:
        return None
    c = f.contribution(4)
    f.plans[4]["contributions"].pop(0)
    f.plans[4]["divisor"] -= bool(config.unit_rounds or config.quorum)
    for place in _later_of(f, c, 3):
        f.change(*place, seq=f.contribution(*place).seq - 1)
    return "is missing from the log" if not config.unit_rounds else "is not made of units"


def dropped(f: Forged, config: Any) -> str:
    number = _followed(f)
    c = f.contribution(number)
    f.plans[number]["contributions"].pop(0)
    if config.quorum:
        return "its divisor is"
    return f"contribution {c.seq} of {c.worker} is missing" if not config.unit_rounds else "is not made of units"


def last_dropped(f: Forged, config: Any) -> str:
    """The last of its worker. Only the job has counted it."""
    f.plans[-1]["contributions"].pop()
    clock = f.state.clock
    f.made_anew()
    f.state = replace(f.state, clock=clock)
    f.made_anew = lambda: f
    return ""


def twice(f: Forged, config: Any) -> str:
    c = f.contribution(3)
    f.plans[5]["contributions"].append(c._replace(round=c.round + 40, base=5).text)
    return ""


def gap(f: Forged, config: Any) -> str | None:
    if config.late == "drop":
        return None
    for place in [(4, 0), *_later_of(f, f.contribution(4), 4)]:
        f.change(*place, seq=f.contribution(*place).seq + 1)
    return f"contribution {f.contribution(4).seq - 1} of"


def seq_twice(f: Forged, config: Any) -> str:
    f.change(4, incarnation=(c := f.contribution(2)).incarnation, worker=c.worker, seq=c.seq)
    return ""


def divisor(f: Forged, config: Any) -> str:
    f.plans[5]["divisor"] += 1
    return "commit 6: its divisor is"


def rate(f: Forged, config: Any) -> str:
    f.plans[5]["lr"] = 0.5
    return "commit 6: its learning rate is 0.5, and no entry sets that"


def rate_left_out(f: Forged, config: Any) -> str:
    f.plans[-1].pop("lr")
    return "its learning rate is its optimizer's own, and no entry sets that"


def set_deleted(f: Forged, config: Any) -> str:
    f.log = [entry for entry in f.log if entry[1]["kind"] != "set"]
    return "its learning rate is 0.01, and no entry sets that"


def set_moved(by: int) -> Forgery:
    def forge(f: Forged, config: Any) -> str:
        at = next(i for i, entry in enumerate(f.log) if entry[1]["kind"] == "set")
        entry = f.log.pop(at)
        commits = [i for i, each in enumerate(f.log) if each[1]["kind"] == "commit"]
        behind = sum(i < at for i in commits)
        f.log.insert(commits[behind + by], entry)
        return "its learning rate is"

    return forge


def weight(f: Forged, config: Any) -> str | None:
    """Of a job whose contributions have weights, only a replay knows it."""
    if config.reduction == "weighted":
        return None
    f.change(4, weight=3)
    return "has the weight 3, which its job does not take"


def zeros(f: Forged, config: Any) -> str:
    f.change(4, weight=0)
    return "has the weight 0, which its job does not take"


def staler(f: Forged, config: Any) -> str:
    """So that it is scaled by another factor."""
    number = _followed(f)
    c = f.contribution(number)
    f.change(*_later_of(f, c, number)[0], base=c.base - 1)
    return " on version"


def rank(f: Forged, config: Any) -> str:
    entry = next(fields for _, fields in f.log if fields["kind"] == "join" and fields["worker"] == "w1")
    entry["rank"] = "2"
    return "w1 joined before it with rank 2, and the job has it with rank 1"


def ranks_swapped(f: Forged, config: Any) -> str | None:
    """In all entries, and in the job."""
    if config.unit_rounds or not any(len(plan["contributions"]) > 1 for plan in f.plans):
        return None
    for _, fields in f.log:
        if fields["kind"] == "join":
            fields["rank"] = str(1 - int(fields["rank"]))
    members: dict[str, Member] = {w: replace(m, rank=1 - m.rank) for w, m in f.state.members.items()}
    f.state = replace(f.state, members=members)
    return "its contributions do not stand in rank order"


def rejected(f: Forged, config: Any) -> str:
    """It does not count, and no entry says why."""
    f.plans[3]["rejected"].append(f.plans[3]["contributions"].pop(0))
    return "is rejected, and no entry says why"


def progress(f: Forged, config: Any) -> str:
    f.plans[5]["more_progress"] = 1
    return "commit 6: its progress is "


def version(f: Forged, config: Any) -> str:
    f.plans[5]["version"] = 7
    return "commit 6: its plan is for version 7"


def contributed(words: str, **values: Any) -> Forgery:
    """Return what changes a contribution of commit 5 to nonsense."""

    def forge(f: Forged, config: Any) -> str:
        f.change(4, **values)
        return words

    return forge


FORGERIES: list[Forgery] = [
    progress, version, contributed("commit 5: it holds a contribution of 'w7', which never joined", worker="w7"),
    contributed("on version 99, which did not exist yet", base=99),
    contributed("has 2 digests, the job 1 s", digest="a,b"),
    unit_twice, unit_missing, dropped, last_dropped, twice, gap, seq_twice, divisor, rate, rate_left_out, set_deleted,
    set_moved(2), set_moved(-3), weight, zeros, staler, rank, ranks_swapped, rejected,
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_each_forgery_is_named_though_the_chain_was_made_anew(store: Store, mode: str) -> None:
    job = _honest(store, **MODES[mode])
    entries, state = list(log_entries(job)), job.state()
    assert state.version >= 12
    assert _proof(job, Forged(entries, state)).differs == "", "the log is honest"
    assert _proof(job, Forged(entries, state).made_anew()).differs == "", "and nothing else has changed"
    for forge in FORGERIES:
        forged = Forged(entries, state)
        words = forge(forged, job.config)
        if words is not None:
            differs = _proof(job, forged.made_anew()).differs
            assert differs.startswith(("commit ", "version ")), f"{mode}: {forge.__name__} passes"
            assert words in differs, (mode, forge.__name__, differs)


UNCHAINED: list[tuple[Callable[[Forged], object], str]] = [
    (lambda f: f.commits[4].update(plan=f.commits[4]["plan"].replace('"divisor":', '"divisor":1')), BROKEN),
    (lambda f: f.commits[4].update(shards=f.commits[4]["shards"][:-4] + "0bad"), BROKEN),
    (lambda f: f.commits[4].update(head=f.commits[3]["head"]), BROKEN),
    (lambda f: f.drop(4), "commit 5: it is missing from the log: commit 6 stands in its place"),
    (lambda f: f.drop(-1), "it is missing from the log, which ends before it"),
    (lambda f: f.log.clear(), "commit 1: it is missing from the log, which ends before it"),
    (lambda f: f.commits[4].update(plan="{"), "commit 5 cannot be read from its log entry"),
    (lambda f: f.commits[4].pop("shards"), "commit 5 cannot be read from its log entry"),
    (lambda f: setattr(f, "state", replace(f.state, head="0123456789abcdef")), "the job at 0123456789ab"),
]


def test_a_chain_that_was_left_as_it_is_breaks_at_the_first_entry_that_was_changed(store: Store) -> None:
    job = _honest(store)
    entries, state = list(log_entries(job)), job.state()
    for number, (tamper, words) in enumerate(UNCHAINED):
        forged = Forged(entries, state)
        tamper(forged)
        proof = _proof(job, forged)
        assert words in proof.differs, (number, proof)
        assert proof.commits == {4: state.version - 1, 5: 0, 8: state.version}.get(number, 4)
