"""The table of a job's settings: the default, bounds, help text and option of each, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from kvps import optim
from kvps.arrays.formats import format_of
from kvps.arrays.weight_view import VIEW, has_view
from kvps.config import specs
from kvps.config.metadata import Metadata
from kvps.config.specs import described, setting, table_of
from kvps.config.unit_rounds import UnitRounds
from kvps.optim import Optimizer, reductions
from kvps.parsing import MOST_SHARDS, MOST_WORKERS
from kvps.staleness import ASP, mode_name

AUTO = "auto"
"""What kvps decides when it creates a job."""

_ASP_PENDING = 2  # one contribution waits while the next is computed; more of them would only be staler
_MOST_PENDING = 10_000


@dataclass(frozen=True)
class UncheckedConfig:
    """The settings of a job; docs/settings.md explains each. Times are in milliseconds. `JobConfig` checks them.

    metadata  what the job notes of itself beside them
    """

    staleness: int = setting(
        0,
        "How many rounds a worker may be ahead of the slowest: 0 is BSP, N is SSP, -1 is ASP, which has no bound.",
        bounds=(-1, 1_000_000),
        option=("--staleness", "-s"),
        group="Training",
    )
    workers: int = setting(
        1,
        "How many workers train. Nothing is committed before all of them have joined once.",
        bounds=(1, MOST_WORKERS),
        option=("--workers", "-w"),
        group="Training",
    )
    shards: int = setting(1, "Into how many parts the parameters are cut.", bounds=(1, MOST_SHARDS), group="Arrays")
    optimizer: Optimizer = field(
        default_factory=optim.SGD,
        metadata=described(
            f"How the aggregator updates the weights: {', '.join(optim.OPTIMIZERS)}; as in sgd:momentum=0.9. One of "
            "your own is module:Class, of a module in this directory.",
            why_not=specs.not_an_optimizer,
            metavar="NAME[:K=V,...]",
            group="Training",
        ),
    )
    local_steps: int = setting(
        1,
        "How many steps a worker takes with an optimizer of its own between two pulls. Then it pushes how far its "
        "weights came, and the job's optimizer steps by that. With 1 it pushes each gradient.",
        bounds=(1, 1_000_000),
    )
    fragments: int = setting(
        0,
        "In how many fragments local steps synchronize the model, one after another: after every local_steps / "
        "fragments steps a worker pushes one fragment and pulls that one, and keeps its own weights of the others. "
        "0 and 1 are the whole model.",
        bounds=(0, 4_096),
    )
    reduction: str = setting(
        "mean",
        "How contributions become one gradient: mean divides their sum by the number of members, sum does not; "
        "weighted is their mean by the weights that workers push, as the number of samples; median and trimmed:PART "
        "are of each item, and bear some bad workers. One of your own is module:function.",
        parse=reductions.parse,
        metavar="NAME",
        group="Training",
    )
    staleness_scaling: Literal["none", "inverse", "inverse-sqrt"] = setting(
        "none",
        "What a contribution is multiplied by that was computed on a version s versions old: none, inverse is 1/(1+s), "
        "inverse-sqrt is 1/sqrt(1+s).",
        choices=tuple(reductions.SCALINGS),
        metavar="NAME",
        group="Training",
    )
    gradient_format: str = setting(
        "fp32",
        "How gradients are sent: fp32 as they are, or shorter: bf16, fp16, int8, topk:PART. What a shorter format "
        "leaves out of a gradient is added to the next one. Use them on slow links: on one host fp32 is faster.",
        parse=format_of,
        metavar="FORMAT",
        group="Arrays",
    )
    weight_format: str = setting(
        "fp32",
        "How workers pull the weights: fp32 as they are, bf16 rounded, or int8 or topk:PART of what has changed since "
        "the version that the worker has. What these leave out of a change is part of the next one.",
        why_not=specs.not_a_weight_format,
        metavar="FORMAT",
        group="Arrays",
    )
    transport: Literal["auto", "redis", "shm"] = setting(
        "auto",
        "How arrays move: redis, through the server; shm, through memory that worker and aggregator share on one host; "
        "auto, which is shm for a model of 1 MiB or more if only this host can reach the server.",
        choices=("auto", "redis", "shm"),
        group="Arrays",
    )
    nonfinite: Literal["reject", "skip"] = setting(
        "reject",
        "What happens to a gradient with NaN or Inf: reject refuses it, skip counts it as zeros. And to one of which a "
        "step makes NaN or Inf: reject stops the job, skip leaves the largest contribution out.",
        choices=("reject", "skip"),
        group="Failures",
    )
    missing: Literal["auto", "zeros", "skip"] = setting(
        AUTO,
        "What becomes of a parameter for which a contribution has no gradient: with zeros it counts as zeros, and "
        "momentum and weight decay go on. With skip it may be left out of a push; it counts as zeros where another "
        "contribution of the version has a gradient, and else the parameter and its optimizer's state stay as they "
        "are. auto is skip if the parameters are PyTorch's, whose optimizers do the same, and else zeros.",
        choices=(AUTO, "zeros", "skip"),
    )
    quorum: int = setting(
        0,
        "With staleness 0 or -1: how many contributions a version waits for. 0 is all workers in BSP, one in ASP. With "
        "fewer workers left it waits for as many as these.",
        bounds=(0, MOST_WORKERS),
        group="Training",
    )
    grace_ms: int = setting(
        0,
        "How much longer a version waits for the other workers once its quorum is there.",
        bounds=(0, 86_400_000),
        metavar="SECONDS",
        group="Training",
    )
    late: Literal["next", "drop"] = setting(
        "next",
        "What becomes of a contribution that comes after its version was made of a quorum: next counts it in the next "
        "version; drop refuses it. Either way its worker goes on with the round that is open.",
        choices=("next", "drop"),
        group="Training",
    )
    reject_norm: float | None = setting(
        None,
        "Rejects a contribution whose norm is more than so many times the median norm of its version's contributions, "
        "of which there must be three; the reason is logged.",
        why_not=specs.not_a_factor,
        read=specs.read_optional,
        metavar="TIMES",
        group="Failures",
    )
    worker_timeout_ms: int = setting(
        10_000,
        "How long a worker may be silent before it is evicted from the vector clock.",
        bounds=(100, 86_400_000),
        metavar="SECONDS",
        group="Failures",
    )
    lease_ms: int = setting(
        3_000,
        "How long an aggregator may be silent before it loses its shards.",
        bounds=(100, 86_400_000),
        metavar="SECONDS",
        group="Failures",
    )
    durability: str = setting(
        "memory",
        "What an acknowledgement means: memory, that the server has the contribution; replicated, that all its "
        "replicas have it too, so that a failover of one server at a time loses nothing; replicated:N, the same where "
        "each server has N replicas.",
        why_not=specs.not_a_durability,
        metavar="memory|replicated[:N]",
        group="Failures",
    )
    min_workers: int = setting(
        0,
        "The job pauses while it has fewer workers than this; workers that have finished count too.",
        bounds=(0, MOST_WORKERS),
        group="Failures",
    )
    units: int = setting(
        0,
        "How many units of data are handed out to the workers, each to be counted once; --data units sets it, to one "
        "for each push. With 0 each worker has its own part of the data.",
        bounds=(0, 2**50),
    )
    units_per_round: int = setting(
        0,
        "Makes each version of a whole round of so many units, whoever computes them: the result then depends neither "
        "on how many workers there are nor on which. With 0 a round is one contribution of each worker.",
        bounds=(0, 10_000),
        group="Training",
    )
    units_per_epoch: int = setting(
        0,
        "How many of the units are an epoch, whose last round may be shorter; a task's epochs set it. With 0 all units "
        "are one.",
        bounds=(0, 2**50),
    )
    samples: int = setting(
        0,
        "How many samples an epoch of a script has. Each of its batches is then a unit, which any worker may compute: "
        "units, units_per_epoch and, unless it is given, units_per_round = 4 follow from it.",
        bounds=(0, 2**50),
    )
    backup_after: float = setting(
        3.0,
        "With units_per_round: a unit that is out for longer than so many times the median of its round is handed out "
        "a second time when no other is free, and the first push counts. 0 never does.",
        why_not=specs.not_a_strength,
        read=specs.read_number,
        metavar="TIMES",
        group="Failures",
    )
    seed: int = setting(
        0, "Decides the initial parameters and the order of the samples.", bounds=(0, 2**32 - 1), group="Training"
    )
    batch_size: int = setting(0, "How many samples make one gradient.", bounds=(0, 2**31), group="Training")
    epochs: int = setting(0, "How many passes over the data.", bounds=(0, 2**31), group="Training")
    metadata: Metadata = field(default_factory=Metadata)

    @property
    def fixed_workers(self) -> bool:
        """Whether no other worker may join once all have: they divide the data of their task among themselves."""
        return bool(self.metadata.task) and not self.units

    @property
    def replicas(self) -> int:
        """How many replicas of a server must have what is acknowledged; 0 with durability memory. A job that was
        created without a number goes back to a kvps that waited for one."""
        word, _, number = self.durability.partition(":")
        return int(number or 1) if word == specs.REPLICATED else 0

    @cached_property
    def measures_gradients(self) -> bool:
        """Whether a version's whole gradient is measured before any of it is stepped on."""
        return self.optimizer.clip_norm > 0 or self.reject_norm is not None

    @property
    def takes_local_steps(self) -> bool:
        """Whether workers step with an optimizer of their own, and push how far they came."""
        return self.local_steps != 1

    @property
    def batches_per_round(self) -> int:
        """How many batches a worker computes between a pull and its push."""
        return self.local_steps // max(1, self.fragments)

    @cached_property
    def partial_rounds(self) -> bool:
        """Whether a round may be committed without some of the workers."""
        return self.quorum > 0 and self.staleness == 0

    @cached_property
    def unit_rounds(self) -> UnitRounds | None:
        """Which units make a round; None where a version is not made of a round of units."""
        if not self.units or not self.units_per_round or self.staleness < 0:
            return None
        return UnitRounds(self.units_per_round, self.units_per_epoch or self.units, self.units)

    @property
    def rounds_are_versions(self) -> bool:
        """Whether each round makes one version: in BSP, and where rounds are of units."""
        return self.staleness == 0 or self.unit_rounds is not None

    @cached_property
    def max_pending(self) -> int:
        """How many accepted contributions of one worker may wait for their commit: as many as the staleness bound
        allows. ASP has no bound, but memory is limited."""
        pending = _ASP_PENDING if self.staleness == ASP else self.staleness + 1
        if self.unit_rounds:  # one worker may have computed all units of all open rounds
            pending *= self.units_per_round
        return min(pending, _MOST_PENDING)

    @property
    def most_contributions(self) -> int:
        """How many contributions the memory of gradients must hold: those that wait, and one of each worker more."""
        if self.unit_rounds:
            return self.max_pending + self.workers
        return self.workers * (self.max_pending + 1)

    def progress(self, version: int, contributions: int) -> float:
        """Return how far learning-rate schedules have come when the version after `version` is made, with so many
        contributions before it: the committed contributions per worker. Where the rounds are the job's, because they
        are of units or a quorum closes them, it is the rounds, or a schedule would depend on who came."""
        if self.unit_rounds or (self.partial_rounds and not self.units):
            return float(version)
        return contributions / self.workers

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the arrays that each version has beside its weights: the optimizer's state, and the view."""
        return self.optimizer.slots + ((VIEW,) if has_view(format_of(self.weight_format)) else ())

    @property
    def user_code(self) -> tuple[str, ...]:
        """The names of the user's own code, of the optimizer and the reduction, which each process that computes
        imports."""
        names = (getattr(each, "name", "") for each in (self.optimizer, reductions.parse(self.reduction)))
        return tuple(filter(None, names))

    @property
    def skips_missing(self) -> bool:
        """Whether a parameter without a gradient in any contribution of a version stays as it is."""
        return self.missing == "skip"

    @property
    def lease_look_s(self) -> float:
        """Seconds between two renewals of a lease: a holder that is late once, or is not heard once, keeps it."""
        return self.lease_ms / 3_000

    @property
    def mode(self) -> str:
        """BSP, SSP(N) or ASP; or published, by a learner."""
        return "published" if self.metadata.publishes else mode_name(self.staleness)

    @property
    def stepped_by(self) -> str:
        """The optimizer as people read it: a learner has one of its own, and the job's is never used."""
        return "its learner's own optimizer" if self.metadata.publishes else str(self.optimizer)


SPECS = table_of(UncheckedConfig)
"""The description of each setting, by its name."""
