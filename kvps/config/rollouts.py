"""How experience comes from actors to the learner of a published job."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from kvps.errors import CorruptData, InvalidSetting, UsageError, shown
from kvps.parsing import LARGEST, MOST_BASES, MOST_GROUP, MOST_ITEMS, Fields

MOST_ITEM_BYTES = 64 << 20
"""The most bytes of one item."""
_BOUNDS = {
    "capacity": (1, MOST_ITEMS),
    "capacity_bytes": (MOST_ITEM_BYTES, LARGEST),
    "prompts": (0, 1 << 40),
    "epochs": (1, 1 << 20),
    "group": (1, MOST_GROUP),
}


@dataclass(frozen=True)
class Rollouts:
    """What a learner sets of the experience that actors send it; see `Store.publisher`. Raises InvalidSetting.

    max_staleness   the most versions by which an item may be older than the weights that are trained on it: 0 trains on
                    what the very weights have made, None on anything. Older items are dropped, and the log says so
    capacity        how many items may wait for the learner, be taken by it, or be on their way; actors wait for room
    capacity_bytes  how many bytes these may have
    prompts         how many prompts there are, each a unit that one actor at a time has; 0 for none
    epochs          how often each of them is handed out
    group           how many items each prompt needs; all of them have one fate
    stale           what becomes of a prompt whose items are too old: "again" hands it out again, "drop" ends it
    """

    max_staleness: int | None = None
    capacity: int = 1024
    capacity_bytes: int = 1 << 30
    prompts: int = 0
    epochs: int = 1
    group: int = 1
    stale: str = "again"

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            if not _is_whole(value := getattr(self, name), low, high):
                raise InvalidSetting(f"{name} must be a whole number from {low} to {high}, not {shown(value)}")
        most = MOST_BASES - 1
        if self.max_staleness is not None and not _is_whole(self.max_staleness, 0, most):
            raise InvalidSetting(
                f"max_staleness must be a whole number from 0 to {most}, or None, not {shown(self.max_staleness)}"
            )
        if self.stale not in ("again", "drop"):
            raise InvalidSetting(f"stale must be again or drop, not {shown(self.stale)}")
        if self.group > 1 and not self.prompts:
            raise InvalidSetting("group needs prompts: without them each item has a fate of its own")
        if self.group > self.capacity:
            raise InvalidSetting(f"capacity is {self.capacity}, and a group has {self.group} items: raise it")

    @property
    def units(self) -> int:
        """How many prompts are handed out in all epochs together."""
        return self.prompts * self.epochs

    @property
    def text(self) -> str:
        """As the job notes it, and scripts read it."""
        own = asdict(self) | {"max_staleness": -1 if self.max_staleness is None else self.max_staleness}
        for_scripts = {
            "staleness": own["max_staleness"],
            "nbytes": self.capacity_bytes,
            "again": self.stale == "again",
            "units": self.units,
        }
        return json.dumps(own | for_scripts, separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> Rollouts:
        """Return what `text` is of. Raises CorruptData."""
        f = Fields.of_json(text, "rollouts", deepest=1)
        numbers = {name: f.whole(name) for name in _BOUNDS}
        bound = f.whole("max_staleness", -1)
        try:
            made = cls(max_staleness=None if bound < 0 else bound, stale=f.text("stale"), **numbers)
        except InvalidSetting as error:
            raise CorruptData(f"rollouts: {error}") from None
        if made.text != text:
            raise CorruptData("rollouts: what scripts read does not follow from the settings")
        return made

    def differing(self, asked: Rollouts) -> list[str]:
        """Return which settings are not as `asked`."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(asked, f.name)]


def rollouts_of(job: str, text: str) -> Rollouts:
    """Return what a job notes of its experience. Raises UsageError if it takes none."""
    if not text:
        raise UsageError(f"job {job!r} takes no experience: no learner publishes it, or an older kvps made it")
    return Rollouts.of(text)


def not_rollouts(value: object) -> str:
    """Return why a text is none of `Rollouts`, as the end of a sentence; "" if it is one, or empty."""
    try:
        if isinstance(value, str) and (not value or Rollouts.of(value)):
            return ""
    except CorruptData as error:
        return f"does not say how experience comes: {error}"
    return f"must be text, not {shown(value)}"


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
