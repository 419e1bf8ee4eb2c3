"""Iterable data sets that can seek: they have shards, and iterate over one of them from any sample on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import Dataset

from kvps.errors import InvalidSetting, counted, shown
from kvps.partitions import Rows, epoch_order

_MOST_OPEN = 2  # iterators of a process: a batch may end one shard and begin the next


@runtime_checkable
class Seekable(Protocol):
    """What an IterableDataset has too, so that `batches` can take it.

    samples_per_shard  how many samples each shard has
    iterate            returns the samples of a shard in their order, from number `offset` on, always the same ones
    """

    samples_per_shard: Sequence[int]

    def iterate(self, shard: int, offset: int) -> Iterator[Any]: ...


class Range(NamedTuple):
    """Samples of a shard: `length` of them, from number `offset` on."""

    shard: int
    offset: int
    length: int


class Shards(Dataset[list[Any]]):
    """Reads ranges of a seekable data set, where one follows another without a seek.

    An epoch has the shards in an order drawn anew, and the samples of each in their own order. Raises InvalidSetting
    for numbers of samples that are none.
    """

    def __init__(self, dataset: Seekable, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        given = dataset.samples_per_shard
        if not isinstance(given, Sequence | np.ndarray) or not all(
            isinstance(each, int | np.integer) and each >= 0 for each in given
        ):
            raise InvalidSetting(f"samples_per_shard must be a list of whole numbers from 0, not {shown(given)}")
        self._lengths: Rows = np.array(given, np.int64)
        self._order = lru_cache(2)(self._order_of)  # batches of the next epoch are loaded ahead
        self._open = dict[tuple[int, int], Iterator[Any]]()  # shard and next sample -> iterator

    def __len__(self) -> int:
        return int(self._lengths.sum())

    def ranges(self, epoch: int, first: int, count: int) -> list[Range]:
        """Return the samples from number `first` on in the order of an epoch; at its end there may be fewer."""
        order, begins = self._order(epoch)
        place, found = int(np.searchsorted(begins, first, "right")) - 1, []
        while count > 0 and place < len(order):
            shard, offset = int(order[place]), first - int(begins[place])
            if took := min(count, int(self._lengths[shard]) - offset):
                found.append(Range(shard, offset, took))
            first, count, place = first + took, count - took, place + 1
        return found

    def _order_of(self, epoch: int) -> tuple[Rows, Rows]:
        """Return the shards in the order of an epoch, and which sample of it each begins with."""
        order = epoch_order(len(self._lengths), self._seed, epoch)
        return order, np.concatenate([[0], self._lengths[order].cumsum()[:-1]])

    def __getitems__(self, ranges: list[Range]) -> list[Any]:
        """Return the samples of ranges. Raises InvalidSetting for a shard that ends early."""
        return [sample for each in ranges for sample in self._read(*each)]

    def _read(self, shard: int, offset: int, count: int) -> Iterator[Any]:
        if (samples := self._open.pop((shard, offset), None)) is None:
            samples = iter(self._dataset.iterate(shard, offset))
        for number in range(count):
            try:
                yield next(samples)
            except StopIteration:
                length = self._lengths[shard]
                raise InvalidSetting(
                    f"shard {shard} ended after {counted(offset + number, 'sample')}, and samples_per_shard says "
                    f"{length}: count its samples again"
                ) from None
        if offset + count < self._lengths[shard]:
            self._open[shard, offset + count] = samples
            while len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
