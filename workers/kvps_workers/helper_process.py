"""A process that computes its share of each contribution of a worker: started fresh, never forked.

``python -m kvps_workers.helper_process FD`` reads an `Order` from that socket, and then numbers of contributions. The
weights, and the share that it computes on them, lie in memory which it shares with its worker. It answers with the
loss, None where it has no share, or the text of an error. It knows nothing of Redis, and ends when its worker does.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.config import JobConfig
from kvps.errors import KvpsError
from kvps.machine.process import die_with_parent
from kvps_workers.contributions import Contributions
from kvps_workers.task import load_task


class Order(NamedTuple):
    """What a helper process is told at its start.

    parent          its worker's process
    memory          the file descriptor of the shared memory
    config, layout  those of the job, as it stores them
    rank, part      the worker's rank, and which of its processes this is, from 1
    """

    parent: int
    memory: int
    config: dict[str, str]
    layout: str
    rank: int
    part: int


def shared_arrays(memory: int, size: int, procs: int) -> list[Array]:
    """Return the arrays, (size,) float32, in the memory of this file descriptor: the weights, and the share of each
    process from 1 to procs - 1."""
    mapped = mmap.mmap(memory, procs * size * DTYPE.itemsize)
    return [np.frombuffer(mapped, DTYPE, size, number * size * DTYPE.itemsize) for number in range(procs)]


def main() -> None:
    """Answer until the worker closes its end."""
    worker = Connection(int(sys.argv[1]))
    with suppress(EOFError, ConnectionResetError):  # reset if an answer lay unread there
        order = Order(*worker.recv())
        die_with_parent(order.parent)
        compute: Callable[[int], float | None] | None = None
        while True:
            number = worker.recv()
            try:
                compute = compute or _computing(order)
                worker.send(compute(number))
            except KvpsError as error:
                worker.send(str(error))


def _computing(order: Order) -> Callable[[int], float | None]:
    """Return a function that computes this process's share, and returns its loss. Raises what the task raises."""
    config, layout = JobConfig.from_hash(order.config), Layout.from_json(order.layout)
    contributions = Contributions(config, layout, load_task(config.metadata.task), order.rank)
    arrays = shared_arrays(order.memory, layout.size, config.metadata.procs)
    params, mine = layout.views(arrays[0]), arrays[order.part]

    def compute(number: int) -> float | None:
        share = contributions.share(params, number, order.part)
        if share is None:
            return None
        np.concatenate(layout.hosted(share.grads, "gradient"), out=mine)
        return share.loss

    return compute


if __name__ == "__main__":
    main()
