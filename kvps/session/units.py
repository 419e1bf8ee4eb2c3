"""Takes units of data for one worker, and knows on which weights each may be computed."""

from __future__ import annotations

import time

from kvps.arrays.layout import Array
from kvps.connection.client import WAIT_MS
from kvps.errors import JobSuspended, WrongOrder
from kvps.partitions import unit_seed
from kvps.protocol.answers import NextUnit, ServerRestarted
from kvps.protocol.job_state import RoundState
from kvps.session.membership import Membership
from kvps.session.pull import Pulled
from kvps.session.round import Round
from kvps.transport.opening import OpenedJob


class Units:
    """The units that one session takes, one after another.

    Where versions are made of rounds of units, the server says after each push whether another unit is free. If none
    is, the worker waits before it asks: for the next version, for a unit that comes back, or until one is so late that
    it may be handed out a second time. In BSP all units of a round are computed on the weights of one pull.
    """

    def __init__(self, access: OpenedJob, membership: Membership) -> None:
        self._access = access
        self._rounds = access.config.unit_rounds
        self._membership = membership
        self._state: RoundState | None = None  # that of the last pull
        self._weights: Pulled | None = None  # those of the last pull
        self._taken_at = time.perf_counter()
        self._late_ms = WAIT_MS  # after so long it asks whether a unit is late

    def next(self, round_: Round, flat: Array | None) -> int | None:
        """Return the next unit; None if there is none. `flat` receives the weights of a small model that come along.

        Raises WorkerEvicted, JobNotFound, JobSuspended, and WrongOrder if the job hands out no units.
        """
        me = self._membership
        if not self._access.config.units:
            raise WrongOrder(f"job {self._access.keys.job!r} hands out no units: create it with units=N")
        try:
            if self._rounds:
                answer = self._await(round_, flat)
            else:
                answer = self._access.scripts.next_unit(me.worker, me.incarnation)
        except ServerRestarted:
            raise me.server_restarted() from None
        if answer.ends:
            ending = me.ended(answer.ends)
            if isinstance(ending, JobSuspended):
                raise ending
        return answer.unit

    def _await(self, round_: Round, flat: Array | None) -> NextUnit:
        """Return the next unit as soon as there is one, or that all are done."""
        me, reader, state = self._membership, self._access.reader, self._state
        if round_.waits:
            answer, timeout_ms = NextUnit(None), self._late_ms
        else:
            answer = self._access.scripts.next_unit(me.worker, me.incarnation)
            timeout_ms = answer.backup_ms or WAIT_MS
        while answer.unit is None and not answer.done and not answer.ends:
            before, patience_ms = state or me.round_state(), min(WAIT_MS, timeout_ms)
            state, came, answer = reader.next_unit(me.worker, me.incarnation, before, flat, patience_ms)
            me.check(state)
            round_.state, round_.waits = (state, came), False
            timeout_ms = answer.backup_ms or WAIT_MS
        self._taken_at = time.perf_counter()
        return answer

    def pulled(self, state: RoundState, weights: Pulled | None) -> None:
        """Note a pull of the whole weights; None if it was of a part of them."""
        self._state, self._weights = state, weights

    def weights(self, unit: int | None) -> tuple[RoundState, Pulled] | None:
        """Return the round state and weights of the last pull, if a unit must be computed on just these."""
        if self._rounds is None or unit is None or self._access.config.staleness or self._weights is None:
            return None
        assert self._state
        return (self._state, self._weights) if self._rounds.round_of(unit) == self._membership.version else None

    def oldest_base(self, unit: int | None) -> int:
        """Return the oldest version that a unit may be computed on."""
        if self._rounds is None or unit is None:
            return 0
        return self._rounds.round_of(unit) - self._access.config.staleness

    def pushed(self, unit: int | None) -> None:
        """Note that a unit was acknowledged: it has taken as long as units of this round do."""
        if self._rounds is None or unit is None:
            return
        self._membership.pushed_unit(self._rounds.round_of(unit))
        factor = self._access.config.backup_after
        took_ms = 1000 * (time.perf_counter() - self._taken_at)
        self._late_ms = max(1, round(min(WAIT_MS, factor * took_ms))) if factor else WAIT_MS

    def seed(self, unit: int | None) -> int:
        """Return the seed of a unit. Raises WrongOrder without one."""
        if unit is None:
            raise WrongOrder("unit_seed needs a next_unit() before it")
        return unit_seed(self._access.config.seed, unit)
