"""The settings of a job: the default, bounds, help text and option of each. Command lines and docs/settings.md are
generated from them. In Redis each setting is one readable field of the config hash."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvps import optimizers, reductions
from kvps.arrays.formats import format_of
from kvps.arrays.inputs import in_words
from kvps.arrays.weight_view import VIEW, has_view
from kvps.errors import CorruptData, InvalidSetting
from kvps.machine.launcher import Launcher
from kvps.parsing import MOST_TEXT, Fields
from kvps.partitions import SCHEMES
from kvps.staleness import ASP, mode_name

OWN_PARTITION = "task"
"""The partition of a job whose task divides its samples itself."""

_ASP_PENDING = 2  # one contribution waits while the next is computed; more of them would only be staler
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_EVERY = re.compile(r"[0-9]{1,9}|[0-9]{1,6}(\.[0-9]{1,6})?s")
_BATCHES = re.compile(r"[0-9]{1,9}")
_MOST_OPTIMIZER = 1 << 22  # characters of JSON: thousands of names in groups, and tables of learning rates
_FACTOR = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_SHOWN = 80  # a message quotes at most so many characters of a value


@dataclass(frozen=True)
class Spec:
    """The description of a setting, besides its name, type and default.

    help     what the setting decides
    bounds   the smallest and the largest whole number allowed
    choices  the words allowed
    why_not  for other kinds of values: returns why a value is refused, as the end of a sentence; "" if it is allowed
    option   the options on a command line, long one first; none if only Python code or kvps sets it. A setting whose
             name ends in _ms, for milliseconds, is given in seconds there
    metavar  the placeholder that a help text shows after the option
    group    the heading under which a help text lists the setting
    """

    help: str
    bounds: tuple[int, int] | None = None
    choices: tuple[str, ...] = ()
    why_not: Callable[[Any], str] | None = None
    option: tuple[str, ...] = ()
    metavar: str = ""
    group: str = ""


def _not_an_optimizer(value: object) -> str:
    if isinstance(value, optimizers.Optimizer):
        size = len(_as_text(value))
        fits = size <= _MOST_OPTIMIZER
        return (
            ""
            if fits
            else f"is {size} characters as JSON, at most {_MOST_OPTIMIZER} are allowed: shorten groups or tables"
        )
    kind = type(value)
    return (
        f"must be a kvps optimizer such as kvps.SGD(...), not a {kind.__module__}.{kind.__name__}; "
        f"kvps.torch.optimizer(...) converts a PyTorch optimizer"
    )


def _as_text(optimizer: optimizers.Optimizer) -> str:
    return json.dumps(optimizer.to_json())


def _not_a_reduction(value: object) -> str:
    try:
        reductions.parse(value)
    except InvalidSetting as error:
        return str(error).removeprefix("reduction ")
    return ""


def _not_a_format(value: object) -> str:
    if not isinstance(value, str):
        return _not_a_text(value)
    try:
        format_of(value)
    except InvalidSetting as error:
        return str(error).removeprefix("gradient_format ")
    return ""


def _not_a_weight_format(value: object) -> str:
    if value == "fp16" or _not_a_format(value):
        return f"must be one of fp32, bf16, int8, topk:PART with a PART up to 1, not {_shown(value)}"
    return ""


def _not_a_period(value: str) -> str:
    fits = _EVERY.fullmatch(value) and float(value.rstrip("s"))
    return "" if fits else f"must be a number of versions, as 10, or of seconds, as 0.5s, not {_shown(value)}"


def _not_a_factor(value: str) -> str:
    fits = not value or (_FACTOR.fullmatch(value) and float(value) >= 1)
    return "" if fits else f"must be a number from 1, as 10 or 2.5, not {_shown(value)}"


def _not_a_push_period(value: str) -> str:
    fits = value == "epoch" or (_BATCHES.fullmatch(value) and int(value))
    return "" if fits else f"must be a number of batches from 1, or epoch, not {_shown(value)}"


def _not_a_launcher(value: str) -> str:
    try:
        _ = value and Launcher.of(value)
    except CorruptData:
        return f"may only be set by kvps up and kvps run, not to {_shown(value)}"
    return ""


def _not_a_text(value: object) -> str:
    fits = isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable()
    return "" if fits else f"must be printable text of at most {MOST_TEXT} characters, not {_shown(value)}"


def _setting(default: Any, help: str, **known: Any) -> Any:
    """Return a field of JobConfig."""
    return field(default=default, metadata={"spec": Spec(help, **known)})


@dataclass(frozen=True)
class JobConfig:
    """The settings of a job; docs/settings.md explains each. Times are in milliseconds. Raises InvalidSetting for a
    value out of its range."""

    staleness: int = _setting(
        0,
        "How many rounds a worker may be ahead of the slowest: 0 is BSP, N is SSP, -1 is ASP, which has no bound.",
        bounds=(-1, 1_000_000),
        option=("--staleness", "-s"),
        group="Training",
    )
    workers: int = _setting(
        1,
        "How many workers train. Nothing is committed before all of them have joined once.",
        bounds=(1, 4_096),
        option=("--workers", "-w"),
        group="Training",
    )
    shards: int = _setting(
        1, "Into how many parts the parameters are cut.", bounds=(1, 1_000), option=("--shards",), group="Arrays"
    )
    optimizer: optimizers.Optimizer = field(
        default_factory=optimizers.SGD,
        metadata={
            "spec": Spec(
                f"How the aggregator updates the weights: {', '.join(optimizers.OPTIMIZERS)}; as in "
                "sgd:momentum=0.9,nesterov=true. One of your own is module:Class, of a module in this directory.",
                why_not=_not_an_optimizer,
                option=("--optimizer",),
                metavar="NAME[:K=V,...]",
                group="Training",
            )
        },
    )
    local_steps: int = _setting(
        1,
        "How many steps a worker takes with an optimizer of its own between two pulls. Then it pushes how far its "
        "weights came, and the job's optimizer steps by that. With 1 it pushes each gradient.",
        bounds=(1, 1_000_000),
        option=("--local-steps",),
        group="Training",
    )
    inner_optimizer: optimizers.Optimizer = field(
        default_factory=optimizers.SGD,
        metadata={
            "spec": Spec(
                "The optimizer with which a task's worker takes its local steps, written as for --optimizer.",
                why_not=_not_an_optimizer,
                option=("--inner-optimizer",),
                metavar="NAME[:K=V,...]",
                group="Training",
            )
        },
    )
    reduction: str = _setting(
        "mean",
        "How contributions become one gradient: mean divides their sum by the number of members, sum does not; "
        "weighted is their mean by the weights that workers push, as the number of samples; median and trimmed:PART "
        "are of each item, and bear some bad workers. One of your own is module:function.",
        why_not=_not_a_reduction,
        option=("--reduction",),
        metavar="NAME",
        group="Training",
    )
    staleness_scaling: str = _setting(
        "none",
        "What a contribution is multiplied by that was computed on a version s versions old: none, inverse is 1/(1+s), "
        "inverse-sqrt is 1/sqrt(1+s).",
        choices=tuple(reductions.SCALINGS),
        option=("--staleness-scaling",),
        metavar="NAME",
        group="Training",
    )
    gradient_format: str = _setting(
        "fp32",
        "How gradients are sent: fp32 as they are, or shorter: bf16, fp16, int8, topk:PART. What a shorter format "
        "leaves out of a gradient is added to the next one. Use them on slow links: on one host fp32 is faster.",
        why_not=_not_a_format,
        option=("--gradient-format",),
        metavar="FORMAT",
        group="Arrays",
    )
    weight_format: str = _setting(
        "fp32",
        "How workers pull the weights: fp32 as they are, bf16 rounded, or int8 or topk:PART of what has changed since "
        "the version that the worker has. What these leave out of a change is part of the next one.",
        why_not=_not_a_weight_format,
        option=("--weight-format",),
        metavar="FORMAT",
        group="Arrays",
    )
    transport: str = _setting(
        "auto",
        "How arrays move: redis, through the server; shm, through memory that worker and aggregator share on one host; "
        "auto, which is shm for a model of 1 MiB or more if only this host can reach the server.",
        choices=("auto", "redis", "shm"),
        option=("--transport",),
        group="Arrays",
    )
    mirror_every: str = _setting(
        "1s",
        "With shm: how often the weights are copied to Redis, in versions (10) or in seconds (0.5s).",
        why_not=_not_a_period,
        option=("--mirror-every",),
        metavar="N|SECONDS",
        group="Arrays",
    )
    memory: str = _setting("", "With shm: which host's memory holds the arrays. kvps sets it when it creates the job.")
    nonfinite: str = _setting(
        "reject",
        "What happens to a gradient with NaN or Inf: reject refuses it, skip counts it as zeros.",
        choices=("reject", "skip"),
        option=("--nonfinite",),
        group="Failures",
    )
    quorum: int = _setting(
        0,
        "With staleness 0 or -1: how many contributions a version waits for. 0 is all workers in BSP, one in ASP. With "
        "fewer workers left it waits for as many as these.",
        bounds=(0, 4_096),
        option=("--quorum",),
        group="Training",
    )
    grace_ms: int = _setting(
        0,
        "How much longer a version waits for the other workers once its quorum is there.",
        bounds=(0, 86_400_000),
        option=("--grace",),
        metavar="SECONDS",
        group="Training",
    )
    late: str = _setting(
        "next",
        "What becomes of a contribution that comes after its version was made of a quorum: next counts it in the next "
        "version; drop refuses it, and its worker computes anew on the new weights.",
        choices=("next", "drop"),
        option=("--late",),
        group="Training",
    )
    reject_norm: str = _setting(
        "",
        "Rejects a contribution whose norm is more than so many times the median norm of its version's contributions, "
        "of which there must be three; the reason is logged.",
        why_not=_not_a_factor,
        option=("--reject-norm",),
        metavar="TIMES",
        group="Failures",
    )
    max_pending: int = _setting(
        0,
        "How many accepted contributions of one worker may wait for their commit. 0 chooses 1 in BSP, N + 1 in SSP, "
        "2 in ASP.",
        bounds=(0, 10_000),
        option=("--max-pending",),
        group="Training",
    )
    worker_timeout_ms: int = _setting(
        10_000,
        "How long a worker may be silent before it is evicted from the vector clock.",
        bounds=(100, 86_400_000),
        option=("--worker-timeout",),
        metavar="SECONDS",
        group="Failures",
    )
    lease_ms: int = _setting(
        3_000,
        "How long an aggregator may be silent before it loses its shards.",
        bounds=(100, 86_400_000),
        option=("--lease",),
        metavar="SECONDS",
        group="Failures",
    )
    durability: str = _setting(
        "memory",
        "What an acknowledgement means: memory, that the server has the contribution; replicated, that a replica has "
        "it too, so that a failover of one server at a time loses nothing.",
        choices=("memory", "replicated"),
        option=("--durability",),
        group="Failures",
    )
    min_workers: int = _setting(
        0,
        "The job pauses while it has fewer workers than this; workers that have finished count too.",
        bounds=(0, 4_096),
        option=("--min-workers",),
        group="Failures",
    )
    units: int = _setting(
        0,
        "How many units of data are handed out to the workers, each to be counted once; --data units sets it, to one "
        "for each push. With 0 each worker has its own part of the data.",
        bounds=(0, 2**50),
    )
    task: str = _setting("", "The task that kvps worker trains. A job that was created in Python has none.")
    seed: int = _setting(
        0,
        "Decides the initial parameters and the order of the samples.",
        bounds=(0, 2**32 - 1),
        option=("--seed",),
        group="Training",
    )
    batch_size: int = _setting(
        0, "How many samples make one gradient.", bounds=(0, 2**31), option=("--batch-size",), group="Training"
    )
    epochs: int = _setting(
        0, "How many passes over the data.", bounds=(0, 2**31), option=("--epochs",), group="Training"
    )
    partition: str = _setting(
        OWN_PARTITION,
        "Which samples a worker has: task, those that the task gives to its rank; or a part of all samples: "
        "contiguous, round-robin, random (drawn anew in each epoch), or overlap, where each worker has all of them.",
        choices=(OWN_PARTITION, *SCHEMES),
        option=("--partition",),
        metavar="SCHEME",
        group="Training",
    )
    push_every: str = _setting(
        "1",
        "After how many batches a worker pushes: N, or epoch for all of an epoch. The gradients of these batches are "
        "computed on the same weights, and their mean is pushed.",
        why_not=_not_a_push_period,
        option=("--push-every",),
        metavar="N|epoch",
        group="Training",
    )
    procs: int = _setting(
        1,
        "How many processes of its host compute each contribution of a worker: each takes an even part of every batch, "
        "and one of them speaks to Redis.",
        bounds=(1, 256),
        option=("--procs",),
        group="Training",
    )
    launched_by: str = _setting(
        "",
        "The kvps up or kvps run that launched the workers. If it is empty, any process may join.",
        why_not=_not_a_launcher,
    )

    @classmethod
    def of(cls, call: str, config: JobConfig | None, settings: Mapping[str, Any]) -> JobConfig:
        """Return `config`, or one made of `settings`. `call` names the user's call in errors. Raises InvalidSetting."""
        if config is None:
            for name in settings:
                if name not in SPECS:
                    raise InvalidSetting(f"{call}: no setting {name!r}: {_instead(name, settings[name])}")
            return cls(**settings)
        if not isinstance(config, cls):
            raise InvalidSetting(f"{call}: config must be a kvps.JobConfig, not {in_words(config)}")
        if settings:
            raise InvalidSetting(f"{call}: {next(iter(settings))} is in config: give either config or single settings")
        return config

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, str):  # as on a command line
            object.__setattr__(self, "optimizer", optimizers.parse(self.optimizer))
        for name in ("mirror_every", "push_every", "reject_norm"):  # they may be given as numbers
            object.__setattr__(self, name, str(getattr(self, name)))
        for name, spec in SPECS.items():
            if why := _why_not(spec, getattr(self, name)):
                raise InvalidSetting(f"{name} {why}")
        if self.min_workers > self.workers:
            raise InvalidSetting(
                f"min_workers must be a whole number from 0 to {self.workers}, the number of workers, "
                f"not {self.min_workers}"
            )
        if self.units and self.partition != OWN_PARTITION:
            raise InvalidSetting(
                f"partition {self.partition} is for data that is divided among the workers: units are handed out one "
                f"by one, so leave one of the two out"
            )
        if self.quorum > self.workers:
            raise InvalidSetting(
                f"quorum must be a whole number from 0 to {self.workers}, the number of workers, not {self.quorum}"
            )
        if self.quorum and self.staleness > 0:
            raise InvalidSetting(
                "quorum is for staleness 0, whose rounds it closes, and for staleness -1, where it collects: the bound "
                "of SSP waits for every worker"
            )
        if self.grace_ms and not self.quorum:
            raise InvalidSetting("grace is the time after a quorum: set quorum too")
        if self.late == "drop" and not self.partial_rounds:
            raise InvalidSetting("late drop is for rounds that a quorum closes: set quorum and staleness 0")
        if self.local_steps == 1 and self.inner_optimizer != optimizers.SGD():
            raise InvalidSetting(
                "inner_optimizer takes local steps, and local_steps is 1: give local_steps from 2 on, or leave it out"
            )
        if isinstance(self.inner_optimizer, optimizers.CustomOptimizer):
            raise InvalidSetting(
                "inner_optimizer must be one of kvps's own: only the job's optimizer may be module:Class"
            )
        if self.inner_optimizer.groups or self.inner_optimizer.clip_norm:
            raise InvalidSetting(
                "inner_optimizer steps on all parameters alike: groups and clip_norm are for the job's optimizer"
            )
        if self.local_steps > 1 and (self.push_every != "1" or self.procs > 1):
            raise InvalidSetting(
                "local_steps steps on each batch, while push_every and procs make one gradient of several: set only one"
            )
        if self.transport == "shm" and self.durability == "replicated":
            raise InvalidSetting("durability replicated is for transport redis: shared memory has no replica")
        if self.transport == "shm" and (self.shards > 1 or self.weight_format != "fp32"):
            raise InvalidSetting(
                "transport shm is for shards=1 and weight_format='fp32', because other values gain nothing on one "
                "host: set these, or choose 'redis'"
            )
        if self.max_pending == 0:
            # The staleness bound allows a worker s + 1 pending contributions. ASP has no bound, but memory is limited.
            pending = _ASP_PENDING if self.staleness == ASP else self.staleness + 1
            object.__setattr__(self, "max_pending", min(pending, 10_000))

    @property
    def host(self) -> str:
        """Over shared memory, the host of that memory."""
        return self.memory.partition("/")[0]

    @property
    def measures_gradients(self) -> bool:
        """Whether a version's whole gradient is measured before any of it is stepped on."""
        return self.optimizer.clip_norm > 0 or bool(self.reject_norm)

    @property
    def mirror_versions(self) -> int:
        """`mirror_every` as a number of versions; 0 if it is in seconds."""
        return 0 if self.mirror_every.endswith("s") else int(self.mirror_every)

    @property
    def mirror_s(self) -> float:
        """`mirror_every` in seconds; 0 if it is a number of versions."""
        return float(self.mirror_every[:-1]) if self.mirror_every.endswith("s") else 0.0

    @property
    def batches_per_round(self) -> int:
        """How many batches a worker computes between a pull and its push; 0 for all of an epoch."""
        if self.local_steps > 1:
            return self.local_steps
        return 0 if self.push_every == "epoch" else int(self.push_every)

    @property
    def partial_rounds(self) -> bool:
        """Whether a round may be committed without some of the workers."""
        return self.quorum > 0 and self.staleness == 0

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the arrays that each version has beside its weights: the optimizer's state, and the view."""
        return self.optimizer.slots + ((VIEW,) if has_view(format_of(self.weight_format)) else ())

    @property
    def user_code(self) -> tuple[str, ...]:
        """The names of the user's own code that whoever computes imports: the optimizer's and the reduction's."""
        names = (getattr(each, "name", "") for each in (self.optimizer, reductions.parse(self.reduction)))
        return tuple(filter(None, names))

    @property
    def inner_state(self) -> bool:
        """Whether a task's workers keep the state of their inner optimizer from round to round: then no round can be
        computed alone."""
        return self.local_steps > 1 and bool(self.inner_optimizer.slots)

    @property
    def lease_look_s(self) -> float:
        """Seconds between two looks at a lease: who is late once, or is not heard once, does not lose it."""
        return self.lease_ms / 3_000

    @property
    def mode(self) -> str:
        """BSP, SSP(N) or ASP."""
        return mode_name(self.staleness)

    def to_hash(self) -> dict[str, str]:
        """Return the fields of the job's config hash."""
        values = {name: getattr(self, name) for name in SPECS}
        return {
            name: _as_text(value) if isinstance(value, optimizers.Optimizer) else str(value)
            for name, value in values.items()
        }

    @classmethod
    def from_hash(cls, stored: Mapping[str, str], where: str = "config") -> JobConfig:
        """Return the settings that `to_hash` wrote. Fields that only a newer kvps knows are ignored.

        Raises CorruptData, which names the field, if one is missing or has a wrong value. `where` names the source in
        that message.
        """
        try:
            return cls(**{name: _read(name, stored) for name in SPECS})
        except InvalidSetting as error:
            raise CorruptData(f"{where} field {error}; another version of kvps or another program wrote it") from None


