"""Checkpoints of a published model: each tensor has its own dtype, for kvps and for any reader of safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.harness import model
from safetensors import safe_open

import kvps
from kvps.arrays.dtypes import DTYPES
from kvps.arrays.layout import DTYPE, Layout
from kvps.history.checkpoint import Checkpoint
from kvps.history.tensor_file import TensorFile, write_tensors
from kvps.store import Store

torch = pytest.importorskip("torch")


def _state() -> dict[str, np.ndarray[Any, Any]]:
    """Return an array of each dtype, an odd number of items, of any bits."""
    rng = np.random.default_rng(5)
    out: dict[str, np.ndarray[Any, Any]] = {"first": np.zeros((0, 3), np.int8), "number": np.array(-3, np.int16)}
    for name, dtype in DTYPES.items():
        raw = rng.integers(0, 256, 15 * dtype.itemsize, np.uint8)
        out[f"layer.{name}"] = (raw & 1 if name == "bool" else raw).view(dtype.numpy).reshape(3, 5)
    out["tied"] = out["layer.bfloat16"]
    return out


@pytest.fixture
def made(store: Store) -> Checkpoint:
    """The checkpoint of a model of all dtypes."""
    state = _state()
    layout = Layout.of_state(state, shards=2)
    words = b"".join(state[p.name].tobytes() + b"\0" * (4 * p.size - p.nbytes) for p in layout.parameters)
    of_job = store.create_job("job", model()).checkpoint()
    return replace(of_job, layout=layout, weights=np.frombuffer(words, DTYPE), slots={})


def test_a_checkpoint_of_all_dtypes_comes_back_bit_for_bit(made: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / made.filename
    made.write(path)
    again = Checkpoint.load(path)
    assert again.layout == made.layout
    assert again.layout.tied == {"tied": "layer.bfloat16"}
    assert again.weights.tobytes() == made.weights.tobytes()


def test_safetensors_itself_reads_it_in_the_right_dtypes(made: Checkpoint, tmp_path: Path) -> None:
    path, state = tmp_path / made.filename, _state()
    made.write(path)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == state.keys() - {"tied"}
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            tensor = file.get_tensor(name)
            assert tensor.dtype == getattr(torch, str(state[name].dtype))
            assert tuple(tensor.shape) == state[name].shape
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == state[name].tobytes()
    entries = {name: entry for name, entry in _header(path).items() if name != "__metadata__"}
    for name, entry in entries.items():
        assert entry["data_offsets"][0] % state[name].itemsize == 0, "a program may map the file"


def test_optimizer_state_of_other_dtypes_is_refused(made: Checkpoint, tmp_path: Path) -> None:
    with_slots = replace(made, slots={"momentum": made.weights})
    with_slots.write(tmp_path / "x")
    with pytest.raises(kvps.CorruptData, match="the optimizer's state of a job that is published"):
        Checkpoint.load(tmp_path / "x")


def test_a_tensor_of_another_dtype_than_the_layout_has_is_refused(made: Checkpoint, tmp_path: Path) -> None:
    made.write(tmp_path / "x")
    other = [p._replace(dtype="float16") if p.dtype == "bfloat16" else p for p in made.layout.parameters]
    metadata = _header(tmp_path / "x")["__metadata__"]
    metadata["layout"] = replace(made.layout, parameters=tuple(other)).to_json()
    write_tensors("checkpoint", tmp_path / "y", made.layout.views(made.weights), metadata)
    with pytest.raises(kvps.CorruptData, match=r"tensor 'layer\.bfloat16' is not a float16 array of shape \(3, 5\)"):
        Checkpoint.load(tmp_path / "y")


def _header(path: Path) -> dict[str, Any]:
    whole = path.read_bytes()
    header: dict[str, Any] = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    return header


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "F4"}, "dtype must be one of"),
    ({"dtype": ["F32"]}, "dtype must be one of"),
    ({"shape": [7]}, r"does not have the 28 bytes of shape \(7,\) and float32"),
    ({"shape": [-2, -3]}, "shape must be a whole number"),
    ({"shape": [0, 1 << 40, 1 << 40]}, "items must be a whole number"),
    ({"shape": [1] * 65}, "shape must be a list of at most 64"),
    ({"data_offsets": [0, 1 << 40]}, "offset must be a whole number from 0 to 24"),
    ({"data_offsets": [24, 0]}, "does not have the 24 bytes"),
    ({"data_offsets": [0]}, "does not have the 24 bytes"),
    ({"data_offsets": [-4, 20]}, "offset must be"),
    ({"data_offsets": 24}, "data_offsets must be a list"),
]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    write_tensors("file", tmp_path / "x", {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, {})
    return tmp_path / "x"


@pytest.mark.parametrize(("changed", "words"), WRONG)
def test_a_header_that_says_something_else_is_refused(path: Path, changed: dict[str, Any], words: str) -> None:
    header = _header(path)
    header["w"] |= changed
    _rewrite(path, json.dumps(header).encode())
    with open(path, "rb") as file, pytest.raises(kvps.CorruptData, match=words):
        TensorFile(file, path).array("w")


@pytest.mark.parametrize("header", [b"[]", b"{", b"{}" * 2, b"\xff\xff", b'{"w": 3}', b"{}"])
def test_a_header_that_is_none_is_refused(path: Path, header: bytes) -> None:
    _rewrite(path, header)
    with open(path, "rb") as file, pytest.raises(kvps.CorruptData, match=str(path)):
        TensorFile(file, path).array("w")


def test_a_header_of_any_length_is_not_read(path: Path) -> None:
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with open(path, "rb") as file, pytest.raises(kvps.CorruptData, match="the length of its header must be"):
        TensorFile(file, path)


def _rewrite(path: Path, header: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
