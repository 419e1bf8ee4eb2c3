"""A job's settings: typed, bounded, and kept in Redis as one readable field each."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvps import optimizers
from kvps.arrays.formats import format_of
from kvps.arrays.inputs import in_words
from kvps.errors import InvalidSetting
from kvps.machine.launcher import Launcher
from kvps.staleness import ASP, mode_name

REDUCTIONS = ("mean", "sum")
NONFINITE = ("reject", "skip")
PULL_WIRES = ("fp32", "bf16")
TRANSPORTS = ("auto", "redis", "shm")
_EVERY = re.compile(r"[0-9]{1,9}|[0-9]{1,6}(\.[0-9]{1,6})?s")
_ASP_PENDING = 2  # one that waits while the next is computed; more would only be older


@dataclass(frozen=True)
class JobConfig:
    """What a job is created with. Raises InvalidSetting for a value out of its range.

    staleness          -1 is ASP, 0 BSP, N SSP
    workers            how many must have joined once before the first commit
    shards             into how many parts the layout is cut
    optimizer          kvps.SGD, kvps.Adagrad, kvps.Adam or kvps.AdamW
    reduction          "mean" divides the sum of contributions by the number of members, "sum" does not
    wire               how gradients are written on the wire: "fp32" as they are, or shorter: see kvps.formats
    weight_format          how workers pull the weights: "fp32" as they are, or "bf16"; Redis keeps both then
    transport          "redis" moves arrays through the server; "shm" through memory that worker and aggregator share,
                       on one host; "auto" is shm where nobody can be elsewhere and it is worth it
    mirror_every       over shared memory: how often Redis is given the weights, in versions ("10") or seconds ("1s")
    memory             over shared memory: which that is, see `transport.shared_memory.Memory`; filled in at creation
    nonfinite          a gradient with NaN or Inf is refused ("reject") or counts as zeros ("skip")
    max_pending        accepted contributions of one worker that may wait for their commit; 0 chooses
    worker_timeout_ms  silence after which a worker is evicted from the vector clock
    lease_ms           silence after which an aggregator loses its shards
    min_workers        with fewer workers, there or finished, nothing is committed until more join
    units              of data to hand out, one for each contribution, each counted once; 0: none are handed out, and
                       each worker has a part of the data of its own
    task, seed, batch_size, epochs   for `kvps worker`; a job made through the Python API has no task
    launched_by        the command whose own processes are the workers, see kvps.launcher; "": anybody may join
    """

    staleness: int = 0
    workers: int = 1
    shards: int = 1
    optimizer: optimizers.Optimizer = field(default_factory=optimizers.SGD)
    reduction: str = "mean"
    gradient_format: str = "fp32"
    weight_format: str = "fp32"
    transport: str = "auto"
    mirror_every: str = "1s"
    memory: str = ""
    nonfinite: str = "reject"
    max_pending: int = 0
    worker_timeout_ms: int = 10_000
    lease_ms: int = 3_000
    min_workers: int = 0
    units: int = 0
    task: str = ""
    seed: int = 0
    batch_size: int = 0
    epochs: int = 0
    launched_by: str = ""

    @classmethod
    def of(cls, call: str, config: JobConfig | None, settings: Mapping[str, Any]) -> JobConfig:
        """`config`, or one of single `settings`; `call` is the user's, for messages. Raises InvalidSetting."""
        if config is None:
            for name in settings:
                if name not in _NAMES:
                    raise InvalidSetting(f"{call}: no setting {name!r}: {_instead(name, settings[name])}")
            return cls(**settings)
        if not isinstance(config, cls):
            raise InvalidSetting(f"{call}: config must be a kvps.JobConfig, not {in_words(config)}")
        if settings:
            raise InvalidSetting(f"{call}: {next(iter(settings))} is in config: give either config or single settings")
        return config

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[int, int]] = {
            "staleness": (-1, 1_000_000),
            "workers": (1, 4_096),
            "shards": (1, 1_000),
            "max_pending": (0, 10_000),
            "worker_timeout_ms": (100, 86_400_000),
            "lease_ms": (100, 86_400_000),
            "min_workers": (0, self.workers),
            "units": (0, 2**50),
            "seed": (0, 2**32 - 1),
            "batch_size": (0, 2**31),
            "epochs": (0, 2**31),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                meaning = " (-1 is ASP, 0 BSP, N SSP)" if name == "staleness" else ""
                raise InvalidSetting(f"{name} must be a whole number from {low} to {high}{meaning}, not {value!r}")
        if not isinstance(self.optimizer, optimizers.Optimizer):
            kind = type(self.optimizer)
            raise InvalidSetting(
                f"optimizer must be kvps.SGD(...) or its like, not a {kind.__module__}.{kind.__name__}; "
                f"kvps.torch.optimizer(...) makes one of PyTorch's"
            )
        for name, allowed in (
            ("reduction", REDUCTIONS),
            ("nonfinite", NONFINITE),
            ("weight_format", PULL_WIRES),
            ("transport", TRANSPORTS),
        ):
            if getattr(self, name) not in allowed:
                raise InvalidSetting(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        format_of(self.gradient_format)
        object.__setattr__(self, "mirror_every", str(self.mirror_every))  # a number of versions may be one
        if not _EVERY.fullmatch(self.mirror_every) or not float(self.mirror_every.rstrip("s")):
            raise InvalidSetting(
                f"mirror_every must be a number of versions, as 10, or of seconds, as 0.5s, not {self.mirror_every!r}"
            )
        if self.transport == "shm" and (self.shards > 1 or self.weight_format != "fp32"):
            raise InvalidSetting(
                "transport shm is for shards=1 and weight_format='fp32': on one host others gain nothing; "
                "or choose 'redis'"
            )
        try:
            _ = self.launched_by and Launcher.of(self.launched_by)
        except (ValueError, TypeError):
            raise InvalidSetting(f"launched_by is what kvps up and kvps run note, not {self.launched_by!r}") from None
        if self.max_pending == 0:
            # The bound itself lets a worker have s + 1 contributions on the way; ASP has none, but memory has.
            pending = _ASP_PENDING if self.staleness == ASP else self.staleness + 1
            object.__setattr__(self, "max_pending", min(pending, 10_000))

    @property
    def host(self) -> str:
        """Over shared memory: where that is."""
        return self.memory.partition("/")[0]

    @property
    def mirror_versions(self) -> int:
        """After how many versions Redis is given the weights; 0 if that goes by time."""
        return 0 if self.mirror_every.endswith("s") else int(self.mirror_every)

    @property
    def mirror_s(self) -> float:
        """After how many seconds Redis is given the weights; 0 if that goes by versions."""
        return float(self.mirror_every[:-1]) if self.mirror_every.endswith("s") else 0.0

    @property
    def mode(self) -> str:
        """BSP, SSP(N) or ASP."""
        return mode_name(self.staleness)

    def to_hash(self) -> dict[str, str]:
        """The fields of the job's config hash."""
        out = {f.name: str(getattr(self, f.name)) for f in fields(self)}
        out["optimizer"] = json.dumps(self.optimizer.to_json())
        return out

    @classmethod
    def from_hash(cls, stored: Mapping[str, str]) -> JobConfig:
        """The settings that `to_hash` wrote. Fields of a newer kvps are passed over."""
        values: dict[str, Any] = {}
        for f in fields(cls):
            if f.name in stored:
                text = stored[f.name]
                values[f.name] = int(text) if f.type == "int" else text
        values.setdefault("transport", "redis")  # of a job that was made before there was another
        values["optimizer"] = optimizers.from_json(json.loads(stored["optimizer"]))
        return cls(**values)


_NAMES = {f.name for f in fields(JobConfig)}


def _instead(name: str, value: object) -> str:
    """What a setting that there is not may be meant to be."""
    rate = "lr" if name == "learning_rate" else name
    for kind in (optimizers.SGD, optimizers.Adagrad, optimizers.Adam):
        if rate in {f.name for f in fields(kind)}:
            return f"give optimizer=kvps.{kind.__name__}({rate}={value if isinstance(value, int | float) else '...'})"
    choices = [f.name for f in fields(JobConfig) if f.name != "memory"]
    near = difflib.get_close_matches(name, choices, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(choices)}"
