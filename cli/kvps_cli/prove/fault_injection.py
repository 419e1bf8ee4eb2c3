"""``kvps up --kill-every``: kills processes at random, and checks afterwards that nothing was lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvps.errors import KvpsError
from kvps.history.commit_log import Log
from kvps.history.log_stream import LogStream
from kvps.job import Job
from kvps.parsing import file_name
from kvps.store import Store
from kvps_cli.supervise import SAME_BITS, Supervisor

_POLL_S = 0.1


class Verdict(NamedTuple):
    """The result of the check.

    acknowledged  how many contributions were acknowledged to their workers
    lost          how many of these are in no commit and were not rejected
    twice         how many times a contribution was committed again
    """

    acknowledged: int
    lost: int
    twice: int


class FaultInjection:
    """Random kills in one run. Each worker appends its acknowledged contributions to a file of its own."""

    def __init__(self, every_s: float, seed: int) -> None:
        self.kills = 0
        self._every_s = every_s
        self._random = random.Random(seed)
        self._folder = tempfile.TemporaryDirectory(prefix="kvps-acks-")

    def acks(self, worker: str) -> Path:
        """Return the file to which a worker appends."""
        return Path(self._folder.name) / file_name(worker, "the name of a worker's file")

    @contextmanager
    def killing(self, supervisor: Supervisor, job: Job) -> Iterator[None]:
        """Kill a random running child inside the block, every `every_s` seconds of training on average."""
        over = threading.Event()
        killer = threading.Thread(target=self._kill, args=(supervisor, job, over), name="kvps-killer", daemon=True)
        killer.start()
        try:
            yield
        finally:
            over.set()
            killer.join()

    def _kill(self, supervisor: Supervisor, job: Job, over: threading.Event) -> None:
        # Where processes take longer to start than to be killed again, a job without this wait would never end.
        while self._committed(job, over) and not over.wait(self._random.uniform(0.5, 1.5) * self._every_s):
            running = [child for _, child in sorted(supervisor.children.items()) if child.running]
            if running:
                child = self._random.choice(running)
                child.killed_by = "--kill-every"
                child.process.kill()
                self.kills += 1

    def _committed(self, job: Job, over: threading.Event) -> bool:
        """Wait for a commit that follows the last kill. Return False if the training is over before."""
        before = _version(job) if self.kills else -1
        while _version(job) <= before:
            if over.wait(_POLL_S):
                return False
        return True

    def judge(self, job: Job, checkpoints: Path | None = None) -> Verdict:
        """Compare the workers' files with the commit log of a job that nobody works on any more."""
        return judge(Path(self._folder.name).iterdir(), job, checkpoints)

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()


def _version(job: Job) -> int:
    """Return the job's version, -1 if it cannot be read now: the loop that shows the training says why."""
    with suppress(KvpsError):
        return job.state().version
    return -1


def replayed(store: Store, job: Job, checkpoints: Path | None = None) -> str:
    """Replay the whole job in a separate process with one thread, as its workers had. Return "" or the difference."""
    verified = subprocess.run(
        [sys.executable, "-P", "-m", "kvps", "verify", job.name, "--quiet"]
        + (["--checkpoints", str(checkpoints)] if checkpoints else []),
        env=SAME_BITS | os.environ | {"KVPS_REDIS_URL": store.url},
        capture_output=True,
        text=True,
    )
    return verified.stderr.strip().removeprefix("kvps: error: ") if verified.returncode else ""


def judge(files: Iterable[Path], job: Job, checkpoints: Path | None = None) -> Verdict:
    """Compare files of acknowledged contributions (a line each: worker, incarnation, number) with the commit log."""
    log = Log(LogStream(job.access), job.state(), checkpoints)
    committed = Counter((c.worker, c.incarnation, c.seq) for commit in log.commits() for c in commit.plan.contributions)
    rejected = {(c.worker, c.incarnation, c.seq) for commit in log.commits() for c in commit.plan.rejected}
    acknowledged = set()
    for file in files:
        # An unfinished last line comes from a process that was killed while it wrote.
        for line in file.read_text().split("\n")[:-1]:
            worker, incarnation, number = line.split()
            acknowledged.add((worker, incarnation, int(number)))
    lost = acknowledged - set(committed) - rejected
    return Verdict(len(acknowledged), len(lost), sum(count - 1 for count in committed.values()))
