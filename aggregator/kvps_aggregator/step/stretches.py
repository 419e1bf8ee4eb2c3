"""Where the groups of parameters lie in the chunks of a shard. Pure.

chunk       [ W1 ............ | b1 | norm | W2 ........ ]     parameters, in layout order
stretches   [ the optimizer's | group 0   | the optimizer's ]  neighbours with the same settings are one
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from kvps.arrays.layout import Layout
from kvps.optimizers import Optimizer

Stretch = tuple[Optimizer, int, int]
"""Settings, and the first item of the shard that has them, and the item after the last."""


def stretches(optimizer: Optimizer, layout: Layout, shard: int) -> list[list[Stretch]]:
    """Return the stretches of each chunk of a shard, in the order of their items."""
    low, _ = layout.shard_range(shard)
    if not optimizer.groups:
        return [[(optimizer, chunk.start - low, chunk.stop - low)] for chunk in layout.chunks[shard]]
    settings = optimizer.of_each([p.name for p in layout.parameters])

    def of(chunk: int) -> Iterator[Stretch]:
        start = layout.chunks[shard][chunk].start - low
        for _, pieces in groupby(layout.pieces[shard][chunk], lambda piece: id(settings[piece.number])):
            found = list(pieces)
            stop = start + sum(piece.stop - piece.start for piece in found)
            yield settings[found[0].number], start, stop
            start = stop

    return [list(of(chunk)) for chunk in range(len(layout.chunks[shard]))]
