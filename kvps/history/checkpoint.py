"""The whole state of a job at one version, and the file that holds it.

    DIR/<job>.<id>-<version>.safetensors    weights under their own names, for any reader of safetensors
    DIR/.<that name>.<nonce>                a file that is being written, or whose writer was killed

Optimizer state is stored beside the weights as `opt.<slot>/<parameter>`, all else in the metadata. Each array has its
own dtype; one that is tied is stored under its first name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.arrays.number_ranges import counts_as_text, counts_in
from kvps.config import JobConfig
from kvps.errors import CorruptData, counted
from kvps.history.experience import Experience, mark_of
from kvps.history.tensor_file import SUFFIX, TensorFile, check_tensors, write_tensors
from kvps.machine.files import regular
from kvps.optim.custom import MOST_SLOTS
from kvps.parsing import JOB_ID, MOST_JSON, Fields, file_name, name, sequence, whole, word
from kvps.protocol.job_state import Begin, Member, State
from kvps.protocol.plan import set_lr
from kvps.protocol.run_control import RunControl
from kvps.protocol.worker_states import MOST_BYTES, committed
from kvps.transport.kept_state import state_bytes
from kvps.transport.opening import OpenedJob

_FORMAT = "2"
_MOST_SLOTS = MOST_SLOTS + 1  # an optimizer's, and the view


@dataclass(frozen=True)
class Checkpoint:
    """A job at one version. `weights` are (size,) float32 in layout order, or the words of other dtypes; `slots`
    maps each optimizer slot to such an array (no slots at version 0, where all are zeros).

    `clock`, `skip`, `workers` and `units` are the job's hashes of these names when the version was the newest, and `lr`
    is the learning rate that was set then; None for the optimizer's own. `states` has the state of each worker, behind
    the contribution with which it came. `experience` has the items that waited for a learner then, `kept` the state
    that it kept with the version. `skipped` is in how many versions each parameter was left out, by its number in the
    layout. `run` says whether somebody has stopped the job (`Job.stop`), and with which round it ends; one that was
    paused or `suspended` goes on."""

    job: str
    id: str
    version: int
    head: str
    config: JobConfig
    layout: Layout
    clock: Mapping[str, int]
    skip: Mapping[str, int]
    workers: Mapping[str, str] = field(repr=False)
    units: Mapping[str, str] = field(repr=False)
    weights: Array = field(repr=False)
    slots: Mapping[str, Array] = field(repr=False)
    saved: str = ""
    skipped: Mapping[int, int] = field(default_factory=dict)
    run: RunControl = field(default=RunControl())
    lr: float | None = None
    states: Mapping[str, str] = field(default_factory=dict, repr=False)
    suspended: bool = False
    experience: Experience = field(default_factory=Experience, repr=False)
    kept: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, access: OpenedJob, state: State) -> Checkpoint:
        """Return the checkpoint of a job at `state`. Raises ChunkGone if the bytes of the version are freed."""
        weights, slots, skipped = access.reader.whole(state)
        return cls(
            job=access.keys.job,
            id=state.id,
            version=state.version,
            head=state.head,
            config=access.config,
            layout=access.layout,
            clock=dict(state.clock),
            skip={m.worker: m.skip for m in state.members.values()},
            workers={m.worker: json.dumps(m.process) for m in state.members.values()},
            units=dict(state.units),
            weights=weights,
            slots=slots,
            saved=datetime.now(UTC).isoformat(timespec="seconds"),
            run=state.run if state.run.state == "stopped" else RunControl(),
            skipped=skipped,
            lr=state.lr,
            states=committed(state.states),
            suspended=state.run.state == "suspended",
            experience=Experience.of(access, state),
            kept=state_bytes(access, state.names[0]) if access.config.metadata.publishes else b"",
        )

    @property
    def begin(self) -> Begin:
        """The point where the log of a job restored from this checkpoint begins."""
        return Begin(self.version, self.head, sum(self.clock.values()))

    @property
    def finished(self) -> bool:
        """Whether the job had done all its work, as `State.finished` says it of a job on a server."""
        if self.run.round is not None:
            return all(map(self.run.is_last, self._rounds_to_do()))
        if self.config.units:
            return whole(self.units.get("done", 0), "units done") == self.config.units
        return sum(m.finished and m.state == "gone" for m in self._members()) >= self.config.workers

    def _rounds_to_do(self) -> Iterable[int]:
        """Return the rounds that must all come to the last one of a job that was stopped."""
        if self.config.rounds_are_versions:
            return (self.version,)
        return (m.round for m in self._members() if m.state != "gone" and not m.evicted)

    def _members(self) -> Iterable[Member]:
        """Return the workers as they were at that version."""
        return _members(self.workers, self.clock, self.skip)

    @property
    def filename(self) -> str:
        """The name of the file. It has the id, so that successive jobs of one name leave each other's files alone."""
        return file_name(f"{self.job}.{self.id}-{self.version:08d}{SUFFIX}", "the name of a checkpoint's file")

    # -- the file ------------------------------------------------------------------------------------------------

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file beside `path`, sync it and rename it. Raises KvpsError, and then leaves `path` as it was."""
        write_tensors("checkpoint", Path(path), self._tensors(), self._metadata())

    def _tensors(self) -> dict[str, NDArray[Any]]:
        tensors: dict[str, NDArray[Any]] = dict(self.layout.views(self.weights))
        for slot, array in self.slots.items():
            named = self.layout.views(array).items()
            tensors |= {_state_name(self.layout, slot, name): values for name, values in named}
        if self.kept:
            tensors[f"{mark_of(self.layout)}kept"] = np.frombuffer(self.kept, np.uint8)
        return tensors | self.experience.tensors(self.layout)

    def _metadata(self) -> dict[str, str]:
        return {
            "kvps": _FORMAT,
            "job": self.job,
            "id": self.id,
            "version": str(self.version),
            "head": self.head,
            "config": json.dumps(self.config.to_hash()),
            "layout": self.layout.to_json(),
            "clock": json.dumps(self.clock),
            "skip": json.dumps(self.skip),
            "workers": json.dumps(self.workers),
            "units": json.dumps(self.units),
            "slots": json.dumps(list(self.slots)),
            "saved": self.saved,
            "stopped": "1" if self.run.ends else "",  # for a kvps of before, which reads no "run"
            "run": json.dumps(self.run.fields),
            "skipped": json.dumps(counts_as_text(self.skipped)),
            **({"states": json.dumps(self.states)} if self.states else {}),
            **({} if self.lr is None else {"lr": repr(self.lr)}),
            **({"suspended": "1"} if self.suspended else {}),
            **self.experience.metadata(),
            **({"kept": "1"} if self.kept else {}),
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read a file. Raises CorruptData if it is damaged, cut short or no checkpoint, InvalidSetting if missing."""
        path = Path(path)
        check_tensors(path)
        try:
            with open(path, "rb", opener=regular) as opened:
                file = TensorFile(opened, path)
                f = file.metadata
                if (format := f.text("kvps")) != _FORMAT:
                    raise CorruptData(f"{path} has format {format}, this kvps reads {_FORMAT}: use a newer kvps")
                layout = Layout.from_json(f.text("layout", MOST_JSON))
                where = f"{path}: slots"
                names = [word(slot, where) for slot in sequence(f.json("slots"), where, _MOST_SLOTS)]
                if names and not layout.trains:
                    raise CorruptData(f"{path} has the optimizer's state of a job that is published, and has none")
                if path.stat().st_size < sum(p.nbytes for p in layout.parameters) * (1 + len(names)):
                    raise CorruptData(f"{path} is too short for the {counted(layout.size, 'item')} of its layout")
                slots = {
                    slot: _flat(layout, file, {p.name: _state_name(layout, slot, p.name) for p in layout.parameters})
                    for slot in names
                }
                clock, skip = _counts(f, "clock"), _counts(f, "skip")
                return cls(
                    job=f.name("job"),
                    id=f.matching("id", *JOB_ID),
                    version=f.whole("version"),
                    head=f.word("head"),
                    config=JobConfig.from_hash(f.json_fields("config").as_dict(), f"{path}: config"),
                    layout=layout,
                    clock=clock,
                    skip=skip,
                    workers=_workers(f, clock, skip),
                    units=f.json_fields("units").scalars(),
                    weights=_flat(layout, file, {}),
                    slots=slots,
                    saved=f.text("saved"),
                    run=_run(f),
                    skipped=counts_in(f.json_fields("skipped"), f.whole("version"), len(layout.parameters))
                    if "skipped" in f
                    else {},
                    lr=set_lr(f),
                    states=f.json_fields("states").scalars(2 * MOST_BYTES) if "states" in f else {},
                    suspended="suspended" in f,
                    experience=Experience.load(file, layout),
                    kept=file.array(f"{mark_of(layout)}kept").tobytes() if "kept" in f else b"",
                )
        except OSError as error:
            raise CorruptData(f"{path} cannot be read as a checkpoint ({error}): use a newer kvps") from None


