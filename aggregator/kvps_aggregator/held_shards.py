"""The shards that one aggregator of a job holds: how they are taken, kept at the committed version, and given up."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvps.arrays.given import Given
from kvps.device.base import CPU, Device
from kvps.errors import CorruptData, KvpsError, LeaseLost, counted, some_of
from kvps.job import Job
from kvps.parsing import STAGED_NAME, matching
from kvps.protocol.answers import ServerRestarted
from kvps.protocol.job_state import State
from kvps.protocol.noted_versions import Pin
from kvps.protocol.recovery import LOOK_S
from kvps.transport.opening import find_transport
from kvps.transport.shm import ShmTransport
from kvps_aggregator.checkpoints import AS_USUAL, Checkpoints, HistoryWriter, KeptLog
from kvps_aggregator.eviction_guard import EvictionGuard
from kvps_aggregator.failover import go_back
from kvps_aggregator.leases import LeaseKeeper, Leases
from kvps_aggregator.nearness import Near, ShardChoice
from kvps_aggregator.shard.garbage import Sweeper
from kvps_aggregator.shard.shard import Shard
from kvps_aggregator.shard.spans import ShardTraces
from kvps_aggregator.shard.storage import Storage
from kvps_aggregator.shard.storage_redis import RedisStorage
from kvps_aggregator.shard.storage_shm import ShmStorage
from kvps_aggregator.step.device_step import DeviceStep
from kvps_aggregator.step.given_arrays import GivenArrays
from kvps_aggregator.step.shard_arrays import ShardArrays

log = logging.getLogger("kvps.commit")


@dataclass(frozen=True)
class AggregatorOptions:
    """What a user chooses about an aggregator, or about all aggregators of a `JobWatcher`.

    record       the directory that keeps every contribution in a file
    checkpoints  where checkpoints are written, and how often; None writes none
    device       reduces and steps; every device gives the same bits
    memory_lost  the user's word that the job's present shared memory is lost
    near         the nodes of a cluster whose shards are taken before others
    log          how much of the commit log stays in Redis, and where the rest is moved
    """

    record: Path | None = None
    checkpoints: Checkpoints | None = None
    device: Device = CPU
    memory_lost: bool = False
    near: Near | None = None
    log: KeptLog = AS_USUAL


class HeldShards:
    """The shards that one aggregator holds. Used by its loop alone.

    shards  number -> shard, of those that are held and loaded
    leases  their leases, which a thread renews
    choice  says which shards to take, and which to give up
    traces  the times of their versions
    history    writes checkpoints, and keeps the commit log short
    evictions  ends the work where the server has deleted keys
    """

    def __init__(
        self,
        job: Job,
        stop: threading.Event,
        eligible: list[int],
        options: AggregatorOptions,
        keeper: LeaseKeeper | None,
        given: Given | None = None,
    ) -> None:
        """`eligible` are the shards that it may hold. Without a `keeper` of leases it has its own. `given` is where a
        learner puts what the next version has."""
        self.shards: dict[int, Shard] = {}
        self.leases = Leases(job, keeper)
        self.choice = ShardChoice(job, self.leases.holder, eligible, options.near)
        self.traces = ShardTraces(job)
        self.history = HistoryWriter(job, options.checkpoints, options.log, self.flush)
        self.evictions = EvictionGuard(job)
        self._last_messages: dict[str, str] = {}  # by what they are about
        self._job = job
        self._stop = stop
        self._given = given
        self._options = options
        self._lost_memory = job.config.metadata.memory if options.memory_lost else ""
        self._sweeper = Sweeper(job)
        self._state: State | None = None  # at which shards were taken last

    @property
    def all_held(self) -> bool:
        """Whether it holds all the shards that it may hold."""
        return len(self.shards) == len(self.choice.eligible)

    def say(self, about: str, message: str) -> None:
        """Log the message, unless it was the last one about that. So messages about two things that last do not take
        turns for ever. A learner's script shows warnings alone, and what it waits for must be among them."""
        if message != self._last_messages.get(about):
            log.log(logging.INFO if self._given is None else logging.WARNING, "job %s: %s", self._job.name, message)
            self._last_messages[about] = message

    def await_history(self) -> None:
        """If the server was restarted, wait until a new history has begun."""
        while not self.leases.watch() and not self._stop.wait(LOOK_S):
            self.say("restart", "waits until its server, which was restarted, has written its append-only file anew")

    # -- taking and giving up ----------------------------------------------------------------------------------

    def hold(self, at_once: bool = False, finishing: bool = False) -> None:
        """Drop the shards that were lost. Take the missing ones and give up others as `ShardChoice.choose` says."""
        if self.shards and not self._job.access.transport.here:
            self._job.access.reader.round_state()  # raises JobNotFound if the job was removed; else its memory is lost
            log.warning("job %s: its shared memory is gone", self._job.name)
            for shard in list(self.shards.values()):
                self.drop(shard)
        terms = self.leases.held()
        for number in [n for n, shard in self.shards.items() if terms.get(n) != shard.term]:
            self.shards.pop(number).storage.close()
        wanted, unwanted = self.choice.choose(self.shards, at_once, finishing)
        for number in unwanted:
            log.info("job %s: gives up shard %d: an aggregator near its bytes has come", self._job.name, number)
            self._close(self.shards.pop(number))
            self.leases.give_up(number)
        if wanted:
            self.await_history()  # first: versions lost with memory are counted from what the server still has
        held_by: dict[str, list[int]] = {}
        for number in wanted:
            try:
                if holder := self._take(number):
                    held_by.setdefault(holder, []).append(number)
                else:
                    self._sweeper.hasten()
            except LeaseLost:
                self.leases.drop(number)
                self.choice.hasten()
        if held_by:
            who = ", ".join(f"{holder} holds shard {some_of(numbers)}" for holder, numbers in held_by.items())
            self.say("holders", f"stands by: {who}")

    def take_again(self, shard: Shard) -> None:
        """Take a held shard under a new term, and read its committed version again."""
        self.shards.pop(shard.number).storage.close()
        self._take(shard.number)

    def _take(self, number: int) -> str:
        """Take a shard and load its committed version. Return the aggregator that holds it instead, if there is one.
        Raises LeaseLost."""
        transport = find_transport(self._job)
        where = self._job.config.metadata
        memory_lost = where.memory == self._lost_memory
        if not transport.seen and not memory_lost:
            self.say(
                "memory",
                f"stands by: its arrays are in a shared memory of {where.host} that this process does not "
                f"see. Run an aggregator where it was created. Only if that memory is lost, because the host was "
                f"restarted or is gone: kvps aggregator start --job {self._job.name} --memory-lost",
            )
            return ""
        term, other = self.leases.take(number)
        if other:
            return other
        # Nothing is committed between the two reads: a commit would need a ready call under this term.
        keys, before_field = self._job.access.keys, f"before:{number}"
        (version, history, before), text = self._job.access.client.together(
            [("HMGET", keys.version, "version", "history", before_field), ("GET", keys.pin)]
        )
        if find_transport(self._job) is not transport:
            raise LeaseLost(f"job {self._job.name}: it moved to another shared memory while it was opened")
        shard = self._open(number, term, memory_lost)
        state = self._state_at(version, history)
        before = matching(before, f"the version: {before_field}", *STAGED_NAME)
        pin = self._pin_in(text)
        try:
            shard.load(state, before, pin and (pin.version, pin.names[number]))
        except CorruptData as damage:
            if self._job.access.reader.terms()[number] == term:
                if self._job.access.client.is_cluster:
                    go_back(self._job, number, term, damage)
                raise
            # This process slept after it took the shard, and a later holder has freed the bytes it wanted to read.
            raise LeaseLost(f"job {self._job.name}: shard {number} was taken by another meanwhile") from None
        self.shards[number] = shard
        return ""

    def _state_at(self, version: object, history: object) -> State:
        """Return the state at a committed version. It has the names of all shards, so it is not read for each of
        them."""
        if not self._state or (str(self._state.version), self._state.history) != (version, history):
            self._state = self._job.state()
        return self._state

    def _open(self, number: int, term: str, memory_lost: bool) -> Shard:
        """Return a shard held under `term`, which must be loaded next."""
        job, device, record = self._job, self._options.device, self._options.record
        if self._given is not None:
            arrays: ShardArrays = GivenArrays(job.config, job.layout, number, self._given)
        elif device is CPU:
            arrays = ShardArrays(job.config, job.layout, number)
        else:
            arrays = DeviceStep(job.config, job.layout, number, device)
        storage: Storage
        if isinstance(job.access.transport, ShmTransport):
            storage = ShmStorage(job, job.access.transport, term, arrays, record is None, memory_lost)
        else:
            storage = RedisStorage(job, number, term, arrays)
        return Shard(job, term, arrays, storage, self.traces.of(number), record)

    def drop(self, shard: Shard) -> None:
        """Forget a shard that another aggregator holds, or whose arrays are not the committed version."""
        self.leases.drop(shard.number)
        if shard is self.shards.get(shard.number):
            self.shards.pop(shard.number).storage.close()

    def release(self) -> None:
        """Give up all shards, so that a standby can take them at once."""
        self.traces.write(at_once=True)
        for shard in self.shards.values():
            self._close(shard)
        self.leases.release()

    def _close(self, shard: Shard) -> None:
        with suppress(KvpsError, ServerRestarted):  # the next holder takes the bytes from where they are
            shard.storage.flush()
        shard.storage.close()

    def finish(self) -> None:
        """Leave the bytes of a finished job as they shall stay, and give up the held shards for good."""
        for shard in self.shards.values():
            shard.storage.retire()
        self.flush()  # before the sweep: over shared memory, what Redis had before is dead then
        self.sweep()
        if 0 in self.shards:
            self.history.finish()
        for number, shard in list(self.shards.items()):
            shard.storage.finish()
            self.leases.give_up(number)
            self.choice.eligible.remove(number)

    # -- the committed version ---------------------------------------------------------------------------------

    def settle(self, version: int, pin: str) -> None:
        """Go on from the committed version: promote the shards whose staged bytes it names, drop the other ones.

        If `version` is older than the newest one seen, the server has lost its last writes.
        """
        if lost := max(0, self.leases.newest - version):
            log.warning("job %s: lost the last %s, to be computed again", self._job.name, counted(lost, "version"))
            self.await_history()  # before `newest` is set back: the commit log notes how many are lost
        self.leases.newest = version
        behind = [shard for shard in self.shards.values() if shard.version != version]
        names = self._job.access.reader.round_state().names if behind else ()
        for shard in behind:
            if shard.version < version and shard.staged and shard.staged_as == names[shard.number]:
                self.promote(shard, pin)
            else:
                name = self._job.name
                log.warning("job %s: lost shard %d: this process lacks version %d", name, shard.number, version)
                self.drop(shard)

    def promote(self, shard: Shard, text: str) -> None:
        """Go on from the staged version of a shard, which is committed. `text` is that of the readers' pin."""
        pin = self._pin_in(text)
        shard.promote(pin.version if pin else None)
        if shard.number == 0:
            self.history.committed(shard.version)
        self._free(shard, wait=True)

    def _pin_in(self, text: str | None) -> Pin | None:
        """Return the pin, or None for damaged text: a reader may write the pin, and must not stop the job."""
        try:
            return Pin.of(text, self._job.layout.shards) if text else None
        except CorruptData as error:
            self.say("pin", f"{error}: no version is kept for readers until that pin expires")
            return None

    # -- bytes -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Make sure that Redis has everything that is committed. Raises KvpsError, ServerRestarted."""
        for shard in list(self.shards.values()):
            shard.storage.flush()

    def sweep_if_due(self) -> None:
        """Sweep, if it is time for that."""
        if self._sweeper.is_due:
            self.sweep()

    def sweep(self) -> None:
        """Delete the bytes that dead processes have left in the slots of the held shards. Raises KeysEvicted if the
        server has deleted others."""
        self.evictions.check()
        self._sweeper.sweep(self.shards.values())
        for shard in list(self.shards.values()):
            if self._free(shard):
                shard.storage.keep_reserve()

    def _free(self, shard: Shard, wait: bool = False) -> bool:
        """Delete a shard's dead bytes, see `Storage.free`. Return False if another process holds the shard by now."""
        try:
            shard.free(wait)
        except LeaseLost as lost:
            log.warning("%s", lost)
            self.drop(shard)
            return False
        return True
