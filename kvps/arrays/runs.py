"""Runs of small parameters, which are moved together: a copy of their bytes costs less than the handling of each. Pure.

parameters  [ W1 ............ | b1 | g1 | b2 | W2 ........... ]
runs        [ 0 ............. | 1 .......... | 2 ............ ]
"""

from __future__ import annotations

from kvps.arrays.layout import CHUNK_ITEMS, Layout

SMALL_ITEMS = 1 << 12
"""The most items of a small parameter."""


class Runs:
    """The runs of a layout: small neighbours of one part, up to a chunk of them; each other parameter is one alone.

    parameters  the layout that they are runs of
    numbers     for each run the numbers of its parameters
    of          for each parameter the number of its run
    layout      the layout in which each run is one flat parameter, under the name of its first
    """

    def __init__(self, parameters: Layout) -> None:
        self.parameters = parameters
        self.numbers = _runs(parameters)
        self.of = [number for number, run in enumerate(self.numbers) for _ in run]
        firsts = [parameters.parameters[run[0]] for run in self.numbers]
        ends = [parameters.parameters[run[-1]].stop for run in self.numbers]
        flat = [first._replace(shape=(end - first.start,)) for first, end in zip(firsts, ends, strict=True)]
        self.layout = Layout(tuple(flat), parameters.shards)


def _runs(layout: Layout) -> list[range]:
    out = list[range]()
    start, before = 0, layout.parameters[0]
    for number, p in enumerate(layout.parameters):
        joins = max(before.size, p.size) <= SMALL_ITEMS and p.stop - start <= CHUNK_ITEMS
        if out and joins and (before.part, before.buffer) == (p.part, p.buffer):
            out[-1] = range(out[-1].start, number + 1)
        else:
            out.append(range(number, number + 1))
            start = p.start
        before = p
    return out
