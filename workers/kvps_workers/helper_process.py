"""A process that computes its share of each contribution of a worker: started fresh, never forked.

``python -m kvps_workers.helper_process`` reads a line of JSON from its standard input, `Order`, and then the number of
a round in each line. The weights, and the share that it computes on them, lie in memory which it shares with its
worker. It answers with a line of JSON: the loss, or why it failed. It knows nothing of Redis, and ends when its worker
does.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.config import JobConfig
from kvps.errors import KvpsError
from kvps.machine.process import die_with_parent, own_input
from kvps_workers.gradient import share_of
from kvps_workers.rounds import Rounds
from kvps_workers.task import load_task

Answer = dict[str, Any]


@dataclass(frozen=True)
class Order:
    """What a helper process is told at its start.

    parent          its worker's process
    memory, answers file descriptors: of the shared memory, and of the pipe for answers
    config, layout  those of the job, as it stores them
    rank, part      the worker's rank, and which of its processes this is, from 1
    """

    parent: int
    memory: int
    answers: int
    config: dict[str, str]
    layout: str
    rank: int
    part: int


def shared_arrays(memory: int, size: int, procs: int) -> list[Array]:
    """Return the arrays, (size,) float32, in the memory of this file descriptor: the weights, and the share of each
    process from 1 to procs - 1."""
    mapped = mmap.mmap(memory, procs * size * DTYPE.itemsize)
    return [np.frombuffer(mapped, DTYPE, size, number * size * DTYPE.itemsize) for number in range(procs)]


def main() -> int:
    """Answer the rounds from standard input until that is closed."""
    orders = own_input()
    order = Order(**json.loads(orders.readline()))
    die_with_parent(order.parent)
    compute: Callable[[int], Answer] | None = None
    for line in orders:
        try:
            compute = compute or _computing(order)
            answer = compute(int(line))
        except KvpsError as error:
            answer = {"error": str(error)}
        os.write(order.answers, json.dumps(answer).encode() + b"\n")
    return 0


def _computing(order: Order) -> Callable[[int], Answer]:
    """Return a function that computes this process's share of a round. Raises what the task raises."""
    config, layout = JobConfig.from_hash(order.config), Layout.from_json(order.layout)
    task = load_task(config.metadata.task)
    rounds = Rounds(task, config, order.rank, np)
    arrays = shared_arrays(order.memory, layout.size, config.procs)
    params, mine = layout.views(arrays[0]), arrays[order.part]

    def compute(number: int) -> Answer:
        share = share_of(task, layout, rounds, number, params, np, order.part)
        if share is None:
            return {"loss": None}
        np.concatenate(layout.hosted(share.grads, "gradient"), out=mine)
        return {"loss": share.loss}

    return compute


if __name__ == "__main__":
    sys.exit(main())
