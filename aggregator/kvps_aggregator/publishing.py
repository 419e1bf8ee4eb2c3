"""The hold of a learner on a job whose versions it makes: it holds the shards as an aggregator does, and stages and
commits the weights that the learner hands over.

One learner holds a job, by the terms of its shards. A learner that another one has replaced commits nothing more, and
does not come back: its model knows nothing of the other's versions.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvps.actors.taking import LearnerRollouts
from kvps.arrays.given import Given
from kvps.errors import JobStopped, JobSuspended, KvpsError, LeaseLost, UsageError
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.protocol.answers import PlanGone, RunOver, ServerRestarted
from kvps.protocol.job_state import Commit, State
from kvps.protocol.keys import staged_name
from kvps.protocol.run_control import LEARNER_HAS_FINISHED
from kvps.protocol.scripts import Said
from kvps_aggregator.checkpoints import Checkpoints, KeptLog
from kvps_aggregator.held_shards import AggregatorOptions, HeldShards
from kvps_aggregator.version_maker import Outcome, VersionMaker

log = logging.getLogger("kvps.publish")

_REST_S = 0.05  # between two tries to stage a version on a server that is full
_LOOK_MS = 1_000  # of a learner that waits for another one, or for the end of a pause, between two looks
_NO_WORD = re.compile(r"[^A-Za-z0-9.:_-]")
_RECENT = 100  # entries of the log, among which commits are looked for


class Publishing:
    """The hold of one learner on a job, see `kvps.actors.publisher.Holder`. One thread at a time uses it. `claims` is
    told of each new term of shard 0."""

    claims: LearnerRollouts | None = None

    def __init__(self, job: Job, given: Given, checkpoints: Path | None = None, every: int = 1) -> None:
        """`given` is where the learner puts what the next version has. A checkpoint is
        written `every` so many versions into the directory `checkpoints`."""
        saved = Checkpoints(checkpoints, every) if checkpoints else None
        options = AggregatorOptions(checkpoints=saved, log=KeptLog(directory=checkpoints))
        self._job = job
        self._shards = range(job.layout.shards)
        self._held = HeldShards(job, threading.Event(), list(self._shards), options, None, given)
        self._maker = VersionMaker(job, self._held)
        self._by = _NO_WORD.sub("-", self._held.leases.holder)  # as plans name it
        self._began = 0  # the version with which it began
        self._term = ""  # under which it held shard 0 last
        self._terms = set[str]()  # of shard 0, that were its own
        self._deposed = ""
        self._unsure = False  # whether a call has failed, and a shard may hold what was given then and is not any more

    def take(self, wait_s: float | None, takeover: bool) -> int:
        """Take all shards, and return the newest version. If another learner holds them, wait up to `wait_s`, for None
        as long as it takes; with `takeover` take its place. Raises UsageError."""
        deadline = math.inf if wait_s is None else time.monotonic() + wait_s
        self._held.await_history()
        while not self._takes(deadline, takeover):
            self._held.await_history()
        state = self._job.state()
        if state.run.ends:
            self._job.resume("its learner goes on")
        self._began = self._held.leases.newest = state.version
        self._note_term()
        self.hold()  # actors may put items from now on
        return state.version

    def _takes(self, deadline: float, takeover: bool) -> bool:
        """Do `take`, and return True; False if the server was restarted meanwhile."""
        client, leases = self._job.access.client, self._job.access.keys.leases
        seen = {leases: "0-0"}
        with suppress(ServerRestarted):
            while not self._holds([0]):  # whoever holds this one holds the job
                holder = self._job.access.reader.holders()[0] or "another learner"
                if takeover:
                    self._seize([0])
                elif time.monotonic() < deadline:
                    seen |= client.wait(seen, min(_LOOK_MS, self._job.config.lease_ms))
                else:
                    raise UsageError(
                        f"job {self._job.name!r} is published by {holder}: end that learner first, or take its place "
                        f"with takeover=True"
                    )
            while not self._holds(list(self._shards)):
                self._seize([number for number in self._shards if number not in self._held.shards])
            return True
        return False

    def _holds(self, shards: list[int]) -> bool:
        """Take these shards; return whether all of them are held."""
        self._held.choice.eligible = shards
        self._held.hold(at_once=True)
        return self._held.all_held

    def _seize(self, shards: Iterable[int]) -> None:
        """End the leases of the learner that holds these shards: their next terms depose it."""
        keys = self._job.access.keys
        if leases := [keys.lease(number) for number in shards]:
            self._job.access.client.unlink(leases)

    def _hold(self) -> State:
        """Hold all shards at the committed version, and return its state. Raises LeaseLost if another learner has
        taken shard 0, which only a restart of the server takes from one that lives."""
        if self._deposed:
            raise LeaseLost(self._deposed)
        if self._unsure:
            for shard in list(self._held.shards.values()):
                self._held.take_again(shard)
            self._unsure = False
        planned = self._job.access.scripts.plan()
        self._held.settle(planned.version, planned.pin)
        replaced = self._was_replaced() or not self._is_ours(self._job.state())
        while not replaced and not self._holds(list(self._shards)):
            # A restart may have ended a term between its beginning and the first read.
            replaced = self._was_replaced() or self._job.access.reader.holders()[0] not in (
                "",
                self._held.leases.holder,
            )
            if not replaced:
                self._seize(number for number in self._shards[1:] if number not in self._held.shards)
                time.sleep(_REST_S)
        if replaced:
            self._deposed = f"another learner publishes job {self._job.name!r}: this one commits nothing more"
            self._held.release()
            raise LeaseLost(self._deposed)
        self._note_term()
        if self.claims and self._job.config.metadata.rollouts:
            self.claims.claim(self._term)
        return self._job.state()

    def hold(self) -> None:
        """Make sure that this learner holds the job. Raises LeaseLost if another one has taken over."""
        while True:
            try:
                self._hold()
                return
            except ServerRestarted:
                self._held.await_history()
            except LeaseLost:
                if self._deposed:
                    raise
                self._held.drop(self._held.shards[0])

    def _was_replaced(self) -> bool:
        """Return whether another learner has taken shard 0. A restart of the server ends terms too, in a new history,
        with which each term begins."""
        self._note_term()
        term = self._job.access.reader.terms()[0]
        return term not in self._terms and _history(term) == _history(self._term)

    def _note_term(self) -> None:
        if 0 in self._held.shards:
            self._term = self._held.shards[0].term
            self._terms.add(self._term)

    def _is_ours(self, state: State) -> bool:
        """Return whether the newest version is this learner's, or the one with which it began, or an earlier one,
        because the server has lost its last writes."""
        if state.version <= self._began:
            return True
        newest = self._newest()
        return not newest or newest[0].plan.by == self._by

    def commit(self, said: Said) -> int:
        """Commit what is given as the next version, once, and return that version."""
        try:
            return self._commit(said)
        except BaseException:
            self._unsure = True
            raise

    def _commit(self, said: Said) -> int:
        tried = set[tuple[str, ...]]()  # names under which it was staged: it gets others after a restart
        while True:
            try:
                state = self._hold()
                there = state.names in tried
                if there or self._make(state, said, tried):
                    committed = state.version + (not there)  # another learner may have taken shard 0 since
                    if not self._held.history.writing:
                        self._free_items()
                        self._held.sweep_if_due()
                    self._held.traces.write()
                    self._held.leases.newest = committed  # of which a restart may lose some
                    return committed
            except ServerRestarted:
                self._held.await_history()
            except LeaseLost:
                if self._deposed:
                    if (version := self._made(tried)) is not None:
                        return version  # before the other learner came; the next call says that it has
                    raise
                self._held.drop(self._held.shards[0])  # the next look says who holds it
            except PlanGone:
                log.info("job %s: it has changed meanwhile, and is looked at again", self._job.name)
            except RunOver as over:
                if over.run.ends:
                    ended = JobStopped if over.run.state == "stopped" else JobSuspended
                    raise ended(f"job {self._job.name!r} was {over.run.why}") from None
                self._held.say("pause", f"waits: it is {over.run.why}")
                self._job.access.client.wait({self._job.access.keys.turns: "$"}, _LOOK_MS)

    def _free_items(self) -> None:
        """Delete the bytes of items that have had their fate."""
        for shard, keys in self.claims.dead_keys() if self.claims else ():
            if shard in self._held.shards:
                self._held.shards[shard].storage.discard(keys)

    def _make(self, state: State, said: Said, tried: set[tuple[str, ...]]) -> bool:
        """Stage the version behind `state`, note its names, and return whether it was committed. If not, the next state
        says what came of it: an answer may be lost, and the one to the last shard is no commit if another learner has
        come between."""
        plan = self._job.access.scripts.publish(self._held.shards[0].term, state, self._by, said)
        if plan is None:
            return False
        tried.add(tuple(staged_name(plan.version, self._held.shards[number].term) for number in self._shards))
        try:
            if self._maker.make(plan) is Outcome.COMMITTED:
                return True
        finally:
            self._note_term()  # a shard may have been taken anew
        time.sleep(_REST_S)  # as while a full server has no room, of which nobody tells
        return False

    def _made(self, tried: set[tuple[str, ...]]) -> int | None:
        """Return the version that the log has under names that were tried; None if there is none."""
        for commit in self._newest():
            if tuple(staged_name(commit.version, shard.partition(" ")[0]) for shard in commit.shards) in tried:
                return commit.version
        return None

    def _newest(self) -> list[Commit]:
        """Return the newest commits of the log, the last one first."""
        return LogStream(self._job.access).newest_commits(_RECENT)

    def finish(self) -> None:
        """Finish the job, and leave its bytes as they shall stay. Raises LeaseLost if another learner has taken over:
        the job goes on then."""
        while True:
            with suppress(ServerRestarted):
                self._hold()
                self._job.stop(LEARNER_HAS_FINISHED)
                self._held.finish()
                return
            self._held.await_history()

    def release(self) -> None:
        """Give the shards up, so that another learner may take them at once."""
        with suppress(KvpsError, ServerRestarted):
            self._held.release()
        self._held.history.close()


def _history(term: str) -> str:
    """Return the history in which a term was given."""
    return term.partition("-")[0]
