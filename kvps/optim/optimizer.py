"""What all optimizers have: a learning rate, a step, and groups of parameters with settings of their own.

Every operation of a step is elementwise and in float32, in the order of PyTorch's single-tensor optimizers. So a run
can be compared with DistributedDataParallel, and cutting a shard into stretches changes no bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from kvps.arrays.layout import Array
from kvps.errors import InvalidSetting, shown
from kvps.optim.arithmetic import State, f32
from kvps.optim.schedules import Schedule
from kvps.optim.settings import Setting, require
from kvps.parsing import MOST_TEXT, names_like

MOST_GROUPS = 1_024
MOST_NAMES = 1 << 16
"""The most names and patterns of a group."""
OPTIMIZERS: dict[str, type[Optimizer]] = {}
"""The rules of kvps, each by its kind."""


@dataclass(frozen=True, init=False)
class ParameterGroup:
    """Parameters with settings of their own: ``ParameterGroup(["*.bias", "norm.*"], weight_decay=0.0)``.

    `names` are names of parameters, or patterns of them with ``*``, ``?`` and ``[...]`` as in a shell. A name that
    is a parameter's stands for that parameter alone. A setting that a group does not have is the optimizer's.
    """

    names: tuple[str, ...]
    settings: tuple[tuple[str, float | Schedule], ...]

    def __init__(self, names: str | Iterable[str], /, **settings: float | Schedule) -> None:
        """Raises InvalidSetting for names that are none."""
        require(isinstance(names, Iterable), f"a parameter group has names of parameters, not {shown(names)}")
        patterns = (names,) if isinstance(names, str) else tuple(names)
        require(0 < len(patterns) <= MOST_NAMES, f"a parameter group has 1 to {MOST_NAMES} names, not {len(patterns)}")
        for name in patterns:
            fits = isinstance(name, str) and 0 < len(name) <= MOST_TEXT and name.isprintable()
            require(fits, f"a name in a parameter group must be printable text of 1 to {MOST_TEXT} characters")
        object.__setattr__(self, "names", patterns)
        object.__setattr__(self, "settings", tuple(settings.items()))

    def matching(self, parameters: Collection[str]) -> Iterable[str]:
        """Yield those of the parameters' names that are in this group."""
        for name in self.names:
            yield from names_like(name, parameters)

    def to_json(self) -> dict[str, Any]:
        own = {name: value.to_json() if isinstance(value, Schedule) else value for name, value in self.settings}
        return {"names": list(self.names)} | own


