"""The processes that compute a worker's contributions together with it: see `helper_process` for what they do.

The worker computes share 0 itself, adds all shares up in their order, and alone speaks to Redis. So whatever happens to
a helper, a contribution is pushed once or not at all.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

import numpy as np

from kvps.errors import InvalidSetting, TaskFailed
from kvps_workers.contributions import Contributions, Gradient
from kvps_workers.helper_process import Order, shared_arrays

log = logging.getLogger("kvps.worker")

_END_S = 1.0


class HelperProcesses:
    """The processes 1 to `procs` - 1 of a worker. A context manager: they have ended after its block.

    Raises InvalidSetting where the kernel has no anonymous shared memory.
    """

    def __init__(self, contributions: Contributions) -> None:
        self._contributions, self._layout = contributions, contributions.layout
        self._procs = contributions.config.metadata.procs
        if not hasattr(os, "memfd_create"):
            raise InvalidSetting(f"procs={self._procs} needs Linux: create the job with procs=1")
        self._memory = os.memfd_create("kvps-worker", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, self._procs * self._layout.nbytes)
        self._weights, *self._shares = shared_arrays(self._memory, self._layout.size, self._procs)
        self._helpers = [_Helper(contributions, part, self._memory) for part in range(1, self._procs)]

    def compute(self, params: Mapping[str, Any], number: int) -> Gradient:
        """Return what `Contributions.compute` returns, computed by all processes at once. Raises as that does.

        A helper that dies is started again, and computes its share again. Raises TaskFailed if it dies a second time.
        """
        np.concatenate(self._layout.hosted(params, "parameter"), out=self._weights)
        for helper in self._helpers:
            helper.ask(number)
        shares = [self._contributions.share(params, number, 0)]
        losses = [self._answer(part, number) for part in range(1, self._procs)]
        for loss, share in zip(losses, self._shares, strict=True):
            if isinstance(loss, str):
                raise TaskFailed(loss)
            shares.append(None if loss is None else Gradient(loss, self._layout.views(share)))
        return self._contributions.sum_of(shares)

    def _answer(self, part: int, number: int) -> float | str | None:
        """Return a helper's answer. Raises TaskFailed."""
        who = f"process {part} of {self._procs}"
        try:
            return self._helpers[part - 1].answer()
        except OSError:
            log.warning("%s died (exit %d); starts it again", who, self._helpers[part - 1].end())
        self._helpers[part - 1] = helper = _Helper(self._contributions, part, self._memory)
        helper.ask(number)
        try:
            return helper.answer()
        except OSError:
            task, code = self._contributions.config.metadata.task, helper.end()
            raise TaskFailed(f"task {task!r} failed: {who} died twice in one round (exit {code})") from None

    def __enter__(self) -> HelperProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for helper in self._helpers:
            helper.end()
        os.close(self._memory)


class _Helper:
    """One helper process. Its output is its worker's; what it is asked and answers, the task does not know."""

    def __init__(self, contributions: Contributions, part: int, memory: int) -> None:
        self._channel, its_end = Pipe()
        # -P: a redis.py or random.py in the user's directory must not hide the library of that name.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvps_workers.helper_process", str(its_end.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(memory, its_end.fileno()),
            start_new_session=True,  # so that Ctrl-C reaches the worker alone
        )
        its_end.close()
        config, layout = contributions.config.to_hash(), contributions.layout.to_json()
        self.ask(tuple(Order(os.getpid(), memory, config, layout, contributions.rank, part)))

    def ask(self, what: object) -> None:
        """Have the process compute its share of the contribution of this number."""
        with suppress(OSError):  # it has died, and `answer` will tell
            self._channel.send(what)

    def answer(self) -> float | str | None:
        """Wait for the answer. Raises OSError if the process has died."""
        try:
            answer: float | str | None = self._channel.recv()
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)  # so that its exit code is its own
            raise OSError from error
        return answer

    def end(self) -> int:
        """End the process, and return its exit code, or the negative number of the signal that ended it."""
        self._process.kill()
        self._channel.close()
        return self._process.wait()
