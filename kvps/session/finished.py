"""A worker that comes back to a job that is finished: a script that is started again begins at its first line, and so
passes through those jobs of its run that are over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from numpy.typing import NDArray

from kvps.device.base import CPU, Device
from kvps.errors import JobStopped, WrongOrder
from kvps.machine.fork import ProcessOwner
from kvps.protocol.job_state import Member, RoundState
from kvps.protocol.run_control import RunControl
from kvps.session.pull import Pulled, WeightPull
from kvps.session.session import Session
from kvps.session.worker_state import WorkerState
from kvps.transport.opening import OpenedJob


class FinishedSession(Session):
    """The session of such a worker, which has not joined: a pull returns the last weights, there is no unit, and a push
    raises JobStopped, so that the script goes on behind its `with` block."""

    def __init__(
        self,
        access: OpenedJob,
        worker: str,
        rank: int,
        member: Member | None,
        state: dict[str, Any],
        device: Device | str = CPU,
    ) -> None:
        """`member` is the worker as the job knows it, and `state` what it keeps beside the weights."""
        self.worker, self.rank = worker, rank
        self.incarnation = member.incarnation if member else ""
        self.round, self.clock = (member.round, member.clock) if member else (0, 0)
        self._access = access
        self._weights = WeightPull(access, access.transport, device, prefetch=False)
        self._state = WorkerState("", worker)
        self.state = state
        self._last = access.reader.round_state()
        self._membership: Any = SimpleNamespace(
            owner=ProcessOwner(f"the session of worker {worker!r}"),
            sequence=0,
            dropped=0,
            duplicates=0,
            version=self._last.version,
            run=RunControl(),
            ending=None,
            closed=False,
        )

    def _pull(self, part: str) -> Pulled:
        return self._weights.pull(self._last, False, self.round, self._newest, part)[1]

    def _newest(self) -> RoundState:
        return self._access.reader.round_state()

    def next_unit(self) -> None:
        """Return None: all units are committed."""

    @property
    def unit_seed(self) -> int:
        raise WrongOrder("unit_seed needs a next_unit() before it, and the job is finished")

    @property
    def undelivered(self) -> int:
        return 0

    def _check_may_push(self) -> None:
        me = self._membership
        me.owner.check()
        me.ending = JobStopped(f"job {self._access.keys.job!r} is finished: nothing more is pushed")
        raise me.ending

    def inherited_state(self) -> dict[str, NDArray[Any]]:
        """Return {}: nobody goes on from it."""
        return {}

    def leave(self, finished: bool = True, state: object = None) -> None:
        """Let the weights go."""
        if not self._membership.closed:
            self._membership.closed = True
            self._weights.close()
