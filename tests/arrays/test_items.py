"""Items of experience: what was put comes back bit for bit, and bytes that nobody put are refused in one way."""

from __future__ import annotations

import json
import math
import random
import struct
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

from kvps.arrays.dtypes import DTYPES
from kvps.arrays.item_forms import differ, form_of
from kvps.arrays.items import ITEM, MOST_BYTES, MOST_SPANS, Encoded, decode, encode
from kvps.errors import CorruptData, InvalidSetting

SPANS = [(0, 7), (5, 8)]


def whole(encoded: Encoded) -> bytes:
    data = b"".join(encoded.parts)
    assert len(data) == encoded.nbytes
    return data


def back(item: dict[str, Any]) -> dict[str, Any]:
    out, spans = decode(whole(encode(item, SPANS)))
    assert spans == SPANS
    assert list(out) == list(item)
    return out


def sample() -> dict[str, Any]:
    """One of each kind, with arrays on both sides of what is copied."""
    return {
        "tokens": np.arange(7),
        "reward": 1.5,
        "done": True,
        "step": -3,
        "prompt": "2 + 2 = ½",
        "raw": b"\0\xff",
        "values": np.linspace(0, 1, 3000, dtype=np.float32).reshape(3, 1000),
        "mask": np.array([[True], [False]]),
        "half": np.arange(5).astype(ml_dtypes.bfloat16),
        "none": np.zeros((0, 4), np.int16),
        "scalar": np.array(2.0),
        "no text": "",
    }


