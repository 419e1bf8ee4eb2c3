"""Measure what one step of the protocol costs, and write the constants of `kvps simulate`.

    python -m kvps_bench.calibrate -o simulate/kvps_simulate/constants.json

The server is this command's own. What counts is processor time: of the server as it counts it, and of the processes.
Times on the clock would hold what else the machine does.

What a byte costs is measured in processes as they are in a real job (`kvps_bench.phases`). What a call, a key or a
shard costs is measured in this process, where hundreds of sessions act one after another. Beside each measurement is
one of the machine's speed: all constants are those of one moment.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvps_aggregator.aggregator import Aggregator
from kvps_simulate.settings import SLOTS, Constants

from kvps import optim
from kvps.arrays.formats import format_of
from kvps.arrays.layout import DTYPE
from kvps.job import Job
from kvps_bench.cost import ScriptTimes, by_kind
from kvps_bench.crew import Place, place
from kvps_bench.phases import (
    LARGE,
    PATIENT,
    QUICK_BYTES,
    Phase,
    Reference,
    Round,
    gradient,
    phased,
    reference,
    server_s,
)
from kvps_bench.result import machine
from kvps_bench.roles import model, temporary_job

_TINY = 1024
_OPTIMIZERS = {
    "sgd": optim.SGD(lr=2.0**-10),
    "momentum": optim.SGD(lr=2.0**-10, momentum=0.5),
    "adagrad": optim.Adagrad(lr=2.0**-10),
    "adam": optim.Adam(lr=2.0**-10),
}


@dataclass(frozen=True)
class Cases:
    """What is measured: a small and a great number of workers, and of shards; formats and optimizers by name; and how
    many bytes the rounds have whose bytes count."""

    workers: tuple[int, int] = (16, 256)
    shards: tuple[int, int] = (16, 128)
    large: int = LARGE
    formats: Sequence[str] = ("fp32", "bf16", "fp16", "int8", "topk:0.01")
    optimizers: Sequence[str] = tuple(_OPTIMIZERS)


QUICK = Cases((2, 4), (2, 4), QUICK_BYTES, ("fp32", "int8"), ("sgd", "adam"))


class Bench:
    """Rounds on one server, whose phases are measured."""

    def __init__(self, where: Place, over: str, rounds: int, large: int, reference: Reference) -> None:
        self._place, self._over, self._rounds, self._large = where, over, rounds, large
        self._reference = reference
        self.unit = reference.seconds(rounds)
        self._times = ScriptTimes(where.store.url)

    def large(self, workers: int, **settings: Any) -> Round:
        """Return a round of many bytes, for one worker's push and pull, in processes: the median of a few."""
        ratios = []
        with phased(self._place, self._over, workers, self._large, **settings) as turn:
            for _ in range(self._rounds):
                speed = self.unit / self._reference.seconds()
                ratios.append(turn().over(speed))
        return _each(statistics.median, ratios)

    def small(self, nbytes: int, workers: int, **settings: Any) -> Round:
        """Return the least of a few rounds in this process: other programs only add to it."""
        speed = self._speed()
        with self._job(nbytes, workers, **settings) as (_, turn):
            times = [turn() for _ in range(self._rounds + 2)][2:]  # the first ones get their memory from the kernel
        return _each(min, times).over(speed)

    def _speed(self) -> float:
        """Return what processor time must be multiplied with, because the machine is faster or slower now."""
        return self.unit / self._reference.seconds(self._rounds)

    def scripts(self, workers: int, shards: int) -> Mapping[str, float]:
        """Return the server's median seconds of each call of a script. `ready` has the calls that do not commit."""
        speed = self._speed()
        with self._job(_TINY * shards, workers, shards=shards) as (_, turn):
            turn()
            with self._times.recording():
                for _ in range(self._rounds):
                    turn()
            calls = self._times.take()
        each: dict[str, list[float]] = {}
        rounds: list[list[float]] = []
        for call in calls:
            each.setdefault(call.script, []).append(call.seconds)
            if call.script == "plan":
                rounds.append([])
            if call.script == "ready":
                rounds[-1].append(call.seconds)
        rounds = [r for r in rounds if len(r) == shards]
        medians = {name: statistics.median(times) for name, times in each.items()}
        medians["plan, opens one"] = (
            max(each["plan"]) if shards > 1 else statistics.median(by_kind(calls)["plan, opens one"])
        )
        medians["commits"] = statistics.median(r[-1] for r in rounds)
        medians["ready"] = statistics.median(s for r in rounds for s in r[:-1]) if shards > 1 else 0.0
        return {name: speed * seconds for name, seconds in medians.items()}

    def inbox(self, workers: int, shards: int) -> Phase:
        """Return what it costs to list the contributions of all workers."""
        speed = self._speed()
        with self._job(_TINY * shards, workers, shards=shards) as (job, turn):
            turn(last=False)
            phase = self._phase(job, lambda: [job.inbox() for _ in range(self._rounds)], self._rounds)
        return Phase(speed * phase.server, speed * phase.client)

    @contextmanager
    def _job(self, nbytes: int, workers: int, **settings: Any) -> Iterator[tuple[Job, Callable[..., Round]]]:
        """Yield a job, and what does one round of it; without its `last` phases, nothing is committed."""
        with temporary_job(self._place, self._over, model(nbytes), workers=workers, **PATIENT | settings) as job:
            sessions = [job.join(f"w{i}") for i in range(workers)]
            pushed = gradient(job)
            aggregator = Aggregator(job, threading.Event())
            aggregator.hold(at_once=True)

            def turn(last: bool = True) -> Round:
                pull = self._phase(job, lambda: [s.pull() for s in sessions], workers)
                push = self._phase(job, lambda: [s.push(pushed) for s in sessions], workers)
                work = self._phase(job, aggregator.work, 1) if last else Phase(0, 0)
                return Round(push, work, pull)

            try:
                yield job, turn
            finally:
                for session in sessions:
                    session.leave(finished=False)
                aggregator.release()

    def _phase(self, job: Job, act: Callable[[], object], times: int) -> Phase:
        server, client = server_s(job), time.process_time()
        act()
        client = time.process_time() - client
        return Phase((server_s(job) - server) / times, client / times)

    def close(self) -> None:
        self._times.close()


