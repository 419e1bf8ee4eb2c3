"""Every role on real servers: what its rules allow and refuse, and whole runs with each process under its own role."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from helpers.arrays import assert_same_bits
from helpers.harness import aggregating, await_version, check_chain, gradient, log_entries, work, work_on
from kvps_cli.serve.acl import url_for
from kvps_workers.queue.queue import CPU, TaskQueue
from kvps_workers.queue.queue import SCRIPTS as QUEUE_SCRIPTS

import kvps
from kvps.arrays.state_dict import unpacked
from kvps.errors import JobNotFound
from kvps.history.checkpoint import Checkpoint
from kvps.protocol import acl
from kvps.protocol.scripts import SCRIPTS
from kvps.store import Store
from kvps.transport.difference_reader import DifferenceReader
from kvps.transport.host_pull import HostPull
from kvps.transport.version_reader import VersionReader
from kvps.transport.weight_reader import PullRequest

ONE = {"w": np.zeros(8, np.float32)}
FOREIGN = [
    "GET kvps:{{other}}:layout",
    "HGETALL kvps:{{other}}:config",
    "HSET kvps:{{other}}:config workers 9",
    "XRANGE kvps:{{other}}:commits - +",
    "SET kvps:{{other/00000000/0/}}:w:0.x:0 1",
    "GET secret",
    "SET secret 1",
]
"""Keys of other jobs and of other programs."""
ADMINISTRATION = [
    *("KEYS *", "CONFIG GET dir", "CONFIG SET dir /tmp", "DEBUG SLEEP 0", "FLUSHALL", "FLUSHDB", "REPLICAOF NO ONE"),
    *("MODULE LIST", "SHUTDOWN NOSAVE", "SAVE", "ACL LIST", "ACL WHOAMI", "MONITOR", "CLIENT LIST", "SWAPDB 0 1"),
    *("CLIENT KILL 127.0.0.1:1", "EVAL return(1) 0"),
]
READ = ["HGETALL {control}version", "GET {control}layout", "XRANGE {control}commits - +", "GET {bytes}w:{name}:0"]
WRITE_WEIGHTS = [
    *("SET {bytes}w:{name}:0 1", "DEL {bytes}w:{name}:0", "SET {bytes}m:{name} 1", "SET {control}term:0 1"),
    *("SET {control}layout x", "HSET {control}made_with task module:code"),
]
GRADIENT = ["SET {bytes}g:w0.x:1:0 1"]
WRITE_CONTROL = ["HSET {control}workers w0 x", "HSET {control}version version 9"]
LOG = ["XADD {control}commits * kind stop", "DEL {control}commits", "SET {control}never x"]
LIST = ["SADD kvps:jobs x", "SREM kvps:jobs mine"]
MEMORY = ["HSET kvps:memory x 1", "HGETALL kvps:memory"]
QUEUE = ["LRANGE rq:queue:kvps 0 -1", "DEL rq:job:x"]
LOAD = ["SCRIPT LOAD return(1)"]
TABLE = {
    "reader": (READ, WRITE_WEIGHTS + WRITE_CONTROL + LOG + LIST + QUEUE + LOAD),
    "evaluator": (
        [*READ, "HSET {control}evaluation x 1", "XADD {control}evaluations * x 1"],
        WRITE_WEIGHTS + WRITE_CONTROL + LOG + LIST + QUEUE + LOAD,
    ),
    "worker": ([*READ, "SET {bytes}g:w0.x:1:0 1"], WRITE_WEIGHTS + LIST + QUEUE + LOAD),
    "actor": (
        [*READ, "SET {bytes}x:a.1-x:1:0 1", "HSET {control}items a.1-x:1 x", "XADD {control}news * lot x"],
        [*WRITE_WEIGHTS, LOG[0], LOG[1], *WRITE_CONTROL[:1], *LIST, *QUEUE, *LOAD, *GRADIENT],
    ),
    "aggregator": (READ + WRITE_WEIGHTS + LOAD, LIST + QUEUE),
    "learner": ([*READ, *WRITE_WEIGHTS, *LOAD, LIST[0]], [*QUEUE, *MEMORY, LIST[1]]),
    "host": (READ + QUEUE + LOAD, WRITE_WEIGHTS + LIST),
    "submitter": (READ + LIST + QUEUE + LOAD, []),
    "operator": (READ + LIST + QUEUE + LOAD, []),
}
"""Role -> what it may do, and what it must not do, on a server that has keys that may only be read."""


class Users:
    """Users of roles, on one server. `expected` is what a test knows that a role is refused."""

    def __init__(self, store: Store, stores: ExitStack) -> None:
        self._store, self._stores = store, stores
        self.names: list[str] = []
        # The test of the connection, and redis-py's own name. Redis 6.2 names no subcommands.
        self.expected = {"kvps:preflight", "set", "client|setinfo", "client"}

    def __call__(self, role: str, job: str = "mine") -> Store:
        """Return the store under a new user of a role."""
        user = f"{role}-{len(self.names)}"
        self.names.append(user)
        reset, *rules = acl.rules(role, job, self._store.client.redis_version())
        self._store.client.call("ACL SETUSER", user, reset, f">{user}", *rules)
        return self._stores.enter_context(kvps.connect(url_for(self._store.url, user, user)))


@pytest.fixture
def under(store: Store) -> Iterator[Users]:
    """Users of roles; at the end, nothing was refused to them that the test does not expect."""
    store.client.call("ACL LOG", "RESET")
    with ExitStack() as stores:
        users = Users(store, stores)
        yield users
    refused = {entry["object"] for entry in store.client.call("ACL LOG")}
    if users.names:
        store.client.call("ACL DELUSER", *users.names)
    assert refused <= users.expected


def test_no_script_calls_a_command_by_another_name() -> None:
    for script in [*SCRIPTS.values(), *QUEUE_SCRIPTS.values()]:
        body = re.sub(r"--[^\n]*", "", script.text)
        assert len(re.findall(r"redis\.p?call", body)) == len(re.findall(r"redis\.p?call\('[A-Z]+'", body)), script.name
    used = set[str]().union(*(script.commands for script in QUEUE_SCRIPTS.values()))
    assert used <= set(acl._QUEUE_COMMANDS)


@pytest.mark.parametrize("job", ["", "a b", "a*b", "[a]", "a**", "{x}", "a?", "*a", "x" * 65])
def test_names_that_are_no_jobs(job: str) -> None:
    with pytest.raises(kvps.InvalidName, match="job name"):
        acl.rules("worker", job, (7, 0))


@pytest.mark.parametrize("role", acl.ROLES)
@pytest.mark.parametrize("jobs", ["mine", "mi*"])
def test_what_a_role_may_do_and_what_not(store: Store, raw: Any, role: str, jobs: str) -> None:
    job = store.create_job("mine", ONE)
    store.create_job("other", ONE)
    raw.set("secret", "1")
    version = store.client.redis_version()
    raw.execute_command("ACL", "SETUSER", "u", *acl.rules(role, jobs, version), ">u")
    named = {
        "control": job.access.keys.config.removesuffix("config"),
        "bytes": job.access.keys.slot(0),
        "name": job.state().names[0],
    }
    allowed, refused = TABLE[role]
    refused = refused + FOREIGN + ADMINISTRATION
    if version < acl.READ_ONLY_KEYS and role != "reader":  # docs/security.md: there is no key that may only be read
        refused = [command for command in refused if command not in WRITE_WEIGHTS + WRITE_CONTROL + LOG + GRADIENT]
        refused = [command for command in refused if command not in LIST or jobs == "mine"]
    with redis.Redis.from_url(url_for(store.url, "u", "u"), protocol=2) as client:
        before = _all(raw)
        for command in refused:
            # Some administration is refused before the rules are looked at.
            with pytest.raises(redis.exceptions.ResponseError, match=r"no permission|No permission|not allowed"):
                client.execute_command(*command.format(**named).split(" "))
        assert _all(raw) == before
        for command in allowed:
            client.execute_command(*command.format(**named).split(" "))
    raw.execute_command("ACL", "DELUSER", "u")


def _all(raw: Any) -> dict[bytes, bytes]:
    """Return everything that the server holds, in its own serialization."""
    return {key: raw.dump(key) for key in raw.scan_iter()}


def test_a_run_with_every_process_under_its_own_role(store: Store, under: Users) -> None:
    """The same weights, bit for bit, as with one user for all; and a reader keeps a version for itself."""
    start = {"a": np.ones((50, 40), np.float32), "b": np.zeros(7, np.float32)}
    settings: dict[str, Any] = {"workers": 2, "optimizer": kvps.SGD(lr=0.1, momentum=0.9)}

    def train(name: str, submitter: Store, aggregator: Store, worker: Store) -> dict[str, np.ndarray]:
        submitter.create_job(name, start, **settings)
        job = worker.job(name)
        with aggregating(aggregator.job(name)):
            work(job, 6, lambda session, params, round_: gradient(params, session.rank, round_), 2)
            await_version(job, 6)
        return dict(job.snapshot()[1])

    theirs = train("mine", under("submitter"), under("aggregator"), under("worker"))
    ours = train("plain", store, store, store)
    assert_same_bits(theirs, ours)
    reader = under("reader").job("mine")
    assert check_chain(reader) == 6
    assert_same_bits(reader.snapshot()[1], ours)
    if store.client.redis_version() >= acl.READ_ONLY_KEYS:
        assert reader.access.reader.held(1).version == 6
        assert store.client.call("EXISTS", reader.access.keys.pin)
        evaluator = under("evaluator").job("mine")
        assert [(evaluator.report(version, {"n": 1}).version, version) for version, _ in evaluator.versions()] == [
            (6, 6)
        ]
    under("operator").remove_job("mine")
    assert store.jobs() == ["plain"]


def test_a_learner_publishes_and_readers_watch(store: Store, under: Users, tmp_path: Path) -> None:
    """Also where one reader of a host reads for the others, and with a server that was restarted."""
    model = {"w": np.arange(5000, dtype=np.float32), "n": np.arange(7, dtype=np.int16)}
    learner = under("learner")
    with learner.publisher("mine", model, shards=2, checkpoints=tmp_path, checkpoint_every=2) as first:
        assert store.jobs() == ["mine"]
        watch, job = under("reader").watch("mine"), under("reader").job("mine")
        assert (watch.update(), watch.running) == (0, True)
        for version in (1, 2, 3):
            model["w"][version] += 1
            assert first.publish(model, loss=1.0) == version
            assert watch.update() == version
            assert_same_bits(watch.arrays, model)
        assert_same_bits(watch.at(2), model | {"w": np.where(np.arange(5000) == 3, 3, model["w"]).astype(np.float32)})
        assert (watch.traffic.differences, watch.traffic.wholes) == (3, 1)
        latest = job.access.reader.round_state
        for _ in range(2):
            pull = HostPull(job.access, DifferenceReader(job.access, job.access.reader), "watchers")
            flat = np.zeros(job.layout.size, np.float32)
            assert pull.read(PullRequest(latest(), 0, latest, flat)).version == 3
            assert_same_bits(unpacked(job.layout, flat), model)
            pull.close()
        with under("learner").publisher("mine", model, takeover=True) as second:
            assert second.publish(model) == 4
        with pytest.raises(kvps.LeaseLost):
            first.publish(model)
        first.close()
    # As after a restart: the server's run is not the one in which the history began.
    store.client.call("HSET", first.job.access.keys.version, "run_id", "0" * 40)
    with under("learner").publisher("mine", model) as third:
        assert third.publish(model) == 5
        third.job.pause()
        third.job.resume()
    assert watch.update() == 5
    assert not watch.running
    assert list(tmp_path.glob("*-00000002.safetensors"))
    assert [e["kind"] for _, e in log_entries(third.job)].count("recover") == 1
    with pytest.raises(JobNotFound):
        under("learner", "other").watch("other", wait=0)


def test_a_reader_that_is_overtaken_keeps_a_version(store: Store, under: Users) -> None:
    """Its first read finds the bytes gone; the pin, or on an old server another read, gives it a whole version."""
    if store.client.redis_version() < acl.READ_ONLY_KEYS:
        under.expected.add("evalsha")  # it asks for a pin, and gets none
    job = store.create_job("mine", {"w": np.zeros(2_000_000, np.float32)}, transport="redis")
    reader = under("reader").job("mine")
    state = reader.state()
    with aggregating(job):
        work_on(job, "w0", 4)
        await_version(job, 4)
    flat = np.empty(job.layout.size, np.float32)
    assert VersionReader.fetch(reader.access.reader, state, flat).version == 4
    assert reader.access.reader.restarts


def test_who_may_not_load_scripts_waits_for_who_may(store: Store, under: Users) -> None:
    store.create_job("mine", ONE)
    worker, aggregator = under("worker").job("mine"), under("aggregator").job("mine")
    under.expected |= {"script|load", "script"}
    store.client.call("SCRIPT FLUSH")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work_on, worker, "w0", 3)
        with aggregating(aggregator):
            assert waiting.result(120) == [1, 2, 3]


def test_a_server_restarted_under_a_worker_is_left_to_the_aggregator(store: Store, under: Users) -> None:
    """The new history: the worker may not begin it, and goes on once the aggregator has."""
    store.create_job("mine", ONE)
    worker, aggregator = under("worker").job("mine"), under("aggregator").job("mine")
    under.expected |= {
        worker.access.keys.leases,
        worker.access.keys.ready,
        worker.access.keys.lease(0),
        worker.access.keys.term(0),
        "bgrewriteaof",
    }
    # As after a restart: the server's run is not the one in which the history began.
    store.client.call("HSET", worker.access.keys.version, "run_id", "0" * 40)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work_on, worker, "w0", 3)
        with aggregating(aggregator):
            assert waiting.result(120) == [1, 2, 3]
    assert [e["kind"] for _, e in log_entries(worker)].count("recover") == 1


def test_a_bad_pin_stops_no_job(store: Store, under: Users) -> None:
    """A reader may write the pin: what is no pin keeps nothing, and commits go on."""
    job = store.create_job("mine", ONE)
    reader = under("reader") if store.client.redis_version() >= acl.READ_ONLY_KEYS else store
    reader.client.call("SET", job.access.keys.pin, '{"version":"x"}')
    with aggregating(job):
        work_on(job, "w0", 3)
        await_version(job, 3)
    assert check_chain(job) == 3


def test_a_checkpoint_and_the_queue_under_their_roles(store: Store, under: Users, tmp_path: Any) -> None:
    if store.client.redis_version() < acl.READ_ONLY_KEYS:
        under.expected.add("evalsha")  # the checkpoint asks for a pin, and gets none
    submitter, host = under("submitter"), under("host")
    job = submitter.create_job("mine", ONE, workers=2)
    with TaskQueue(submitter.url, CPU) as queue, TaskQueue(host.url, CPU) as theirs:
        queue.submit(job)
        theirs.beat(busy=False)
        theirs.await_task(1)
        taken = theirs.take("run-1")
        assert taken
        assert theirs.release(taken[0], "run-1", "finished") == "finished"
        assert queue.look()[0] == 1
        assert queue.cancel("mine") == (1, 0)
        theirs.depart()
    made = under("reader").job("mine").checkpoint()
    made.write(tmp_path / "c.safetensors")
    assert Checkpoint.load(tmp_path / "c.safetensors").version == 0
