"""The items of experience in a checkpoint: those that had no fate when its version was the newest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvps.arrays.digest import Buffers, digest_of
from kvps.arrays.layout import CHUNK_BYTES, Layout
from kvps.errors import CorruptData
from kvps.history.tensor_file import TensorFile
from kvps.parsing import MOST_ITEMS
from kvps.protocol.job_state import State
from kvps.protocol.keys import JobKeys
from kvps.protocol.rollout_scripts import Record
from kvps.transport.access import JobAccess

_COUNTERS = ("form", "orders", "entered", "trained", "stale", "rejected")


@dataclass(frozen=True)
class Experience:
    """The items without a fate at one version. `counters` are fields of the hash `rollouts`, `records` and `lots` the
    hashes `items` and `lots`, `values` the bytes of each item."""

    counters: Mapping[str, str] = field(default_factory=dict)
    records: Mapping[str, str] = field(default_factory=dict)
    lots: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, access: JobAccess, state: State) -> Experience:
        """Read the items of a job at `state`. Raises ChunkGone if one has had its fate meanwhile, CorruptData."""
        if not state.experience:
            return cls()
        numbers, records, lots = state.experience
        values = {id: np.empty(Record.of(text, id).nbytes, np.uint8) for id, text in records.items()}
        gets = []
        for id, value in values.items():
            _, prefix = access.keys.item(id, access.layout.shards)
            gets += [(f"{prefix}{i}", chunk) for i, chunk in enumerate(_chunks(value))]
        access.client.get(gets)
        found = cls({name: numbers[name] for name in _COUNTERS if name in numbers}, records, lots, values)
        found._check()
        return found

    def _check(self) -> None:
        for id, value in self.values.items():
            if digest_of([_memory(value)]) != Record.of(self.records[id], id).digest:
                raise CorruptData(f"item {id} has other bytes than when it was accepted")

    def items(self, keys: JobKeys, shards: int) -> Iterator[tuple[str, Buffers]]:
        """Yield the keys of a job with so many shards and their values."""
        for id, value in self.values.items():
            _, prefix = keys.item(id, shards)
            yield from ((f"{prefix}{i}", [chunk]) for i, chunk in enumerate(_chunks(value)))

    def as_text(self) -> dict[str, dict[str, str]]:
        """Return what create.lua takes."""
        nbytes = sum(value.nbytes for value in self.values.values())
        counters = {**self.counters, "bytes": str(nbytes)} if self.counters else {}
        return {"counters": counters, "items": dict(self.records), "lots": dict(self.lots)}

    # -- the file ---------------------------------------------------------------------------------------------

    def tensors(self, layout: Layout) -> dict[str, NDArray[Any]]:
        """Return the items as tensors of a file that has also those of a layout."""
        mark = mark_of(layout)
        return {f"{mark}{number}": value for number, value in enumerate(self.values.values())}

    def metadata(self) -> dict[str, str]:
        """Return what else the file says of them; nothing for a job without."""
        if not self.counters:
            return {}
        return {"experience": json.dumps([self.counters, self.records, self.lots])}

    @classmethod
    def load(cls, file: TensorFile, layout: Layout) -> Experience:
        """Read what `tensors` and `metadata` wrote. Raises CorruptData."""
        if "experience" not in file.metadata:
            return cls()
        parts = file.metadata.json("experience")
        if not isinstance(parts, list) or len(parts) != 3 or not all(isinstance(part, dict) for part in parts):
            raise CorruptData("experience is none: another program wrote it")
        counters, records, lots = ({str(k): str(v) for k, v in part.items()} for part in parts)
        if len(records) > MOST_ITEMS or {id for lot in lots.values() for id in lot.split()[2:]} != set(records):
            raise CorruptData("experience has other items than its lots: another program wrote it")
        values, mark = {}, mark_of(layout)
        for number, (id, text) in enumerate(records.items()):
            values[id] = file.array(f"{mark}{number}")
            if values[id].shape != (Record.of(text, id).nbytes,) or values[id].dtype != np.uint8:
                raise CorruptData(f"item {id} has another size than its record says")
        found = cls(counters, records, lots, values)
        found._check()
        return found


def mark_of(layout: Layout) -> str:
    """Return what the names of tensors begin with that are no parameters."""
    mark = "experience/"
    while any(p.name.startswith(mark) for p in layout.parameters):
        mark = f"_{mark}"
    return mark


def _memory(value: NDArray[np.uint8]) -> memoryview:
    return value.data


def _chunks(value: NDArray[np.uint8]) -> Iterator[memoryview]:
    memory = _memory(value)
    return (memory[at : at + CHUNK_BYTES] for at in range(0, value.nbytes, CHUNK_BYTES))