SPECS: dict[str, Spec] = {f.name: f.metadata["spec"] for f in fields(JobConfig)}
"""The description of each setting, by its name."""


def _why_not(spec: Spec, value: Any) -> str:
    """Return why a setting may not have this value, as the end of a sentence after its name; "" if it may."""
    if spec.bounds:
        low, high = spec.bounds
        fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return "" if fits else f"must be a whole number from {low} to {high}, not {_shown(value)}"
    if spec.choices:
        return "" if value in spec.choices else f"must be one of {', '.join(spec.choices)}, not {_shown(value)}"
    return (spec.why_not or _not_a_text)(value)


def _read(name: str, stored: Mapping[str, str]) -> Any:
    """Return the value of a setting from a config hash. Raises InvalidSetting."""
    text = stored.get(name)
    if not isinstance(text, str):
        raise InvalidSetting(f"{name} {'is missing' if text is None else f'is no text: {_shown(text)}'}")
    if SPECS[name].why_not is _not_an_optimizer:
        try:
            return optimizers.from_json(Fields.of_json(text, "it", _MOST_OPTIMIZER).as_dict())
        except (CorruptData, InvalidSetting, TypeError) as error:
            raise InvalidSetting(f"{name} holds {_shown(text)}: {error}") from None
    value = int(text) if SPECS[name].bounds and _WHOLE.fullmatch(text) else text
    if why := _why_not(SPECS[name], value):
        raise InvalidSetting(f"{name} {why}")
    return value


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


def _instead(name: str, value: object) -> str:
    """Return a hint at what the user may have meant by an unknown setting."""
    rate = "lr" if name == "learning_rate" else name
    for kind in optimizers.OPTIMIZERS.values():
        if rate in {f.name for f in fields(kind)}:
            return f"give optimizer=kvps.{kind.__name__}({rate}={value if isinstance(value, int | float) else '...'})"
    choices = [name for name in SPECS if name != "memory"]
    near = difflib.get_close_matches(name, choices, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(choices)}"