def made(header: object, values: bytes = b"", length: int | None = None) -> bytes:
    """Return bytes with a header that nobody checks."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = (len(text) if length is None else length).to_bytes(4, "little") + text
    return head + bytes(-len(head) % 64) + values


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (40, 50, 3)])
def test_arrays_of_each_dtype_come_back_bit_for_bit(dtype: Any, shape: tuple[int, ...]) -> None:
    random_bytes = np.random.default_rng(0).integers(0, 2 if dtype.name == "bool" else 256, 1 << 16, np.uint8)
    array = random_bytes[: math.prod(shape) * dtype.itemsize].view(dtype.numpy).reshape(shape)
    out = back({"x": array, "after": 1})["x"]
    assert (out.dtype, out.shape, out.tobytes()) == (dtype.numpy, shape, array.tobytes())
    with pytest.raises(ValueError, match="read-only"):
        out[...] = 0


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_pytorch_come_back_bit_for_bit(name: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(24).reshape(4, 6).to(getattr(torch, name)).t()  # not contiguous
    if tensor.is_floating_point():
        tensor.requires_grad_()
    out = back({"x": tensor})["x"]
    assert (out.dtype, out.shape) == (DTYPES[name].numpy, (6, 4))
    assert out.astype(np.float64).tolist() == tensor.detach().double().tolist()


def test_arrays_of_jax_come_back() -> None:
    jnp = pytest.importorskip("jax.numpy")
    out = back({"x": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "y": jnp.ones(3, bool)})
    np.testing.assert_array_equal(out["x"], np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16))
    assert out["y"].tolist() == [True, True, True]


@pytest.mark.parametrize(
    "value",
    [
        0,
        1,
        -1,
        2**63 - 1,
        -(2**63),
        True,
        False,
        0.0,
        -0.0,
        0.1,
        1e308,
        math.inf,
        b"",
        b"\0",
        "",
        "é\n😀\0",
        b"x" * 9999,
    ],
    ids=lambda value: repr(value)[:20],
)
def test_numbers_text_and_bytes_come_back_as_they_were(value: Any) -> None:
    out = back({"x": value})["x"]
    assert type(out) is type(value)
    assert repr(out) == repr(value)


def test_nan_comes_back() -> None:
    assert math.isnan(back({"x": math.nan})["x"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int8(-3), -3), (np.uint64(5), 5), (np.bool_(True), True), (np.float32(0.1), float(np.float32(0.1))),
        (np.float64(0.1), 0.1), (np.float16(2), 2.0), (ml_dtypes.bfloat16(1.5), 1.5), (np.str_("a"), "a"),
        (np.bytes_(b"a"), b"a"),
    ],
)  # fmt: skip
def test_scalars_of_numpy_come_back_as_python_s(value: Any, expected: Any) -> None:
    out = back({"x": value})["x"]
    assert type(out) is type(expected)
    assert out == expected


def test_truth_values_with_other_bits_than_1_are_true() -> None:
    assert back({"x": np.array([0, 1, 2, 255], np.uint8).view(bool)})["x"].view(np.uint8).tolist() == [0, 1, 1, 1]


class Unreadable:
    dtype, shape = np.dtype("f4"), (2,)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("Array has been deleted.")


class Changing(Unreadable):
    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": np.zeros(2)}, "flatten it: a name for each array, as in 'x.a'"),
        (None, "None: give an array, bytes, text or a number"),
        ([1, 2], "a list of int, int: give an array"),
        (bytearray(2), r"a bytearray: give bytes\(...\) of it"),
        (1j, "complex: give an array"),
        (np.zeros(2, complex), "complex128, .* give its real and its imaginary part"),
        (np.complex64(1), "complex64, .* give its real and its imaginary part"),
        (np.zeros(2, "f8,i4"), "convert it to one"),
        (np.array(["a"]), "<U1, .* convert it to one"),
        (np.array([None]), "object, .* convert it to one"),
        (np.zeros(2, ">f4"), ">f4, .* convert it to one"),
        (np.timedelta64(3, "s"), "timedelta64.* convert it to one"),
        (np.longdouble(3), "float.*, .* convert it to one"),
        (np.ma.masked_array([1.0], [True]), r"give it .filled\(0\)"),
        (2**63, "more than 64 bits"),
        (-(2**63) - 1, "more than 64 bits"),
        (10**5000, "more than 64 bits"),
        (np.uint64(2**63), "more than 64 bits"),
        ("\ud800", "half of a surrogate pair: give bytes"),
        (np.zeros((0, 2**55), np.int8), "reshape it"),
        (np.zeros((0, 2**26, 2**28), np.int8), "reshape it"),
        (Unreadable(), "cannot be read: Array has been deleted"),
        (Changing(), r"give it as np.asarray"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_other_value_is_refused_by_its_name(value: Any, words: str) -> None:
    with pytest.raises(InvalidSetting, match=f"^'x' in the item .*{words}") as error:
        encode({"before": 1, "x": value}, SPANS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ([1], "a mapping of names"),
        ({}, f"1 to {ITEM.names} names, not 0"),
        ({str(n): n for n in range(ITEM.names + 1)}, "stack"),
        ({1: 2}, "not 1"),
        ({"": 2}, "not ''"),
        ({"n" * 129: 2}, "1 to 128 characters"),
        ({"a\nb": 2}, "printable"),
        ({"\ud800": 2}, "printable"),
        ({"small": 1, "big": bytes(MOST_BYTES)}, "'big' has 67.1 MB"),
        ({"a": bytes(MOST_BYTES // 2), "big": np.zeros(MOST_BYTES // 8, np.float64)}, "'big' has 67.1 MB"),
    ],
    ids=lambda value: "",
)
def test_other_items_are_refused(item: Any, words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        encode(item, SPANS)


@pytest.mark.parametrize(
    "spans",
    [None, "ab", [(0,)], [(0, 1, 2)], [(0, -1)], [(-1, 0)], [(0, 2**53)], [(0, 1.0)], [(3, 1), (3, 1)],
     [(3, 1), (2, 1)], [(n, 0) for n in range(MOST_SPANS + 1)]],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_other_spans_are_refused(spans: Any) -> None:
    with pytest.raises(InvalidSetting, match="span"):
        encode({"x": 1}, spans)


def test_the_largest_items_are_put() -> None:
    names = {"😀" * 125 + f"{n:03}": np.zeros((1,) * 32, np.int8) for n in range(ITEM.names)}
    spans = [(2**53 - 1 - MOST_SPANS + n, 2**53 - 1) for n in range(MOST_SPANS)]
    item, out = decode(whole(encode(names, spans)))
    assert (list(item), out) == (list(names), spans)
    encoded = encode({"x": np.zeros(MOST_BYTES - 128, np.uint8)}, [])
    assert encoded.nbytes == MOST_BYTES
    with pytest.raises(InvalidSetting, match="has at most"):
        encode({"x": np.zeros(MOST_BYTES - 127, np.uint8)}, [])


def test_values_are_aligned_and_the_same_item_has_the_same_bytes() -> None:
    data = whole(encode(sample(), SPANS))
    assert data == whole(encode(sample(), SPANS))
    header = int.from_bytes(data[:4], "little") + 4
    arrays = [value for value in decode(data)[0].values() if isinstance(value, np.ndarray) and value.size]
    start = np.frombuffer(data, np.uint8).ctypes.data
    places = [array.ctypes.data - start for array in arrays]
    assert places[0] == header + -header % 64
    assert all(place % 16 == 0 for place in places)


def test_large_arrays_are_neither_copied_nor_decoded_by_copy() -> None:
    array = np.arange(10_000)
    encoded = encode({"x": array}, SPANS)
    assert [np.shares_memory(np.frombuffer(part, np.uint8), array) for part in encoded.parts] == [False, True]
    data = whole(encoded)
    assert np.shares_memory(decode(data)[0]["x"], np.frombuffer(data, np.uint8))
    for kind in (bytearray, memoryview):
        assert decode(kind(data))[0]["x"].tolist() == array.tolist()


def test_the_bytes_are_as_the_page_says() -> None:
    data = whole(encode({"n": 2, "x": np.array([1, 2], np.int16)}, [(0, 3)]))
    values = b'{"name":"n","kind":"int"},{"name":"x","kind":"array","dtype":"int16","shape":[2]}'
    header = b'{"values":[' + values + b'],"spans":[[0,3]]}'
    head = struct.pack("<I", len(header)) + header
    assert data == head + bytes(128 - len(head)) + struct.pack("<q", 2) + bytes(8) + struct.pack("<hh", 1, 2)


@pytest.mark.parametrize("nbytes", [1, 7, 64, 5000, 12_000, 1 << 20])
def test_chunks_are_full_but_the_last_and_make_up_all(nbytes: int) -> None:
    encoded = encode(sample(), SPANS)
    chunks = [b"".join(chunk) for chunk in encoded.cut(nbytes)]
    assert b"".join(chunks) == whole(encoded)
    assert [len(chunk) for chunk in chunks[:-1]] == [nbytes] * (len(chunks) - 1)
    assert 0 < len(chunks[-1]) <= nbytes
    assert encoded.digest == xxhash.xxh3_64_hexdigest(whole(encoded))


# Forms


def test_forms_say_names_kinds_dtypes_and_axes() -> None:
    assert encode(sample(), SPANS).form == (
        "tokens:int64[1],reward:number,done:number,step:number,prompt:text,raw:bytes,values:float32[2],mask:bool[2],"
        "half:bfloat16[1],none:int16[2],scalar:float64[0],no%20text:text"
    )
    assert encode({"r": 1, "x": np.zeros(3)}, []).form == encode({"r": True, "x": np.zeros(9)}, SPANS).form


def test_no_two_items_share_a_form_by_their_names() -> None:
    names = ["a", "b", "a:number,b", "a%3A", "a:", "é", "%C3%A9", "sha256=", "a b", "a+b"]
    forms = [form_of(dict.fromkeys(some, "number")) for some in ([name] for name in names)]
    forms += [form_of({"a": "number", "b": "number"}), form_of({"b": "number", "a": "number"})]
    assert len(set(forms)) == len(forms)
    assert all(form.isascii() and " " not in form for form in forms)


def test_a_long_form_is_a_digest() -> None:
    long = {f"{'n' * 100}{n}": "number" for n in range(100)}
    form, other = form_of(long), form_of(long | {"x": "text"})
    assert len(form) < 100
    assert form == form_of(long)
    assert differ(form, other) == "they have other names, or other kinds of values"
    assert differ(form, form) == ""


@pytest.mark.parametrize(
    ("form", "other", "words"),
    [
        ("a:number", "a:number", ""),
        ("a:number,b:text", "a:number", "missing 'b'"),
        ("a:number", "a:number,b%20c:text", "unknown 'b c'"),
        ("a:number,x:int64[1]", "a:number,x:int32[2]", "'x' is int32[2], not int64[1]"),
        ("a:number,x:int64[1]", "b:number,x:int32[1]", "missing 'a'; unknown 'b'; 'x' is int32[1], not int64[1]"),
        ("a:number,b:text", "b:text,a:number", "the names have another order, it is 'a', 'b'"),
        ("a:number", "sha256=ab", "they have other names, or other kinds of values"),
        ("", "a:number", "they have other names, or other kinds of values"),
    ],
)
def test_a_message_says_which_names_differ(form: str, other: str, words: str) -> None:
    assert differ(form, other) == words


def test_a_message_about_any_form_is_short() -> None:
    assert len(differ("a:number", ",".join(f"{'%0A' * n}:{'k' * n}" for n in range(2000)))) < 1000
    assert "\n" not in differ("a:number", "%0A:number")


# Bytes that nobody put


def entry(**other: Any) -> dict[str, Any]:
    return {"name": "x", "kind": "array", "dtype": "uint8", "shape": [2]} | other


def header(*entries: Any, **other: Any) -> dict[str, Any]:
    return {"values": list(entries), "spans": [[0, 1]]} | other


HEADER = json.dumps(header(entry())).encode()
BAD = {
    "nothing": b"",
    "three bytes": b"\0\0\0",
    "no header": bytes(4),
    "a header of 4 GB": b"\xff" * 4 + bytes(100),
    "a header longer than the item": made(header(entry()), b"ab", 4000),
    "no UTF-8": made(b'{"a":"\xff"}'),
    "no JSON": made(b"{]"),
    "no object": made([]),
    "empty": made({}),
    "no names": made(header()),
    "NaN": made(b'{"values":[NaN],"spans":[]}'),
    "deep JSON": made(b"[" * 200_000),
    "deep spans": made(header(entry(), spans=[[[[[[0]]]]]]), b"ab"),
    "a long number": made(b'{"values":[],"spans":[[%s,0]]}' % (b"9" * 100_000)),
    "many lists": made(b"[" + b"[]," * 40_000 + b"[]]"),
    "a value that is a list": made(header(["x"])),
    "values that are no list": made({"values": {}, "spans": []}),
    "too many names": made(header(*({"name": str(n), "kind": "text", "nbytes": 0} for n in range(ITEM.names + 1)))),
    "too many spans": made(header(entry(), spans=[[n, 0] for n in range(MOST_SPANS + 1)]), b"ab"),
    "no spans": made({"values": [entry()]}, b"ab"),
    "a span of one": made(header(entry(), spans=[[1]]), b"ab"),
    "a span of text": made(header(entry(), spans=["ab"]), b"ab"),
    "a span below 0": made(header(entry(), spans=[[-1, 0]]), b"ab"),
    "a version below 0": made(header(entry(), spans=[[0, -1]]), b"ab"),
    "a version too large": made(header(entry(), spans=[[0, 2**53]]), b"ab"),
    "spans that do not rise": made(header(entry(), spans=[[1, 0], [1, 1]]), b"ab"),
    "twice": made(header(entry(), entry()), b"ab" + bytes(14) + b"ab"),
    "twice, with the bytes of one": made(header(entry(), entry()), b"ab"),
    "an empty name": made(header(entry(name="")), b"ab"),
    "a long name": made(header(entry(name="n" * 129)), b"ab"),
    "a name of half a pair": made(header(entry(name="\ud800")), b"ab"),
    "a name that a terminal obeys": made(header(entry(name="\x1b[2J")), b"ab"),
    "a name that is none": made(header(entry(name=None)), b"ab"),
    "an unknown kind": made(header(entry(kind="pickle")), b"ab"),
    "a kind that is a list": made(header(entry(kind=["array"])), b"ab"),
    "an unknown dtype": made(header(entry(dtype="object")), b"ab"),
    "an axis below 0": made(header(entry(shape=[-2])), b"ab"),
    "two axes below 0": made(header(entry(shape=[-1, -2])), b"ab"),
    "an axis of text": made(header(entry(shape=["x"])), b"ab"),
    "an axis that is true": made(header(entry(shape=[True, 2])), b"ab"),
    "an axis that is infinite": made(json.dumps(header(entry(shape=[777]))).replace("777", "1e999").encode(), b"ab"),
    "no shape": made(header({"name": "x", "kind": "array", "dtype": "uint8"}), b"ab"),
    "too many axes": made(header(entry(shape=[1] * 33)), b"a"),
    "a shape that overflows": made(header(entry(shape=[2**32, 2**32]))),
    "a shape without items that overflows": made(header(entry(shape=[0, 2**53 - 1, 2**53 - 1]))),
    "a shape of 64 GiB": made(header(entry(shape=[2**36]))),
    "fewer bytes than the shape": made(header(entry(shape=[3])), b"ab"),
    "trailing bytes": made(header(entry()), b"abc"),
    "bytes between": made(header(entry(), entry(name="y")), b"ab" + b"\1" * 14 + b"ab"),
    "bytes behind the header": made(HEADER + b"\0\1", b"ab", len(HEADER)),
    "text below 0": made(header({"name": "x", "kind": "text", "nbytes": -1})),
    "text of 1 TB": made(header({"name": "x", "kind": "text", "nbytes": 10**12})),
    "text that is no UTF-8": made(header({"name": "x", "kind": "text", "nbytes": 2}), b"\xff\xff"),
    "text of half a pair": made(header({"name": "x", "kind": "text", "nbytes": 3}), b"\xed\xa0\x80"),
    "a truth value of 2": made(header({"name": "x", "kind": "bool"}), b"\2"),
    "an array of truth values of 2": made(header(entry(dtype="bool")), b"\1\2"),
    "a number cut short": made(header({"name": "x", "kind": "int"}), bytes(7)),
}  # fmt: skip


def test_what_they_are_made_of_is_an_item() -> None:
    assert decode(made(header(entry()), b"ab"))[0]["x"].tobytes() == b"ab"
    assert decode(made(header({"name": "x", "kind": "bool"}), b"\1")) == ({"x": True}, [(0, 1)])


@pytest.mark.parametrize("name", BAD)
def test_malformed_bytes_are_corrupt_and_take_little_memory(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData) as error:
            decode(BAD[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


def test_more_bytes_than_an_item_has_are_corrupt() -> None:
    with pytest.raises(CorruptData, match="its bytes"):
        decode(bytes(MOST_BYTES + 1))


HOSTILE: list[Any] = [
    *(-1, 0, 1, 2, 3, 17, 2**31, 2**53 - 1, 2**53, 2**64, 10**30, 1.0, 0.5, 1e300, True, None, "", "x", "2", "\ud800"),
    *("array", "text", "bytes", "int", "float", "bool", "int64", "bfloat16", "object", [], {}, [[]], [0], [2, 3]),
    *([0, 2**53 - 1, 2**53], [-1, -1], [1] * 40, [[0, 1], [1, 1]], [["0", 1.0]], [[0, 1, 2]]),
]


def flipped(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes with one to three changes of some bytes, of which few change the length."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        place, many = draw.randrange(len(out)), draw.randint(1, 4)
        of = draw.choice([place + many] * 6 + [place, place + many + 1, len(out)])
        out[place:of] = draw.choice([draw.randbytes(many), b"0123"[:many], b'"[]}'[:many]])
    return bytes(out)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes with changes anywhere, in the text of the header, or in a value of it; its length is right."""
    stop = 4 + int.from_bytes(data[:4], "little")
    text, values = data[4:stop], data[stop + -stop % 64 :]
    how = draw.randrange(3)
    if how == 0:
        return flipped(data, draw)
    if how == 1:
        return made(flipped(text, draw), values)
    stored = json.loads(text)
    place = draw.choice([stored, *stored["values"], *stored["values"], stored["spans"] or stored])
    place[draw.choice(list(place if isinstance(place, dict) else range(len(place))))] = draw.choice(HOSTILE)
    return made(stored, values)


def test_mutated_items_are_items_or_corrupt() -> None:
    draw = random.Random(3)
    small = sample() | {"values": np.arange(6, dtype=np.float32).reshape(2, 3)}
    some = [{name: small[name] for name in draw.sample(list(small), draw.randint(1, 4))} for _ in range(40)]
    items = [whole(encode(item, SPANS[: number % 3])) for number, item in enumerate(some)]
    corrupt = 0
    for number in range(3000):
        try:
            item, spans = decode(mutated(items[number % len(items)], draw))
        except CorruptData:
            corrupt += 1
        else:
            again = whole(encode(item, spans))  # what is an item can be put, and is the same then
            assert whole(encode(*decode(again))) == again
    assert 1500 < corrupt < 2900, "some changes are of values alone"
