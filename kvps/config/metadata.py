"""What a job notes of itself beside its settings. It lies in the config hash too, where redis-cli shows it."""

from __future__ import annotations

from dataclasses import dataclass

from kvps.config.rollouts import not_rollouts
from kvps.config.specs import not_a_launcher, setting, table_of
from kvps.machine import launcher
from kvps.machine.launcher import Launcher


@dataclass(frozen=True)
class Metadata:
    """What a job notes of itself and of the loop of its task. Raises InvalidSetting.

    No plan reads it, and of scripts only few: `adopt` compares and changes `launched_by`, `join` reads the task of
    a job of an earlier version, which has no `fixed_workers`, `join` and `publish` ask who makes the versions, and the
    scripts of experience read `rollouts`.

    launched_by  changes when another command resumes the job
    memory       changes when that memory is lost
    """

    procs: int = setting(
        1,
        "How many processes of its host compute each contribution of a worker: each takes an even part of every batch, "
        "and one of them speaks to Redis.",
        bounds=(1, 256),
        group="Training",
    )
    task: str = setting("", "The task that kvps worker trains: it names code. A job of a script has none.")
    rounds: int = setting(
        0,
        "How many rounds each worker is going to do, so that screens can show how much is done; 0 if that is not "
        "known. No worker is bound by it; kvps run --resume goes on with a finished job where it grows.",
        bounds=(0, 2**50),
    )
    launched_by: str = setting(
        "",
        "The kvps up or kvps run that launched the workers. If it is empty, any process may join.",
        why_not=not_a_launcher,
    )
    memory: str = setting("", "With shm: which host's memory holds the arrays.")
    publishes: int = setting(
        0,
        "Whether a learner with an optimizer of its own publishes the versions: no worker joins, and no aggregator "
        "serves the job.",
        bounds=(0, 1),
    )
    rollouts: str = setting(
        "",
        "Of such a job: the `kvps.Rollouts` as JSON, which say how experience comes to the learner.",
        why_not=not_rollouts,
    )

    def __post_init__(self) -> None:
        for name, spec in METADATA.items():
            spec.check(getattr(self, name))

    @property
    def launcher(self) -> Launcher | None:
        """The command that launched the workers; it may have ended."""
        return Launcher.of(self.launched_by) if self.launched_by else None

    @property
    def is_ours(self) -> bool:
        """Whether a command launched the workers, and launched this process."""
        return bool(self.launched_by) and self.launched_by == launcher.own()

    @property
    def foreign_launcher(self) -> Launcher | None:
        """The command that launched the workers; None if none did, it is dead, or it launched this process."""
        launched = self.launcher
        return None if self.is_ours or not launched or launched.is_dead else launched

    @property
    def host(self) -> str:
        """Over shared memory, the host of that memory."""
        return self.memory.partition("/")[0]


METADATA = table_of(Metadata)
"""The description of each, by its name."""
NONE = Metadata()
"""What a job notes of which nothing is said."""
