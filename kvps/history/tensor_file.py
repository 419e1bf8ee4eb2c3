"""Files of safetensors that carry a digest of themselves.

safetensors notices a file that is cut short, but not a flipped bit. So the metadata has a digest: xxh3-128 of every
byte of the file, with the digest's own 32 digits taken as zeros.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from kvps.arrays.digest import view
from kvps.arrays.dtypes import DTYPES
from kvps.errors import CorruptData, InvalidSetting, KvpsError
from kvps.machine.files import private, regular, sync_directory
from kvps.parsing import Fields, whole

SUFFIX = ".safetensors"
_UNKNOWN = "0" * 32
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{32})"')
_LONGEST_HEADER = 100 << 20  # that safetensors allows
_PIECE = 1 << 20
_MOST_AXES = 64
_BY_NAME = {dtype.safetensors: dtype for dtype in DTYPES.values()}


def write_tensors(what: str, path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write a file of safetensors beside `path`, with the digest of its bytes in its metadata, sync it and rename it.

    The tensors have dtypes of `kvps.arrays.dtypes.DTYPES`. `what` it is says the message of the KvpsError that it
    raises; then `path` is as it was.

    The library's own writer gives the file that it writes a name of its own, which nobody would find again.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    # Whoever maps the file finds all items aligned, as there is no padding: the largest come first.
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
    head = _head(arrays, {**metadata, "digest": _UNKNOWN})
    place = _DIGEST.search(head)
    assert place
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        drop_asides(path.parent)
        with open(aside, "xb", opener=private) as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(head)
            hasher = xxhash.xxh3_128(head)
            for array in arrays.values():
                memory = view(array.reshape(-1).view(np.uint8))  # bfloat16 and float8 give no memoryview themselves
                file.write(memory)
                hasher.update(memory)
            file.seek(place.start(1))
            file.write(hasher.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
            aside.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise KvpsError(f"could not write {what} {path}: {error.strerror}") from None


def drop_asides(directory: Path) -> None:
    """Delete what killed writers have left in a directory. A writer that lives has locked its file."""
    for aside in directory.glob(f".*{SUFFIX}.{'[0-9a-f]' * 8}"):
        with suppress(OSError), aside.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:  # its writer may be about to lock an empty one
                aside.unlink()


def _head(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return what stands before the bytes of the arrays: the length of the header, and the header."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        entries[name] = {
            "dtype": DTYPES[str(array.dtype)].safetensors,
            "shape": array.shape,
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


class TensorFile:
    """Reads the tensors of an open file of safetensors, each in its own dtype: the library has no bfloat16 and no
    float8 for NumPy. Its methods raise CorruptData for a file that is not as its header says."""

    def __init__(self, file: BufferedReader, path: Path) -> None:
        self._file, self._path = file, path
        file.seek(0)
        size = whole(int.from_bytes(file.read(8), "little"), f"{path}: the length of its header", 2, _LONGEST_HEADER)
        header = file.read(size).decode(errors="replace")
        self._header = Fields.of_json(header, str(path), _LONGEST_HEADER)
        self._begin = 8 + size
        self._nbytes = max(0, os.fstat(file.fileno()).st_size - self._begin)

    @property
    def metadata(self) -> Fields:
        return self._header.fields("__metadata__")

    @property
    def names(self) -> list[str]:
        return [name for name in self._header if name != "__metadata__"]

    def array(self, name: str) -> NDArray[Any]:
        """Return a tensor. It is not read if the file is too short for it."""
        entry = self._header.fields(name)
        where = f"{self._path}: tensor {name!r}"
        dtype = _BY_NAME[entry.one_of("dtype", tuple(_BY_NAME))]
        shape = tuple(whole(n, f"{where}: shape") for n in entry.sequence("shape", _MOST_AXES))
        whole(math.prod(n or 1 for n in shape), f"{where}: items")  # NumPy makes no array of more
        offsets = [whole(n, f"{where}: offset", 0, self._nbytes) for n in entry.sequence("data_offsets", 2)]
        nbytes = math.prod(shape) * dtype.itemsize
        if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
            raise CorruptData(f"{where} does not have the {nbytes} bytes of shape {shape} and {dtype.name}")
        memory = np.empty(nbytes, np.uint8)
        self._file.seek(self._begin + offsets[0])
        if self._file.readinto(memory.data) != memory.size:
            raise CorruptData(f"{where} is cut short")
        return memory.view(dtype.numpy).reshape(shape)


def check_tensors(path: Path) -> None:
    """Raise CorruptData or InvalidSetting unless every byte is as it was written. A file whose length is not the one
    that its header says is refused before its bytes are read: a sparse tail costs its author nothing."""
    try:
        with open(path, "rb", opener=regular) as file:
            with safe_open(path, "numpy"):
                pass
            _, stored, digest = _digests(file)
    except FileNotFoundError:
        raise InvalidSetting(f"there is no checkpoint {path}") from None
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be read: {error.strerror}") from None
    except (SafetensorError, ValueError) as error:
        raise CorruptData(f"{path} is no checkpoint of kvps, or is damaged or cut short: {error}") from None
    if stored != digest:
        raise CorruptData(f"{path} is damaged or cut short: its bytes do not match its digest")


def _digests(file: BinaryIO) -> tuple[int, bytes, bytes]:
    """Return the position of a file's digest, that digest, and the digest of its bytes. Raises ValueError."""
    length = file.read(8)
    size = int.from_bytes(length, "little")
    header = file.read(size) if size <= _LONGEST_HEADER else b""
    match = _DIGEST.search(header)
    if not match:
        raise ValueError("there is no digest in its header")
    hasher = xxhash.xxh3_128(length)
    hasher.update(header[: match.start(1)] + _UNKNOWN.encode() + header[match.end(1) :])
    while piece := file.read(_PIECE):
        hasher.update(piece)
    return 8 + match.start(1), match[1], hasher.hexdigest().encode()
