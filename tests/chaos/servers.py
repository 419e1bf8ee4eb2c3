"""Redis is killed and loses its last writes, by a cut file or a lagging replica: kvps detects and reports the loss."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
from helpers.faults import MortalServer
from helpers.harness import check_chain, log_entries
from helpers.internals import segments_of
from helpers.servers import private_directory
from kvps_aggregator import Aggregator, Outcome

import kvps
from chaos.arena import Arena, shared_out
from chaos.crew import Crew
from chaos.report import Result
from chaos.verdict import Ack, acknowledged
from kvps.connection.client import Client
from kvps.job import Job
from kvps.protocol.job_state import Entry, State
from kvps.store import Store

FILES = (("always", False), ("everysec", True))
"""How a server syncs its file, and whether the end of the file is cut off when the server is killed."""
PATIENT = {"worker_timeout_ms": 60_000, "lease_ms": 300}


def redis_is_killed(arena: Arena, kills: int = 40, pause_s: float = 0.4, **settings: Any) -> Result:
    """Kill Redis, half of the times with its file whole, as `appendfsync always` leaves it, half with its end cut."""
    result = Result("redis", "Redis killed", arena.seed, needed=kills)
    rolled_back = 0
    for fsync, cuts in FILES:
        with ExitStack() as stack:
            server = stack.enter_context(MortalServer(stack.enter_context(private_directory()), fsync=fsync))
            store = stack.enter_context(Store(Client(server.url)))
            for mode, staleness, share in shared_out(kills // 2, arena.seed):
                job = arena.job(store, staleness=staleness, **PATIENT | settings)
                with arena.crew(job, result) as crew:
                    losses = Losses(job, crew.forgiven, synced=not cuts)
                    crew.start_all(3, job.layout.shards, log=True)
                    crew.until(lambda j=job: j.state().version > 3)
                    losses.floor = server.log().stat().st_size
                    for _ in range(share):
                        crew.wait(pause_s * arena.random.uniform(0.5, 1.5))
                        server.kill()
                        before = state_in(server.folder, job.name)
                        if cuts:
                            whole = server.log().read_bytes()
                            # Cut off about the last second of the job, not so much that the job itself is lost.
                            cut = min(arena.random.randint(0, 150_000), len(whole) - losses.floor)
                            server.log().write_bytes(whole[: len(whole) - cut])
                        after, kept = found_in(server.folder, job.name)
                        losses.note(crew, before, after)
                        server.start()
                        crew.until(lambda j=job, h=after.history: j.state().history != h)
                        if segments_of(job):
                            crew.until(lambda j=job: goes_on(j))
                            losses.settle(crew, kept)
                        losses.floor = server.log().stat().st_size
                    crew.finish()
                    result.problems += losses.unsaid(arena.processes.log)
                    if losses.rollbacks and not cuts:
                        result.problems.append(f"{job.name}: the job rolled back, though Redis had lost nothing")
                    result.figures |= {
                        what: result.figures.get(what, 0) + count for what, count in losses.rolled_back().items()
                    }
                rolled_back += losses.versions
                key = f"appendfsync {fsync}{', its file cut' if cuts else ''}"
                result.faults[key] = result.faults.get(key, 0) + share
                arena.say(f"{key}, {mode}: {share} kills, {losses.versions} versions rolled back")
    result.figures["versions that Redis lost, all reported"] = rolled_back
    return result.close()


def rewriting(store: Store) -> bool:
    """Return whether the server is still rewriting its file: until that ends, the old, cut file counts."""
    told = store.client.call("INFO", "persistence")
    return bool(told["aof_rewrite_in_progress"] or told["aof_rewrite_scheduled"])


def state_in(folder: Path, job: str) -> State:
    """Return the state that a server would load from a dead server's files, which are not touched."""
    return found_in(folder, job)[0]


def found_in(folder: Path, job: str) -> tuple[State, Kept]:
    """Return the same, and what of it would survive a loss of shared memory."""
    with private_directory() as copy:
        shutil.copytree(folder, copy / "d", ignore=shutil.ignore_patterns("s"))
        with MortalServer(copy / "d") as probe, Store(Client(probe.url)) as store:
            found = store.job(job)
            state = found.state()
            return state, Kept.of(found, state)


