"""Actors and learners of experience in processes of their own, which tests kill, and the oracle of what they say.

    python tests/helpers/rollouts_oracle.py act URL FILE NAME PROCESS
    python tests/helpers/rollouts_oracle.py learn URL FILE SEED [--takeover]

Each appends to a file of its own what it is about to do and what it was told, a line each, written at once. The oracle
compares the lines of all of them with the log. It uses nothing of kvps but the raw entries of the log.

    about WHO UNIT VERSION     an actor is about to put the item that it calls WHO
    told WHO ID                it was told the id, "-" for None, "full" for ServerFull
    took ID WHO UNIT VERSION   a learner took it, with the bits that WHO stands for ("wrong" in place of "took": others)
    rejects ID...              it is about to reject
    rejected ID...             and was told so
    trained VERSION DIGEST ID...   it was told that the version of these weights is trained on these
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from helpers.harness import log_entries
from helpers.learners import Judge, digest, weights
from helpers.zygote import Popen

import kvps
from kvps.actors.taking import Item
from kvps.arrays.layout import DTYPE, Layout
from kvps.arrays.state_dict import pack
from kvps.config import JobConfig, Metadata
from kvps.errors import ItemsRefused, LeaseLost, NoServer, ServerFull
from kvps.job import Job
from kvps.store import Store

JOB = "policy"
Write = Callable[..., None]


def create(
    store: Store, rollouts: kvps.Rollouts, durability: str = "memory", worker_timeout_ms: int = 2_000, shards: int = 2
) -> Job:
    """Create the job with version 0 of `weights`, and with times after which what is dead is soon taken for dead."""
    model = weights(0, 0)
    layout = Layout.of_state(model, shards, None)
    flat = np.zeros(layout.size, DTYPE)
    pack(layout, model, flat)
    config = JobConfig(
        staleness=-1,
        shards=shards,
        durability=durability,
        transport="redis",
        lease_ms=1_000,
        worker_timeout_ms=worker_timeout_ms,
        metadata=Metadata(publishes=1, rollouts=rollouts.text),
    )
    return store.create_published(JOB, layout, flat, config)


def made(who: str, unit: int) -> dict[str, Any]:
    """Return the item that `who` stands for; a few have several chunks."""
    rng = np.random.default_rng(zlib.crc32(who.encode()))
    size = 300_000 if rng.random() < 0.02 else int(rng.integers(1, 2_000))
    return {"tokens": rng.integers(0, 1 << 40, size), "reward": float(rng.normal()), "who": who, "unit": unit}


def _is_right(item: Item) -> bool:
    expected = made(item.data["who"], item.data["unit"])
    same = all(item.data[name] == expected[name] for name in ("reward", "who", "unit"))
    return same and np.array_equal(item.data["tokens"], expected["tokens"]) and item.unit == item.data["unit"]


def lines_to(path: Path) -> Write:
    """Return a function that appends a line to a file, so that a kill leaves it whole."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(*words: object) -> None:
        os.write(file, (" ".join(map(str, words)) + "\n").encode())

    return write


