"""Honest jobs beside one whose worker, reader and evaluator are hostile: how fast they train, and with which bits.

`python -m hostile.beside --minutes 60` takes turns of a minute: in one, three hostile clients of a job change its keys
and use it; in the next, three honest ones make as many calls a second. What the honest jobs made in both is compared,
and their weights with those of a plain loop. With `--full` the hostile worker fills the server's memory, once.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from random import Random
from typing import Any

import numpy as np
import redis
from helpers.arrays import assert_same_bits
from helpers.harness import Params, gradient, model
from helpers.servers import ServerProcess, private_directory
from helpers.waiting import eventually
from kvps_cli.serve.acl import url_for

import kvps
from hostile.mutations import Content, mutation_of
from hostile.scene import READ, GaveUp, HurriedClient
from kvps.errors import KvpsError
from kvps.protocol import acl
from kvps.protocol.keys import control_keys
from kvps.store import Store

MINE, HONEST, ROLES = "mine", tuple(f"honest{number}" for number in range(5)), ("worker", "reader", "evaluator")
_A_SECOND = 50  # calls of each client of the job
_ANEW_S = 5.0  # after which the job is again what it was
_LR = 0.05
_FULL = 64 << 20  # bytes of memory of a server that is filled
_PIECES = (1 << 20, 1 << 16, 1 << 12, 1 << 8, 16)
_SPAWN = multiprocessing.get_context("spawn")


def train(url: str, name: str, over: Any) -> None:
    """Be the worker of an honest job, as fast as it goes."""
    with kvps.connect(url) as store, store.job(name).join("w0") as session:
        while not over.is_set():
            session.push(gradient(session.pull(), 0, session.round))


def use(url: str, role: str, content: Content, over: Any, hostile: Any, made: Any) -> None:
    """Be a client of the job in this role, hostile while `hostile` is set. `made` counts calls, and those refused."""
    random, at = Random(role), time.monotonic()
    with kvps.connect(url) as store, Store(HurriedClient(url, waits=4)) as hurried, redis.Redis.from_url(url) as raw:
        for was_hostile in itertools.cycle((False, True)):
            begin = partial(_harm, hurried, raw, role, content, random) if was_hostile else partial(_calls, store, role)
            with ExitStack() as stack:
                calls = stack.enter_context(closing(begin()))
                while hostile.is_set() == was_hostile and not over.is_set():
                    try:
                        next(calls)
                    except (KvpsError, redis.RedisError, GaveUp):
                        made[1] += 1
                        calls = stack.enter_context(closing(begin()))
                    made[0] += 1
                    at = max(at + 1 / _A_SECOND, time.monotonic() - 1)  # what is missed by more is not made good
                    time.sleep(max(0.0, at - time.monotonic()))
            if over.is_set():
                return


def _calls(store: Store, role: str) -> Iterator[None]:
    """Use the job once a step, as this role does."""
    job = store.job(MINE)
    if role != "worker":
        while True:
            yield job.snapshot() and None if role == "reader" else job.report(job.state().version, {"n": 1.0}) and None
    with job.join("w0", takeover=True) as session:
        while True:
            session.push(gradient(session.pull(), session.rank, session.round))
            yield


def _harm(store: Store, raw: Any, role: str, content: Content, random: Random) -> Iterator[None]:
    """Change a key of the job once a step, or use the job as it is now."""
    may = [control_keys(MINE, what) for what in acl.ROLES[role].writes]
    own = {key: held for key, held in content.items() if any(fnmatchcase(key.decode(), each) for each in may)}
    while True:
        client = store.client
        assert isinstance(client, HurriedClient)
        client.begin()
        if random.random() < 0.05:
            with closing(_calls(store, role)) as calls:
                next(calls)
        else:
            for command in mutation_of(random, own if random.random() < 0.9 else content, []).commands:
                raw.execute_command(*command)
        yield


class Place:
    """A server with an aggregator of all jobs, honest jobs that train, and the job of the hostile."""

    def __init__(self, server: ServerProcess, stack: ExitStack) -> None:
        self.url = f"redis://127.0.0.1:{server.port}/0"
        self.store = stack.enter_context(kvps.connect(self.url))
        self.raw = stack.enter_context(redis.Redis.from_url(self.url, protocol=2))
        self.over, self.hostile = _SPAWN.Event(), _SPAWN.Event()
        for name in HONEST:
            self.store.create_job(name, model(), workers=1, optimizer=kvps.SGD(lr=_LR), transport="redis")
        job = self.store.create_job(MINE, model(), workers=1, optimizer=kvps.Adam(lr=_LR), transport="redis")
        command = [sys.executable, "-m", "kvps", "aggregator", "start", "--redis", self.url, "--log-keep", "1000"]
        self._aggregator = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        stack.callback(self._aggregator.terminate)
        with job.join("w0") as session:
            for _ in range(3):
                session.push(gradient(session.pull(), 0, session.round))
            session.leave(finished=False)
        job.report(1, {"loss": 0.5})
        job.access.scripts.pin(600_000)
        keys = [key for key in self.raw.keys("kvps:{mine*") if not key.startswith(b"kvps:{mine}:lease")]
        self.content = {key: (kind := self.raw.type(key).decode(), READ[kind](self.raw, key)) for key in keys}
        self._dumps = {key: self.raw.dump(key) for key in keys}
        self._processes = [_SPAWN.Process(target=train, args=(self.url, name, self.over)) for name in HONEST]
        self.made = {role: _SPAWN.Array("q", 2) for role in ROLES}
        for role in ROLES:
            user = f"{MINE}-{role}"
            self.raw.execute_command("ACL", "SETUSER", user, *acl.rules(role, MINE), ">p")
            given = (url_for(self.url, user, "p"), role, self.content, self.over, self.hostile, self.made[role])
            self._processes.append(_SPAWN.Process(target=use, args=given))
        for process in self._processes:
            process.start()

    def anew(self) -> None:
        """Make the hostile clients' job what it was."""
        self.raw.delete(*self.raw.keys("kvps:{mine*"))  # before the rest: the memory may be full
        with self.raw.pipeline(transaction=True) as pipe:
            for key, dump in self._dumps.items():
                pipe.restore(key, 0, dump, replace=True)
            pipe.execute()

    def versions(self) -> dict[str, int]:
        """Return the version of each honest job."""
        return {name: self.store.job(name).state().version for name in HONEST}

    def end(self) -> None:
        """End all, and compare what the honest jobs have learned with what a plain loop does. Raises AssertionError."""
        self.over.set()
        for process in self._processes:
            process.join(60)
            assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"
        states = {name: self.store.job(name).state() for name in HONEST}
        assert eventually(
            lambda: all(self.store.job(n).state().version == s.members["w0"].accepted for n, s in states.items())
        )
        assert self._aggregator.poll() is None, "the aggregator has ended"
        weights, rounds = model(), 0
        for version, name in sorted((version, name) for name, version in self.versions().items()):
            weights, rounds = _loop(weights, rounds, version), version
            assert self.store.job(name).state().clock == {"w0": version}
            assert_same_bits(self.store.job(name).snapshot()[1], weights)


