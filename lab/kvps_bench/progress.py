"""What a fleet has made in some time, and when its learners are killed."""

from __future__ import annotations

import bisect
import random
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from kvps.job import Job
from kvps.protocol.job_state import Commit

T = TypeVar("T")


class Window(NamedTuple):
    """A stretch of time, in ms since 1970."""

    begin_ms: int
    end_ms: int


class Made(NamedTuple):
    """A version: when it was committed, in ms on the server's clock, and of how many samples."""

    at_ms: int
    samples: int


class Progress(NamedTuple):
    """All versions of a job, oldest first."""

    versions: Sequence[Made]

    @classmethod
    def of(cls, job: Job) -> Progress:
        """Read them from the commit log. The samples of a contribution are its weight."""
        commits = [(entry, Commit.of(fields)) for entry, fields in job.entries() if fields.get("kind") == "commit"]
        return cls(
            [Made(int(e.partition("-")[0]), sum(c.weight for c in made.plan.contributions)) for e, made in commits]
        )

    def within(self, begin_ms: int, end_ms: int) -> Progress:
        """Return the versions from the last one before `begin_ms` to the first one at `end_ms` or later."""
        at = [version.at_ms for version in self.versions]
        return Progress(
            self.versions[max(0, bisect.bisect_left(at, begin_ms) - 1) : bisect.bisect_left(at, end_ms) + 1]
        )

    def intervals(self) -> list[float]:
        """Return the seconds between two versions."""
        return [(b.at_ms - a.at_ms) / 1000 for a, b in pairwise(self.versions)]

    @property
    def samples_per_s(self) -> float:
        return sum(version.samples for version in self.versions[1:]) / sum(self.intervals())

    @property
    def versions_per_s(self) -> float:
        return len(self.intervals()) / sum(self.intervals())


class Fire:
    """Kills of random learners, `every_s` seconds apart on average."""

    def __init__(self, every_s: float, seed: int) -> None:
        self.every_s = every_s
        self._random = random.Random(seed)

    def kills(self, until: float) -> Iterator[float]:
        """Yield the times of kills from now on, of `time.monotonic`, that lie before `until`."""
        at = time.monotonic()
        while (at := at + self._random.uniform(0.5, 1.5) * self.every_s) < until:
            yield at

    def choose(self, learners: Sequence[T]) -> T:
        """Return the learner that is killed next."""
        return self._random.choice(learners)
