"""The checked settings of a job. In Redis each setting is one readable field of the config hash."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from inspect import Parameter, signature
from typing import Any, TypeVar, cast

from kvps import optim
from kvps.arrays.inputs import in_words
from kvps.config import combinations, samples
from kvps.config.gone import GONE, UNUSED
from kvps.config.metadata import METADATA, NONE, Metadata
from kvps.config.settings import AUTO, SPECS, UncheckedConfig
from kvps.config.specs import MOST_OPTIMIZER, REPLICATED, Spec, as_text
from kvps.errors import CorruptData, InvalidSetting, shown
from kvps.parsing import Fields

_WHOLE = re.compile(r"-?[0-9]{1,18}")
_NEWER = frozenset(
    {"units_per_round", "units_per_epoch", "backup_after", "samples", "missing", "publishes", "rollouts"}
)
"""Settings that jobs of earlier versions of kvps lack; their defaults are what those did."""
_CHANGING = frozenset({"launched_by", "memory"})
"""What may be other than when the job was made. Neither names code."""
_Call = TypeVar("_Call", bound=Callable[..., Any])


@dataclass(frozen=True)
class JobConfig(UncheckedConfig):
    """The settings of a job; docs/settings.md explains each. Times are in milliseconds. Raises InvalidSetting for a
    value out of its range, and for values that do not go together."""

    @classmethod
    def of(
        cls, call: str, config: JobConfig | None, settings: Mapping[str, object], metadata: Metadata = NONE
    ) -> JobConfig:
        """Return `config`, or one made of the others. `call` names the user's call in errors. Raises InvalidSetting."""
        if config is None:
            for name in settings:
                if name not in SPECS:
                    raise InvalidSetting(f"{call}: no setting {name!r}: {_instead(name, settings[name])}")
            return cls(metadata=metadata, **cast(dict[str, Any], settings))
        if not isinstance(config, cls):
            raise InvalidSetting(f"{call}: config must be a kvps.JobConfig, not {in_words(config)}")
        if given := [*settings, *(name for name, spec in METADATA.items() if getattr(metadata, name) != spec.default)]:
            raise InvalidSetting(f"{call}: {given[0]} is in config: give either config or single settings")
        return config

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, str):  # as on a command line
            object.__setattr__(self, "optimizer", optim.parse(self.optimizer))
        for name, spec in SPECS.items():
            if spec.read and isinstance(text := getattr(self, name), str):  # as on a command line
                object.__setattr__(self, name, spec.read(text))
            spec.check(getattr(self, name))
        if self.samples:
            samples.derive_units(self)
        combinations.check(self)

    def differing(self, asked: UncheckedConfig, names: Iterable[str]) -> list[str]:
        """Return which of these settings of a job, or of what it notes, are not as `asked`. What was asked in general,
        such as "auto", is what the job has, and the number of workers is another matter."""
        general = {"transport": AUTO, "durability": REPLICATED}
        return [
            name
            for name in names
            if name != "workers"
            and value_of(asked, name) != value_of(self, name)
            and (name not in general or getattr(asked, name) != general[name])
        ]

    def changes(self, before: JobConfig) -> dict[str, tuple[str, str]]:
        """Return each setting that is other than `before`, with the text that it had and the one that it has."""
        had, has = before.to_hash(), self.to_hash()
        return {name: (had[name], has[name]) for name in has if had[name] != has[name]}

    def noting(self, **metadata: Any) -> JobConfig:
        """Return the settings with other metadata."""
        return replace(self, metadata=replace(self.metadata, **metadata))

    def to_hash(self) -> dict[str, str]:
        """Return settings and metadata as they are stored."""
        return {name: as_text(value_of(self, name)) for name in (*SPECS, *METADATA)}

    @property
    def stored(self) -> dict[str, str]:
        """The fields of the job's config hash: also what scripts read that follows from the others."""
        follows = {"max_pending": str(self.max_pending), "fixed_workers": "1" if self.fixed_workers else ""}
        return self.to_hash() | follows

    @classmethod
    def from_hash(cls, stored: Mapping[str, str], where: str = "config") -> JobConfig:
        """Return the settings that `to_hash` wrote. Fields that only a newer kvps knows are ignored.

        Raises CorruptData, which names the field, if one is missing or has a wrong value, or is of a setting that kvps
        no longer has and that the job uses. `where` names the source in that message.
        """
        for name, unused in UNUSED.items():
            if (text := stored.get(name, unused)) != unused:
                raise CorruptData(f"{where} field {name} is {shown(text)}, which kvps no longer does: {GONE[name]}")
        try:
            metadata = Metadata(**{name: _read(spec, stored) for name, spec in METADATA.items()})
            return cls(metadata=metadata, **{name: _read(spec, stored) for name, spec in SPECS.items()})
        except InvalidSetting as error:
            raise CorruptData(f"{where} field {error}; another version of kvps or another program wrote it") from None

    @classmethod
    def of_job(cls, stored: Mapping[str, str], made_with: Mapping[str, str]) -> JobConfig:
        """Return the settings in the config hash of a job on a server. `made_with` has what its creator wrote there;
        jobs of earlier versions of kvps lack it. Raises CorruptData, also if what scripts read there does not follow
        from the settings."""
        config = cls.from_hash(stored)
        text, follows = stored.get("max_pending"), str(config.max_pending)
        if text != follows:
            raise CorruptData(f"config field max_pending is {shown(text)}, and not {follows}: {GONE['max_pending']}")
        for name in {**stored, **made_with} if made_with else ():
            if name not in _CHANGING and (text := stored.get(name)) != (before := made_with.get(name)):
                raise CorruptData(
                    f"config field {name} is {shown(text)}, and was {shown(before)} when the job was made: another "
                    f"program wrote there"
                )
        return config


