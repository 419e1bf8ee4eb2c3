"""Takes units of data for one worker, in a job whose versions are made of rounds of units."""

from __future__ import annotations

import time

from kvps.arrays.layout import Array
from kvps.connection.client import WAIT_MS
from kvps.protocol.answers import NextUnit
from kvps.protocol.job_state import RoundState
from kvps.session.membership import Membership
from kvps.session.round import Round
from kvps.transport.opening import OpenedJob


class Units:
    """The units that one session takes, one after another.

    After a push the server has said whether another unit is free. If none is, the worker waits before it asks: for the
    next version, for a unit that comes back, or until one is so late that it may be handed out a second time.
    """

    def __init__(self, access: OpenedJob, membership: Membership) -> None:
        self._access = access
        self._membership = membership
        self._taken_at = time.perf_counter()
        self._late_ms = WAIT_MS  # after so long it asks whether a unit is late

    def take(self, round_: Round, state: RoundState | None, flat: Array | None) -> NextUnit:
        """Return the next unit, as soon as there is one; or that all units are done. `state` is the newest round state
        that the worker knows. `flat` receives the weights of a small model that come along.

        Raises WorkerEvicted, JobNotFound, ServerRestarted.
        """
        me, reader, scripts = self._membership, self._access.reader, self._access.scripts
        answer = NextUnit(None) if round_.waits else scripts.next_unit(me.worker, me.incarnation)
        timeout_ms = self._late_ms if round_.waits else answer.backup_ms or WAIT_MS
        while answer.unit is None and not answer.done:
            before = state or me.round_state()
            state, came, answer = reader.next_unit(
                me.worker, me.incarnation, before, flat, min(WAIT_MS, max(1, timeout_ms))
            )
            me.check(state)
            round_.state, round_.waits = (state, came), False
            timeout_ms = answer.backup_ms or WAIT_MS
        self._taken_at = time.perf_counter()
        return answer

    def pushed(self, unit: int | None) -> None:
        """Note that a unit was acknowledged: it has taken as long as units of this round do."""
        factor, rounds = self._access.config.backup_after, self._access.config.unit_rounds
        if rounds is None or unit is None:
            return
        self._membership.pushed_unit(rounds.round_of(unit))
        took_ms = 1000 * (time.perf_counter() - self._taken_at)
        self._late_ms = round(min(WAIT_MS, factor * took_ms)) if factor else WAIT_MS