def _run(f: Fields) -> RunControl:
    """Return what a job did. A kvps of before noted no more than that it was stopped."""
    if "run" in f:
        return RunControl.of(f.json_fields("run"))
    return RunControl("stopped", 0) if f.text("stopped", default="") else RunControl()


def _counts(f: Fields, what: str) -> dict[str, int]:
    counts = f.json_fields(what)
    return {name(worker, what): counts.whole(worker) for worker in counts}


def _workers(f: Fields, clock: Mapping[str, int], skip: Mapping[str, int]) -> dict[str, str]:
    """Return the entries of workers. Raises CorruptData if one cannot be read, or has no count of skipped rounds."""
    entries = f.json_fields("workers").scalars()
    list(_members(entries, clock, skip))
    return entries


def _members(workers: Mapping[str, str], clock: Mapping[str, int], skip: Mapping[str, int]) -> Iterator[Member]:
    for worker, entry in workers.items():
        done = clock.get(worker, 0)
        skipped = whole(skip.get(worker), f"the skipped rounds of worker {worker!r}")
        yield Member.of(worker, entry, done + skipped, done)


def _flat(layout: Layout, file: TensorFile, names: Mapping[str, str]) -> Array:
    """Return the tensors of all parameters end to end, as the layout has them: (size,) float32. `names` has the names
    under which they are in the file, where these are other ones."""
    flat: Array = np.empty(layout.size, DTYPE)
    for p in layout.parameters:
        array = file.array(names.get(p.name, p.name))
        if array.dtype != p.stored_as.numpy or array.shape != p.shape:
            raise CorruptData(f"tensor {p.name!r} is not a {p.stored_as.name} array of shape {p.shape}")
        flat[p.stop - 1 : p.stop] = 0  # what lies behind the last item
        p.items_in(flat)[:] = array.reshape(-1)
    return flat


def _state_name(layout: Layout, slot: str, parameter: str) -> str:
    """Return the name of a tensor of optimizer state: one that no parameter of the layout has."""
    mark = "opt."
    while any(p.name.startswith(mark) for p in layout.parameters):
        mark = f"_{mark}"
    return f"{mark}{slot}/{parameter}"
