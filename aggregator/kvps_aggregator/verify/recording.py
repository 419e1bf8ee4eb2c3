"""Keeps contributions in files, so that a job can be replayed even if its gradients cannot be computed again.

    DIR/<job>.<id>/shard<i>/initial.<digest>.f32              version 0
    DIR/<job>.<id>/shard<i>/<worker>.<incarnation>.<seq>.g    one contribution's part, in the job's wire format

The holder of a shard writes each contribution before it calls ready, so every committed contribution is in a file,
whichever process is killed when. The log says which contributions counted. A file is written under a temporary name,
which begins with a dot, and then renamed: a killed writer leaves only the temporary one. There is no fsync: a machine
that loses power loses its last files, and the digests say which.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from kvps.arrays.digest import shard_digests, view
from kvps.arrays.formats import Bytes, format_of
from kvps.arrays.layout import DTYPE, Array, Layout
from kvps.errors import KvpsError
from kvps.machine.files import make_directory, private, regular
from kvps.parsing import file_name
from kvps.protocol.plan import Contribution
from kvps_aggregator.verify.chain import Unproved
from kvps_aggregator.verify.contribution import Coding
from kvps_aggregator.verify.replay import Encode


class Recorder:
    """The record of one shard, which its holder writes. KvpsError is raised before anything unrecorded can commit."""

    def __init__(self, directory: Path, job: str, id: str, shard: int) -> None:
        self._folder = _folder(directory, job, id, shard)
        self._begun: dict[str, Path] = {}

    def initial(self, weights: Array, digest: str) -> None:
        """Keep the shard's part of version 0."""
        self._extend(f"initial.{digest}.f32", view(weights))
        self.keep()

    def extend(self, contribution: Contribution, data: Bytes) -> None:
        """Write the next chunk of the shard's part of a contribution, as received."""
        self._extend(_name(contribution), data.data)

    def keep(self) -> None:
        """Give the files, which are whole, their final names."""
        while self._begun:
            name, aside = self._begun.popitem()
            with self._may_fail(name, aside):
                aside.rename(_within(self._folder, name))

    def forget(self) -> None:
        """Delete the files that were written and not kept."""
        while self._begun:
            with suppress(OSError):
                self._begun.popitem()[1].unlink()

    def _extend(self, name: str, memory: memoryview) -> None:
        # Another holder may write the same file at the same time, so each has a temporary file of its own. It is opened
        # for each chunk, because a plan may hold more contributions than a process may have files open.
        if name not in self._begun:
            self._begun[name] = _within(self._folder, f".{name}.{secrets.token_hex(4)}")
        aside = self._begun[name]
        with self._may_fail(name, aside):
            make_directory(self._folder)
            with open(aside, "ab", opener=private) as file:
                file.write(memory)

    @contextmanager
    def _may_fail(self, name: str, aside: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                aside.unlink()
            raise KvpsError(f"could not keep {_within(self._folder, name)}: {error.strerror}") from None


class Recorded:
    """The `Source` that reads the files that recorders have written."""

    proof = "recorded"
    wants_weights = False

    def __init__(self, directory: Path, job: str, id: str, layout: Layout, gradient_format: str) -> None:
        self._folders = [_folder(directory, job, id, shard) for shard in range(layout.shards)]
        self._layout = layout
        self._format = format_of(gradient_format)

    def initial(self) -> Array:
        """Return the weights of version 0, (size,) float32. Raises Unproved."""
        paths = [next(iter(folder.glob("initial.*.f32")), folder / "initial.*.f32") for folder in self._folders]
        sizes = [DTYPE.itemsize * (stop - start) for start, stop in map(self._layout.shard_range, range(len(paths)))]
        flat = _joined(paths, sizes).view(DTYPE)
        for path, digest in zip(paths, shard_digests(self._layout, flat), strict=True):
            if path.name.split(".")[1] != digest:
                raise Unproved(_damaged(path))
        return flat

    def contribution(self, contribution: Contribution, weights: Array | None, encode: Encode) -> Bytes:
        """Return the contribution as it was on the wire. Raises Unproved."""
        paths = [_within(folder, _name(contribution)) for folder in self._folders]
        coding = Coding(self._layout, self._format, contribution.part)
        return _joined(paths, [coding.nbytes(shard) for shard in range(len(paths))])

    def otherwise(self, contribution: Contribution, shard: int) -> str:
        """Return why a shard's part of a contribution has another digest than the logged one."""
        return _damaged(_within(self._folders[shard], _name(contribution)))


def _joined(paths: list[Path], sizes: list[int]) -> Bytes:
    """Return the bytes of all shards' files, end to end. Raises Unproved unless each file has its size in `sizes`."""
    parts = []
    for path, size in zip(paths, sizes, strict=True):
        if not size:  # the shard has nothing of the contribution's part, and so no file
            continue
        try:
            with open(path, "rb", opener=regular) as file:  # a sparse one may claim to have a terabyte
                whole = os.fstat(file.fileno()).st_size == size
                parts.append(np.fromfile(file, np.uint8, size if whole else 0))
        except FileNotFoundError:
            raise Unproved(f"{path} is missing: it was removed, or an aggregator ran without --record") from None
        except OSError as error:
            raise Unproved(f"{path} cannot be read: {error.strerror}") from None
        if parts[-1].size != size:
            raise Unproved(_damaged(path))
    return np.concatenate(parts)


def _folder(directory: Path, job: str, id: str, shard: int) -> Path:
    return _within(_within(directory, f"{job}.{id}"), f"shard{shard}")


def _within(folder: Path, name: str) -> Path:
    return folder / file_name(name, "the name of a recorded file")


def _name(c: Contribution) -> str:
    return f"{c.worker}.{c.incarnation}.{c.seq}.g"


def _damaged(path: Path) -> str:
    return f"{path} is damaged: it is not what was recorded"
