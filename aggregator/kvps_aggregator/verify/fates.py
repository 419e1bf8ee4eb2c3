"""Proves that each item of experience has one fate, and each prompt one end, as the log of a learner's job says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvps.config.rollouts import Rollouts
from kvps.errors import counted
from kvps.history.commit_log import Log
from kvps.history.rollouts import RolloutsNow
from kvps.job import Job
from kvps.parsing import Fields
from kvps.protocol.job_state import Commit, State
from kvps.protocol.plan import TrainedItem
from kvps_aggregator.verify.chain import Unproved

TRAINED, STALE, REJECTED = "trained", "stale", "rejected"


@dataclass(frozen=True)
class Experience:
    """What was proved of a job's experience: how many items had which fate, and how many wait for one or are taken; how
    many prompts have ended, of how many. All zero for a job without."""

    trained: int = 0
    stale: int = 0
    rejected: int = 0
    waiting: int = 0
    ended: int = 0
    prompts: int = 0

    def __str__(self) -> str:
        items = counted(self.trained + self.stale + self.rejected + self.waiting, "item")
        fates = f"{self.trained:,} trained, {self.stale:,} stale, {self.rejected:,} rejected, {self.waiting:,} waiting"
        prompts = f"; {self.ended:,} of {counted(self.prompts, 'prompt')} ended" if self.prompts else ""
        return f"{items}, none with two fates: {fates}{prompts}"


def experience_proved(job: Job, log: Log, state: State, before: RolloutsNow) -> Experience:
    """Prove the fates in a log that was opened after `before`. The job may go on. Raises Unproved, CorruptData."""
    fates = Fates(job.rollouts.settings)
    for fields in log.entries():
        fates.add(fields)
    fates.end()
    # Read after the log: what has a fate there is not among them.
    live = job.access.client.call("HKEYS", job.access.keys.items)
    if not fates.lost:
        fates.compare(live, before if log.begin.version <= state.begin.version else None, log.begin.version == 0)
    return Experience(**fates.counts, waiting=len(live), ended=len(fates.ended), prompts=job.rollouts.settings.units)


@dataclass
class Fates:
    """The fates in the checked part of a log. Pure.

    fates  id -> the fate, and the version that was made with it, or that was the newest then
    ended  prompt -> the same of the fate that ended it
    lost   whether the server has lost versions, or the job was restored: what is there may be older than the log
    """

    settings: Rollouts
    fates: dict[str, tuple[str, int]] = field(default_factory=dict)
    ended: dict[int, tuple[str, int]] = field(default_factory=dict)
    lost: bool = False
    _newest: int | None = None
    _open: tuple[str, int] = ("", 0)  # the kind and version of the last entries, whose lots may not be complete yet
    _bases: dict[int | str, list[int]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """How many items had which fate."""
        counts = Counter(fate for fate, _ in self.fates.values())
        return {fate: counts[fate] for fate in (TRAINED, STALE, REJECTED)}

    def add(self, fields: Mapping[str, str]) -> None:
        """Check the next entry, and go on from it. Raises Unproved."""
        f, kind = Fields(fields, "an entry of the log"), fields.get("kind")
        if kind == "commit":
            commit = Commit.of(fields)
            self._settle(TRAINED, commit.version, commit.plan.trained)
            self._newest = commit.version
        elif kind in (STALE, REJECTED):
            version, items = f.whole("version"), TrainedItem.all_in(f)
            if self._newest not in (None, version):
                raise Unproved(f"{kind} {items[0].id}: its entry says version {version}, after commit {self._newest}")
            ends = kind == REJECTED or f.text("then") == "drop"
            if kind == STALE and ends == (self.settings.units > 0 and self.settings.stale == "again"):
                raise Unproved(f"stale {items[0].id}: its prompt must {'be handed out again' if ends else 'end'}")
            self._settle(kind, version, items, ends)
        elif kind in ("recover", "restore"):
            self._go_back(f.whole("version"))

    def end(self) -> None:
        """Check what the last entries say. Raises Unproved."""
        self._close(("", 0))

    def compare(self, live: Sequence[str], before: RolloutsNow | None, whole: bool) -> None:
        """Compare the log with the ids that have no fate in the job, and with what it had counted `before` the log was
        read, if the log has all of that; `whole` is whether it also has all prompts. Raises Unproved."""
        for id in live:
            if id in self.fates:
                raise Unproved(f"item {id} {self._was(self.fates[id])}, and the job has it still")
        if before is None:
            return
        for fate, logged in self.counts.items():
            if logged < (had := getattr(before, fate)):
                raise Unproved(f"the job has counted {counted(had, 'item')} {fate}, and the log has {logged:,}")
        if whole and len(self.ended) < before.closed:
            had = counted(before.closed, "prompt")
            raise Unproved(f"the job has counted {had} that ended, and the log has {len(self.ended):,}")

    def _settle(self, fate: str, version: int, items: Sequence[TrainedItem], ends: bool = True) -> None:
        now = fate, version
        if now != self._open or fate == TRAINED:
            self._close(now)
        for item in items:
            for problem in self._problems(item, now):
                raise Unproved(f"item {item.id}, which {self._was(now)}: {problem}")
            self.fates[item.id] = now
            if item.unit is not None and ends:
                self.ended[item.unit] = now
            self._bases.setdefault(item.id if item.unit is None else item.unit, []).append(item.base)

    def _problems(self, item: TrainedItem, now: tuple[str, int]) -> Iterator[str]:
        s, (fate, version) = self.settings, now
        if item.id in self.fates:
            yield f"it {self._was(self.fates[item.id])} before"
        if (item.unit is None) == bool(s.units) or (item.unit or 0) >= max(1, s.units):
            yield f"it is of prompt {item.unit}, and the job has {s.units}"
        if item.unit is not None and self.ended.get(item.unit, now) != now:
            yield f"its prompt {self._was(self.ended[item.unit])} before"
        made_on = version - 1 if fate == TRAINED else version  # the newest version that it can have been made on
        if item.base > made_on and not self.lost:
            yield f"it was made on version {item.base}, which did not exist yet"
        if fate == TRAINED and s.max_staleness is not None and made_on - item.base > s.max_staleness:
            yield f"it was made on version {item.base}, and none before {made_on - s.max_staleness} may be"

    def _close(self, now: tuple[str, int]) -> None:
        """Check the lots of the last entries, before those of `now` come. Raises Unproved."""
        (fate, version), bound = self._open, self.settings.max_staleness
        for lot, bases in self._bases.items():
            what = f"{'prompt' if self.settings.units else 'item'} {lot}, which {self._was(self._open)}"
            if fate != STALE and len(bases) != self.settings.group:
                raise Unproved(f"{what}: it has {counted(len(bases), 'item')}, not {self.settings.group}")
            if fate == STALE and (bound is None or version - min(bases) <= bound):
                raise Unproved(f"{what}: it was made on version {min(bases)}, which is not too old")
        self._open, self._bases = now, {}

    def _go_back(self, version: int) -> None:
        """Forget what came after a version: it was lost. Of what stands right behind its commit nobody knows."""
        self._close(("", 0))
        self.fates = {id: each for id, each in self.fates.items() if each[1] < version + (each[0] == TRAINED)}
        self.ended = {unit: each for unit, each in self.ended.items() if each[1] < version + (each[0] == TRAINED)}
        self._newest, self.lost = version, True

    def _was(self, fate: tuple[str, int]) -> str:
        word, version = fate
        return f"was trained on in version {version}" if word == TRAINED else f"was {word} after version {version}"
