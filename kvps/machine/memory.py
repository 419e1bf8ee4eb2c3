"""How much memory processes may use here: what this machine has, or what their control group (a container) is given."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvps.parsing import bytes_text

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_NUMBER = re.compile(r"^(?:(\S+?):?\s+)?(\d+)(?: kB)?$", re.MULTILINE)


class _Files(NamedTuple):
    """The files of a control group: its limit, what it uses, and how many processes were killed when that ran out.
    `freed` is the entry of memory.stat that says how much the kernel frees when others need it."""

    limit: str
    used: str
    freed: str
    events: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_V2 = _Files("memory.max", "memory.current", "inactive_file", "memory.events")


class Memory(NamedTuple):
    """How many bytes of memory processes may use here, and how many of them are free. `contained` says that a control
    group gives less than the machine has."""

    total: int
    free: int
    contained: bool = False

    @property
    def place(self) -> str:
        return "this container" if self.contained else "this machine"

    def __str__(self) -> str:
        return f"{bytes_text(self.free)} of {bytes_text(self.total)} free in {self.place}"

    @classmethod
    def here(cls, proc: Path = _PROC, groups: Path = _GROUPS) -> Memory | None:
        """Return the memory of this process: the least that the machine and its control groups have. None where that is
        unknown, as outside Linux."""
        machine = _numbers(proc / "meminfo")
        if "MemAvailable" not in machine:
            return None
        least = cls(1024 * machine["MemTotal"], 1024 * machine["MemAvailable"])
        for folder, files in _own_groups(proc, groups):
            limit = _numbers(folder / files.limit).get("", least.total)  # "max" is no number
            freed = _numbers(folder / "memory.stat").get(files.freed, 0)
            left = limit - _numbers(folder / files.used).get("", 0) + freed
            if limit < least.total:
                least = cls(limit, max(0, min(left, least.free)), True)
        return least


def kills(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return how many processes the kernel has killed because memory ran out: in the control group of this process
    since that exists, else on this machine since its boot. 0 where that is unknown."""
    counts = [_numbers(folder / files.events) for folder, files in _own_groups(proc, groups)]
    return next((n["oom_kill"] for n in [*counts, _numbers(proc / "vmstat")] if "oom_kill" in n), 0)


def ran_out() -> str:
    """Return the words for the end of a process that the kernel has killed here because memory ran out."""
    memory = Memory.here()
    return f"the {bytes_text(memory.total)} of memory of {memory.place} ran out" if memory else "memory ran out"


def overcommits(proc: Path = _PROC) -> bool:
    """Return whether the kernel lets a process fork however little memory is free."""
    return _numbers(proc / "sys/vm/overcommit_memory").get("", 1) == 1


def _own_groups(proc: Path, groups: Path) -> list[tuple[Path, _Files]]:
    """Return the folder of the control group that has the memory of this process, then those of the groups around it,
    which limit it too; each with the names of its files."""
    places = dict[str, Path]()
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            places |= {name: Path(path.lstrip("/")) for name in controllers.split(",")}
    root, files = (groups / "memory", _V1) if "memory" in places else (groups, _V2)
    place = places.get("memory", places.get("", Path()))
    # In a container the path may be one of its host: then only the root is there, and is its group.
    return [(folder, files) for each in (place, *place.parents) if (folder := root / each).is_dir()]


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers in a file, by the names before them, "" for one without; none if it cannot be read."""
    try:
        return {name: int(value) for name, value in _NUMBER.findall(path.read_text())}
    except OSError:
        return {}