def _loop(params: Params, first: int, last: int) -> Params:
    """Return the weights that one worker makes of these in the rounds from `first` up to `last`."""
    for round_ in range(first, last):
        grads = gradient(params, 0, round_)
        params = {name: params[name] - np.float32(_LR) * grads[name] for name in params}
    return params


@contextmanager
def place(*options: str) -> Iterator[Place]:
    """A place on a server with these options. At the end, what the honest jobs have learned was compared."""
    with private_directory() as folder, ExitStack() as stack:
        server = stack.enter_context(ServerProcess.on_port(folder, "--save", "", "--appendonly", "no", *options))
        found = Place(server, stack)
        try:
            yield found
        finally:
            found.end()


def turns(minutes: float, turn_s: float) -> int:
    """Take turns of hostile and honest clients, and print what the honest jobs make in them."""
    made: dict[bool, list[float]] = {True: [], False: []}
    with place() as here:
        ends = time.monotonic() + 60 * minutes
        assert eventually(lambda: min(here.versions().values()) > 10)
        while not made[False] or time.monotonic() < ends:
            for hostile in (True, False):
                here.anew()
                (here.hostile.set if hostile else here.hostile.clear)()
                time.sleep(1)
                before, began, done = here.versions(), time.monotonic(), {r: list(m) for r, m in here.made.items()}
                while time.monotonic() - began < turn_s:
                    time.sleep(_ANEW_S)
                    if hostile:
                        here.anew()
                rates = [(after - before[n]) / (time.monotonic() - began) for n, after in here.versions().items()]
                made[hostile].append(sum(rates))
                calls = ", ".join(
                    f"{role} {after[0] - done[role][0]} calls, {after[1] - done[role][1]} refused"
                    for role, after in here.made.items()
                )
                print(f"{'hostile' if hostile else 'honest ':8} {sum(rates):7.1f} versions/s; {calls}", flush=True)
    beside = {hostile: statistics.median(rates) for hostile, rates in made.items()}
    print(
        f"medians: {beside[True]:.1f} versions/s beside hostile clients, {beside[False]:.1f} beside honest ones: "
        f"{beside[True] / beside[False]:.3f}; the honest jobs' weights are those of a plain loop, bit for bit"
    )
    return 0


def _filled(raw: Any, size: int) -> int:
    """Fill the server with keys of so many bytes, as many as it takes. Return their number."""
    for number in itertools.count():
        try:
            raw.set(f"kvps:{{{MINE}}}:trace:{secrets.token_hex(8)}", b"x" * size)
        except redis.exceptions.OutOfMemoryError:
            return number
    raise AssertionError


def full() -> int:
    """Fill the server's memory as the job's worker may, and empty it again."""
    with place(
        "--save", "", "--appendonly", "no", "--maxmemory", str(_FULL), "--maxmemory-policy", "noeviction"
    ) as here:
        assert eventually(lambda: min(here.versions().values()) > 10)
        with redis.Redis.from_url(url_for(here.url, f"{MINE}-worker", "p")) as raw:
            pieces = sum(_filled(raw, size) for size in _PIECES)
            stood, ends = here.versions(), time.monotonic() + 5
            while time.monotonic() < ends:  # it takes at once what becomes free
                pieces += _filled(raw, _PIECES[-1])
        waited = here.versions()
        here.anew()
        assert eventually(lambda: all(version > waited[name] + 10 for name, version in here.versions().items()))
        then, later, last = (list(each.values()) for each in (stood, waited, here.versions()))
        print(f"{pieces} keys fill the memory: versions {then}, 5 s later {later}, in the end {last}", flush=True)
    print("nothing that was acknowledged is lost: the weights are those of a plain loop, bit for bit")
    return 0


def main() -> int:
    """Return 0; raises AssertionError for a bit that differs."""
    parser = argparse.ArgumentParser(prog="hostile.beside", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--turn", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--full", action="store_true", help="fill the memory instead")
    asked = parser.parse_args()
    return full() if asked.full else turns(asked.minutes, asked.turn)


if __name__ == "__main__":
    sys.exit(main())
