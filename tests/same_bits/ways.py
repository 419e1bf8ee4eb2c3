"""The ways in which the jobs are trained. Each run is judged, and names what it did."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from chaos.arena import Arena
from chaos.crew import Crew
from chaos.verdict import remains
from helpers.clusters import running_cluster
from helpers.digits_job import in_thread, run_workers
from helpers.faults import MortalServer
from helpers.harness import aggregating, log_entries
from helpers.servers import private_directory, running_server

from kvps.connection.client import Client
from kvps.connection.cluster import open_client
from kvps.job import Job
from kvps.store import Store
from same_bits.job import VERSIONS, Kind, sha256_of
from same_bits.workers import DIGITS

COUNTS = (1, 2, 3, 5, 8)
SHARDS = (1, 3)
PLACES = (("Redis", 1), ("Redis", 3), ("shared memory", 1))
"""Where arrays are, and in how many shards; a job in shared memory has one."""
BACKUPS = (0, 3)
_SLOW = 40.0  # a unit takes 20 ms or so: a run lasts long enough to be killed in


@dataclass
class Run:
    """One run: what it did, what is not as promised, and how many processes of each kind were killed. `fault` is what
    was planted, so that something is not as promised. `sha256` is that of the weights, where it is shown."""

    did: str
    kind: Kind
    problems: list[str]
    kills: Counter[str] = field(default_factory=Counter)
    fault: str = ""
    sha256: str = ""


# -- threads --------------------------------------------------------------------------------------------------------


def on_threads(
    arena: Arena,
    kind: Kind = DIGITS,
    counts: Iterable[int] = COUNTS,
    places: Iterable[tuple[str, int]] = PLACES,
    backups: Iterable[int] = BACKUPS,
) -> Iterator[Run]:
    """Train with so many workers, over Redis and shared memory, backup tasks on and off."""
    with running_server() as url, Store(Client(url)) as store:
        for n, (count, (place, shards), backup) in enumerate(product(counts, places, backups)):
            yield _on_threads(arena, store, kind, f"threads-{n}", count, shards, place, backup)


def _on_threads(
    arena: Arena, store: Store, kind: Kind, name: str, count: int, shards: int, place: str, backup: int
) -> Run:
    """Train with workers that come and go, or are slow in some units, or neither."""
    settings = {"shards": shards, "transport": _transport(place), "backup_after": backup}
    job = kind.create(store, name, workers=1, **settings)
    slow, leaves = arena.random.random() < 0.5, arena.random.random() < 0.5
    run_workers(job, *kind.threads(job, count, arena.random, slow, leaves))
    manner = ", ".join(["slow at times"] * slow + ["come and go"] * leaves) or "steady"
    return Run(f"{_of(count, shards, place)}, {manner}, {_backups(job)}", kind, kind.problems(job))


def _transport(place: str) -> str:
    return "shm" if place == "shared memory" else "redis"


def _of(count: int, shards: int, place: str) -> str:
    return f"{count} {'worker' if count == 1 else 'workers'}, {shards} {'shard' if shards == 1 else 'shards'}, {place}"


def _backups(job: Job) -> str:
    """Return what the log says of backup tasks."""
    if not job.config.backup_after:
        return "no backup tasks"
    kinds = Counter(fields["kind"] for _, fields in log_entries(job))
    return f"{kinds['backup']} backup tasks, {kinds['duplicate']} duplicates"


def on_a_cluster(arena: Arena, counts: Iterable[int] = COUNTS, fire: int = 5) -> Iterator[Run]:
    """Train on a cluster of three masters: on threads, then with processes that are killed."""
    with running_cluster(masters=3, replicas=0) as cluster, Store(open_client(cluster.url)) as store:
        for count, shards in product(counts, SHARDS):
            yield _on_threads(arena, store, DIGITS, f"cluster-{count}-{shards}", count, shards, "a cluster", 3)
        for number in range(fire):
            yield train_processes(arena, store, f"burning-{number}", 3, 3, "a cluster", every_s=1.0)


def from_checkpoints(arena: Arena, kind: Kind = DIGITS, number: int = 12) -> Iterator[Run]:
    """Take a checkpoint while workers train, and go on from it as another job with other workers and shards."""
    with running_server() as url, Store(Client(url)) as store:
        for n in range(number):
            count, shards = arena.random.choice(COUNTS), arena.random.choice(SHARDS)
            first = kind.create(store, f"first-{n}", workers=1, shards=shards, worker_timeout_ms=2000)
            version = arena.random.randint(1, VERSIONS - 2)
            with aggregating(first):
                training_now = [in_thread(each) for each in kind.threads(first, count, arena.random, slow=True)]
                while (state := first.state()).version < version:
                    first.access.reader.await_change(state)
                checkpoint = first.checkpoint()
                for each in training_now:
                    each.result()
            yield Run(f"checkpoint taken: {_of(count, shards, 'Redis')}", kind, kind.problems(first))
            others, parts = arena.random.choice([c for c in COUNTS if c != count]), arena.random.choice(SHARDS)
            second = store.restore_job(checkpoint, f"second-{n}", shards=parts)
            run_workers(second, *kind.threads(second, others, arena.random))
            did = f"restored at version {checkpoint.version}: {_of(others, parts, 'Redis')}, after {count}"
            yield Run(did, kind, kind.problems(second, first=checkpoint.version + 1))


# -- processes ------------------------------------------------------------------------------------------------------


def on_processes(arena: Arena, counts: Iterable[int] = COUNTS) -> Iterator[Run]:
    """Train with processes, in every place."""
    with arena.server() as store:
        for number, (count, (place, shards)) in enumerate(product(counts, PLACES)):
            yield train_processes(arena, store, f"process-{number}", count, shards, place)


def under_fire(arena: Arena, number: int = 30, every_s: float = 1.0) -> Iterator[Run]:
    """Train with processes that are killed and started again, while others join."""
    with arena.server() as store:
        for n in range(number):
            count, (place, shards) = arena.random.choice((2, 3, 5)), arena.random.choice(PLACES)
            yield train_processes(arena, store, f"fire-{n}", count, shards, place, every_s)


def train_processes(
    arena: Arena, store: Store, name: str, count: int, shards: int, place: str, every_s: float = 0.0
) -> Run:
    """Train with processes. With `every_s`, kill one about so often, and have more workers join than the job knows."""
    backup, at_once = arena.random.choice(BACKUPS), arena.random.random() < 0.7
    settings: dict[str, Any] = {"transport": _transport(place), "backup_after": backup}
    job = DIGITS.create(store, name, workers=1, shards=shards, worker_timeout_ms=5000 if at_once else 1000, **settings)
    with arena.crew(job, at_once=at_once, url=store.url) as crew:
        _start(crew, count, shards, arena.random, joins_s=1.0 if every_s else 0.0)
        crew.run(arena.random if every_s else None, every_s)
        kills = Counter(worker=crew.kills["trainer"], aggregator=crew.kills["aggregator"])
    did = f"processes: {_of(count, shards, place)}, {_backups(job)}"
    if every_s:
        found = "" if at_once else ", found by timeouts"
        did += f", killed: {kills['worker']} workers, {kills['aggregator']} aggregators{found}"
    sha256 = sha256_of(job.snapshot()[1])
    return Run(did, DIGITS, DIGITS.problems(job) + remains(store, job), kills, sha256=sha256)


def _start(crew: Crew, count: int, shards: int, rng: random.Random, joins_s: float) -> None:
    """Start an aggregator for each shard, a worker, and the other workers within `joins_s`."""
    for shard in range(shards):
        crew.start(f"a{shard}", "aggregator", shards=[shard])
    for number in range(count):
        crew.start(f"w{number}", "trainer", slow=_SLOW, waits_s=rng.uniform(0, joins_s) if number else 0.0)


def redis_is_killed(arena: Arena, number: int = 8, kills: int = 2) -> Iterator[Run]:
    """Kill Redis with its file whole, as `appendfsync always` leaves it, and start it again."""
    for n in range(number):
        count, shards = arena.random.choice((2, 3, 5)), arena.random.choice(SHARDS)
        with ExitStack() as stack:
            server = stack.enter_context(MortalServer(stack.enter_context(private_directory())))
            store = stack.enter_context(Store(Client(server.url)))
            job = DIGITS.create(store, f"redis-{n}", workers=1, shards=shards, worker_timeout_ms=60_000)
            with arena.crew(job) as crew:
                _start(crew, count, shards, arena.random, joins_s=0.0)
                for _ in range(kills):
                    version = job.state().version
                    crew.until(lambda j=job, v=version: j.state().version > v)
                    crew.wait(arena.random.uniform(0, 0.15))
                    server.kill()
                    server.start()
                crew.run()
            killed = Counter({"Redis": kills})
            did = f"Redis killed {kills} times: {_of(count, shards, 'Redis')}, appendfsync always"
            yield Run(did, DIGITS, DIGITS.problems(job) + remains(store, job), killed)
