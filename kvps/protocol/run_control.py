"""Whether a job goes on, is paused, suspended or stopped: what `control.lua` has noted in the version hash. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvps.errors import CorruptData, shown
from kvps.parsing import Fields, whole

LEARNER_HAS_FINISHED = "its learner has finished"
"""The reason of a stop with which a learner ends the job that it publishes."""
STATES = {"stop": "stopped", "suspend": "suspended", "pause": "paused"}


class RunControl(NamedTuple):
    """Whether the job goes on, and who has asked for what it does, why and when.

    state   "running", "paused", "suspended" or "stopped"
    round   the round with which all workers end; in rounds of units the version; 0 in ASP, where each ends at once;
            None unless the job is suspended or stopped
    by      the worker that has asked for it; "" if it was none
    reason  why; "" if nobody said
    at_ms   when, by the server's clock; 0 if nobody has
    """

    state: str = "running"
    round: int | None = None
    by: str = ""
    reason: str = ""
    at_ms: int = 0

    @classmethod
    def of(cls, version: Fields) -> RunControl:
        """Make it from the fields of the version hash. Raises CorruptData."""
        run = version.text("run", default="")
        if not run:
            return cls()
        what, _, last = run.partition(" ")
        if what not in STATES or (what == "pause") == bool(last):
            raise CorruptData(f"the version: run is {shown(run)}, and must be one of {', '.join(STATES)}")
        return cls(
            STATES[what],
            whole(last, "the last round") if last else None,
            version.text("run_by", default=""),
            version.text("run_reason", default=""),
            version.whole("run_at_ms", default=0),
        )

    @property
    def fields(self) -> dict[str, str]:
        """The fields of the version hash that say it; none for a job that goes on."""
        what = next((what for what, state in STATES.items() if state == self.state), "")
        last = "" if self.round is None else f" {self.round}"
        values = {"run": what + last, "run_by": self.by, "run_reason": self.reason, "run_at_ms": str(self.at_ms)}
        return values if what else {}

    @property
    def ends(self) -> bool:
        """Whether all workers' loops end: it is suspended or stopped."""
        return self.round is not None

    def is_last(self, round_: int) -> bool:
        """Return whether a worker ends that has done this round."""
        return self.round is not None and round_ >= self.round

    @property
    def why(self) -> str:
        """What has happened, for a person, as "stopped by w0: the loss is low enough"; "" for a job that goes on."""
        if self.state == "running":
            return ""
        return f"{self.state}{f' by {self.by}' if self.by else ''}{f': {self.reason}' if self.reason else ''}"