def _connected(url: str) -> Store:
    """Return a store on a server that may just be started again."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return kvps.connect(url)
        except NoServer:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


# -- what the processes do ------------------------------------------------------------------------------------------


def act(url: str, path: str, name: str, process: str) -> None:
    """Answer prompts until all have had their fate."""
    chance, write, number = random.Random(f"{name}/{process}"), lines_to(Path(path)), 0
    with _connected(url) as store, store.watch(JOB, actor=name) as watch:
        while (unit := watch.next_unit()) is not None:
            watch.update()
            number += 1
            who, version = f"{name}/{process}/{number}", watch.version
            time.sleep(chance.uniform(0, 0.01))
            write("about", who, unit, version)
            try:
                id = watch.rollouts.put(made(who, unit), version=version, unit=unit)
            except ServerFull:
                id = "full"
                time.sleep(0.05)
            write("told", who, id or "-")
    write("end")


def learn(url: str, path: str, seed: str, *options: str) -> None:
    """Take, give back, reject and train until all prompts have had their fate, or another learner takes over."""
    with _connected(url) as store, suppress(LeaseLost):
        with store.publisher(JOB, weights(0, 0), takeover="--takeover" in options) as policy:
            _Learner(policy, int(seed), lines_to(Path(path))).run()
        lines_to(Path(path))("end")


class _Learner:
    def __init__(self, policy: kvps.Publisher, seed: int, write: Write) -> None:
        self._policy = policy
        self._seed = seed
        self._write = write
        self._chance = random.Random(f"learner/{seed}")
        self._turns = count(seed)
        self._under_way: tuple[object, ...] = ()  # what is said of a publish once it is made

    def run(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except ItemsRefused:  # too old by now: they wait again, and are dropped
                self._under_way = ()
                self._policy.rollouts.give_back()

    def _turn(self) -> bool:
        """Take some groups, and decide what becomes of them. Return whether there may be more."""
        chance, rollouts = self._chance, self._policy.rollouts
        order, wait = chance.choice(["oldest", "newest", "random"]), chance.choice([None, None, 0.02, 0.2])
        items = rollouts.take(groups=chance.randint(1, 3), wait=wait, order=order)
        for item in items:
            self._write("took" if _is_right(item) else "wrong", item.id, item.data["who"], item.unit, item.version)
        if self._under_way:
            self._policy.wait()
            self._note()
        trained = list[Item]()
        for unit in dict.fromkeys(item.unit for item in items):
            group, turn = [item for item in items if item.unit == unit], next(self._turns) % 16
            ids = [item.id for item in group]
            if turn == 5:
                rollouts.give_back(group)
            elif turn == 13:
                self._write("rejects", *ids)
                rollouts.reject(ids, "by chance")
                self._write("rejected", *ids)
            else:
                trained += group
        if trained:
            self._train(trained)
        return bool(items) or wait is not None

    def _train(self, items: list[Item]) -> None:
        version = self._policy.version + 1
        model = weights(self._seed, version)
        self._under_way = ("trained", version, digest(model), *(item.id for item in items))
        wait = self._chance.random() < 0.5
        self._policy.publish(model, trained=items, loss=self._seed, wait=wait)
        if wait:
            self._note()

    def _note(self) -> None:
        self._write(*self._under_way)
        self._under_way = ()


class Process:
    """A process of this module."""

    def __init__(self, folder: Path, url: str, verb: str, *words: object) -> None:
        name = "-".join(str(word).lstrip("-") for word in (verb, *words))
        self.path = folder / f"{name}.lines"
        self._said = folder / f"{name}.stderr"
        command = [sys.executable, __file__, verb, url, str(self.path), *map(str, words)]
        with self._said.open("w") as said:
            self.process = Popen(command, stdout=said, stderr=subprocess.STDOUT)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """Send SIGKILL, and wait until it is dead."""
        self.process.kill()
        self.process.wait()

    def check(self) -> None:
        """Assert that it did not end by an error."""
        code = self.process.poll()
        assert code in (None, 0, -9), f"{self._said.name} ended with {code}: {self._said.read_text()[-3000:]}"


# -- the oracle -----------------------------------------------------------------------------------------------------


class Logged(NamedTuple):
    """A fate in the log."""

    kind: str
    version: int
    unit: int
    base: int
    reason: str


class Report(NamedTuple):
    """How much the oracle has looked at."""

    put: int
    acknowledged: int
    trained: int
    stale: int
    rejected: int
    versions: int


class Oracle:
    """What all processes have said."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.about: dict[str, tuple[int, int]] = {}  # who -> unit, version
        self.told: dict[str, str] = {}  # who -> id
        self.took: dict[str, tuple[str, int, int]] = {}  # id -> who, unit, version
        self.wrong = list[str]()
        self.rejects, self.rejected = set[str](), set[str]()
        self.trained: dict[str, int] = {}  # id -> version
        self.judge = Judge()
        for line in lines:
            self._read(*line.split())

    @classmethod
    def of(cls, folder: Path) -> Oracle:
        """Return that of all files in a folder."""
        return cls(line for path in sorted(folder.glob("*.lines")) for line in path.read_text().splitlines())

    def _read(self, kind: str, *words: str) -> None:
        match kind, *words:
            case "about", who, unit, version:
                self.about[who] = (int(unit), int(version))
            case "told", who, id:
                self.told[who] = id
            case "took", id, who, unit, version:
                now = (who, int(unit), int(version))
                assert self.took.setdefault(id, now) == now, f"{id} was taken as two different items"
            case "wrong", *all_of_it:
                self.wrong.append(" ".join(all_of_it))
            case "rejects", *ids:
                self.rejects.update(ids)
            case "rejected", *ids:
                self.rejected.update(ids)
            case "trained", version, bits, *ids:
                self.judge.add([(int(version), bits)])
                for id in ids:
                    assert id not in self.trained, f"a learner was told twice that {id} is trained"
                    self.trained[id] = int(version)
            case _:
                assert kind == "end", kind

    def check(self, job: Job) -> Report:
        """Assert that each item has one fate, each prompt one end, and that nobody was told anything else."""
        settings = job.rollouts.settings
        fates = self._fates(job)
        assert not self.wrong, f"taken with other bits: {self.wrong[:3]}"
        acknowledged = {id: who for who, id in self.told.items() if id not in ("-", "full")}
        assert len(acknowledged) == sum(id not in ("-", "full") for id in self.told.values()), "an id of two items"
        assert not (lost := [id for id in acknowledged if id not in fates]), f"acknowledged, and without a fate: {lost}"
        for id, fate in fates.items():
            who = self._who(id, acknowledged)
            assert who is None or self.about[who] == (fate.unit, fate.base), f"{id} is {who}: {fate}, {self.about[who]}"
            assert who is None or self.told.get(who, id) == id, f"{id} of {who} has a fate, who was told None: {fate}"
            assert fate.kind != "trained" or id in self.took, f"{id} is trained, and no learner has taken it"
            if settings.max_staleness is not None and fate.kind == "trained":
                late = fate.version - 1 - fate.base
                assert 0 <= late <= settings.max_staleness, f"{id} is trained {late} versions late"
        for id, version in self.trained.items():
            assert fates[id][:2] == ("trained", version), f"{id} was said to be trained in {version}: {fates[id]}"
        assert not [id for id in self.rejected if fates[id].kind != "rejected"], "said to be rejected"
        rejected = {id for id, fate in fates.items() if fate.kind == "rejected"}
        assert rejected <= self.rejects, f"nobody has rejected {rejected - self.rejects}"
        self._check_prompts(settings, fates)
        told = {each.id: (each.fate, each.version, each.unit) for each in job.rollouts.fates()}
        assert told == {id: (fate.kind, fate.version, fate.unit) for id, fate in fates.items()}
        kinds = Counter(fate.kind for fate in fates.values())
        now = job.rollouts.now()
        assert (now.waiting, now.taken, now.nbytes) == (0, 0, 0), now
        assert (now.trained, now.stale, now.rejected) == (kinds["trained"], kinds["stale"], kinds["rejected"]), now
        versions = self.judge.check(job, [])
        return Report(
            len(self.about), len(acknowledged), *(kinds[k] for k in ("trained", "stale", "rejected")), versions
        )

    def _who(self, id: str, acknowledged: dict[str, str]) -> str | None:
        """Return whose item it is; None if its actor was killed before it was told, and no learner has taken it."""
        return acknowledged.get(id) or (self.took[id][0] if id in self.took else None)

    def _fates(self, job: Job) -> dict[str, Logged]:
        """Return id -> its fate in the log. Nothing was lost, so each has one."""
        fates: dict[str, Logged] = {}
        for _, fields in log_entries(job):
            kind, version = fields["kind"], int(fields.get("version", 0))
            if kind == "commit":
                kind, texts = "trained", _plan_of(fields).get("trained", [])
            elif kind in ("stale", "rejected"):
                texts = fields["items"].split(",")
            else:
                assert kind != "recover" or fields["lost"] == "0", fields
                continue
            for text in texts:
                id, unit, base = text.split(" ")
                fate = Logged(kind, version, int(unit), int(base), fields.get("then", fields.get("reason", "")))
                assert id not in fates, f"{id} has two fates: {fates[id]} and {fate}"
                fates[id] = fate
        return fates

    def _check_prompts(self, settings: kvps.Rollouts, fates: dict[str, Logged]) -> None:
        """Assert that each prompt of each epoch ended once: trained in one version, rejected, or dropped."""
        ends: dict[int, list[Logged]] = defaultdict(list)
        for fate in fates.values():
            if fate.kind != "stale" or fate.reason == "drop":
                ends[fate.unit].append(fate)
        assert not (missing := set(range(settings.units)) - set(ends)), f"without an end: {sorted(missing)[:9]}"
        assert set(ends) == set(range(settings.units)), "of no prompt"
        for unit, found in ends.items():
            assert len({(fate.kind, fate.version) for fate in found}) == 1, f"prompt {unit} ended twice: {found}"
            wanted = settings.group if found[0].kind != "stale" else len(found)
            assert len(found) == wanted <= settings.group, f"prompt {unit} has {len(found)} items: {found}"


def _plan_of(fields: dict[str, str]) -> dict[str, Any]:
    return dict(json.loads(fields["plan"]))


if __name__ == "__main__":
    {"act": act, "learn": learn}[sys.argv[1]](*sys.argv[2:])
