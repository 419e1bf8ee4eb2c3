"""Actors, learners and servers are killed while experience flows: each item that was acknowledged has one fate, and
each prompt of each epoch one end. Faults that are planted show that the oracle sees them.

PYTHONPATH=tests python tests/actors/test_rollouts_seams.py KILLS [SEED]   kills actors and learners by hand
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import redis
from helpers.learners import Watching, watching
from helpers.rollouts_oracle import JOB, Oracle, Process, Report, act, create, learn
from helpers.sentinels import watched_servers
from helpers.servers import ServerProcess, running_server
from helpers.waiting import eventually

import kvps
from kvps.job import Job
from kvps.protocol.scripts import SCRIPTS
from kvps.store import Store

pytestmark = pytest.mark.contract

IN_FILES = ("--appendonly", "yes", "--appendfsync", "always")
ACTORS = 3
few_or_many = pytest.mark.parametrize("kills", [6, pytest.param(40, marks=pytest.mark.slow)])


def rollouts(kills: int, **changed: object) -> kvps.Rollouts:
    """Return the settings of a job that is long enough for so many kills."""
    settings = {"prompts": 4 + kills, "epochs": 3, "group": 4, "capacity": 24, "max_staleness": 2} | changed
    return kvps.Rollouts(**settings)  # type: ignore[arg-type]


class Storm:
    """Actors and a learner at work on a job, and what is done to them, spread evenly over the job's prompts."""

    def __init__(self, store: Store, job: Job, folder: Path, seed: int) -> None:
        self._store = store
        self._job = job
        self._folder = folder
        self._chance = random.Random(seed)
        self._processes = list[Process]()
        self._actors = [self._begin("act", f"a{number}", 0) for number in range(ACTORS)]
        self._learner = self._begin("learn", 0)
        self.done = Counter[str]()

    def _begin(self, *words: object) -> Process:
        self._processes.append(Process(self._folder, self._store.url, *words))
        return self._processes[-1]

    def run(self, faults: dict[Callable[[], None], int], count: int) -> None:
        """Do so many of these faults, as often as their weights say, and wait for the end of the job."""
        units = self._job.rollouts.settings.units
        for number in range(count):
            assert eventually(lambda n=number: self.closed() >= (n + 1) * units // (count + 2)), self.says()
            time.sleep(self._chance.uniform(0, 0.1))
            [fault] = self._chance.choices(list(faults), list(faults.values()))
            fault()
            self.done[fault.__name__] += 1
        assert eventually(lambda: self.closed() == units), self.says()
        assert eventually(lambda: all(each.ended for each in self._processes)), self.says()
        for process in self._processes:
            process.check()

    def closed(self) -> int:
        """Return how many prompts have had their fate."""
        for process in self._processes:
            process.check()
        return int(self._store.client.call("HGET", self._job.access.keys.units, "done") or 0)

    def says(self) -> str:
        """Return what there is, for the message of a test that fails."""
        return f"after {self.done}: {self._job.rollouts.now()}, {self._job.state().run}"

    def end(self) -> None:
        for process in self._processes:
            process.kill()

    # -- faults -----------------------------------------------------------------------------------------------------

    def kill_actor(self) -> None:
        """Another process of its name follows at once, or one of another name, and the server waits for the dead."""
        number = self._chance.randrange(ACTORS)
        self._actors[number].kill()
        name = f"a{number}" if self._chance.random() < 0.8 else f"b{len(self._processes)}"
        self._actors[number] = self._begin("act", name, len(self._processes))

    def kill_learner(self) -> None:
        """The next one takes over, or waits until the lease of the dead one is over."""
        self._learner.kill()
        takeover = ["--takeover"] if self._chance.random() < 0.7 else []
        self._learner = self._begin("learn", len(self._processes), *takeover)

    def replace_learner(self) -> None:
        """The other one lives, and finds that out."""
        self._learner = self._begin("learn", len(self._processes), "--takeover")

    @property
    def of_processes(self) -> dict[Callable[[], None], int]:
        return {self.kill_actor: 5, self.kill_learner: 4, self.replace_learner: 1}


def judged(job: Job, folder: Path, watch: Watching | None = None) -> Report:
    """Return what the oracle says of all that was done."""
    oracle = Oracle.of(folder)
    found = oracle.check(job)
    if watch:
        oracle.judge.check(job, [watch.said])
    return found


def storm(store: Store, folder: Path, kills: int, seed: int, **settings: object) -> tuple[Counter[str], Report]:
    """Kill processes so many times."""
    job = create(store, rollouts(kills, **settings))
    with watching(store, JOB) as watch:
        acting = Storm(store, job, folder, seed)
        try:
            acting.run(acting.of_processes, kills)
        finally:
            acting.end()
    return acting.done, judged(job, folder, watch)


@few_or_many
@pytest.mark.parametrize("stale", ["again", "drop"])
def test_actors_and_learners_are_killed(store: Store, tmp_path: Path, kills: int, stale: str) -> None:
    done, report = storm(store, tmp_path, kills, kills, stale=stale)
    assert sum(done.values()) == kills
    assert report.acknowledged > 10 * kills, report
    assert report.trained > 8 * kills, report


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20])
def test_the_server_is_killed_and_has_all_that_was_acknowledged(tmp_path: Path, kills: int) -> None:
    with (
        ServerProcess.on_port(tmp_path, *IN_FILES) as server,
        kvps.connect(f"redis://127.0.0.1:{server.port}") as store,
    ):

        def restart_server() -> None:
            server.kill()
            server.start()

        job = create(store, rollouts(kills))
        with watching(store, JOB) as watch:
            acting = Storm(store, job, tmp_path, kills)
            try:
                acting.run({restart_server: 2, acting.kill_actor: 1, acting.kill_learner: 1}, kills)
            finally:
                acting.end()
        report = judged(job, tmp_path, watch)
        assert acting.done["restart_server"] > kills // 4
        assert report.trained > 8 * kills, report


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6])
def test_sentinels_fail_over(tmp_path: Path, kills: int) -> None:
    """With durability replicated nothing that was acknowledged is lost."""
    with watched_servers(*IN_FILES) as watched, kvps.connect(watched.url) as store:

        def fail_over() -> None:
            victim = watched.master
            victim.kill()
            assert eventually(lambda: watched.failed_over(victim))
            victim.start()
            assert eventually(watched.is_whole)

        job = create(store, rollouts(5 * kills), durability="replicated")
        with watching(store, JOB) as watch:
            acting = Storm(store, job, tmp_path, kills)
            try:
                acting.run({fail_over: 2, acting.kill_actor: 1, acting.kill_learner: 1}, kills)
            finally:
                acting.end()
        report = judged(job, tmp_path, watch)
        assert acting.done["fail_over"] > 1
        assert report.trained > 8 * kills, report


