"""An optimizer of the user's own: a class, named ``module:Class`` and imported only where steps are computed.

    @dataclass(frozen=True)
    class Momentum:
        mu: float = 0.9
        slots = ("momentum",)

        def step(self, weights, gradient, state, out, state_out, lr, version, xp):
            buffer = state_out["momentum"]
            xp.multiply(state["momentum"], np.float32(self.mu), out=buffer)
            xp.add(buffer, gradient, out=buffer)
            xp.multiply(buffer, np.float32(lr), out=out)
            xp.subtract(weights, out, out=out)

A job stores the name, the numbers and the names of the state arrays. So whoever only reads a job imports nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np

from kvps.arrays.layout import Array
from kvps.errors import InvalidSetting, shown
from kvps.optim import user_code
from kvps.optim.arithmetic import State
from kvps.optim.optimizer import Optimizer, ParameterGroup
from kvps.optim.schedules import Schedule
from kvps.optim.settings import is_number, require
from kvps.parsing import MOST_TEXT

MOST_SLOTS = 8
"""The most state arrays of an optimizer."""
_MOST_NUMBERS = 64
_SLOT = re.compile(r"(?!(w|view)\Z)[A-Za-z][A-Za-z0-9]{0,31}", re.ASCII)  # the others are kvps's own arrays
_NUMBER = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)


class Rule(Protocol):
    """What the user writes. It is called on several threads at once, so it keeps nothing between two calls."""

    slots: Sequence[str]
    """The names of its state arrays, of letters and digits. Each is as large as the weights and begins as zeros."""

    def step(
        self,
        weights: Any,
        gradient: Any,
        state: Mapping[str, Any],
        out: Any,
        state_out: Mapping[str, Any],
        lr: float,
        version: int,
        xp: Any,
    ) -> None:
        """Write the weights of `version`, counted from 1, to `out`, and its state to `state_out`.

        All arrays are (n,) float32 arrays of the module `xp`, and n is any stretch of the parameters. `weights` and
        `state` are only read; `gradient` may be overwritten. Each item may depend on the same item of the others alone.
        """


@dataclass(frozen=True)
class CustomOptimizer(Optimizer, is_rule=False):
    """The settings of an optimizer of the user's own; `custom` makes one.

    name         ``module:Class``, of a module in the current directory of whoever computes
    numbers      what the class is called with, as pairs of a name and a number
    state_names  the names of its state arrays
    """

    lr: float | Schedule
    name: str = dataclasses.field(kw_only=True)
    numbers: tuple[tuple[str, float | bool], ...] = dataclasses.field(default=(), kw_only=True)
    state_names: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    kind: ClassVar[str] = "custom"

    counts_steps = True

    def __post_init__(self) -> None:
        fits = _is(user_code.NAME, self.name) and len(self.name) <= MOST_TEXT
        require(fits, f"an optimizer of your own is named module:Class, not {shown(self.name)}")
        try:
            object.__setattr__(self, "numbers", tuple(dict(self.numbers).items()))
        except (TypeError, ValueError):
            raise InvalidSetting(f"{self._title}: numbers must be name -> number, not {shown(self.numbers)}") from None
        require(len(self.numbers) <= _MOST_NUMBERS, f"{self._title}: at most {_MOST_NUMBERS} numbers are allowed")
        taken = {"names", *(f.name for f in dataclasses.fields(self))}
        for name, value in self.numbers:
            fits = _is(_NUMBER, name) and name not in taken
            require(fits, f"{self._title}: {shown(name)} cannot be the name of a number of its own")
            fits = isinstance(value, bool) or is_number(value)
            require(fits, f"{self._title}: {name} must be a finite number, or true or false, not {shown(value)}")
        object.__setattr__(self, "state_names", self._checked_slots(self.state_names))
        super().__post_init__()

    def _checked_slots(self, slots: object) -> tuple[str, ...]:
        fits = (
            isinstance(slots, tuple | list)
            and len(set(map(str, slots))) == len(slots) <= MOST_SLOTS
            and all(_is(_SLOT, slot) for slot in slots)
        )
        require(
            fits,
            f"{self._title}: slots must be a tuple of at most {MOST_SLOTS} names of letters and digits, none of them "
            f"w or view, not {shown(slots)}",
        )
        assert isinstance(slots, tuple | list)
        return tuple(slots)

    @property
    def own_slots(self) -> tuple[str, ...]:
        return self.state_names

    @cached_property
    def rule(self) -> Rule:
        """The user's object, imported from the current directory. Raises InvalidSetting."""
        rule, slots = self._imported()
        require(
            slots == self.state_names,
            f"{self._title} has the slots {', '.join(slots) or 'none'} here, and the job was created with "
            f"{', '.join(self.state_names) or 'none'}: use the module that it was created with",
        )
        return rule

    def with_slots(self) -> CustomOptimizer:
        """Return it with the state arrays that the user's class names. Imports the class. Raises InvalidSetting."""
        _, slots = self._imported()
        return dataclasses.replace(self, state_names=slots)

    def _imported(self) -> tuple[Rule, tuple[str, ...]]:
        """Return the user's object, and the names of its state arrays."""
        kind = user_code.load("optimizer", self.name, InvalidSetting)
        require(isinstance(kind, type), f"{self._title} is no class")
        with self._blamed():
            rule = kind(**dict(self.numbers))
            slots, step = getattr(rule, "slots", None), getattr(rule, "step", None)
        require(callable(step), f"{self._title} is no optimizer: it lacks the method step")
        return rule, self._checked_slots(slots)

    def prepare(self) -> None:
        _ = self.rule
        super().prepare()

    def step(self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any) -> None:
        """Have the user's rule make a step; see `Rule.step`. Raises InvalidSetting for its errors."""
        rule, state = self.rule, {slot: _read_only(array) for slot, array in state.items()}
        with self._blamed():
            rule.step(_read_only(w), g, state, out, state_out, lr, t, xp)

    def _blamed(self) -> AbstractContextManager[None]:
        return user_code.blamed("optimizer", self.name, InvalidSetting)

    @property
    def _title(self) -> str:
        return f"optimizer {self.name!r}"

    def _changed(self, changes: dict[str, Any]) -> Optimizer:
        """A group may have another learning rate, and any numbers that the class takes."""
        own = {name: changes.pop(name) for name in ("lr", "maximize") if name in changes}
        return dataclasses.replace(self, groups=(), numbers=tuple((dict(self.numbers) | changes).items()), **own)

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"numbers": dict(self.numbers), "state_names": list(self.state_names)}

    def __str__(self) -> str:
        hidden = ("name=", "numbers=", "state_names=")
        own = [word for word in self.in_words() if not word.startswith(hidden)]
        return f"{self.name}({', '.join(own + [f'{name}={value}' for name, value in self.numbers])})"


def custom(
    name: str,
    lr: float | Schedule,
    *,
    maximize: bool = False,
    clip_norm: float = 0.0,
    groups: Sequence[ParameterGroup] = (),
    **numbers: float | bool,
) -> CustomOptimizer:
    """Return an optimizer of your own: ``custom("rules:Momentum", lr=0.1, mu=0.9)`` calls ``Momentum(mu=0.9)``.

    The class is imported from the current directory; `Rule` says what it has. Raises InvalidSetting.
    """
    chosen = CustomOptimizer(
        lr, name=name, numbers=tuple(numbers.items()), maximize=maximize, clip_norm=clip_norm, groups=tuple(groups)
    )
    return chosen.with_slots()


def _is(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _read_only(array: Any) -> Any:
    """Return the same memory, which NumPy refuses to write to. CuPy has no such arrays."""
    if isinstance(array, np.ndarray):
        array = array[:]
        array.flags.writeable = False
    return array