class Kept(NamedTuple):
    """What survives a loss of shared memory: the version that Redis was last given, and the contributions in it."""

    version: int
    contributions: frozenset[Ack]

    @classmethod
    def of(cls, job: Job, state: State) -> Kept:
        version = job.access.transport.safe_version(state.version)
        return cls(version, committed(job, version))


def committed(job: Job, version: int) -> frozenset[Ack]:
    """Return the contributions that the log holds up to a version."""
    plans = [commit.plan for commit in job.log() if commit.version <= version]
    ended = [c for plan in plans for c in plan.contributions + plan.rejected]
    return frozenset((c.worker, c.incarnation, c.seq) for c in ended)


def goes_on(job: Job) -> bool:
    """Return whether a version was committed after the last loss."""
    last = job.access.client.call("XREVRANGE", job.access.keys.commits, "+", "-", "COUNT", 200)
    return next((f["kind"] for _, f in last if f["kind"] in ("commit", "recover")), "") == "commit"


def recoveries(job: Job) -> list[Entry]:
    """Return the log's entries about losses, oldest first."""
    return [entry for entry in log_entries(job) if entry[1]["kind"] == "recover"]


class Losses:
    """The losses of a server over its restarts, found by looking into its files; and whether kvps reported each.

    lost      acknowledged contributions that the server forgot, which are forgiven
    versions  the number of committed versions that it forgot
    floor     the length of its file when all processes had noticed its last start
    rollbacks the number of versions lost at each rollback to the mirror, as the log says
    """

    def __init__(self, job: Job, lost: set[Ack], synced: bool = True) -> None:
        self.lost = lost
        self.versions = 0
        self.floor = 0
        self.rollbacks: list[int] = []
        self._job = job
        self._synced = synced
        self._each: list[int] = []
        self._seen = 0
        self._lives: list[int] | None = None
        self._problems: list[str] = []

    def note(self, crew: Crew, before: State, after: State) -> None:
        """Note that the server went from the state `before` to the earlier state `after`."""
        self._each.append(before.version - after.version)
        self.versions += before.version - after.version
        self.lost |= {ack for ack in acknowledged(crew.acks) if not _remembered(ack, after)}

    def settle(self, crew: Crew, kept: Kept) -> None:
        """Over shared memory: read from the log where the job continued, at the server's state or at the mirror."""
        life, *rollbacks = recoveries(self._job)[self._seen :]
        self._seen += 1 + len(rollbacks)
        self._lives = [*(self._lives or ()), int(life[1]["lost"])]
        for entry, fields in rollbacks:
            self._rolled(crew, kept, int(life[1]["version"]), entry, fields)

    def fell(self, crew: Crew, kept: Kept, version: int, rolls_back: bool) -> None:
        """Note a loss of shared memory alone: the job was at `version`, and continues from the mirror (`kept`)."""
        found = recoveries(self._job)[self._seen :]
        self._seen, self._lives = self._seen + len(found), self._lives or []
        if len(found) != rolls_back:
            self._problems.append(f"memory was lost once at version {version}, the log says so {len(found)} times")
        for entry, fields in found:
            self._rolled(crew, kept, version, entry, fields)
            if int(fields["version"]) != kept.version:  # no holder was alive to give Redis more
                self._problems.append(f"the log goes on from version {fields['version']}, not from {kept.version}")

    def _rolled(self, crew: Crew, kept: Kept, version: int, entry: str, fields: dict[str, str]) -> None:
        """Check that, by the log's `entry`, the job went from `version` back to the mirror, and no further. What was
        acknowledged before and is not in the mirror is lost with the memory.

        A holder that still had a newer version may have mirrored it since the server's files were looked at.
        """
        to, lost = int(fields["version"]), int(fields["lost"])
        if not kept.version <= to <= version or lost != version - to:
            self._problems.append(f"went from {version} to {kept.version} or later, the log says to {to}, {lost} lost")
        self.rollbacks.append(lost)
        behind = [f for _, f in log_entries(self._job, entry) if f["kind"] == "join"]
        anew = {(f["worker"], f["incarnation"]) for f in behind}
        told = {ack for ack in acknowledged(crew.acks) if ack[:2] not in anew}
        self.lost |= told - committed(self._job, to)

    def rolled_back(self) -> dict[str, int]:
        """Return the figures of a job over shared memory; none over Redis."""
        if not segments_of(self._job):
            return {}
        return {"times memory was lost too": len(self.rollbacks), "versions lost by that": sum(self.rollbacks)}

    def unwarned(self, log: Path) -> Counter[int]:
        """Return the rollbacks, as numbers of versions, of which no aggregator has warned so far."""
        counts = re.findall(
            rf"job {self._job.name}: shared memory.*last ([\d,]+) versions?,", log.read_text(errors="replace")
        )
        return Counter(self.rollbacks) - Counter(int(count.replace(",", "")) for count in counts)

    def unsaid(self, log: Path) -> list[str]:
        """Return the losses that kvps did not notice, or reports too small.

        A process that lost the reply to a commit never knew that version, so one version less may be reported. More may
        be if the file was not `synced` with every write: while a sync runs, Redis puts writes off but answers at once.
        """
        job, text = self._job, log.read_text(errors="replace")
        lives = self._lives
        if lives is None:
            lives = [int(fields["lost"]) for _, fields in recoveries(job)]
        counts = re.findall(rf"job {job.name}: lost the last ([\d,]+) version", text)
        warned = {int(count.replace(",", "")) for count in counts}
        terms = Counter(re.findall(rf"job {job.name}: holds shard \d+ under term (\S+)", text))
        problems = [f"term {term} was given {count} times" for term, count in terms.items() if count > 1]
        problems += self._problems
        problems += [f"no aggregator warned of a loss of {lost} with the memory" for lost in self.unwarned(log)]
        if len(lives) != len(self._each):
            problems.append(f"the server was restarted {len(self._each)} times, noticed were {len(lives)}")
        for size, logged in zip(self._each, lives, strict=False):
            most = size if self._synced else math.inf
            if not any(size - 1 <= number <= most for number in {logged} | warned):
                problems.append(f"{size} versions were lost, the log says {logged}, the warnings {sorted(warned)}")
        return problems


