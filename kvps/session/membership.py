"""A worker as a member of a job: one incarnation, from its join to its leave."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from kvps.errors import JobStopped, JobSuspended, RunEnds, WorkerEvicted, WrongOrder
from kvps.machine.fork import ProcessOwner
from kvps.protocol.answers import Joined, ServerRestarted, evicted
from kvps.protocol.job_state import Member, RoundState
from kvps.protocol.recovery import await_history
from kvps.protocol.run_control import RunControl
from kvps.session.heartbeat import Heartbeat, Signs
from kvps.session.iteration import IterationTimer
from kvps.transport.opening import OpenedJob
from kvps.transport.shared_memory import SharedMemoryLost


class Membership:
    """One incarnation of a worker. Belongs to the thread and the process that made it.

    sequence  how many contributions of this incarnation have been acknowledged
    settled   contributions up to this number wait no more: they are committed, or rejected
    version   the version of the weights that the last pull returned
    dropped   how many of these contributions came late and do not count
    duplicates   how many of those were of units that another worker had pushed before
    run       whether the job goes on, as far as the worker knows
    ending    what `ended` has returned last, which ends the worker's loop
    """

    def __init__(self, access: OpenedJob, worker: str, joined: Joined, timer: IterationTimer) -> None:
        self.worker = worker
        self.incarnation = joined.incarnation
        self.owner = ProcessOwner(f"the session of worker {worker!r}")
        self.closed = False
        self.sequence = self.settled = self.version = 0
        self.dropped = self.duplicates = 0
        self.run = RunControl()
        self.ending: RunEnds | None = None
        self._open_units: list[tuple[int, int]] = []  # sequence number and round of units that may not be committed yet
        self._access = access
        self._thread = threading.get_ident()
        signs = Signs(
            partial(access.scripts.heartbeat, worker, joined.incarnation),
            partial(access.scripts.sign_of_life, worker, joined.incarnation),
        )
        self._heartbeat = Heartbeat(access, worker, signs, timer)
        self._heartbeat.start()
        # A worker that drops its session without leaving falls silent.
        weakref.finalize(self, self.owner.run, self._heartbeat.stop)

    def check_usable(self) -> None:
        """Raise WrongOrder for a closed session, another thread or a fork; WorkerEvicted if a heartbeat raised it."""
        self.owner.check()
        if self.closed:
            raise WrongOrder(f"the session of worker {self.worker!r} is closed: join again")
        if threading.get_ident() != self._thread:
            raise WrongOrder("a session belongs to the thread that joined: let each thread join under its own id")
        if self._heartbeat.evicted:
            raise self._heartbeat.evicted

    def round_state(self) -> RoundState:
        """Return the newest round state. Raises WorkerEvicted, JobNotFound."""
        round_state = self._access.reader.round_state(self.worker)
        self.check(round_state)
        return round_state

    def check(self, round_state: RoundState) -> Member:
        """Return this worker as it is in a round state. Raises WorkerEvicted if this incarnation is no longer
        active."""
        me = round_state.me
        if me is None:
            raise self._access.client.lacking(self._evicted("unknown"))
        if me.incarnation != self.incarnation:
            raise self._evicted("replaced")
        if me.state != "active":
            raise self._evicted("evicted after a silence, or its server was restarted")
        if me.accepted < self.sequence:
            raise self.server_restarted()
        self.run = round_state.run
        self.settled = me.accepted - me.pending
        if self._open_units:  # units are committed by their rounds, and a worker may push them in another order
            self._open_units = [(seq, round_) for seq, round_ in self._open_units if round_ >= round_state.version]
            self.settled = min((seq - 1 for seq, _ in self._open_units), default=self.settled)
        return me

    def ended(self, run: RunControl) -> RunEnds:
        """Note that this worker has done its last round. Return the error to raise."""
        self.run = run
        job = self._access.keys.job
        if run.state == "stopped":
            self.ending = JobStopped(f"job {job!r} was {run.why}")
        else:
            self.ending = JobSuspended(f"job {job!r} was {run.why}; it goes on from here when it is resumed")
        return self.ending

    def pushed_unit(self, round_: int) -> None:
        """Note that the contribution that was acknowledged last is of a unit of this round."""
        self._open_units.append((self.sequence, round_))

    def server_restarted(self) -> WorkerEvicted:
        """Begin a new history, because the server remembers less than this session. Return the error to raise."""
        await_history(self._access.server, self._access.scripts, self._access.keys.job, self.version)
        why = "its server was restarted, and may have lost its last writes"
        return self._access.client.lacking(self._evicted(why))

    @contextmanager
    def memory_checked(self) -> Iterator[None]:
        """Raise WorkerEvicted if shared memory is gone although the job exists: everything after the version that Redis
        was last given will be done again."""
        try:
            yield
        except SharedMemoryLost:
            self.round_state()
            raise self._evicted("the shared memory of the job is lost") from None

    def stop_heartbeat(self) -> None:
        """Stop giving signs of life."""
        self._heartbeat.stop()

    def leave(self, finished: bool, traces: list[str], residual: str) -> None:
        """Leave the vector clock. `residual` is the name of the residual stored for the next incarnation, or "".

        Raises WorkerEvicted if it was evicted before and not replaced, JobNotFound.
        """
        try:
            self._access.scripts.leave(self.worker, self.incarnation, finished, traces, residual)
        except ServerRestarted:
            raise self.server_restarted() from None

    def _evicted(self, why: str) -> WorkerEvicted:
        return evicted(self.worker, self._access.keys.job, why)
