"""Learners and watchers in processes of their own, which tests kill, and the judge of what they say.

    python tests/helpers/learners.py learn URL JOB SEED SHARDS [--takeover]
    python tests/helpers/learners.py watch URL JOB

A learner writes a line for each version that was acknowledged to it, a watcher for each that it has: the version and
the digest of the arrays. A learner publishes its seed as the loss, so that the log says which bits a version has.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash
from helpers.harness import check_chain, log_entries
from helpers.zygote import Popen
from kvps_cli.prove.verify import proof_of

import kvps
from kvps.job import Job

ITEMS = 20_000
Arrays = dict[str, np.ndarray]
Said = tuple[int, str]
"""A version, and the digest of its arrays."""


def weights(seed: int, version: int, items: int = ITEMS) -> Arrays:
    """Return what the learner of this seed publishes as this version: some items differ from the version before."""
    flat, changed = _base(items)
    flat = flat.copy()
    flat[changed[version % 5]] += ml_dtypes.bfloat16(1 + version % 7)
    flat[: seed % 50] = ml_dtypes.bfloat16(seed % 100)
    return {"w": flat.reshape(100, -1), "steps": np.array([seed, version], np.int64), "on": np.array([True, False])}


@cache
def _base(items: int) -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return rng.normal(size=items).astype(ml_dtypes.bfloat16), [rng.integers(0, items, items // 100) for _ in range(5)]


def digest(arrays: Arrays) -> str:
    """Return a digest of names and bits."""
    hasher = xxhash.xxh3_128()
    for name in sorted(arrays):
        hasher.update(name.encode())
        hasher.update(arrays[name].tobytes())
    return str(hasher.hexdigest())


class Child:
    """A process of this module, and the lines that it has said so far."""

    def __init__(self, *words: object) -> None:
        command = [sys.executable, str(Path(__file__)), *map(str, words)]
        self.said: list[Said] = []
        self.process = Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._reads = threading.Thread(target=self._read, daemon=True)
        self._reads.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.endswith("\n"):  # else the kill has cut it
                version, _, found = line.strip().partition(" ")
                self.said.append((int(version), found))

    def kill(self) -> None:
        """Send SIGKILL, and read what it had said."""
        self.process.kill()
        self.end()

    def end(self) -> str:
        """Wait until it has ended, and return what it wrote to stderr."""
        self.process.wait()
        self._reads.join()
        assert self.process.stdout
        assert self.process.stderr
        error = str(self.process.stderr.read())
        self.process.stdout.close()
        self.process.stderr.close()
        return error


class Watching:
    """A watcher on a thread of this process, which notes each version that it has, and what its calls raise."""

    def __init__(self, store: kvps.Store, job: str) -> None:
        self.said: list[Said] = []
        self.failed: BaseException | None = None
        self.traffic: Any = None
        self._watch = store.watch(job)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._watch as watch:
                while not self._stop.is_set():
                    _noted(watch, self.said)
                self.traffic = watch.traffic
        except BaseException as failed:
            self.failed = failed

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def watching(store: kvps.Store, job: str) -> Iterator[Watching]:
    """Watch a job on a thread while the block runs; no call of the watch may fail."""
    found = Watching(store, job)
    try:
        yield found
    finally:
        found.end()
    assert found.failed is None, found.failed


def _noted(watch: kvps.Watch, said: list[Said]) -> None:
    before = watch.version
    if (version := watch.update(wait=0.2)) != before:
        said.append((version, digest(watch.arrays)))


class Judge:
    """What was acknowledged to learners, and what watchers have seen, compared with the log of a job.

    acknowledged  version -> digest
    """

    def __init__(self) -> None:
        self.acknowledged: dict[int, str] = {}

    def add(self, said: Iterable[Said]) -> None:
        """Note what a learner was told. No version is acknowledged twice with other bits."""
        for version, found in said:
            assert self.acknowledged.setdefault(version, found) == found, f"version {version} was acknowledged twice"

    def check(self, job: Job, seen: Iterable[Iterable[Said]], items: int = ITEMS) -> int:
        """Assert that each acknowledged version is in the log once, with these bits; that watchers have seen nothing
        but committed versions, and went back only where the log notes a loss; and that the job has the bits of its last
        version. Return how many versions there are."""
        published = {commit.version: int(commit.plan.loss or 0) for commit in job.log()}
        entries = [int(fields["version"]) for _, fields in log_entries(job) if fields["kind"] == "commit"]
        lost = sum(int(fields["lost"]) for _, fields in log_entries(job) if fields["kind"] == "recover")
        assert len(entries) == len(set(entries)) or lost
        assert check_chain(job) == max(published, default=0)
        bits = {0: digest(weights(0, 0, items))} | {v: digest(weights(seed, v, items)) for v, seed in published.items()}
        if not lost:
            assert not (missing := set(self.acknowledged) - set(published)), f"lost: {sorted(missing)}"
            assert not {v for v, found in self.acknowledged.items() if bits[v] != found}, "acknowledged with other bits"
        for said in map(list, seen):
            versions = [version for version, _ in said]
            assert versions == sorted(versions) or lost, versions
            assert not [v for v, found in said if bits.get(v) != found and not lost], "seen, and never committed"
        with kvps.connect(job.access.client.url) as store, store.watch(job.name) as watch:
            version = watch.update()
            assert digest(watch.arrays) == bits[version]
        proof = proof_of(job)[1]
        assert proof.differs == "", proof.differs
        return len(published)


def learn(url: str, job: str, seed: str, shards: str, *options: str) -> None:
    """Publish version after version, until this process is killed, or another learner takes over."""
    takeover = "--takeover" in options
    with kvps.connect(url) as store, suppress(kvps.LeaseLost):
        policy = store.publisher(job, weights(0, 0), shards=int(shards), takeover=takeover)
        while True:
            model = weights(int(seed), policy.version + 1)
            version = policy.publish(model, loss=int(seed))
            os.write(1, f"{version} {digest(model)}\n".encode())


def watch(url: str, job: str) -> None:
    """Say each version that this process has, until it is killed."""
    with kvps.connect(url) as store, store.watch(job) as found:
        while True:
            said: list[Said] = []
            _noted(found, said)
            for version, bits in said:
                os.write(1, f"{version} {bits}\n".encode())


if __name__ == "__main__":
    {"learn": learn, "watch": watch}[sys.argv[1]](*sys.argv[2:])