def _each(choose: Callable[[list[float]], float], rounds: Sequence[Round]) -> Round:
    """Return the round of the least, or the median, of each number."""
    phases = [zip(*each, strict=True) for each in zip(*rounds, strict=True)]
    return Round(*(Phase(*(choose(list(numbers)) for numbers in phase)) for phase in phases))


def measured(bench: Bench, cases: Cases) -> Constants:
    """Return all constants."""
    (few, many), shards, large = cases.workers, cases.shards, cases.large
    two, four = (bench.large(n) for n in (2, 4))
    small = bench.small(_TINY, few)
    lone, pair, keys = bench.small(_TINY, 1), bench.small(_TINY * shards[1], 1, shards=shards[1]), shards[1] - 1
    pieces = bench.small(_TINY * shards[1], few, shards=shards[1])
    items = large / DTYPE.itemsize

    put, get = (two.push.server - small.push.server) / large, (two.pull.server - small.pull.server) / large
    receive = (two.pull.client - small.pull.client) / large
    encode, reduce = {}, {}
    for name in cases.formats:
        fewer, more = (two, four) if name == "fp32" else (bench.large(n, gradient_format=name) for n in (2, 4))
        kind = name.partition(":")[0]
        nbytes = _nbytes(name, items)
        # Receiving is on a thread of its own, which the simulation knows as such.
        reduce[kind] = max(0.0, (more.work.client - fewer.work.client) / 2 - nbytes * receive) / items
        encode[kind] = max(0.0, more.push.client - small.push.client) / items
    half = bench.large(2, weight_format="bf16")
    decode = {"fp32": 0.0, "bf16": max(0.0, half.pull.client - large / 2 * receive) / items}
    full = {name.partition(":")[0]: name for name in cases.formats}
    send = _send_byte(encode["fp32"])
    encode = {kind: max(0.0, s - send * _nbytes(full[kind], items) / items) for kind, s in encode.items()}
    step = {}
    for name in cases.optimizers:
        pair = two if name == "sgd" else bench.large(2, optimizer=_OPTIMIZERS[name])
        made = pair.work.client - small.work.client - 2 * (items * reduce["fp32"] + large * receive)
        step[name] = max(0.0, made - large * (1 + SLOTS[name]) * send) / items

    a, b = bench.scripts(few, 1), bench.scripts(many, 1)
    c, d = bench.scripts(few, shards[0]), bench.scripts(few, shards[1])
    e = bench.scripts(many, shards[0])
    wide = shards[1] - shards[0]
    listed, listed_wide = bench.inbox(many, 1), bench.inbox(many, shards[0])

    def by_worker(what: str) -> tuple[float, float]:
        """What each contribution adds, and each of its digests."""
        each = max(0.0, (b[what] - a[what]) / (many - few))
        with_digests = max(0.0, (e[what] - c[what]) / (many - few))
        return each, max(0.0, (with_digests - each) / (shards[0] - 1))

    plan, plan_digest = by_worker("plan, opens one")
    commit, commit_digest = by_worker("commits")
    per_list = (listed.server / many, listed.client / many)
    per_digest = [max(0.0, (x - y) / many / (shards[0] - 1)) for x, y in zip(listed_wide, listed, strict=True)]
    overhead = small.push.server - a["push"]  # of the request around the script
    ready_shard = max(0.0, (d["ready"] - c["ready"]) / wide)
    pull_key = max(0.0, pieces.pull.server - small.pull.server - keys * _TINY * get) / keys
    in_shard, in_shard_of_one = ((p.work.server - q.work.server) / keys for p, q in ((pieces, small), (pair, lone)))
    contribution = (in_shard - in_shard_of_one) / (few - 1)  # a chunk of it is read and freed
    return Constants(
        reference=bench.unit,
        put_byte=put,
        get_byte=get,
        put_key=max(0.0, pieces.push.server - small.push.server - keys * _TINY * put) / keys,
        get_key=pull_key,
        free_key=max(0.0, contribution - pull_key),
        stage_shard=max(0.0, in_shard_of_one - contribution - d["ready"] - overhead),
        push=small.push.server,
        turn=small.pull.server,
        plan=a["plan"] + overhead,
        ready=max(1e-6, c["ready"] - shards[0] * ready_shard) + overhead,
        push_digest=max(0.0, (d["push"] - c["push"]) / wide),
        plan_contribution=plan,
        plan_digest=plan_digest,
        commit_contribution=commit,
        commit_digest=commit_digest,
        ready_shard=ready_shard,
        inbox_contribution=per_list[0],
        inbox_digest=per_digest[0],
        parse_contribution=per_list[1],
        parse_digest=per_digest[1],
        worker_push=small.push.client,
        worker_pull=small.pull.client,
        send_byte=send,
        receive_byte=receive,
        shard=max(0.0, pair.work.client - lone.work.client) / keys,
        shard_contribution=max(0.0, pieces.work.client - small.work.client - pair.work.client + lone.work.client)
        / keys
        / (few - 1),
        aggregate=lone.work.client,
        encode=encode,
        reduce=reduce,
        decode=decode,
        step=step,
    )


def _nbytes(name: str, items: float) -> float:
    return format_of(name).nbytes(int(items))


def _send_byte(fp32_item: float) -> float:
    """fp32 encodes nothing: what a worker does for a byte is a look for NaN, a digest and the send."""
    return fp32_item / DTYPE.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, help="the file of constants; without it they are printed")
    parser.add_argument("--over", choices=("tcp", "unix"), default="tcp", help="how the processes reach the server")
    parser.add_argument("--rounds", type=int, default=5, help="of each case")
    parser.add_argument("--quick", action="store_true", help="few cases, and small: a check that it works")
    options = parser.parse_args()
    cases = QUICK if options.quick else Cases()
    with place(None) as where, reference(where, options.over, cases.large) as machine_speed:
        bench = Bench(where, options.over, options.rounds, cases.large, machine_speed)
        try:
            constants = measured(bench, cases)
        finally:
            bench.close()
        command = f"python -m kvps_bench.calibrate --over {options.over} --rounds {options.rounds}"
        text = constants.to_json({"command": command, **machine(where.store.client)})
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
