"""Honest jobs beside one whose worker, reader and evaluator are hostile: how fast they train, and with which bits.

`python -m hostile.beside --minutes 60` takes turns of a minute: in one, three honest clients use a job; in the next,
three hostile ones change its keys and use it, each with as many calls a second, of as many commands, as the honest one
of its role made. What the honest jobs made in both is compared, and their weights with those of a plain loop. With
`--control` the hostile worker keeps the server busy too, so that the comparison must fail. With `--full` it fills the
server's memory, once.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import multiprocessing
import resource
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

import numpy as np
import redis
from helpers.arrays import assert_same_bits
from helpers.harness import Params, await_version, gradient, model
from helpers.servers import ServerProcess, private_directory
from helpers.waiting import eventually
from kvps_cli.serve.acl import url_for

import kvps
from hostile.mutations import Content, Mutation, mutation_of
from hostile.scene import READ, GaveUp, HurriedClient
from kvps.errors import KvpsError
from kvps.protocol import acl
from kvps.protocol.keys import control_keys
from kvps.store import Store

MINE, OTHERS, ROLES = "mine", tuple(f"honest{number}" for number in range(5)), ("worker", "reader", "evaluator")
IDLE, HONEST, HOSTILE = range(3)  # what the clients of the job are in a turn
_A_SECOND = 50  # calls of each honest client of the job, at the most
_DRAWN = 1_000  # mutations of each hostile client
_ANEW_S = 5.0  # after which the job is again what it was
_LR = 0.05
_BUSY = "for i = 1, 20000000 do end"  # so long that a few calls a second are enough
_FULL = 64 << 20  # bytes of memory of a server that is filled
_PIECES = (1 << 20, 1 << 16, 1 << 12, 1 << 8, 16)
_SPAWN = multiprocessing.get_context("spawn")


def train(url: str, name: str, over: Any) -> None:
    """Be the worker of an honest job, as fast as it goes."""
    with kvps.connect(url) as store, store.job(name).join("w0") as session:
        while not over.is_set():
            session.push(gradient(session.pull(), 0, session.round))


class Made(ctypes.Structure):
    """What a client makes: how many calls, and what of it was refused; how many calls it is to make in a second, of how
    many commands; and in which turn it is."""

    _fields_: ClassVar = [
        *((name, ctypes.c_double) for name in ("calls", "refused", "a_second", "commands")),
        ("turn", ctypes.c_int),
    ]


class Client(NamedTuple):
    """A client of the job in a role. `busy` is the digest of a script that it runs while it is hostile, "" for none."""

    url: str
    role: str
    content: Content
    busy: str

    def use(self, over: Any, turn: Any, made: Any) -> None:
        """Do what `turn` says until all is `over`. `made` is `Made`, shared with the one that asks."""
        random, at, url = Random(self.role), time.monotonic(), self.url
        drawn = [self._mutation(random).commands for _ in range(_DRAWN)]  # to draw one takes longer than to send it
        with (
            kvps.connect(url) as store,
            Store(HurriedClient(url, waits=4)) as hurried,
            redis.Redis.from_url(url) as raw,
        ):
            does = {HONEST: partial(_calls, store, self.role), HOSTILE: partial(self._harm, hurried, raw, drawn, made)}
            while not over.wait(0.01):
                made.turn = now = turn.value
                with ExitStack() as stack:
                    calls = stack.enter_context(closing(does[now]())) if now in does else None
                    while calls and turn.value == now and not over.is_set():
                        try:
                            made.refused += next(calls)
                        except (KvpsError, redis.RedisError, GaveUp):
                            made.refused += 1
                            calls = stack.enter_context(closing(does[now]()))
                        made.calls += 1
                        at = max(
                            at + 1 / made.a_second, time.monotonic() - 1
                        )  # what is missed by more is not made good
                        time.sleep(max(0.0, at - time.monotonic()))

    def _harm(self, store: Store, raw: Any, drawn: list[Any], made: Any) -> Iterator[int]:
        """Change keys of the job once a step, or use the job as it is now. Yield how many commands were refused."""
        random = Random(made.calls)
        while True:
            client = store.client
            assert isinstance(client, HurriedClient)
            client.begin()
            if self.busy:
                raw.evalsha(self.busy, 0)
            if random.random() < 0.05:
                with closing(_calls(store, self.role)) as calls:
                    yield next(calls)
                continue
            pipe = raw.pipeline(transaction=False)
            while len(pipe) < made.commands:
                for command in random.choice(drawn):
                    pipe.execute_command(*command)
            yield sum(isinstance(reply, Exception) for reply in pipe.execute(raise_on_error=False))

    def _mutation(self, random: Random) -> Mutation:
        """Return one that the role may make, and now and then any."""
        may = [control_keys(MINE, what) for what in acl.ROLES[self.role].writes]
        own = {key: held for key, held in self.content.items() if any(fnmatchcase(key.decode(), each) for each in may)}
        let, tries = set(acl.rules(self.role, MINE)), random.random() < 0.1
        while True:
            found = mutation_of(random, self.content if tries else own, [])
            if tries or all(f"+{command[0].lower()}" in let for command in found.commands):
                return found


def _calls(store: Store, role: str) -> Iterator[int]:
    """Use the job once a step, as this role does."""
    job = store.job(MINE)
    if role != "worker":
        while True:
            _ = job.snapshot() if role == "reader" else job.report(job.state().version, {"n": 1.0})
            yield 0
    with job.join("w0", takeover=True) as session:
        while True:
            session.push(gradient(session.pull(), session.rank, session.round))
            yield 0


class Place:
    """A server with an aggregator of all jobs, honest jobs that train, and the job of the hostile."""

    def __init__(self, server: ServerProcess, stack: ExitStack, control: bool) -> None:
        self.url = f"redis://127.0.0.1:{server.port}/0"
        self.store = stack.enter_context(kvps.connect(self.url))
        self.raw = stack.enter_context(redis.Redis.from_url(self.url, protocol=2))
        self.over, self._turn = _SPAWN.Event(), _SPAWN.Value("i", IDLE)
        for name in OTHERS:
            self.store.create_job(name, model(), workers=1, optimizer=kvps.SGD(lr=_LR), transport="redis")
        job = self.store.create_job(MINE, model(), workers=1, optimizer=kvps.Adam(lr=_LR), transport="redis")
        command = [sys.executable, "-m", "kvps", "aggregator", "start", "--redis", self.url, "--log-keep", "1000"]
        self._aggregator = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        stack.callback(self._aggregator.terminate)
        with job.join("w0") as session:
            for _ in range(3):
                session.push(gradient(session.pull(), 0, session.round))
            session.leave(finished=False)
        await_version(job, 3)
        job.report(1, {"loss": 0.5})
        job.access.scripts.pin(600_000)
        keys = [key for key in self.raw.keys("kvps:{mine*") if not key.startswith(b"kvps:{mine}:lease")]
        # The gradients of the last version are deleted meanwhile.
        self._dumps = {key: dump for key in keys if (dump := self.raw.dump(key))}
        kinds = {key: kind for key in self._dumps if (kind := self.raw.type(key).decode()) in READ}
        self.content = {key: (kind, READ[kind](self.raw, key)) for key, kind in kinds.items()}
        self._processes = [_SPAWN.Process(target=train, args=(self.url, name, self.over)) for name in OTHERS]
        self.made = {role: _SPAWN.Value(Made, 0, 0, _A_SECOND, 1, IDLE) for role in ROLES}
        busy = self.raw.script_load(_BUSY) if control else ""
        for role in ROLES:
            user = f"{MINE}-{role}"
            self.raw.execute_command("ACL", "SETUSER", user, *acl.rules(role, MINE), ">p")
            client = Client(url_for(self.url, user, "p"), role, self.content, busy if role == "worker" else "")
            given = (self.over, self._turn, self.made[role])
            self._processes.append(_SPAWN.Process(target=client.use, args=given))
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
        return {name: self.store.job(name).state().version for name in OTHERS}

    def turn(self, hostile: bool, seconds: float) -> float:
        """Have the clients be hostile or honest for so long, and print what was made. Return versions a second."""
        for made in () if hostile else self.made.values():
            made.a_second = _A_SECOND
        for self._turn.value in (IDLE, HOSTILE if hostile else HONEST):
            assert eventually(lambda: all(made.turn == self._turn.value for made in self.made.values()))
            if self._turn.value == IDLE:
                self.anew()  # or a call of the last turn would spoil the job for this one
        before, began, done, worked = self.versions(), time.monotonic(), self._counts(), self._worked()
        while (took := time.monotonic() - began) < seconds:
            time.sleep(_ANEW_S)
            if hostile:
                self.anew()
        versions = sum(after - before[name] for name, after in self.versions().items()) / took
        said = [f"{'hostile' if hostile else 'honest ':8} {versions:6.1f} versions/s"]
        for role, counts in self._counts().items():
            calls, refused, commands = ((now - then) / took for now, then in zip(counts, done[role], strict=True))
            said.append(f"{role} {calls:.1f} calls/s ({refused:.1f} refused, {commands:.0f} commands/s)")
            if not hostile:
                self.made[role].a_second, self.made[role].commands = max(calls, 1.0), commands / max(calls, 1.0)
        said.append(f"server {100 * (self._worked() - worked) / took:.0f}% busy")
        server, pages = self.raw.info("memory"), Path(f"/proc/{self._aggregator.pid}/statm").read_text().split()
        own, aggregators = server["used_memory"] / 2**20, int(pages[1]) * resource.getpagesize() / 2**20
        print("; ".join([*said, f"{own:.1f} MiB, aggregator {aggregators:.1f} MiB"]), flush=True)
        return versions

    def _worked(self) -> float:
        """Return for how many seconds the server has worked."""
        cpu = self.raw.info("cpu")
        return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])

    def _counts(self) -> dict[str, list[float]]:
        """Return how many calls each role has made, how many were refused, and how many commands the server got."""
        clients = self.raw.client_list()
        return {
            role: [
                made.calls,
                made.refused,
                sum(int(c.get("tot-cmds", 0)) for c in clients if c["user"] == f"{MINE}-{role}"),
            ]
            for role, made in self.made.items()
        }

    def end(self) -> None:
        """End all, and compare what the honest jobs have learned with what a plain loop does. Raises AssertionError."""
        self.over.set()
        for process in self._processes:
            process.join(60)
            assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"
        states = {name: self.store.job(name).state() for name in OTHERS}
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
def place(*options: str, control: bool = False) -> Iterator[Place]:
    """A place on a server with these options; see `--control`. At the end, what the honest jobs have learned was
    compared."""
    with private_directory() as folder, ExitStack() as stack:
        server = stack.enter_context(ServerProcess.on_port(folder, "--save", "", "--appendonly", "no", *options))
        found = Place(server, stack, control)
        try:
            yield found
        finally:
            found.end()


def turns(minutes: float, turn_s: float, least: float, control: bool) -> int:
    """Take turns of honest and hostile clients, and compare what the honest jobs make in each two of them. Return 1 if
    beside the hostile ones that is less than this part of the rest."""
    ratios: list[float] = []
    with place(control=control) as here:
        ends = time.monotonic() + 60 * minutes
        assert eventually(lambda: min(here.versions().values()) > 10)
        while not ratios or time.monotonic() < ends:
            honest = here.turn(False, turn_s)
            ratios.append(here.turn(True, turn_s) / honest)
    median = statistics.median(ratios)
    print(
        f"beside hostile clients {median:.3f} of the versions beside honest ones, in the median of {len(ratios)} pairs "
        f"of turns ({min(ratios):.3f} to {max(ratios):.3f}); "
        f"the honest jobs' weights are those of a plain loop, bit for bit"
    )
    if median < least:
        print(f"that is less than {least:g}")
    return int(median < least)


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
    """Return 1 if honest jobs were too slow; raises AssertionError for a bit that differs."""
    parser = argparse.ArgumentParser(prog="hostile.beside", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--turn", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--least", type=float, default=0.9, help="part of their versions that honest jobs must make")
    parser.add_argument("--control", action="store_true", help="keep the server busy: a control of the comparison")
    parser.add_argument("--full", action="store_true", help="fill the memory instead")
    asked = parser.parse_args()
    return full() if asked.full else turns(asked.minutes, asked.turn, asked.least, asked.control)


if __name__ == "__main__":
    sys.exit(main())
