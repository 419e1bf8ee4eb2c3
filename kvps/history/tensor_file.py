"""Files of safetensors that carry a digest of themselves.

safetensors notices a file that is cut short, but not a flipped bit. So the metadata has a digest: xxh3-128 of every
byte of the file, with the digest's own 32 digits taken as zeros.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from kvps.arrays.digest import view
from kvps.arrays.layout import DTYPE, Array
from kvps.errors import CorruptData, InvalidSetting, KvpsError
from kvps.machine.files import private, regular, sync_directory

SUFFIX = ".safetensors"
_UNKNOWN = "0" * 32
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{32})"')
_LONGEST_HEADER = 100 << 20  # that safetensors allows
_PIECE = 1 << 20


def write_tensors(what: str, path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a file of safetensors beside `path`, with the digest of its bytes in its metadata, sync it and rename it.
    `what` it is says the message of the KvpsError that it raises; then `path` is as it was.

    The library's own writer gives the file that it writes a name of its own, which nobody would find again.
    """
    arrays = {name: np.asarray(array, DTYPE, order="C") for name, array in tensors.items()}
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
            for memory in map(view, arrays.values()):
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


def _head(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """Return what stands before the bytes of the arrays: the length of the header, and the header."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        entries[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


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
