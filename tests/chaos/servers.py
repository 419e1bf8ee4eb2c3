"""Redis is killed and loses its last writes, by its file or by a replica that lagged: that is detected, and said."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import numpy as np
from conftest import private_directory
from faults import MortalServer
from harness import check_chain
from kvps_aggregator import Aggregator

import kvps
from chaos.arena import BINARY, MODES, Arena
from chaos.crew import Crew
from chaos.report import Result
from chaos.verdict import Ack, acknowledged
from kvps.client import Client
from kvps.job import Job
from kvps.state import State
from kvps.store import Store

FILES = (("always", False), ("everysec", True))
"""How a server syncs its file, and whether the end of that is cut off when it is killed."""
PATIENT = {"worker_timeout_ms": 60_000, "lease_ms": 300}


def redis_is_killed(arena: Arena, kills: int = 40, pause_s: float = 0.4) -> Result:
    """Half of the kills with the file whole, as `appendfsync always` leaves it; half with its end cut off."""
    result = Result("redis", "Redis killed", arena.seed, needed=kills)
    rolled_back = 0
    for fsync, cuts in FILES:
        with ExitStack() as stack:
            server = stack.enter_context(MortalServer(BINARY, stack.enter_context(private_directory()), fsync=fsync))
            store = stack.enter_context(Store(Client(server.url)))
            for number, (mode, staleness) in enumerate(MODES.items()):
                job = arena.job(store, staleness=staleness, **PATIENT)
                share = kills // 2 // 3 + (number < kills // 2 % 3)
                if not share:
                    continue
                losses = Losses(job)
                with arena.crew(job, at_once=True) as crew:
                    crew.start_all(3, 2, log=True)
                    crew.until(lambda j=job: j.state().version > 3)
                    losses.floor = server.log().stat().st_size
                    for _ in range(share):
                        crew.wait(pause_s * arena.random.uniform(0.5, 1.5))
                        server.kill()
                        before = state_in(server.folder, job.name)
                        if cuts:
                            whole = server.log().read_bytes()
                            # Not so far that the job itself would be gone: its last second, not its life.
                            cut = min(arena.random.randint(0, 150_000), len(whole) - losses.floor)
                            server.log().write_bytes(whole[: len(whole) - cut])
                        after = state_in(server.folder, job.name)
                        losses.note(crew, before, after)
                        server.start()
                        crew.until(lambda j=job, h=after.history: j.state().history != h)
                        crew.until(lambda s=store: not rewriting(s))
                        losses.floor = server.log().stat().st_size
                    crew.finish()
                    result.problems += losses.unsaid(arena.zygote.log)
                    result.verdict.add(arena.judge(store, crew, frozenset(losses.lost)))
                rolled_back += losses.versions
                key = f"appendfsync {fsync}{', its file cut' if cuts else ''}"
                result.faults[key] = result.faults.get(key, 0) + share
                arena.say(f"{key}, {mode}: {share} kills, {losses.versions} versions rolled back")
    result.figures["versions that Redis lost, all of them said"] = rolled_back
    return result.close()


def rewriting(store: Store) -> bool:
    """Whether the server still writes its file anew: until then an old, cut one counts."""
    told = store.client.call("INFO", "persistence")
    return bool(told["aof_rewrite_in_progress"] or told["aof_rewrite_scheduled"])


def state_in(folder: Path, job: str) -> State:
    """What a server would make of the files of another that is dead; those are not touched."""
    with private_directory() as copy:
        shutil.copytree(folder, copy / "d", ignore=shutil.ignore_patterns("s"))
        with MortalServer(BINARY, copy / "d") as probe, Store(Client(probe.url)) as store:
            return store.job(job).state()


class Losses:
    """What a server's lives have lost, found by looking into its files; and whether kvps said it too.

    lost      acknowledged contributions that the server forgot
    versions  committed versions that it forgot
    floor     how long its file was when all had noticed its last life
    """

    def __init__(self, job: Job) -> None:
        self.lost: set[Ack] = set()
        self.versions = 0
        self.floor = 0
        self._job = job
        self._each: list[int] = []

    def note(self, crew: Crew, before: State, after: State) -> None:
        """The server went from one state to an earlier one."""
        self._each.append(before.version - after.version)
        self.versions += before.version - after.version
        self.lost |= {ack for ack in acknowledged(crew.acks) if not _remembered(ack, after)}

    def unsaid(self, log: Path) -> list[str]:
        """Rollbacks that kvps did not notice, or of which it says too little.

        Who lost the reply to a commit never knew of that version, so one less may be said.
        """
        job, text = self._job, log.read_text(errors="replace")
        entries = job.client.call("XRANGE", job.keys.commits, "-", "+")
        lives = [int(fields["lost"]) for _, fields in entries if fields["kind"] == "recover"]
        warned = {int(count) for count in re.findall(rf"job {job.name}: the last (\d+) versions are lost", text)}
        terms = Counter(re.findall(rf"job {job.name}: holds shard \d+ under term (\S+)", text))
        problems = [f"term {term} was given to {count}" for term, count in terms.items() if count > 1]
        if len(lives) != len(self._each):
            problems.append(f"{len(self._each)} new lives of the server, noticed were {len(lives)}")
        for size, said in zip(self._each, lives, strict=False):
            if not any(size - 1 <= number <= size for number in {said} | warned):
                problems.append(f"{size} versions were lost, said were {said}, and warned was of {sorted(warned)}")
        return problems


def _remembered(ack: Ack, state: State) -> bool:
    """Whether a server in this state has accepted it. Incarnations begin with a number that grows."""
    worker, incarnation, seq = ack
    member = state.members.get(worker)
    if not member:
        return False
    if member.incarnation == incarnation:
        return seq <= member.accepted
    return int(incarnation.split("-")[0]) < int(member.incarnation.split("-")[0])


def file_is_cut(arena: Arena, cuts: int = 400) -> Result:
    """The append-only file ends at every byte of the last commits: each time it is one whole earlier state."""
    result = Result("cuts", "the append-only file cut at every byte", arena.seed, needed=cuts)
    mixed, unsaid, states = [], [], set()
    with private_directory() as folder, MortalServer(BINARY, folder) as server, Store(Client(server.url)) as store:
        job = store.create_job(
            "cuts", {"x": np.zeros(3, np.float32)}, shards=2, reduction="sum", optimizer=kvps.SGD(lr=1.0), **PATIENT
        )
        sizes = []
        with job.join("w0") as session, _holding(job) as aggregator:
            for round_ in range(6):
                session.pull()
                session.push({"x": np.full(3, 2.0**round_, np.float32)})
                assert aggregator.work()
                sizes.append(server.log().stat().st_size)
        server.kill()
        whole = server.files()
        for number, cut in enumerate(range(max(sizes[0], sizes[-1] - cuts), sizes[-1])):
            server.restore(whole, cut)
            server.start()
            here = store.job("cuts")
            state = here.state()
            states.add(state.version)
            version, weights = here.snapshot()
            want = np.full(3, 1.0 - 2.0**version, np.float32)
            if not check_chain(here) == version == state.clock["w0"] or not np.array_equal(weights["x"], want):
                mixed.append(cut)
            with _holding(here, remembers=6) as witness:
                recovered = [f for _, f in here.client.call("XRANGE", here.keys.commits, "-", "+")][-1]
                if recovered["kind"] != "recover" or int(recovered["lost"]) != 6 - version:
                    unsaid.append(cut)
                witness.work()
            while rewriting(store):  # its child would hold connections open for seconds
                time.sleep(0.005)
            server.kill()
            if number % 100 == 99:
                arena.say(f"{number + 1} cuts")
        server.restore(whole, sizes[-1])
        server.start()
    result.faults["cuts"] = cuts
    result.figures |= {"states found": ", ".join(f"version {v}" for v in sorted(states)), "mixed states": len(mixed)}
    result.problems += [f"cut at byte {cut}: a mixed state" for cut in mixed]
    result.problems += [f"cut at byte {cut}: the loss is not said" for cut in unsaid]
    return result.close()


@contextmanager
def _holding(job: Job, remembers: int = 0):
    """An aggregator that holds all shards, and remembers a version from before the server's new life."""
    aggregator = Aggregator(job, Event())
    try:
        if remembers:
            aggregator._leases.newest, aggregator._leases._life = remembers, "an earlier one"
            aggregator._leases.watch()
        aggregator.hold()
        yield aggregator
    finally:
        aggregator.release()