def takes_settings(call: _Call) -> _Call:
    """Have `help` and a notebook show the settings that `call` takes as keywords, each with its default. Type checkers
    and editors have them from `JobSettings`."""
    taken = signature(call)
    own = [p for p in taken.parameters.values() if p.annotation != "Unpack[JobSettings]"]
    others = [own.pop()] if own[-1].kind is Parameter.VAR_KEYWORD else []
    settings = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=_short(spec.default), annotation=spec.type)
        for name, spec in SPECS.items()
        if name not in taken.parameters
    ]
    call.__signature__ = taken.replace(parameters=own + settings + others)  # type: ignore[attr-defined]
    return call


def _short(default: Any) -> Any:
    """Return a default as a user would type it: the name of an optimizer."""
    return default.kind if isinstance(default, optim.Optimizer) else default


def value_of(config: UncheckedConfig, name: str) -> Any:
    """Return a setting, or what the job notes under this name."""
    return getattr(config.metadata if name in METADATA else config, name)


def _read(spec: Spec, stored: Mapping[str, str]) -> Any:
    """Return a value from a config hash. Raises InvalidSetting."""
    name = spec.name
    if name in _NEWER and name not in stored:
        return spec.default
    text = stored.get(name)
    if not isinstance(text, str):
        raise InvalidSetting(f"{name} {'is missing' if text is None else f'is no text: {shown(text)}'}")
    if isinstance(spec.default, optim.Optimizer):
        try:
            return optim.from_json(Fields.of_json(text, "it", MOST_OPTIMIZER).as_dict())
        except (CorruptData, InvalidSetting, TypeError) as error:
            raise InvalidSetting(f"{name} holds {shown(text)}: {error}") from None
    value = spec.read(text) if spec.read else int(text) if spec.bounds and _WHOLE.fullmatch(text) else text
    spec.check(value)
    return value


def _instead(name: str, value: object) -> str:
    """Return a hint at what the user may have meant by an unknown setting."""
    if name in GONE:
        return GONE[name]
    rate = "lr" if name == "learning_rate" else name
    kinds: Iterable[type[optim.Optimizer]] = (optim.SGD, *optim.OPTIMIZERS.values())
    for kind in kinds:
        if rate in {f.name for f in fields(kind)}:
            return f"give optimizer=kvps.{kind.__name__}({rate}={value if isinstance(value, int | float) else '...'})"
    near = difflib.get_close_matches(name, SPECS, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(SPECS)}"
