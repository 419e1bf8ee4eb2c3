"""The classic arrangements by name, as settings of a job. Pure.

An arrangement consists of what it means, which no other setting may contradict, and of what it only suggests, which
any other setting replaces.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack, cast

from kvps.config import SPECS, JobSettings
from kvps.errors import InvalidSetting, shown

_DATA = "data"  # what only a command line has; in Python it is how many units there are


@dataclass(frozen=True)
class Topology:
    """An arrangement: settings as on a command line, under the names of `JobConfig`; and "data", as of --data."""

    means: Mapping[str, Any]
    suggests: Mapping[str, Any] = field(default_factory=dict)


TOPOLOGIES = {
    # Valiant, "A Bridging Model for Parallel Computation", 1990.
    "bsp": Topology({"staleness": 0}, {_DATA: "static"}),
    # Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012: replicas push without waiting, and Adagrad steps.
    "downpour": Topology({"staleness": -1}, {"optimizer": "adagrad"}),
    # The same paper: a coordinator hands out small parts of the work, and the parameters are in several shards.
    "sandblaster": Topology({"staleness": 0, _DATA: "units"}, {"shards": 4}),
    # Recht et al., "Hogwild: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS 2011.
    "hogwild": Topology({"staleness": -1, "transport": "shm"}),
}


def topology(name: str, **settings: Unpack[JobSettings]) -> JobSettings:
    """Return the settings of a job in a classic arrangement: bsp, downpour, sandblaster or hogwild.

    job = store.create_job("mine", params, **kvps.topology("downpour", workers=4, shards=2))

    `settings` are your own, under the names of `JobConfig`. They are returned too, and win over what the arrangement
    only suggests. sandblaster hands out units of data, so it needs `units`: how many. Raises InvalidSetting for another
    name, and for a setting that contradicts what the arrangement means.
    """
    added = added_by(name, settings)
    if added.pop(_DATA, "") == "units" and not settings.get("units"):
        raise InvalidSetting(f"topology {name} hands out units of data: give units=N, one for each push")
    return cast(JobSettings, added | settings)


def added_by(name: str, stated: Mapping[str, Any], known: Collection[str] | None = None) -> dict[str, Any]:
    """Return the settings that an arrangement adds to those that the user stated; of `known` ones, if these are given.

    Raises InvalidSetting.
    """
    if not isinstance(name, str) or name not in TOPOLOGIES:
        raise InvalidSetting(f"topology must be one of {', '.join(TOPOLOGIES)}, not {shown(name)}")
    chosen = TOPOLOGIES[name]
    for setting, value in chosen.means.items():
        if stated.get(setting, value) != value:
            raise InvalidSetting(
                f"topology {name} means {setting} {value}, not {shown(stated[setting])}: leave one of the two out"
            )
    suggested = {setting: value for setting, value in chosen.suggests.items() if not _replaced(setting, stated)}
    settings = {**chosen.means, **suggested}
    return {
        setting: value
        for setting, value in settings.items()
        if setting not in stated and (known is None or setting in known)
    }


def _replaced(suggested: str, stated: Mapping[str, Any]) -> bool:
    """Return whether another setting that the user stated leaves no room for a suggestion."""
    if suggested == _DATA:
        return "units_per_round" in stated
    if suggested == "shards":
        return bool(stated.get("transport") == "shm")
    return False


def as_options(settings: Mapping[str, Any]) -> str:
    """Return settings as the options of a command line."""
    options = [(SPECS[name].option[0] if name in SPECS else f"--{name}", value) for name, value in settings.items()]
    return " ".join(f"{option} {value}" for option, value in options)
