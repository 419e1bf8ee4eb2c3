"""The processes that compute a worker's contributions together with it: see `helper_process` for what they do.

The worker computes share 0 itself, adds all shares up in their order, and alone speaks to Redis. So whatever happens to
a helper, a contribution is pushed once or not at all.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from kvps.arrays.layout import Layout
from kvps.config import JobConfig
from kvps.errors import InvalidSetting, TaskFailed
from kvps_workers.gradient import Gradient, share_of, sum_of_shares
from kvps_workers.helper_process import Order, shared_arrays
from kvps_workers.rounds import Rounds
from kvps_workers.task import Task

log = logging.getLogger("kvps.worker")

_END_S = 1.0


class HelperProcesses:
    """The processes 1 to `config.procs` - 1 of a worker. A context manager: they have ended after its block.

    Raises InvalidSetting where the kernel has no anonymous shared memory.
    """

    def __init__(self, config: JobConfig, layout: Layout, rank: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise InvalidSetting(f"procs={config.procs} needs Linux: create the job with procs=1")
        self._config, self._layout, self._rank = config, layout, rank
        self._memory = os.memfd_create("kvps-worker", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, config.procs * layout.nbytes)
        self._weights, *self._shares = shared_arrays(self._memory, layout.size, config.procs)
        self._helpers = [self._start(part) for part in range(1, config.procs)]

    def round_gradient(self, task: Task, rounds: Rounds, number: int, params: Mapping[str, Any]) -> Gradient:
        """Return what `gradient.round_gradient` returns, computed by all processes at once. Raises as that does.

        A helper that dies is started again, and computes its share again. Raises TaskFailed if it dies a second time.
        """
        np.concatenate(self._layout.hosted(params, "parameter"), out=self._weights)
        for helper in self._helpers:
            helper.ask(number)
        own = share_of(task, self._layout, rounds, number, params, np, 0)
        return sum_of_shares(self._layout, [own, *self._shares_of_helpers(number)])

    def _shares_of_helpers(self, number: int) -> Iterator[Gradient | None]:
        answers = [self._answer(part, number) for part in range(1, self._config.procs)]
        for answer, share in zip(answers, self._shares, strict=True):
            if "error" in answer:
                raise TaskFailed(answer["error"])
            loss = answer["loss"]
            yield None if loss is None else Gradient(loss, self._layout.views(share))

    def _answer(self, part: int, number: int) -> dict[str, Any]:
        """Return a helper's answer. Raises TaskFailed."""
        who = f"process {part} of {self._config.procs}"
        answer = self._helpers[part - 1].answer()
        if answer is None:
            code = self._helpers[part - 1].end()
            log.warning("%s died (exit %d); starts it again", who, code)
            self._helpers[part - 1] = self._start(part)
            self._helpers[part - 1].ask(number)
            answer = self._helpers[part - 1].answer()
        if answer is None:
            code = self._helpers[part - 1].end()
            raise TaskFailed(f"task {self._config.metadata.task!r} failed: {who} died twice in one round (exit {code})")
        return answer

    def _start(self, part: int) -> _Helper:
        return _Helper(self._config, self._layout, self._rank, part, self._memory)

    def __enter__(self) -> HelperProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for helper in self._helpers:
            helper.end()
        os.close(self._memory)


class _Helper:
    """One helper process. Its output is its worker's, its answers come through a pipe that the task does not know."""

    def __init__(self, config: JobConfig, layout: Layout, rank: int, part: int, memory: int) -> None:
        answers, its_end = os.pipe()
        order = Order(os.getpid(), memory, its_end, config.to_hash(), layout.to_json(), rank, part)
        # -P: a redis.py or random.py in the user's directory must not hide the library of that name.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvps_workers.helper_process"],
            stdin=subprocess.PIPE,
            pass_fds=(memory, its_end),
            start_new_session=True,  # so that Ctrl-C reaches the worker alone
        )
        os.close(its_end)
        self._answers = os.fdopen(answers, "rb")
        self._say(json.dumps(asdict(order)))

    def ask(self, number: int) -> None:
        """Have the process compute its share of a round."""
        self._say(str(number))

    def answer(self) -> dict[str, Any] | None:
        """Wait for the answer; None if the process has died."""
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)  # so that its exit code is its own
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> int:
        """End the process, and return its exit code, or the negative number of the signal that ended it."""
        self._process.kill()
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._answers.close()
        return self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it has died, and `answer` will tell
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