def _remembered(ack: Ack, state: State) -> bool:
    """Return whether a server in this state has accepted the contribution. Incarnations begin with a growing number."""
    worker, incarnation, seq = ack
    member = state.members.get(worker)
    if not member:
        return False
    if member.incarnation == incarnation:
        return seq <= member.accepted
    return int(incarnation.split("-")[0]) < int(member.incarnation.split("-")[0])


def file_is_cut(arena: Arena, cuts: int = 400) -> Result:
    """Cut the append-only file at every byte of the last commits: each cut must leave one whole earlier state."""
    result = Result("cuts", "the append-only file cut at every byte", arena.seed, needed=cuts)
    mixed, unsaid, states = [], [], set()
    with private_directory() as folder, MortalServer(folder) as server, Store(Client(server.url)) as store:
        job = store.create_job(
            "cuts", {"x": np.zeros(3, np.float32)}, shards=2, reduction="sum", optimizer=kvps.SGD(lr=1.0), **PATIENT
        )
        sizes = []
        with job.join("w0") as session, _holding(job) as aggregator:
            for round_ in range(6):
                session.pull()
                session.push({"x": np.full(3, 2.0**round_, np.float32)})
                assert aggregator.work() is Outcome.COMMITTED
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
                recovered = [f for _, f in here.access.client.call("XRANGE", here.access.keys.commits, "-", "+")][-1]
                if recovered["kind"] != "recover" or int(recovered["lost"]) != 6 - version:
                    unsaid.append(cut)
                witness.work()
            while rewriting(store):  # the rewriting child would hold connections open for seconds
                time.sleep(0.005)
            server.kill()
            if number % 100 == 99:
                arena.say(f"{number + 1} cuts")
        server.restore(whole, sizes[-1])
        server.start()
    result.faults["cuts"] = cuts
    result.figures |= {"states found": ", ".join(f"version {v}" for v in sorted(states)), "mixed states": len(mixed)}
    result.problems += [f"cut at byte {cut}: a mixed state" for cut in mixed]
    result.problems += [f"cut at byte {cut}: the loss is not reported" for cut in unsaid]
    return result.close()


@contextmanager
def _holding(job: Job, remembers: int = 0):
    """Yield an aggregator that holds all shards, and remembers version `remembers` from before the server's restart."""
    aggregator = Aggregator(job, Event())
    try:
        if remembers:
            aggregator.held.leases.newest, aggregator.held.leases._run_id = remembers, "an earlier one"
            while not aggregator.held.leases.watch():  # the server is rewriting its file
                time.sleep(0.005)
        aggregator.hold()
        yield aggregator
    finally:
        aggregator.release()
