"""One round of a worker: it is pulled, then pushed, then acknowledged."""

from __future__ import annotations

from dataclasses import dataclass

from kvps.config import JobConfig
from kvps.protocol.job_state import RoundState
from kvps.session.buffers import GradientBuffers
from kvps.session.push import Push, PushState


@dataclass
class Round:
    """What a session knows of the round that is not acknowledged yet. The acknowledgement of its push ends it.

    push     its contribution
    after    in BSP after a push: the round state that this worker has used, so that it first waits for another one
    pulled   the round state that admitted it; None before its pull
    unit     the unit of data that it computes, if the job hands out units; None before `next_unit`
    waits    in rounds of units, that no unit was free after the last push, so that it waits before it asks for one
    state    in rounds of units, the round state that came with the unit, and whether its weights came along
    buffers  the arrays that the user computes its gradient into; None if he has asked for none
    """

    push: Push
    after: RoundState | None = None
    pulled: RoundState | None = None
    unit: int | None = None
    waits: bool = False
    state: tuple[RoundState, bool] | None = None
    buffers: GradientBuffers | None = None

    def following(self, push: Push, config: JobConfig, more_units: bool) -> Round:
        """Return the next round. After a contribution that came too late for its version the same unit is computed
        anew. In BSP without units, no worker of the job begins the round before all have ended this one."""
        if config.unit_rounds:
            return Round(push, waits=not more_units)
        if self.push.state is PushState.DROPPED:
            return Round(push, unit=self.unit)
        return Round(push, after=self.pulled if config.staleness == 0 else None)
