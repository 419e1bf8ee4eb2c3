"""Makes the next version of the held shards: asks for the plan, reduces, steps, stages, and calls ready.

It decides nothing: `plan.lua` says which contributions make the next version, and `ready.lua` when that version is
whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import cache, partial

import numpy as np

from kvps.errors import CorruptData, LeaseLost, NotFinite, ServerFull, counted
from kvps.job import Job
from kvps.protocol.answers import PlanGone, Planned
from kvps.protocol.plan import Plan
from kvps_aggregator.alike import AlikeContributions
from kvps_aggregator.held_shards import HeldShards
from kvps_aggregator.shard.fetch import BadContribution
from kvps_aggregator.shard.shard import Shard
from kvps_aggregator.step.clipping import outlier, scale_of

log = logging.getLogger("kvps.commit")

_MOST_REFUSALS = 20  # another aggregator's commit explains the first


class Outcome(Enum):
    """What came of a look at the open plan."""

    IDLE = "there was nothing to do"
    WORKED = "some work was done, and nothing was committed"
    COMMITTED = "a version was committed"


class VersionMaker:
    """The work of one aggregator on the plans of its job. Used by its loop alone.

    planned      the last answer of `plan.lua`; None before the first, and if the server may have lost it
    last_commit  the id of the log entry of the newest commit that this aggregator has made
    """

    def __init__(self, job: Job, held: HeldShards) -> None:
        self.planned: Planned | None = None
        self.last_commit = ""
        self._job = job
        self._held = held
        self._alike = AlikeContributions(job.name, job.config, job.layout)
        self._refused = (0, 0)  # the id of a plan, and how often `ready.lua` did not accept it

    def work(self) -> Outcome:
        """Work on the open plan."""
        known = self.planned.plan if self.planned else None  # it is not read again
        self.planned = planned = self._job.access.scripts.plan(known)
        self._held.settle(planned.version, planned.pin)
        if planned.waits_for_workers and self._held.shards:
            self._held.say("workers", f"waits for {counted(self._job.config.workers, 'worker')} to join")
        return self.make(planned.plan) if planned.plan else Outcome.IDLE

    def make(self, plan: Plan) -> Outcome:
        """Work on this plan, which is open."""
        unstaged = [shard for shard in self._held.shards.values() if shard.staged != plan]
        if not unstaged:
            return Outcome.IDLE
        if not self._job.config.measures_gradients or not plan.contributions:
            return self._advance_each(unstaged, plan)
        return self._advance_measured(unstaged, plan)

    @property
    def no_members(self) -> bool:
        """Whether all workers are gone. Only then the job may be finished, and reading all its members is worth it."""
        return self.planned is not None and self.planned.members == 0

    def fetch_early(self) -> bool:
        """Fetch one contribution before its plan is made. Return False if there is none, or a plan is open."""
        if self.planned is None or self.planned.plan is not None:
            return False
        inbox = cache(self._job.access.reader.inbox)
        return any(shard.storage.fetch_one_early(inbox) for shard in self._held.shards.values())

    # -- a shard at a time -------------------------------------------------------------------------------------

    def _each(self, shards: list[Shard], plan: Plan, step: Callable[[Shard], Outcome]) -> Outcome:
        """Do `step` on each shard, until the plan changes."""
        outcome = Outcome.WORKED
        for shard in shards:
            try:
                if step(shard) is Outcome.COMMITTED:
                    outcome = Outcome.COMMITTED
            except LeaseLost as lost:
                log.warning("%s", lost)
                self._held.drop(shard)
            except PlanGone:
                self._count_refusal(plan)
                return Outcome.WORKED
            except ServerFull as full:  # the plan stays open, and is staged again until there is room
                self._held.say("memory of the server", f"{full}; goes on when there is room")
                return Outcome.WORKED
            except BadContribution as bad:
                self._reject(shard, plan, bad)
                return Outcome.WORKED
            except NotFinite as error:
                raise NotFinite(f"version {plan.version} of job {self._job.name!r} is not committed: {error}") from None
        return outcome

    def _advance_each(self, shards: list[Shard], plan: Plan, scale: np.float32 | None = None) -> Outcome:
        return self._each(shards, plan, partial(self._advance, plan=plan, scale=scale))

    def _advance(self, shard: Shard, plan: Plan, scale: np.float32 | None) -> Outcome:
        """Stage a shard's part of the plan and call ready."""
        if shard.begun not in (None, plan):
            # This term has staged this version, or a part of it, for a plan that was replaced. A late write of those
            # bytes must not land among the new ones, so a new term stages the version. It first reads the committed
            # version again, because another aggregator may have held the shard in between.
            self._held.take_again(shard)
            return Outcome.WORKED
        digest = shard.make(plan, scale)
        result = shard.commit(plan, digest)
        if shard.number == 0:
            self._alike.look(plan)
        if not result.flipped:
            return Outcome.WORKED
        for each in [each for each in self._held.shards.values() if each.staged == plan]:
            self._held.promote(each, result.pin)
        self.last_commit = result.commit_id
        return Outcome.COMMITTED

    def _reject(self, shard: Shard, plan: Plan, bad: BadContribution) -> None:
        c = bad.contribution
        self._held.evictions.check()  # its bytes may be among what the server has deleted
        log.warning("job %s: rejects %s of %s: %s", self._job.name, c.seq, c.worker, bad.reason)
        try:
            self._job.access.scripts.reject(shard.number, shard.term, plan, c, bad.reason, bad.damaged)
        except LeaseLost:
            self._held.drop(shard)
        except PlanGone:
            return

    def _count_refusal(self, plan: Plan) -> None:
        """Raise CorruptData for a plan that stays open and is refused each time: it does not fit the job's version."""
        self._refused = (plan.id, self._refused[1] + 1 if self._refused[0] == plan.id else 1)
        if self._refused[1] > _MOST_REFUSALS:
            raise CorruptData(
                f"job {self._job.name!r}: plan {plan.id} does not fit the job's version: another program wrote to "
                f"{self._job.access.keys.plan}"
            )

    # -- gradients that are measured before they are used ------------------------------------------------------

    def _advance_measured(self, shards: list[Shard], plan: Plan) -> Outcome:
        """Measure the plan's gradient in each shard. Reject an outlier; else clip the gradient and use it."""

        def measure(shard: Shard) -> Outcome:
            shard.measure(plan)
            return Outcome.WORKED

        self._each([shard for shard in shards if not shard.has_measured(plan)], plan, measure)
        if not all(shard.has_measured(plan) for shard in shards):
            return Outcome.WORKED
        sums = self._square_sums(plan)
        if sums is None:
            return Outcome.IDLE
        if rejected := outlier(self._job.config.reject_norm, [each[1:] for each in sums]):
            number, reason = rejected
            self._reject(shards[0], plan, BadContribution(plan.counting[number], reason))
            return Outcome.WORKED
        scale = scale_of(self._job.config.optimizer.clip_norm, [each[0] for each in sums])
        return self._advance_each(shards, plan, scale)

    def _square_sums(self, plan: Plan) -> list[tuple[float, ...]] | None:
        """Return the sums of squares of each shard; None as long as another aggregator has not measured its own."""
        measured = {number: shard.measured for number, shard in self._held.shards.items()}
        sums = {number: one.square_sums for number, one in measured.items() if one and one.plan == plan}
        shards = range(self._job.layout.shards)
        if len(sums) < len(shards):
            with suppress(PlanGone):
                sums = self._job.access.scripts.norm(plan, sums)
        if any(number not in sums for number in shards):
            return None
        return [sums[number] for number in shards]
