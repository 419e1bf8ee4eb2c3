"""Says once if the workers of a job push the same gradient, version for version: then each trains the same batches."""

from __future__ import annotations

import logging

import numpy as np

from kvps.arrays.error_feedback import Residual
from kvps.arrays.formats import format_of
from kvps.arrays.layout import DTYPE, Layout
from kvps.config import JobConfig
from kvps.protocol.plan import Plan
from kvps_aggregator.verify.contribution import Coding

log = logging.getLogger("kvps.commit")

_VERSIONS = 3  # one that is alike may be chance, as where the loss is flat at first


class AlikeContributions:
    """Looks at the first versions of a job that several workers make, until one tells that their data differ."""

    def __init__(self, job: str, config: JobConfig, layout: Layout) -> None:
        self._job, self._config, self._layout = job, config, layout
        self._alike: list[int] | None = []  # versions; None when there is nothing left to find out

    def look(self, plan: Plan) -> None:
        """Look at the plan of a version that is being made, by its digests alone."""
        if self._alike is None or plan.version in self._alike:
            return
        counting = plan.counting
        workers, digests = {c.worker for c in counting}, {c.digest for c in counting}
        if len(workers) < 2 or any(c.part for c in counting):
            return
        if len(digests) == 1 and digests == {self._zeros()}:
            return
        self._alike = [*self._alike, plan.version] if len(digests) == 1 else None
        if self._alike and len(self._alike) == _VERSIONS:
            log.warning(
                "job %s: %d workers have pushed the same gradient in versions %d to %d, bit for bit: each trains the "
                "same batches. Divide the data by rank, or let the job hand out the batches",
                self._job,
                len(workers),
                self._alike[0],
                plan.version,
            )
            self._alike = None

    def _zeros(self) -> str:
        """Return the digests of a gradient of zeros, as a contribution has them."""
        format_, zeros = format_of(self._config.gradient_format), np.zeros(self._layout.size, DTYPE)
        coding = Coding(self._layout, format_)
        return ",".join(coding.digests(coding.encode(zeros, Residual(format_, zeros) if format_.lossy else None)))
