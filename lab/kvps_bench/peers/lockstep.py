"""The common part of the scripts beside this one. They run in their own environments, where kvps is not installed.

A script has one argument, a JSON object: workers, nbytes, tensors, and what else its kind needs. It reads from its
standard input how many rounds to run, one number a line, and answers each on its standard output with a line of JSON:
the seconds of each round as worker 0 saw them. At the end of its input it answers whether its weights are right, and
ends. So the script can take turns with other cases.

Worker k's gradient is the constant k + 1 and the weights begin at 0, so the number of rounds determines the weights.
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
os.dup2(2, 1)  # what libraries print goes to stderr, not between our lines


def options():
    """Return the benchmark's request."""
    return json.loads(sys.argv[1])


def sizes(nbytes, tensors):
    """Return the items of each array: one array of all, or unequal ones, from small to a thousand times as large."""
    items = nbytes // 4
    if tensors == 1:
        return [items]
    weights = [1000 ** (i / (tensors - 1)) for i in range(tensors)]
    out = [max(1, int(items * w / sum(weights))) for w in weights]
    out[-1] += items - sum(out)
    return out


def right(values, workers, rounds):
    """Return whether `rounds` rounds make these weights of zeros, within 1e-3, because float32 rounds."""
    wanted = -LR * rounds * (workers + 1) / 2
    return all(abs(value - wanted) <= 1e-3 * abs(wanted) for value in values)


def free_port():
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def timed(number, step, before=None):
    """Return the seconds of each of `number` steps; `before` runs ahead of each, outside of its time."""
    took = []
    for _ in range(number):
        if before:
            before()
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return took


def answer(rounds, check):
    """Answer the requests on standard input."""

    def say(what):
        OUT.write(json.dumps(what) + "\n")
        OUT.flush()

    say({"ready": True})
    for line in sys.stdin:
        say({"seconds": rounds(int(line))})
    say({"right": bool(check())})


class Crowd:
    """Processes, of which the last `workers` are workers that do rounds together."""

    def __init__(self, target, processes, workers, *arguments):
        spawning = multiprocessing.get_context("spawn")
        self._barrier = spawning.Barrier(workers)
        self._pipes = []
        for number in range(processes):
            mine, its = spawning.Pipe()
            arguments_ = (number, Worker(its, self._barrier), *arguments)
            spawning.Process(target=target, args=arguments_, daemon=True).start()
            its.close()  # otherwise the end of that process would go unnoticed
            self._pipes.append(mine)
        self._pipes = self._pipes[-workers:]
        for pipe in self._pipes:
            pipe.recv()

    def rounds(self, number):
        """Have the workers do `number` rounds; return the seconds of the first worker."""
        return self._ask(number)[0]

    def check(self):
        """Return whether all workers have the right weights."""
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
        """Do rounds until asked for the weights, then answer `check(rounds)`: whether the weights are right."""
        done = 0
        self._pipe.send("ready")
        while number := self._pipe.recv():
            self._barrier.wait()
            self._pipe.send(timed(number, step, before))
            done += number
        self._pipe.send(check(done))
