"""The aggregator's loop: hold shards, ask for the plan, reduce, step, stage, call ready; the last ready call commits.

The loop decides nothing: `plan.lua` says what makes the next version, and `ready.lua` when that version is whole. So
any number of aggregators may serve one job: one holds each shard, the others stand by.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import numpy as np

from kvps.connection.client import WAIT_MS
from kvps.device.base import CPU, Device
from kvps.errors import CorruptData, InvalidSetting, JobNotFound, KvpsError, LeaseLost, ServerFull
from kvps.job import Job
from kvps.parsing import STAGED_NAME, matching
from kvps.protocol.job_state import Pin
from kvps.protocol.plan import Plan
from kvps.protocol.recovery import LOOK_S
from kvps.protocol.scripts import PlanGone, Planned, ServerRestarted
from kvps_aggregator.checkpoints import Checkpoints, Saver
from kvps_aggregator.failover import FailoverGuard, go_back
from kvps_aggregator.leases import LeaseKeeper, Leases
from kvps_aggregator.nearness import Near, ShardChoice
from kvps_aggregator.shard.fetch import BadContribution
from kvps_aggregator.shard.garbage import Sweeper
from kvps_aggregator.shard.opening import open_shard
from kvps_aggregator.shard.shard import Shard
from kvps_aggregator.shard.spans import WRITE_EVERY_S, ShardTraces
from kvps_aggregator.step.clipping import outlier, scale_of

log = logging.getLogger("kvps.commit")

_MOST_REFUSALS = 20  # another aggregator's commit explains the first
_SERVER_TICK_MS = 110  # with the default `hz` of 10, Redis notices within 100 ms that a wait is over
_NAP_MS = 5
_LOOK_S = 1.0  # between two checks whether the job is idle: each is a request


def serve(
    job: Job,
    *,
    stop: threading.Event | None = None,
    until_finished: bool = True,
    record: Path | None = None,
    checkpoints: Checkpoints | None = None,
    device: Device = CPU,
    memory_lost: bool = False,
    near: Near | None = None,
) -> None:
    """Aggregate for `job` until the job is finished or removed, or `stop` is set.

    A job is finished when as many workers as it was created for have left with all their rounds done, and everything
    they pushed is committed. With ``until_finished=False`` a finished job is served on, for workers that may still
    join. Any number of processes and threads may serve one job: one holds each shard, the others stand by. With
    `record`, every contribution is kept in a file under that directory. With `checkpoints`, checkpoints are written,
    and each moves the commit log into a file. `device` reduces and steps; every device gives the same bits.

    `memory_lost` says that the job's present shared memory is lost, because its host or container was restarted or is
    gone. If this process does not see that memory, the job continues in this process's memory, from the version that
    Redis has. `near` names the nodes of a cluster whose shards this process takes before others.

    Raises ServerLost, CorruptData; KvpsError if a record cannot be written or the device fails; InvalidSetting for
    `memory_lost` of a job over Redis, and for `near` without a cluster.
    """
    if memory_lost and job.config.transport == "redis":
        raise InvalidSetting(f"the arrays of job {job.name!r} are in Redis: it has no shared memory to lose")
    if memory_lost and job.access.transport.seen:
        log.info("job %s: this process sees its shared memory, so it finds out by itself what is lost", job.name)
    if near:
        near.check(job.access.client)
    aggregator = Aggregator(job, stop or threading.Event(), None, record, checkpoints, device, memory_lost, near=near)
    aggregator.run(until_finished)


def is_idle(job: Job) -> bool:
    """Return whether a job needs no aggregator: it has no worker, an empty inbox and no open plan.

    A worker that a restored job awaits does not count: it has given no sign of life yet.
    """
    keys = job.access.keys
    present, looked, waiting, planned = job.access.client.together(
        [("ZCARD", keys.heartbeat), ("ZSCORE", keys.heartbeat, ""), ("XLEN", keys.inbox), ("EXISTS", keys.plan)]
    )
    return present == (looked is not None) and not waiting and not planned


class Aggregator:
    """One aggregator of one job. `shards` are the shards that it may hold; None means all.

    `keeper` renews its leases; without one the aggregator makes its own. `near` says which shards it takes first.
    """

    def __init__(
        self,
        job: Job,
        stop: threading.Event,
        shards: list[int] | None = None,
        record: Path | None = None,
        checkpoints: Checkpoints | None = None,
        device: Device = CPU,
        memory_lost: bool = False,
        keeper: LeaseKeeper | None = None,
        near: Near | None = None,
    ) -> None:
        self._job = job
        self._lost_memory = job.config.memory if memory_lost else ""
        self._device = device
        self._saver = Saver(job, checkpoints, self._flush) if checkpoints else None
        self._record = record
        self._stop = stop
        self._leases = Leases(job, keeper)
        eligible = list(range(job.layout.shards) if shards is None else shards)
        self._choice = ShardChoice(job, self._leases.holder, eligible, near)
        self._shards: dict[int, Shard] = {}
        self._sweeper = Sweeper(job)
        self._next_look = 0.0
        self._alone_since = math.inf
        self._planned: Planned | None = None
        self._refused = (0, 0)  # the id of a plan, and how often `ready.lua` did not accept it
        self._traces = ShardTraces(job)
        self._said = ""

    def run(self, until_finished: bool, idle_s: float = math.inf) -> None:
        """Serve the job, see `serve`. Return also when it has been idle for `idle_s`, see `is_idle`."""
        job, stream, guard = self._job, self._job.access.keys, FailoverGuard(self._job)
        try:
            self._watch_server()
            seen = dict.fromkeys([stream.inbox, stream.leases, stream.norms], "0-0")
            seen[stream.commits] = job.state().last_entry
            changed = freed = True
            while not self._stop.is_set():
                try:
                    self.hold(at_once=freed)
                    freed = False
                    guard.look(self._shards.values())
                    if self._sweeper.is_due:
                        self.sweep()
                    commit_id = self.work()
                    self._traces.write()
                    if commit_id is None and self._left_alone(idle_s):
                        self.sweep()  # it may be long before another aggregator holds the shards
                        return
                except ServerRestarted:
                    self._watch_server()
                    self._planned, commit_id = None, ""
                if commit_id:
                    seen[stream.commits] = commit_id  # its own commit need not wake it
                    changed = True
                elif commit_id is None:
                    if self._planned and self._planned.plan is None and self._fetch_early():
                        continue
                    if until_finished and changed and self._nobody_is_left() and job.state().finished(job.config):
                        if self._finished():
                            return
                        freed = True
                        continue
                    arrived = self._await_entries({key: seen[key] for key in self._streams()})
                    changed, freed = stream.inbox not in arrived, stream.leases in arrived
                    seen |= arrived
        except JobNotFound:
            log.info("job %s was removed", job.name)
            job.access.transport.discard()  # the process that removed it may be on another host
        finally:
            if job.access.client.owner.is_here:  # when a fork ends, its parent still holds the shards
                with suppress(KvpsError, ServerRestarted):
                    self.release()
                if self._saver:
                    self._saver.close()

    def _watch_server(self) -> None:
        """If the server was restarted, wait until a new history has begun."""
        while not self._leases.watch() and not self._stop.wait(LOOK_S):
            self._say("waits until its server, which was restarted, has written its append-only file anew")

    def release(self) -> None:
        """Give up all shards, so that a standby can take them at once."""
        self._traces.write(at_once=True)
        for shard in self._shards.values():
            self._close(shard)
        self._leases.release()

    def _close(self, shard: Shard) -> None:
        with suppress(KvpsError, ServerRestarted):  # the next holder takes the bytes from where they are
            shard.storage.flush()
        shard.storage.close()

    def _left_alone(self, idle_s: float) -> bool:
        """Return whether the job has been idle for `idle_s`."""
        now = time.monotonic()
        if idle_s == math.inf or now < self._next_look:
            return False
        self._next_look = now + min(_LOOK_S, idle_s / 2)
        self._alone_since = min(self._alone_since, now) if is_idle(self._job) else math.inf
        return now - self._alone_since >= idle_s

    def _flush(self) -> None:
        for shard in list(self._shards.values()):
            shard.storage.flush()

    def _finished(self) -> bool:
        """Finish the job. Return False if its server was restarted meanwhile: it may have lost the last commits."""
        eligible = list(self._choice.eligible)
        try:
            self._finish()
        except ServerRestarted:
            self._watch_server()
            self._choice.eligible = eligible
            return False
        return True

    def _finish(self) -> None:
        """Sweep each shard and give it up, a killed holder's shards too, so that no dead bytes stay.

        A lease that is still held after a whole lease time has a living holder, which sweeps that shard itself.
        """
        self._traces.write(at_once=True)  # who writes a log of the job waits for these
        job, last_entry = self._job, {self._job.access.keys.leases: "0-0"}
        deadline = time.monotonic() + 1.5 * job.config.lease_ms / 1000
        while not self._stop.is_set():
            self.hold(at_once=True, finishing=True)
            planned = job.access.scripts.plan()
            self._settle(planned.version, planned.pin)  # another aggregator's call may have committed the last version
            if not job.state().finished(job.config):  # another process began the new history
                raise ServerRestarted("the job is not finished any more")
            for shard in self._shards.values():
                shard.storage.retire()
            self._flush()  # before the sweep: over shared memory, what Redis had before is dead then
            self.sweep()
            if self._saver and 0 in self._shards:
                self._saver.finish()
            for number, shard in list(self._shards.items()):
                shard.storage.finish()
                self._leases.give_up(number)
                self._choice.eligible.remove(number)
            if not self._choice.eligible or time.monotonic() > deadline:
                return
            last_entry |= job.access.client.wait(last_entry, self._patience_ms())

    # -- shards ------------------------------------------------------------------------------------------------

    def hold(self, at_once: bool = False, finishing: bool = False) -> None:
        """Drop the shards that were lost. Take the missing ones and give up others as `ShardChoice.look` says."""
        if self._shards and not self._job.access.transport.here:
            self._job.round_state()  # raises JobNotFound if the job was removed; else its memory is lost
            log.warning("job %s: its shared memory is gone", self._job.name)
            for shard in list(self._shards.values()):
                self._drop(shard)
        held = self._leases.held()
        for number in [n for n, shard in self._shards.items() if held.get(n) != shard.term]:
            self._shards.pop(number).storage.close()
        wanted, unwanted = self._choice.look(self._shards, at_once, finishing)
        for number in unwanted:
            log.info("job %s: gives up shard %d: an aggregator near its bytes has come", self._job.name, number)
            self._close(self._shards.pop(number))
            self._leases.give_up(number)
        if wanted:
            self._watch_server()  # first: versions lost with memory are counted from what the server still has
        for number in wanted:
            try:
                self._take(number)
                self._sweeper.hasten()
            except LeaseLost:
                self._leases.drop(number)
                self._choice.hasten()

    def sweep(self) -> None:
        """Delete the bytes that dead processes have left in the slots of the held shards."""
        self._sweeper.sweep(self._shards.values())
        for shard in list(self._shards.values()):
            if self._free(shard):
                shard.storage.keep_reserve()

    def _take(self, number: int) -> None:
        transport = self._job.find_transport()
        memory_lost = self._job.config.memory == self._lost_memory
        if not transport.seen and not memory_lost:
            self._say(
                f"stands by: its arrays are in a shared memory of {self._job.config.host} that this process does not "
                f"see. Run an aggregator where it was created. Only if that memory is lost, because the host was "
                f"restarted or is gone: kvps aggregator start --job {self._job.name} --memory-lost"
            )
            return
        term, other = self._leases.take(number)
        if other:
            self._say(f"stands by: shard {number} is held by {other}")
            return
        # Nothing is committed between the two reads: a commit would need a ready call under this term.
        keys = self._job.access.keys
        before, text = self._job.access.client.together([("HGET", keys.version, f"before:{number}"), ("GET", keys.pin)])
        if self._job.find_transport() is not transport:
            raise LeaseLost(f"job {self._job.name}: it moved to another shared memory while it was opened")
        shard = open_shard(self._job, number, term, self._record, self._device, memory_lost)
        shard.spans = self._traces.of(number)
        state = self._job.state()
        before = matching(before, f"the version: before:{number}", *STAGED_NAME)
        pin = self._pinned(text)
        try:
            shard.load(state, before, pin and (pin.version, pin.names[number]))
        except CorruptData as damage:
            if self._job.terms()[number] == term:
                if self._job.access.client.is_cluster:
                    go_back(self._job, number, term, damage)
                raise
            # This process slept after it took the shard, and a later holder has freed the bytes it wanted to read.
            raise LeaseLost(f"job {self._job.name}: shard {number} was taken by another meanwhile") from None
        self._shards[number] = shard

    def _streams(self) -> list[str]:
        """Return the streams that wake the loop. Without a shard it waits only for leases that are given up."""
        keys = self._job.access.keys
        work = [keys.inbox, keys.commits] if self._shards else []
        if self._shards and self._job.config.measures_gradients:
            work.append(keys.norms)
        return work + ([keys.leases] if len(self._shards) < len(self._choice.eligible) else [])

    def _await_entries(self, seen: Mapping[str, str]) -> dict[str, str]:
        """Wait for an entry after the given ids, or until a quorum's grace time is over. Return as `Client.wait`.

        The server notices the end of a wait up to 100 ms late. So the last of the grace time is slept, in naps.
        """
        patience, grace = self._patience_ms(), self._planned.grace_ms if self._planned else 0
        if self._traces.waiting:  # if nothing comes, it is written then
            patience = min(patience, int(1000 * WRITE_EVERY_S))
        if 0 < grace <= _SERVER_TICK_MS:
            time.sleep(min(grace, _NAP_MS) / 1000)
            return {}
        return self._job.access.client.wait(seen, min(patience, grace - _SERVER_TICK_MS) if grace else patience)

    def _patience_ms(self) -> int:
        if len(self._shards) < len(self._choice.eligible):
            return max(10, min(WAIT_MS, self._job.config.lease_ms // 3))
        return WAIT_MS

    # -- versions ----------------------------------------------------------------------------------------------

    def work(self) -> str | None:
        """Work on the open plan. Return the id of a commit made, "" for less than that, None if there was no work."""
        planned = self._plan()
        self._settle(planned.version, planned.pin)
        if planned.waits_for_workers and self._shards:
            self._say(f"waits until {self._job.config.workers} workers have joined")
        plan = planned.plan
        todo = [s for s in self._shards.values() if plan and s.staged != plan]
        if plan is None or not todo:
            return None
        if not self._job.config.measures_gradients or not plan.contributions:
            return self._each(todo, plan, self._advance)
        self._each([shard for shard in todo if not _has_measured(shard, plan)], plan, self._measure)
        if not all(_has_measured(shard, plan) for shard in todo):
            return ""
        sums = self._square_sums(plan)
        if sums is None:
            return None
        if found := outlier(self._job.config.reject_norm, [each[1:] for each in sums]):
            number, reason = found
            self._reject(todo[0], plan, BadContribution(plan.counting[number], reason))
            return ""
        scale = scale_of(self._job.config.optimizer.clip_norm, [each[0] for each in sums])
        return self._each(todo, plan, partial(self._advance, scale=scale))

    def _measure(self, shard: Shard, plan: Plan) -> str:
        shard.measure(plan)
        return ""

    def _square_sums(self, plan: Plan) -> list[tuple[float, ...]] | None:
        """Return the sums of squares of each shard; None as long as another aggregator has not measured its own."""
        measured = {number: shard.measured for number, shard in self._shards.items()}
        sums = {number: found.square_sums for number, found in measured.items() if found and found.plan == plan}
        shards = range(self._job.layout.shards)
        if len(sums) < len(shards):
            with suppress(PlanGone):
                sums = self._job.access.scripts.norm(plan, sums)
        if any(number not in sums for number in shards):
            return None
        return [sums[number] for number in shards]

    def _each(self, todo: list[Shard], plan: Plan, work: Callable[[Shard, Plan], str]) -> str:
        """Do `work` on each shard, until the plan changes. Return the id of the commit that it made, or ""."""
        done = ""
        for shard in todo:
            try:
                done = work(shard, plan) or done
            except LeaseLost as lost:
                log.warning("%s", lost)
                self._drop(shard)
            except PlanGone:
                self._count_refusal(plan)
                return ""
            except ServerFull as full:  # the plan stays open, and is staged again until there is room
                self._say(f"{full}; goes on when there is room")
                return ""
            except BadContribution as bad:
                self._reject(shard, plan, bad)
                return ""
        return done

    def _count_refusal(self, plan: Plan) -> None:
        """Raise CorruptData for a plan that stays open and is refused each time: it does not fit the job's version."""
        self._refused = (plan.id, self._refused[1] + 1 if self._refused[0] == plan.id else 1)
        if self._refused[1] > _MOST_REFUSALS:
            raise CorruptData(
                f"job {self._job.name!r}: plan {plan.id} does not fit the job's version: another program wrote to "
                f"{self._job.access.keys.plan}"
            )

    def _plan(self) -> Planned:
        """Return the answer of `plan.lua`. A plan that is known already is not read again."""
        self._planned = self._job.access.scripts.plan(self._planned.plan if self._planned else None)
        return self._planned

    def _nobody_is_left(self) -> bool:
        """Return whether all workers are gone: only then may it be finished, and all members are worth a read."""
        return self._planned is not None and self._planned.members == 0

    def _advance(self, shard: Shard, plan: Plan, scale: np.float32 | None = None) -> str:
        """Stage a shard's part of the plan and call ready. Return the id of the commit if that made one, else ""."""
        if shard.begun not in (None, plan):
            # This term has staged this version, or a part of it, for a plan that was replaced. A late write of those
            # bytes must not land among the new ones, so a new term stages the version. It first reads the committed
            # version again, because another aggregator may have held the shard in between.
            self._shards.pop(shard.number).storage.close()
            self._take(shard.number)
            return ""
        digest = shard.make(plan, scale)
        flip = shard.commit(plan, digest)
        if flip.flipped:
            for held in [s for s in self._shards.values() if s.staged == plan]:
                self._promote(held, flip.pin)
        return flip.commit_id

    def _fetch_early(self) -> bool:
        """Fetch one contribution before its plan is made. Return False if there is none to fetch."""
        inbox = cache(self._job.inbox)
        return any(shard.storage.fetch_one_early(inbox) for shard in self._shards.values())

    def _settle(self, version: int, pin: str) -> None:
        """Go on from the committed version: promote the shards whose staged bytes it names, drop those without it.

        If `version` is older than the newest one seen, the server has lost its last writes.
        """
        if lost := max(0, self._leases.newest - version):
            log.warning("job %s: the last %d versions are lost and will be computed again", self._job.name, lost)
            self._watch_server()  # before `newest` is set back: the commit log notes how many are lost
        self._leases.newest = version
        astray = [shard for shard in self._shards.values() if shard.version != version]
        names = self._job.round_state().names if astray else ()
        for shard in astray:
            if shard.version < version and shard.staged and shard.staged_as == names[shard.number]:
                self._promote(shard, pin)
            else:
                name = self._job.name
                log.warning("job %s: lost shard %d: this process lacks version %d", name, shard.number, version)
                self._drop(shard)

    def _promote(self, shard: Shard, pin: str) -> None:
        pinned = self._pinned(pin)
        shard.promote(pinned.version if pinned else None)
        if self._saver and shard.number == 0:
            self._saver.committed(shard.version)
        self._free(shard, wait=True)

    def _pinned(self, text: str | None) -> Pin | None:
        """Return the pin, or None for text that is none: a reader may write the pin, and must not stop the job."""
        try:
            return Pin.of(text, self._job.layout.shards) if text else None
        except CorruptData as error:
            self._say(f"{error}: no version is kept for readers until that pin expires")
            return None

    def _free(self, shard: Shard, wait: bool = False) -> bool:
        """Delete a shard's dead bytes, see `Storage.free`. Return False if another process holds the shard by now."""
        try:
            shard.free(wait)
        except LeaseLost as lost:
            log.warning("%s", lost)
            self._drop(shard)
            return False
        return True

    def _drop(self, shard: Shard) -> None:
        """Forget a shard that another aggregator holds, or whose arrays are not the committed version."""
        self._leases.drop(shard.number)
        if shard is self._shards.get(shard.number):
            self._shards.pop(shard.number).storage.close()

    def _reject(self, shard: Shard, plan: Plan, bad: BadContribution) -> None:
        c = bad.contribution
        log.warning("job %s: rejects %s of %s: %s", self._job.name, c.seq, c.worker, bad.reason)
        try:
            self._job.access.scripts.reject(shard.number, shard.term, plan, c, bad.reason)
        except LeaseLost:
            self._drop(shard)
        except PlanGone:
            return

    def _say(self, message: str) -> None:
        if message != self._said:
            log.info("job %s: %s", self._job.name, message)
            self._said = message


def _has_measured(shard: Shard, plan: Plan) -> bool:
    return shard.measured is not None and shard.measured.plan == plan
