"""Where the groups of parameters, and the buffers, lie in the chunks of a shard. Pure.

chunk       [ W1 ............ | b1 | norm | W2 .......... | mean | var ]     parameters and buffers, in layout order
stretches   [ the optimizer's | group 0   | the optimizer's | buffers  ]     neighbours with the same settings are one
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from kvps.arrays.layout import Layout
from kvps.optim import Optimizer

Stretch = tuple[Optimizer | None, int, int]
"""Settings, None for buffers, and the first item of the shard that has them, and the item after the last."""


def stretches(optimizer: Optimizer, layout: Layout, shard: int) -> list[list[Stretch]]:
    """Return the stretches of each chunk of a shard, in the order of their items."""
    low, _ = layout.shard_range(shard)
    if not optimizer.groups and not layout.buffer_kind:
        return [[(optimizer, chunk.start - low, chunk.stop - low)] for chunk in layout.chunks[shard]]
    of_each = optimizer.of_each([p.name for p in layout.parameters])
    settings = [None if p.buffer else setting for p, setting in zip(layout.parameters, of_each, strict=True)]

    def of(chunk: int) -> Iterator[Stretch]:
        start = layout.chunks[shard][chunk].start - low
        for _, group in groupby(layout.pieces[shard][chunk], lambda piece: id(settings[piece.number])):
            pieces = list(group)
            stop = start + sum(piece.stop - piece.start for piece in pieces)
            yield settings[pieces[0].number], start, stop
            start = stop

    return [list(of(chunk)) for chunk in range(len(layout.chunks[shard]))]