@pytest.mark.slow
@pytest.mark.parametrize("fills", [8])
def test_memory_is_filled(tmp_path: Path, fills: int) -> None:
    """Actors are told so, or wait; what was acknowledged is there."""
    with running_server("--maxmemory", "64mb", "--maxmemory-policy", "noeviction") as url, kvps.connect(url) as store:
        other = redis.Redis.from_url(url)

        def fill() -> None:
            size = 1 << 20
            while size > 64:
                try:
                    other.rpush("ballast", bytes(size))
                except redis.exceptions.OutOfMemoryError:
                    size //= 2
            time.sleep(0.3)
            other.delete("ballast")

        job = create(store, rollouts(fills))
        acting = Storm(store, job, tmp_path, fills)
        try:
            acting.run({fill: 3, acting.kill_actor: 1, acting.kill_learner: 1}, fills)
        finally:
            acting.end()
            other.close()
        report = judged(job, tmp_path)
        assert acting.done["fill"] > 1
        assert report.trained > 8 * fills, report


# -- faults that the oracle must see --------------------------------------------------------------------------------

FAULTS = {
    "none": ("", "", "", ""),
    "a fate is written twice": (
        "settle",
        "log_fates('rejected', version, texts, 'reason', reason)",
        "for _ = 1, 2 do log_fates('rejected', version, texts, 'reason', reason) end",
        "has two fates",
    ),
    "a stale item is trained on": (
        "publish",
        "present - found.base > s.staleness",
        "false",
        "versions late",
    ),
    "a prompt is skipped": (
        "prompt",
        "if not unit and fresh < s.units then unit = digits(fresh) end",
        "if fresh == 5 then fresh = 6; redis.call('HINCRBY', keys.units, 'done', 1) end\n"
        "if not unit and fresh < s.units then unit = digits(fresh) end",
        "without an end",
    ),
    "an item is lost when it is given back": (
        "settle",
        "    give_back(lot)\n",
        "    redis.call('ZREM', keys.taken_lots, lot); delete_lot(lot, read_lot(lot)); close_prompt(lot)\n",
        "without a fate",
    ),
    "an acknowledged item is dropped": (
        "put",
        "if number <= entry.last then return { 'OK', id } end",
        "if number <= entry.last or number == 7 then return { 'OK', id } end",
        "without a fate",
    ),
    "an item has other bits": ("take", "", "", "other bits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_sees_a_fault(store: Store, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, correct, planted, seen = FAULTS[fault]
    changed = {script: (correct, planted)} if correct else {}
    if fault == "a stale item is trained on":
        changed["take"] = ("if s.staleness < 0 then return", "if true then return")
    for name, (before, after) in changed.items():
        assert SCRIPTS[name].text.count(before) == 1, f"{name}.lua has changed: plant this fault anew"
        text = SCRIPTS[name].text.replace(before, SCRIPTS[name].header.placed(after))
        monkeypatch.setitem(SCRIPTS, name, replace(SCRIPTS[name], text=text))  # type: ignore[arg-type]
    if fault == "an item has other bits":
        monkeypatch.setattr("helpers.rollouts_oracle.made", _made_with_its_own_mind())
    job = create(store, rollouts(2, max_staleness=1, prompts=15))
    running = [
        *(
            Thread(target=act, args=(store.url, str(tmp_path / f"a{n}.lines"), f"a{n}", "0"), daemon=True)
            for n in range(3)
        ),
        Thread(target=learn, args=(store.url, str(tmp_path / "l.lines"), "1"), daemon=True),
    ]
    for each in running:
        each.start()
    for each in running:
        each.join(60)
        assert not each.is_alive()
    if not seen:
        judged(job, tmp_path)
    else:
        with pytest.raises(AssertionError, match=seen):
            judged(job, tmp_path)


def _made_with_its_own_mind() -> Callable[[str, int], dict[str, object]]:
    """Return a `made` of which every call but the first of an item changes one number."""
    from helpers.rollouts_oracle import made

    seen = Counter[str]()

    def changed(who: str, unit: int) -> dict[str, object]:
        item = made(who, unit)
        seen[who] += 1
        item["tokens"][0] += seen[who] > 1
        return item

    return changed


if __name__ == "__main__":
    how_many, chosen = int(sys.argv[1]), int((sys.argv[2:] or ["1"])[0])
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, running_server() as url, kvps.connect(url) as found_store:
        kinds, found = storm(found_store, Path(directory), how_many, chosen)
        print(f"{sum(kinds.values())} kills in {time.monotonic() - began:.0f} s: {dict(kinds)}; {found}")
