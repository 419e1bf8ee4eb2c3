"""The state that the user of a worker keeps beside the weights, and when it travels with a push."""

from __future__ import annotations

from typing import Any

from kvps.errors import CorruptData, shown
from kvps.protocol.worker_states import LACKING, decoded, encoded

_NONE = encoded({})


class WorkerState:
    """`value` is the user's own dict. A push takes it along if it has changed since the last accepted one.

    lacking  by how many local steps the contributions so far were shorter than whole rounds: those before a leave
    """

    def __init__(self, text: str, worker: str) -> None:
        """`text` is the state that came with the worker's last accepted contribution, "" for none."""
        self.value: dict[str, Any] = decoded(text, worker)
        self.lacking: int = self.value.pop(LACKING, 0)
        if type(self.lacking) is not int or self.lacking < 0:
            raise CorruptData(f"the state of worker {worker!r} says that its rounds lacked {shown(self.lacking)} steps")
        self._accepted = self._text()
        self._sent: str | None = None

    def to_send(self) -> str:
        """Return what a push takes along, "" if nothing has changed. A push whose result is unknown takes the same
        again, because its first try may have been accepted. Raises UsageError, InvalidSetting."""
        if self._sent is None:
            self._sent = self._text()
        return "" if self._sent == self._accepted else self._sent

    def _text(self) -> str:
        if type(self.value) is dict and not self.value and not self.lacking:
            return _NONE
        text = encoded(self.value)
        return encoded(self.value | {LACKING: self.lacking}) if self.lacking else text

    def accepted(self) -> None:
        """Note that the push was accepted."""
        assert self._sent is not None
        self._accepted, self._sent = self._sent, None

    def refused(self) -> None:
        """Note that the push does not count, and is not made again as it was."""
        self._sent = None
