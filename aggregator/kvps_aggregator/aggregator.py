"""The aggregator's loop: hold shards, make versions of them, and wait for news when there is nothing to do.

The loop decides nothing: the Lua scripts do. So any number of aggregators may serve one job: one holds each shard, the
others stand by.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvps.connection.client import WAIT_MS
from kvps.device.base import CPU, Device
from kvps.errors import CorruptData, InvalidSetting, JobNotFound, KvpsError, UsageError
from kvps.job import Job
from kvps.protocol.answers import ServerRestarted
from kvps_aggregator.checkpoints import AS_USUAL, Checkpoints, KeptLog
from kvps_aggregator.failover import FailoverGuard
from kvps_aggregator.held_shards import AggregatorOptions, HeldShards
from kvps_aggregator.leases import LeaseKeeper
from kvps_aggregator.nearness import Near
from kvps_aggregator.shard.spans import WRITE_EVERY_S
from kvps_aggregator.version_maker import Outcome, VersionMaker

log = logging.getLogger("kvps.commit")

_SERVER_TICK_MS = 110  # with the default `hz` of 10, Redis notices within 100 ms that a wait is over
_NAP_MS = 5
_IDLE_CHECK_S = 1.0  # between two checks whether the job is idle: each is a request


def serve(
    job: Job,
    *,
    stop: threading.Event | None = None,
    until_finished: bool = True,
    record: str | os.PathLike[str] | None = None,
    checkpoints: Checkpoints | None = None,
    device: Device = CPU,
    memory_lost: bool = False,
    near: Near | None = None,
    log_kept: KeptLog = AS_USUAL,
) -> None:
    """Aggregate for `job` until the job is finished or removed, or `stop` is set.

    A job is finished when as many workers as it was created for have left with all their rounds done, and everything
    they pushed is committed. With ``until_finished=False`` a finished job is served on, for workers that may still
    join. Any number of processes and threads may serve one job: one holds each shard, the others stand by. With
    `record`, every contribution is kept in a file under that directory. With `checkpoints`, checkpoints are written,
    and each moves the commit log into a file. `log_kept` says how long that log may become in Redis, and where the rest
    is moved. `device` reduces and steps; every device gives the same bits.

    `memory_lost` says that the job's present shared memory is lost, because its host or container was restarted or is
    gone. If this process does not see that memory, the job continues in this process's memory, from the version that
    Redis has. `near` names the nodes of a cluster whose shards this process takes before others.

    Raises ServerLost, CorruptData; UsageError for a job that a learner publishes; KvpsError if a record cannot be
    written or the device fails; InvalidSetting for `memory_lost` of a job over Redis, and for `near` without a cluster.
    """
    if job.config.metadata.publishes:
        raise UsageError(f"job {job.name!r} needs no aggregator: the learner that publishes it makes its versions")
    if memory_lost and job.config.transport == "redis":
        raise InvalidSetting(f"the arrays of job {job.name!r} are in Redis: it has no shared memory to lose")
    if memory_lost and job.access.transport.seen:
        log.info("job %s: this process sees its shared memory, so it finds out by itself what is lost", job.name)
    if near:
        near.check(job.access.client)
    if checkpoints:
        checkpoints = checkpoints._replace(directory=Path(checkpoints.directory))
    if log_kept.directory:
        log_kept = log_kept._replace(directory=Path(log_kept.directory))
    options = AggregatorOptions(Path(record) if record else None, checkpoints, device, memory_lost, near, log_kept)
    Aggregator(job, stop or threading.Event(), options=options).run(until_finished)


class Aggregator:
    """One aggregator of one job: `run` it, or take its steps one at a time with `hold`, `work` and `sweep`.

    held  the shards that it holds
    """

    def __init__(
        self,
        job: Job,
        stop: threading.Event,
        shards: list[int] | None = None,
        options: AggregatorOptions | None = None,
        keeper: LeaseKeeper | None = None,
    ) -> None:
        """`shards` are the shards that it may hold; None means all. `keeper` renews its leases; without one it has its
        own."""
        eligible = list(range(job.layout.shards) if shards is None else shards)
        self.held = HeldShards(job, stop, eligible, options or AggregatorOptions(), keeper)
        self._job = job
        self._stop = stop
        self._maker = VersionMaker(job, self.held)
        self._guard = FailoverGuard(job)
        self._next_idle_check = 0.0
        self._idle_since = math.inf

    def hold(self, at_once: bool = False) -> None:
        """Take and give up shards, see `HeldShards.hold`."""
        self.held.hold(at_once)

    def work(self) -> Outcome:
        """Work on the open plan, see `VersionMaker.work`."""
        return self._maker.work()

    def sweep(self) -> None:
        """Delete the bytes that dead processes have left in the slots of the held shards."""
        self.held.sweep()

    def release(self) -> None:
        """Give up all shards, so that a standby can take them at once."""
        self.held.release()

    def run(self, until_finished: bool, idle_s: float = math.inf) -> None:
        """Serve the job, see `serve`. Return also when it has been idle for `idle_s`, see `JobAccess.is_idle`."""
        job = self._job
        try:
            self.held.await_history()
            self._loop(until_finished, idle_s)
        except JobNotFound:
            self.held.evictions.check()
            log.info("job %s was removed", job.name)
            job.access.transport.discard()  # the process that removed it may be on another host
        except CorruptData:
            self.held.evictions.check()
            raise
        finally:
            if job.access.client.owner.is_here:  # when a fork ends, its parent still holds the shards
                with suppress(KvpsError, ServerRestarted):
                    self.release()
                self.held.history.close()

    def _loop(self, until_finished: bool, idle_s: float) -> None:
        keys = self._job.access.keys
        seen = dict.fromkeys([keys.inbox, keys.leases, keys.norms], "0-0")
        seen[keys.commits] = self._job.state().last_entry
        may_be_finished = lease_freed = True
        while not self._stop.is_set():
            try:
                self.hold(at_once=lease_freed)
                lease_freed = False
                self._guard.check(self.held.shards.values())
                self.held.sweep_if_due()
                outcome = self.work()
                self.held.traces.write()
                if outcome is Outcome.IDLE and self._left_alone(idle_s):
                    self.sweep()  # it may be long before another aggregator holds the shards
                    return
            except ServerRestarted:
                self.held.await_history()
                self._maker.planned = None
                continue
            if outcome is Outcome.COMMITTED:
                seen[keys.commits] = self._maker.last_commit  # its own commit need not wake it
                may_be_finished = True
            if outcome is not Outcome.IDLE or self._maker.fetch_early():
                continue
            if until_finished and may_be_finished and self._is_finished():
                if self._finished():
                    return
                lease_freed = True
                continue
            arrived = self._await_entries({key: seen[key] for key in self._streams()})
            may_be_finished, lease_freed = keys.inbox not in arrived, keys.leases in arrived
            seen |= arrived

    def _left_alone(self, idle_s: float) -> bool:
        """Return whether the job has been idle for `idle_s`."""
        now = time.monotonic()
        if idle_s == math.inf or now < self._next_idle_check:
            return False
        self._next_idle_check = now + min(_IDLE_CHECK_S, idle_s / 2)
        self._idle_since = min(self._idle_since, now) if self._job.access.is_idle() else math.inf
        return now - self._idle_since >= idle_s

    # -- the end of the job ------------------------------------------------------------------------------------

    def _is_finished(self) -> bool:
        return self._maker.no_members and self._job.state().finished(self._job.config)

    def _finished(self) -> bool:
        """Finish the job. Return False if its server was restarted meanwhile: it may have lost the last commits."""
        eligible = list(self.held.choice.eligible)
        try:
            self._finish()
        except ServerRestarted:
            self.held.await_history()
            self.held.choice.eligible = eligible
            return False
        return True

    def _finish(self) -> None:
        """Sweep each shard and give it up, a killed holder's shards too, so that no dead bytes stay.

        A lease that is still held after a whole lease time has a living holder, which sweeps that shard itself.
        """
        self.held.traces.write(at_once=True)  # programs that write the job's log elsewhere wait for these
        job, last_entry = self._job, {self._job.access.keys.leases: "0-0"}
        deadline = time.monotonic() + 1.5 * job.config.lease_ms / 1000
        while not self._stop.is_set():
            self.held.hold(at_once=True, finishing=True)
            planned = job.access.scripts.plan()
            self.held.settle(planned.version, planned.pin)  # another aggregator may have committed the last version
            if not job.state().finished(job.config):  # another process began the new history
                raise ServerRestarted("the job is not finished any more")
            self.held.finish()
            if not self.held.choice.eligible or time.monotonic() > deadline:
                return
            last_entry |= job.access.client.wait(last_entry, self._patience_ms())

    # -- waiting -----------------------------------------------------------------------------------------------

    def _streams(self) -> list[str]:
        """Return the streams that wake the loop. Without a shard it waits only for leases that are given up."""
        keys = self._job.access.keys
        work = [keys.inbox, keys.commits] if self.held.shards else []
        if self.held.shards and self._job.config.measures_gradients:
            work.append(keys.norms)
        return work if self.held.all_held else [*work, keys.leases]

    def _await_entries(self, seen: Mapping[str, str]) -> dict[str, str]:
        """Wait for an entry after the given ids, or until a quorum's grace time is over. Return as `Client.wait`.

        The server notices the end of a wait up to 100 ms late. So the last of the grace time is slept, in naps.
        """
        planned = self._maker.planned
        patience, grace = self._patience_ms(), planned.grace_ms if planned else 0
        if self.held.traces.waiting:  # if nothing comes, it is written then
            patience = min(patience, int(1000 * WRITE_EVERY_S))
        if 0 < grace <= _SERVER_TICK_MS:
            time.sleep(min(grace, _NAP_MS) / 1000)
            return {}
        return self._job.access.client.wait(seen, min(patience, grace - _SERVER_TICK_MS) if grace else patience)

    def _patience_ms(self) -> int:
        if self.held.all_held:
            return WAIT_MS
        return max(10, min(WAIT_MS, self._job.config.lease_ms // 3))
