"""What the scripts beside this one share. They run in environments of their own, where kvps is not installed.

A script is started with one argument, JSON: workers, nbytes, tensors, and what else its kind needs. On its standard
input it reads how many rounds to run now, a number a line; on its standard output it answers with a line of JSON: the
seconds of each round as worker 0 saw them. At the end of its input it says whether the weights are what they must be,
and ends. So it can take turns with others.

Worker k's gradient is the constant k + 1 and the weights begin at 0: they follow from the number of rounds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
os.environ.update(dict.fromkeys(THREADS, "1"))
LR = 2.0**-10
OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print goes with the errors, not between our lines


def options():
    """What the benchmark asks for."""
    return json.loads(sys.argv[1])


def sizes(nbytes, tensors):
    """Items of each array: one of all, or unequal ones, from small to a thousand times as large."""
    items = nbytes // 4
    if tensors == 1:
        return [items]
    weights = [1000 ** (i / (tensors - 1)) for i in range(tensors)]
    out = [max(1, int(items * w / sum(weights))) for w in weights]
    out[-1] += items - sum(out)
    return out


def right(values, workers, rounds):
    """Whether these weights are what so many rounds make of zeros, as float32 rounds it."""
    wanted = -LR * rounds * (workers + 1) / 2
    return all(abs(value - wanted) <= 1e-3 * abs(wanted) for value in values)


def free_port():
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def timed(number, step, before=None):
    """Seconds of so many steps; `before` runs ahead of each, outside of its time."""
    took = []
    for _ in range(number):
        if before:
            before()
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return took


def answer(rounds, check):
    """Do what is asked on standard input."""

    def say(what):
        OUT.write(json.dumps(what) + "\n")
        OUT.flush()

    say({"ready": True})
    for line in sys.stdin:
        say({"seconds": rounds(int(line))})
    say({"right": bool(check())})


class Crowd:
    """Processes; the last `workers` of them are workers, which do rounds together."""

    def __init__(self, target, processes, workers, *arguments):
        spawning = multiprocessing.get_context("spawn")
        self._barrier = spawning.Barrier(workers)
        self._pipes = []
        for number in range(processes):
            mine, its = spawning.Pipe()
            arguments_ = (number, Worker(its, self._barrier), *arguments)
            spawning.Process(target=target, args=arguments_, daemon=True).start()
            its.close()  # or the end of that process would go unnoticed
            self._pipes.append(mine)
        self._pipes = self._pipes[-workers:]
        for pipe in self._pipes:
            pipe.recv()

    def rounds(self, number):
        """Have the workers do so many rounds; the seconds of the first."""
        return self._ask(number)[0]

    def check(self):
        """Whether all workers have the right weights."""
        return all(self._ask(0))

    def _ask(self, what):
        for pipe in self._pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self._pipes]


class Worker:
    """A worker's end of the crowd."""

    def __init__(self, pipe, barrier):
        self._pipe, self._barrier = pipe, barrier

    def obey(self, step, check, before=None):
        """Do rounds until asked for the weights: `check(rounds)` says whether they are right."""
        done = 0
        self._pipe.send("ready")
        while number := self._pipe.recv():
            self._barrier.wait()
            self._pipe.send(timed(number, step, before))
            done += number
        self._pipe.send(check(done))
