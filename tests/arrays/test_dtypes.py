"""The table of dtypes that a published array may have, against NumPy, ml_dtypes, PyTorch and safetensors themselves."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import kvps
from kvps.arrays.dtypes import DTYPES, all_finite, dtype_of, host_bits, memory_of, published_as

torch = pytest.importorskip("torch")
SMALL = [dtype for dtype in DTYPES.values() if dtype.special and dtype.itemsize < 4]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_each_is_known_to_numpy_torch_and_safetensors(dtype: kvps.arrays.dtypes.Dtype) -> None:
    from safetensors.torch import save

    assert dtype.numpy == np.dtype(getattr(ml_dtypes, dtype.name, dtype.name))
    assert dtype_of(np.zeros(2, dtype.numpy), "x") is dtype
    tensor = torch.zeros(2, dtype=getattr(torch, dtype.name))
    assert dtype_of(tensor, "x") is dtype
    assert host_bits(tensor).dtype == dtype.numpy
    assert f'"dtype":"{dtype.safetensors}"'.encode() in save({"x": tensor})


def test_arrays_of_jax_are_arrays() -> None:
    jnp = pytest.importorskip("jax.numpy")
    array = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    assert dtype_of(array, "x").name == "bfloat16"
    np.testing.assert_array_equal(host_bits(array), np.arange(6).astype(ml_dtypes.bfloat16))
    assert memory_of(array) != memory_of(array), "the zeros that two arrays begin with are not tied"


@pytest.mark.parametrize("dtype", SMALL, ids=lambda dtype: dtype.name)
def test_each_pattern_of_bits_is_finite_or_not(dtype: kvps.arrays.dtypes.Dtype) -> None:
    values = np.arange(256**dtype.itemsize, dtype=f"<u{dtype.itemsize}").view(dtype.numpy)
    finite = np.isfinite(values.astype(np.float32))
    assert [all_finite(values[i : i + 1], dtype) for i in range(values.size)] == finite.tolist()
    assert all_finite(values[finite], dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 131_071, 131_072, 299_999])
def test_one_item_of_many_is_found(dtype: str, bad: float, place: int) -> None:
    values = np.full(300_000, np.finfo(dtype).max, dtype)
    assert all_finite(values, DTYPES[dtype])
    values[place] = bad
    assert not all_finite(values, DTYPES[dtype])


@pytest.mark.parametrize("dtype", SMALL, ids=lambda dtype: dtype.name)
def test_a_wider_dtype_holds_each_number_and_no_other_is_called_so(dtype: kvps.arrays.dtypes.Dtype) -> None:
    values = np.arange(256**dtype.itemsize, dtype=f"<u{dtype.itemsize}").view(dtype.numpy)
    values = values[np.isfinite(values.astype(np.float32))]
    for other in DTYPES.values():
        if other.special and other.itemsize > dtype.itemsize:
            assert dtype.widens_to(other)
            np.testing.assert_array_equal(values.astype(other.numpy).astype(np.float64), values.astype(np.float64))
        else:
            assert not dtype.widens_to(other)


def test_names_of_the_dtype_to_publish_as() -> None:
    for given in ("bfloat16", "bf16", torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        assert published_as(given) is DTYPES["bfloat16"]
    for given in ("float16", "fp16", torch.float16, np.float16):
        assert published_as(given) is DTYPES["float16"]
    assert published_as(None) is None
    for wrong in ("int8", "float8_e5m2", "half", "", 16, torch.int8, ["bf16"]):
        with pytest.raises(kvps.InvalidSetting, match="dtype must be one of float32, bfloat16, float16, not"):
            published_as(wrong)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.5, "is float: give an array$"),
        ([1.0], "is a list of float: give an array$"),
        (None, "is None: give an array$"),
        ({"step": 1}, "is a dict with 'step': give each array in it a name of its own, as in 'x.step'"),
        (np.ma.array([1.0], mask=[True]), "is a masked array"),
        (np.array([None]), "is of object, and a published one is of float32, float64, "),
        (np.array(["a"]), "is of <U1, and"),
        (np.zeros(2, ">f4"), "is of >f4, and"),
        (np.zeros(2, np.complex64), "is of complex64, and"),
        (np.zeros(2, ml_dtypes.float8_e4m3fnuz), "is of float8_e4m3fnuz, and"),
        (torch.zeros(2, dtype=torch.complex64), "is of complex64, and"),
        (torch.zeros(2, device="meta"), "is on the device meta"),
        (torch.eye(2).to_sparse(), "is sparse"),
        (torch.nn.LazyLinear(3).weight, "is without a shape yet: put one batch through the model first"),
    ],
)
def test_what_is_no_array_of_these_is_refused_in_one_line(value: object, words: str) -> None:
    with pytest.raises(kvps.LayoutMismatch, match=f"^array 'x' {words}") as caught:
        dtype_of(value, "x")
    assert "\n" not in str(caught.value)
