"""What a look at a job returns: plain values, which screens draw and programs read as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from kvps.errors import counted
from kvps.history.evaluations import Evaluation
from kvps.history.events import Event
from kvps.history.rollouts import RolloutsNow

WORKING = ("computing", "fetching", "pushing", "waiting")
"""The states of a worker that is at work."""


def short_name(name: str, most: int = 20) -> str:
    """Return a name for a picture: without its middle, if it is longer. Names of one job differ at their ends."""
    left = most // 2
    return name if len(name) <= most else f"{name[:left]}…{name[left + 1 - most :]}"


def event_json(event: Event, some: Callable[[list[Any]], list[Any]] | None = None) -> dict[str, Any]:
    """Return an event as `kvps log --json` prints it. With `some` it has only the contributions that this chooses, and
    how many there are of all."""
    found = {"at_ms": event.at_ms, "event": event.kind, **event.facts}
    for name in ("contributions", "rejected"):
        if some and name in found:
            found |= {name: some(found[name]), f"{name}_in_all": len(found[name])}
    return found


@dataclass(frozen=True)
class WorkerView:
    """One worker at one instant.

    state          computing, fetching, pushing, waiting, paused (it waits until the job goes on), silent, rejoining,
                   awaited (it has not joined since the job was restored), finished, left or evicted
    state_s        for how many seconds, as far as that is known
    waits_for      whom it waits for: workers, slowest first and at most four, or the aggregator
    pushed         the last round that it has pushed
    committed      the last round of it that is committed
    clock          its contributions that count
    ahead          how many rounds later its round is than the slowest worker's: the staleness bound limits this, see
                   `kvps.staleness`
    behind         how many rounds earlier its round is than the fastest worker's
    staleness      how many versions came between the one that its last committed contribution was computed on and that
                   contribution's own; None before the first
    silent_s       seconds since its last sign of life; None if it is not in the job
    round_ms       median milliseconds of its last iterations; None without spans
    rounds_per_s   iterations a second, of the last ten seconds; None before the second, and without spans
    shares         phase -> share of the time of its last iterations, 0 to 1; see `kvps_monitor.spans`
    pulled_per_s, pushed_per_s  bytes a second, of the last ten seconds
    loss, losses   the newest, also NaN, and (round, loss) of the last iterations; not finite ones are None
    """

    worker: str
    rank: int
    state: str
    state_s: float | None
    waits_for: list[str]
    pushed: int
    committed: int
    clock: int
    ahead: int
    behind: int
    staleness: int | None
    silent_s: float | None
    round_ms: float | None
    rounds_per_s: float | None
    shares: dict[str, float]
    pulled_per_s: float
    pushed_per_s: float
    loss: float | None
    losses: list[tuple[int, float | None]]
    host: str
    pid: int
    device: str


@dataclass(frozen=True)
class ShardView:
    """One shard at one instant. `term` counts its holders, `phases` has the mean milliseconds of each phase of its last
    versions. Rates are those of the last ten seconds."""

    shard: int
    holder: str
    term: int
    commits_per_s: float | None
    phases: dict[str, float]
    received_per_s: float
    stored_per_s: float


@dataclass(frozen=True)
class JobView:
    """A job at one instant. `at_ms` is the server's time, milliseconds since 1970.

    state          one of `job_now.JOB_WORDS`
    waits_for      the workers that a stalled job waits for, slowest first
    why            who has stopped, suspended or paused it, and why; "" if it goes on
    backlog        accepted contributions that wait for their commit
    losses         (version, loss) of the last versions, as the learner said that publishes the job; else none
    gradient_norms (version, norm of the reduced gradient) of the last versions
    units          units of data, 0 if the job hands out none; `units_done` are committed
    rounds         how many rounds all units make, where a version is made of each; else 0
    backups        how many units were handed out a second time, because they were late
    progress       how much of the units or rounds is committed, 0 to 1; None if it is not known how many there are
    elapsed_s      seconds from the first join to now, or to the last commit of a finished job; None before the first
    eta_s          seconds until the last of them is committed at the present rate; None if that is not known
    standbys       aggregators that hold no shard, and take over one whose holder is gone
    memory, memory_limit  bytes that the server uses, and may use; 0 is no limit
    events         the newest events of its log, oldest first
    settings       each setting of the job as text, by name
    evaluation     what was reported last of the weights of a version; None if nothing was
    rollouts       the experience that its learner takes, see `JobRollouts.if_any`
    """

    job: str
    at_ms: int
    task: str
    mode: str
    staleness: int
    transport: str
    optimizer: str
    state: str
    waits_for: list[str]
    why: str
    version: int
    head: str
    backlog: int
    commits_per_s: float | None
    contributions: int
    loss: float | None
    gradient_norms: list[tuple[int, float]]
    units: int
    units_done: int
    rounds: int
    backups: int
    progress: float | None
    elapsed_s: float | None
    eta_s: float | None
    memory: int
    memory_limit: int
    model_bytes: int
    expected_workers: int
    workers: list[WorkerView]
    shards: list[ShardView]
    standbys: list[str]
    events: list[Event] = field(repr=False)
    evaluation: Evaluation | None = None
    settings: dict[str, str] = field(default_factory=dict, repr=False)
    losses: list[tuple[int, float]] = field(default_factory=list)
    rollouts: RolloutsNow | None = None

    @property
    def published_by(self) -> str:
        """Who publishes the job now, in words; "" if workers train it."""
        if self.mode != "published":
            return ""
        return f"published by {holder}" if (holder := self.shards[0].holder) else "no learner publishes it now"

    @property
    def evaluation_text(self) -> str:
        """The newest evaluation in words; "" without one."""
        e = self.evaluation
        return f"evaluation of {e}, by {e.by}" if e else ""

    @property
    def units_text(self) -> str:
        """How many units and rounds of units are done, in words; "" if the job hands out no units."""
        if not self.units:
            return ""
        done = f"units {self.units_done:,} of {self.units:,} ({self.units_done / self.units:.0%})"
        open_round = f"round {min(self.version + 1, self.rounds):,} of {self.rounds:,}" if self.rounds else ""
        backups = counted(self.backups, "backup task") if self.backups else ""
        return "  ".join(filter(None, [done, open_round, backups]))

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON; see `event_json`."""
        told = self.evaluation and self.evaluation._asdict()
        others = {"evaluation": told, "rollouts": self.rollouts and self.rollouts.facts}
        return asdict(self) | others | {"events": [event_json(event) for event in self.events]}
