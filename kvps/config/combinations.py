"""Which settings of a job go together. Each check raises InvalidSetting with one line that says what to change."""

from __future__ import annotations

from typing import NamedTuple

from kvps.arrays.formats import format_of
from kvps.arrays.layout import Layout
from kvps.arrays.weight_view import has_view
from kvps.config.settings import UncheckedConfig
from kvps.errors import InvalidSetting
from kvps.parsing import MOST_OPEN_UNITS


def check(s: UncheckedConfig) -> None:
    """Raise InvalidSetting for settings that do not go together."""
    _check_numbers(s)
    _check_unit_rounds(s)
    _check_quorum(s)
    _check_fragments(s)
    _check_shared_memory(s)


def _check_numbers(s: UncheckedConfig) -> None:
    if s.min_workers > s.workers:
        raise InvalidSetting(
            f"min_workers must be a whole number from 0 to {s.workers}, the number of workers, not {s.min_workers}"
        )


def _check_unit_rounds(s: UncheckedConfig) -> None:
    """Raise InvalidSetting for what contradicts versions that are made of whole rounds of units."""
    if s.units_per_epoch and (not s.units or s.units % s.units_per_epoch):
        raise InvalidSetting(
            f"units_per_epoch must divide units, so that all epochs are alike: {s.units_per_epoch} does not divide "
            f"{s.units}"
        )
    if not s.units_per_round:
        return
    if not s.units:
        raise InvalidSetting(
            "units_per_round makes rounds of units: set units too, in a script as samples or units, with kvps up as "
            "--data units"
        )
    if s.unit_rounds and (against := against_unit_rounds(s, s.units_per_round)):
        raise InvalidSetting(f"{against.why}: {against.instead}")


class Contradiction(NamedTuple):
    """Why settings do not go together, and what to do instead."""

    why: str
    instead: str


def against_unit_rounds(s: UncheckedConfig, units_per_round: int) -> Contradiction | None:
    """Return what keeps a job with these settings from rounds of so many units; None if nothing does."""
    if s.quorum:
        return Contradiction(
            "quorum closes a round without some contributions, and units_per_round waits for all units of it",
            "a slow worker delays none of them, so leave quorum out",
        )
    if format_of(s.gradient_format).lossy:
        return Contradiction(
            f"gradient_format {s.gradient_format} keeps what it leaves out at the worker that computed the gradient, "
            f"and with units_per_round the result must not depend on who that was",
            "choose fp32",
        )
    most = units_per_round * (s.staleness + 1)
    if most > MOST_OPEN_UNITS:
        return Contradiction(
            f"units_per_round times (staleness + 1) must be at most {MOST_OPEN_UNITS:,}, not {most:,}",
            "choose a larger batch_size",
        )
    return None


def _check_quorum(s: UncheckedConfig) -> None:
    if s.quorum > s.workers:
        raise InvalidSetting(
            f"quorum must be a whole number from 0 to {s.workers}, the number of workers, not {s.quorum}"
        )
    if s.quorum and s.staleness > 0:
        raise InvalidSetting(
            "quorum is for staleness 0, whose rounds it closes, and for staleness -1, where it collects: the bound "
            "of SSP waits for every worker"
        )
    if s.grace_ms and not s.quorum:
        raise InvalidSetting("grace is the time after a quorum: set quorum too")
    if s.late == "drop" and not s.partial_rounds:
        raise InvalidSetting("late drop is for rounds that a quorum closes: set quorum and staleness 0")


def _check_fragments(s: UncheckedConfig) -> None:
    if s.fragments < 2:
        return
    if s.local_steps % s.fragments:
        raise InvalidSetting(
            f"fragments must divide local_steps, so that each has its turn once in so many steps: {s.fragments} "
            f"does not divide {s.local_steps}"
        )
    if s.units:
        raise InvalidSetting("fragments are for workers with data of their own: leave units or fragments out")
    if s.late == "drop":
        raise InvalidSetting(
            "late drop has a worker begin its round anew, and with fragments it goes on from its own weights: "
            "choose late next"
        )
    if has_view(format_of(s.weight_format)):
        raise InvalidSetting(
            f"weight_format {s.weight_format} sends what has changed in the whole model: with fragments choose "
            f"fp32 or bf16"
        )


def _check_shared_memory(s: UncheckedConfig) -> None:
    if s.transport == "shm" and s.replicas:
        raise InvalidSetting("durability replicated is for transport redis: shared memory has no replica")
    if s.transport == "shm" and (s.shards > 1 or s.weight_format != "fp32"):
        raise InvalidSetting(
            "transport shm is for shards=1 and weight_format='fp32', because other values gain nothing on one "
            "host: set these, or choose 'redis'"
        )


def check_layout(s: UncheckedConfig, layout: Layout) -> None:
    """Raise InvalidSetting for settings that do not go with the parts or the buffers of a model."""
    if layout.buffer_kind:
        _check_buffers(s)
    if layout.parts:
        _check_parts(s)


def _check_buffers(s: UncheckedConfig) -> None:
    """Raise InvalidSetting if a format would round buffers: a variance that was rounded may be negative."""
    for name in ("gradient_format", "weight_format"):
        if format_of(chosen := getattr(s, name)).lossy:
            raise InvalidSetting(
                f"{name} {chosen} would round the buffers too, and a variance may become negative: choose fp32, or "
                f"leave its buffers to each worker, with kvps.torch.parameters(model, buffers='own')"
            )


def _check_parts(s: UncheckedConfig) -> None:
    """Raise InvalidSetting if the model may have no parts, which step alone."""
    if any(each.counts_steps for each in s.optimizer.variants):
        raise InvalidSetting(
            f"optimizer {s.optimizer.kind} counts its steps, and parts of a model have different numbers of "
            f"them: choose one that does not, as sgd without dampening, adagrad, rmsprop, yogi or lion"
        )
    if s.reject_norm:
        raise InvalidSetting("reject_norm compares contributions of the whole model: leave parts or it out")
