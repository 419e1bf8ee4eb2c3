"""The batches of a data set, each a unit of the job that counts exactly once, loaded ahead by DataLoader.

A worker has one unit at a time, and which one it gets next is not known before it asks. So the loader's processes load
the units that it will probably get. A wrong guess costs a load, never a wrong batch: what is loaded is kept by the
number of the batch, and a batch that was not guessed is loaded when it is needed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from kvps.arrays.inputs import in_words
from kvps.errors import InvalidSetting
from kvps.partitions import UnitBatches
from kvps.session.batches import check_repeats, plan_of, seed_numpy
from kvps.session.session import Session
from kvps.torch.seekable import Range, Seekable, Shards

if TYPE_CHECKING:
    from kvps.torch.session import TorchSession

log = logging.getLogger("kvps.session")
_REMEMBERED = 8  # units from which the next ones are guessed
_OWN = ("shuffle", "sampler", "batch_sampler")


class Request(NamedTuple):
    """A batch to load: its number, the seed of what is random in that (None seeds nothing), and its samples: their
    numbers, or ranges of shards."""

    number: int
    seed: int | None
    samples: list[int] | list[Range]


class Batches:
    """What `TorchSession.batches` returns: iterate over it once.

    epoch         the epoch of the present batch, from 0
    unit          its unit; None before the first one
    loaded_ahead  how many batches were being loaded before they were needed
    loaded_late   how many were not, because this worker was not expected to get them
    """

    def __init__(self, worker: TorchSession, loader: _Loader, plan: UnitBatches, seeds: bool) -> None:
        self.epoch = 0
        self.unit: int | None = None
        self._worker, self._loader, self._plan, self._seeds = worker, loader, plan, seeds

    @property
    def loaded_ahead(self) -> int:
        return self._loader.ahead

    @property
    def loaded_late(self) -> int:
        return self._loader.late

    def __iter__(self) -> Iterator[Any]:
        with closing(self._loader):
            while (unit := self._worker.session.next_unit()) is not None:
                self.unit, numbers = unit, self._plan.division.of(unit)
                self._worker.begin_unit(len(numbers))
                for number in numbers:
                    yield from self._until_stepped(number)
        of, ahead = self.loaded_ahead + self.loaded_late, self.loaded_ahead
        log.info("worker %s: %d of its %d batches were loaded ahead", self._worker.session.worker, ahead, of)

    def _until_stepped(self, number: int) -> Iterator[Any]:
        """Yield a batch until a step was taken on it: GradScaler takes none on a gradient that is not finite."""
        before, repeats, batch = self._worker.steps, 0, None
        self.epoch = self._plan.epoch(number)  # local steps go on from one epoch to the next within a unit
        while self._worker.steps == before:
            check_repeats(self._plan.division.unit(number), repeats)
            self._worker.pull()
            batch = batch if repeats else self._loader.get(number)
            if self._seeds:
                _seed(self._plan.seed(number))
            yield batch
            repeats += 1


def batches_of(
    worker: TorchSession, dataset: Any, batch_size: int | None, epochs: int | None, seed: bool, options: dict[str, Any]
) -> Batches:
    """Return what `TorchSession.batches` does. Raises InvalidSetting."""
    if not isinstance(worker.session, Session):
        raise InvalidSetting(
            "batches() hands a unit to one process, and the members of a group share theirs: take next_unit(), and "
            "give each member its part"
        )
    config, source = worker.session.config, _source_of(dataset, worker.session.config.seed)
    drop_last = bool(options.pop("drop_last", False))
    plan = plan_of(config, len(source), batch_size, epochs, drop_last)
    return Batches(worker, _Loader(source, plan, seed, options), plan, seed)


def _source_of(dataset: Any, seed: int) -> Any:
    """Return what batches are read from: a data set with samples by their numbers, or with shards. Raises
    InvalidSetting."""
    if isinstance(dataset, DataLoader):
        raise InvalidSetting(
            "batches() makes the DataLoader itself: give it the data set and the loader's own arguments, as num_workers"
        )
    if isinstance(dataset, Seekable):
        return Shards(dataset, seed)
    if isinstance(dataset, IterableDataset):
        raise InvalidSetting(
            "an iterable data set cannot give a batch a second time, as when a worker dies: give it samples_per_shard "
            "and iterate(shard, offset), or make one with len() and [number]"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise InvalidSetting(f"batches() needs a data set with len() and [number], not {in_words(dataset)}")
    return dataset


class _Loader:
    """Loads batches by their numbers, in processes of a DataLoader those that will probably be asked for.

    ahead, late  how many of the batches that were asked for had been guessed, and how many had not
    """

    def __init__(self, source: Any, plan: UnitBatches, seeds: bool, options: dict[str, Any]) -> None:
        self.ahead = self.late = 0
        self._source, self._plan, self._seeds = source, plan, seeds
        for name in _OWN:
            if name in options:
                raise InvalidSetting(f"{name} is not for batches(): the job's seed decides the order, so leave it out")
        self._fetch = _Fetch(source, options.pop("collate_fn", None) or default_collate)
        self._pins = bool(options.get("pin_memory", False))
        try:
            self._loader = DataLoader(self._fetch, batch_size=None, sampler=self, collate_fn=_as_it_is, **options)
        except (TypeError, ValueError) as error:
            raise InvalidSetting(f"batches() gives its other arguments to a DataLoader, which says: {error}") from None
        self._processes: Iterator[tuple[int, Any]] | None = None
        self._units: deque[int] = deque(maxlen=_REMEMBERED)  # those that this worker had last
        self._guessed = set[int]()  # units that are being loaded, or were, and that it may still get
        self._coming = list[int]()  # batches that are being loaded, in this order
        self._loaded = dict[int, Any]()

    def get(self, number: int) -> Any:
        """Return a batch."""
        self._note(self._plan.division.unit(number))
        if self._loader.num_workers and self._processes is None:
            self._processes = iter(self._loader)
        while self._coming and (min(self._coming) < number or number in self._coming):
            self._receive()
        self._loaded = {other: batch for other, batch in self._loaded.items() if other >= number}
        if number in self._loaded:
            self.ahead += 1
            return self._loaded.pop(number)
        self.late += 1
        direct = DataLoader(
            self._fetch, batch_size=None, sampler=[self._request(number)], collate_fn=_as_it_is, pin_memory=self._pins
        )
        return next(iter(direct))[1]

    def close(self) -> None:
        """End the processes."""
        self._processes = None

    def __iter__(self) -> Iterator[Request]:
        """Yield what the processes load next, each time they are asked for a batch."""
        while (unit := self._guess()) is not None:
            self._guessed.add(unit)
            for number in self._plan.division.of(unit):
                self._coming.append(number)
                yield self._request(number)

    def _note(self, unit: int) -> None:
        if not self._units or self._units[-1] != unit:
            self._units.append(unit)
            self._guessed = {guess for guess in self._guessed if guess >= unit} | {unit}

    def _guess(self) -> int | None:
        """Return a unit that this worker may get: as far on as its last ones were apart, or else the next one."""
        last = self._units[-1]
        apart = max(1, round((last - self._units[0]) / max(1, len(self._units) - 1)))
        likely = chain(
            range(last + apart, self._plan.division.units, apart), range(last + 1, self._plan.division.units)
        )
        return next((unit for unit in likely if unit not in self._guessed), None)

    def _receive(self) -> None:
        assert self._processes is not None
        number, batch = next(self._processes)
        self._coming.remove(number)
        self._loaded[number] = batch

    def _request(self, number: int) -> Request:
        seed = self._plan.loading_seed(number) if self._seeds else None
        if isinstance(self._source, Shards):
            return Request(number, seed, self._source.ranges(*self._plan.place(number)))
        return Request(number, seed, self._plan.rows(number).tolist())


class _Fetch(Dataset[tuple[int, Any]]):
    """Makes whole batches of a data set's samples; in a process of a DataLoader or in this one."""

    def __init__(self, source: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._source, self._collate = source, collate

    def __getitem__(self, request: Request) -> tuple[int, Any]:
        if request.seed is not None:
            _seed(request.seed)
        if hasattr(self._source, "__getitems__"):  # as DataLoader asks for several at once
            samples = self._source.__getitems__(request.samples)
        else:
            samples = [self._source[number] for number in request.samples]
        return request.number, self._collate(samples)


def _as_it_is(batch: Any) -> Any:
    return batch


def _seed(seed: int) -> None:
    seed_numpy(seed)
    torch.manual_seed(seed)