@dataclass(frozen=True)
class Optimizer(Setting):
    """The rule by which the aggregator steps on a reduced gradient.

    lr        a number or a `Schedule`
    maximize  step up the gradient instead of down
    clip_norm  if above 0, the most that the norm of the reduced gradient of all parameters may have: one that has more
               is scaled down to it, before the rule is applied
    groups    parameters with other settings; of several groups that match a parameter, the first one has it

    A rule of kvps says too:

    kind        its name on a command line and in Redis
    torch_name  the name of the class of torch.optim that steps in the same way; "" if there is none
    torch_only  the settings that only that class has, each with the value at which it changes nothing
    paper       for docs/optimizers.md, what the rule is held against if PyTorch does not have it
    """

    torch_name: ClassVar[str] = ""
    torch_only: ClassVar[Mapping[str, Any]] = {}
    paper: ClassVar[str] = ""
    lr: float | Schedule
    maximize: bool = field(default=False, kw_only=True)
    clip_norm: float = field(default=0.0, kw_only=True)
    groups: tuple[ParameterGroup, ...] = field(default=(), kw_only=True)

    def __init_subclass__(cls, is_rule: bool = True) -> None:
        if is_rule and "kind" in vars(cls):  # a user's subclass of a rule takes no name of ours
            OPTIMIZERS.setdefault(cls.kind, cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        are_groups = isinstance(self.groups, tuple | list) and all(isinstance(g, ParameterGroup) for g in self.groups)
        require(are_groups, f"{self.kind}: groups must be a tuple of kvps.ParameterGroup(...)")
        object.__setattr__(self, "groups", tuple(self.groups))
        require(len(self.groups) <= MOST_GROUPS, f"{self.kind}: there may be at most {MOST_GROUPS} groups")
        _ = self._of_groups

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """The names of the state arrays that any parameter needs. Each is as large as the weights and begins as
        zeros."""
        return tuple(dict.fromkeys(slot for each in self.variants for slot in each.own_slots))

    @property
    def variants(self) -> tuple[Optimizer, ...]:
        """The settings of parameters in no group, and those of each group."""
        return (self, *self._of_groups)

    @property
    def own_slots(self) -> tuple[str, ...]:
        """The names of the state arrays that parameters in no group need."""
        raise NotImplementedError

    @property
    def counts_steps(self) -> bool:
        """Whether a step depends on how many there were before it, besides the learning rate."""
        return False

    def prepare(self) -> None:
        """Import code of the user's own now, and not at the first step. Raises InvalidSetting."""
        for group in self._of_groups:
            group.prepare()

    def update(
        self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any = np
    ) -> None:
        """Make step `t`, counted from 1, with the gradient `g` and learning rate `lr`, on arrays of the module `xp`.

        `g` is overwritten, and `out` is scratch before it gets the next weights. So no rule makes a temporary array: a
        large one would be fresh memory, page by page, for every chunk.
        """
        if self.maximize:
            xp.multiply(g, f32(-1), out=g)
        self.step(w, g, state, out, state_out, lr, t, xp)

    def step(self, w: Array, g: Array, state: State, out: Array, state_out: State, lr: float, t: int, xp: Any) -> None:
        """Step down the gradient, as `update`: read the weights `w` and the state, write the next ones."""
        raise NotImplementedError

    def lr_at(self, progress: float) -> float:
        """Return the learning rate after `progress` committed contributions per worker."""
        return self.lr.at(progress) if isinstance(self.lr, Schedule) else float(self.lr)

    def lr_of(self, settings: Optimizer, progress: float, lr: float | None) -> float:
        """Return the learning rate of the parameters with these settings, one of `variants`, after `progress` committed
        contributions per worker. An `lr` that was set takes the place of this optimizer's, schedule and all. A group
        with a rate of its own keeps the proportion of their highest rates."""
        if lr is None:
            return settings.lr_at(progress)
        own, base = settings._highest_lr, self._highest_lr
        return lr if own == base else lr * (own / base) if base else settings.lr_at(progress)

    @property
    def _highest_lr(self) -> float:
        return self.lr.highest if isinstance(self.lr, Schedule) else float(self.lr)

    def of_each(self, parameters: Sequence[str]) -> list[Optimizer]:
        """Return the settings of each of the parameters: those of its group, or this optimizer's."""
        names = dict.fromkeys(parameters)
        own: dict[str, Optimizer] = {}
        for group, settings in zip(reversed(self.groups), reversed(self._of_groups), strict=True):
            own |= dict.fromkeys(group.matching(names), settings)
        return [own.get(name, self) for name in parameters]

    def check_groups(self, parameters: Collection[str]) -> None:
        """Raise InvalidSetting for a name or a pattern in a group that matches no parameter."""
        known = dict.fromkeys(parameters)
        for group in self.groups:
            for name in group.names:
                if not names_like(name, known):
                    raise InvalidSetting(
                        f"no parameter is called {shown(name)}, which a parameter group names: the job has "
                        f"{', '.join(list(parameters)[:5])}{', ...' if len(parameters) > 5 else ''}"
                    )

    def to_json(self) -> dict[str, Any]:
        """Return what is stored; without groups or clipping it has no field for these."""
        own = super().to_json()
        own.pop("groups")
        if not self.clip_norm:
            own.pop("clip_norm")
        return own | ({"groups": [group.to_json() for group in self.groups]} if self.groups else {})

    def in_words(self) -> list[str]:
        """Return the settings for a message. Groups are only counted, because it is one short line."""
        own = [word for word in super().in_words() if not word.startswith("groups=")]
        return own + ([f"groups={len(self.groups)}"] if self.groups else [])

    @cached_property
    def _of_groups(self) -> tuple[Optimizer, ...]:
        """The settings of each group. Raises InvalidSetting for those that this rule does not have."""
        return tuple(self._changed(dict(group.settings)) for group in self.groups)

    def _changed(self, changes: dict[str, Any]) -> Optimizer:
        """Return these settings with `changes`, for a group. Raises InvalidSetting."""
        own = [f.name for f in dataclasses.fields(self) if f.name not in ("groups", "clip_norm")]
        for name in changes:
            require(name in own, f"{self.kind} has no setting {shown(name)} for a group: it has {', '.join(own)}")
        return dataclasses.replace(self, groups=(), **changes)
