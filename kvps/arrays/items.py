"""Items of experience as bytes, and back. Pure.

    item     {"tokens": int64 (7,),  "reward": 1.0,  "prompt": "2 + 2 ="}
    bytes    [ length of the header, 4 bytes | header, JSON | zeros | tokens | zeros | reward | zeros | prompt ]
    form     tokens:int64[1],reward:number,prompt:text

The header has the names in their order, what each of them is, and the spans of the item: the versions that made it,
each with the position from which it did. The first value begins at a multiple of 64, each other at a multiple of 16,
and they lie in the order of their names. All numbers are little-endian, and nothing is pickled. The same item has the
same bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvps.arrays.digest import Buffers, digest_of, view
from kvps.arrays.dtypes import DTYPES, Dtype, host_bits, word_of
from kvps.arrays.inputs import in_words, wrong_kind
from kvps.arrays.item_forms import form_of
from kvps.arrays.layout import CHUNK_BYTES
from kvps.errors import CorruptData, InvalidSetting, counted, shown
from kvps.parsing import LARGEST, Fields, bytes_text, sequence, whole, whole_setting

Spans = list[tuple[int, int]]

MOST_BYTES = 64 << 20
"""The most bytes of an item, with its header."""


class Limits(NamedTuple):
    """The most bytes, names, and bytes of the header."""

    nbytes: int
    names: int
    header: int


LONGEST_NAME = 128
MOST_SPANS = 1_024
_MOST_AXES = 32  # all versions of NumPy have as many
ITEM = Limits(MOST_BYTES, 256, 256 << 10)  # Python needs some 30 times as much for what a hostile header says
KEPT = Limits(1 << 40, 1 << 16, 32 << 20)
"""Of the state that a learner keeps with its versions."""
_FIRST, _EACH = 64, 16
_COPIED = 4_096  # a smaller value is copied beside its neighbours: a part costs more than its bytes
_NUMBERS = {"int": struct.Struct("<q"), "float": struct.Struct("<d"), "bool": struct.Struct("<B")}
_KINDS = ("array", "bytes", "text", *_NUMBERS)


class Encoded(NamedTuple):
    """An item as bytes: `parts` are these when laid end to end, `nbytes` in all. Large arrays in host memory are not
    copied, and must not change until they are sent. `form` is the same for items that are alike: see
    `kvps.arrays.item_forms`."""

    form: str
    parts: Buffers
    nbytes: int

    @property
    def digest(self) -> str:
        """The xxh3-64 of all bytes, as 16 hex digits; computed at each call."""
        return digest_of(self.parts)

    def cut(self, nbytes: int = CHUNK_BYTES) -> Iterator[Buffers]:
        """Yield the chunks, of `nbytes` bytes each but the last, without a copy."""
        chunk, room = list[memoryview](), nbytes
        for part in self.parts:
            while part.nbytes:
                chunk.append(part[:room])
                room -= chunk[-1].nbytes
                part = part[chunk[-1].nbytes :]
                if not room:
                    yield chunk
                    chunk, room = [], nbytes
        if chunk:
            yield chunk


class _Value(NamedTuple):
    """What the header says of one name. `kind` is one of `_KINDS`, `dtype` and `shape` are those of an array."""

    kind: str
    nbytes: int
    dtype: Dtype = DTYPES["bool"]
    shape: tuple[int, ...] = ()

    @property
    def form(self) -> str:
        if self.kind == "array":
            return f"{self.dtype.name}[{len(self.shape)}]"
        return "number" if self.kind in _NUMBERS else self.kind

    def entry(self, name: str) -> dict[str, Any]:
        """Return what stands in the header."""
        if self.kind == "array":
            return {"name": name, "kind": "array", "dtype": self.dtype.name, "shape": self.shape}
        return {"name": name, "kind": self.kind} | ({} if self.kind in _NUMBERS else {"nbytes": self.nbytes})


def encode(item: Mapping[str, Any], spans: Sequence[tuple[int, int]], most: Limits = ITEM) -> Encoded:
    """Return an item as bytes.

    item   name -> array of NumPy, PyTorch or JAX, on any device, of a dtype of `kvps.arrays.dtypes.DTYPES` and of any
           shape; or bytes, text, or a number: of Python, or a scalar of NumPy, which comes back as Python's
    spans  (position, version): from this position on, this version made the item; positions rise

    Raises InvalidSetting for anything else, which names what is wrong, and for an item of more than `most`.
    """
    prepared = {name: _prepared(name, value) for name, value in _named(item, most.names).items()}
    described = {name: value for name, (value, _) in prepared.items()}
    head = _head(described, _checked_spans(spans), most.header)
    nbytes = _ends(described.values(), len(head))[-1]
    if nbytes > most.nbytes:
        largest = max(described, key=lambda name: described[name].nbytes)
        raise InvalidSetting(
            f"the item has {bytes_text(nbytes)}, of which {largest!r} has {bytes_text(described[largest].nbytes)}, and "
            f"an item has at most {bytes_text(most.nbytes)}: split it into several, or put smaller dtypes"
        )
    parts, small, place = list[memoryview](), bytearray(head), len(head)
    for name, (value, source) in prepared.items():
        small += bytes(-place % _EACH)
        place = _up(place, _EACH) + value.nbytes
        memory = _memory(name, source, value)
        if value.nbytes <= _COPIED:
            small += memory
            continue
        parts += [memoryview(small), memory] if small else [memory]
        small = bytearray()
    if small:
        parts.append(memoryview(small))
    return Encoded(form_of({name: each.form for name, each in described.items()}), parts, nbytes)


def decode(data: bytes | bytearray | memoryview, most: Limits = ITEM) -> tuple[dict[str, Any], Spans]:
    """Return the item and the spans that `encode` was given.

    Arrays are read-only views of NumPy into `data`, of the dtype and shape that they had; those of bfloat16 and float8
    have the dtypes of ml_dtypes, as in a published model. Numbers, text and bytes are Python's. Raises CorruptData for
    anything that `encode` does not make. It takes no memory for arrays, up to 8 MB for a header, and what Python needs
    for text and bytes: up to 4 bytes a character.
    """
    memory = np.frombuffer(memoryview(data).toreadonly(), np.uint8) if len(data) else np.empty(0, np.uint8)
    whole(memory.size, "the item: its bytes", 4, most.nbytes)
    longest = min(most.header, memory.size - 4)
    length = whole(int.from_bytes(memory[:4].tobytes(), "little"), "the item: the length of its header", 0, longest)
    try:
        header = memory[4 : 4 + length].tobytes().decode()
    except UnicodeDecodeError:
        raise CorruptData("the item: its header is no UTF-8: another program wrote it, or it is damaged") from None
    f = Fields.of_json(header, "the item", most.header, 4)
    values = dict[str, _Value]()
    for each in f.sequence("values", most.names):
        name, value = _of_entry(Fields(each, "the item: a value"), most.nbytes)
        if name in values:
            raise CorruptData(f"the item has {name!r} twice: another program wrote it")
        values[name] = value
    spans = _stored_spans(f)
    whole(len(values), "the item: how many names it has", 1)
    first = _up(4 + length, _FIRST)
    ends = _ends(values.values(), first)
    if ends[-1] != memory.size:
        raise CorruptData(
            f"the item has {counted(memory.size, 'byte')}, and its header says {ends[-1]:,}: it is damaged"
        )
    item, stop = dict[str, Any](), 4 + length
    for (name, value), end in zip(values.items(), ends, strict=True):
        begin = end - value.nbytes
        if memory[stop:begin].any():
            raise CorruptData(f"the item: there are bytes before {name!r} that are not its own: it is damaged")
        item[name] = _decoded(name, value, memory[begin:end])
        stop = end
    return item, spans


def _up(place: int, multiple: int) -> int:
    return place + -place % multiple


def _ends(values: Iterable[_Value], first: int) -> list[int]:
    """Return where each value ends, if the first one begins at `first`."""
    out, place = [], first
    for value in values:
        place = _up(place, _EACH) + value.nbytes
        out.append(place)
    return out


def _head(described: Mapping[str, _Value], spans: Spans, most: int) -> bytes:
    """Return the bytes before the first value. Raises InvalidSetting for too many of them."""
    entries = [value.entry(name) for name, value in described.items()]
    header = json.dumps({"values": entries, "spans": spans}, separators=(",", ":"), ensure_ascii=False).encode()
    if len(header) > most:
        longest = max(described, key=lambda name: len(name.encode()))
        raise InvalidSetting(f"the item's names are too long, as {longest!r}: give shorter ones, or fewer")
    head = len(header).to_bytes(4, "little") + header
    return head + bytes(-len(head) % _FIRST)


def _named(item: Any, most: int) -> dict[str, Any]:
    """Return name -> value. Raises InvalidSetting unless the item may have these names."""
    if not isinstance(item, Mapping):
        raise InvalidSetting(
            f"an item must be a mapping of names to arrays, bytes, text or numbers, not {in_words(item)}: give each "
            "value a name, as in {'tokens': array}"
        )
    out = dict(item)
    if not 1 <= len(out) <= most:
        raise InvalidSetting(f"an item must have 1 to {most} names, not {len(out)}: stack what is alike in one array")
    for name in out:
        if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
            raise InvalidSetting(
                f"names in an item must be printable strings of 1 to {LONGEST_NAME} characters, not {shown(name)}"
            )
    return {str(name): value for name, value in out.items()}


def _checked_spans(spans: Any) -> Spans:
    if not isinstance(spans, Sequence) or len(spans) > MOST_SPANS:
        raise InvalidSetting(
            f"spans must be at most {MOST_SPANS} pairs of a position and a version, not {shown(spans)}"
        )
    out, before = Spans(), -1
    for span in spans:
        if not isinstance(span, Sequence) or len(span) != 2:
            raise InvalidSetting(f"a span must be a position and a version, not {shown(span)}")
        before = whole_setting("the position of a span, which rise,", span[0], before + 1, LARGEST)
        out.append((before, whole_setting("the version of a span", span[1], 0, LARGEST)))
    return out


def _stored_spans(f: Fields) -> Spans:
    out, before = Spans(), -1
    for span in f.sequence("spans", MOST_SPANS):
        pair = sequence(span, "the item: a span", 2)
        whole(len(pair), "the item: the length of a span", 2, 2)
        before = whole(pair[0], "the item: the position of a span", before + 1)
        out.append((before, whole(pair[1], "the item: the version of a span")))
    return out


def _refuse(name: str, what: str) -> NoReturn:
    raise InvalidSetting(f"{name!r} in the item is {what}")


def _prepared(name: str, value: Any) -> tuple[_Value, Any]:
    """Return what the header says of a value, and its bytes or, still where it is, the array."""
    if isinstance(value, np.generic) and word_of(value) in DTYPES:  # text and bytes of NumPy are Python's too
        value = value.item() if not DTYPES[word_of(value)].special else float(value)
    if isinstance(value, bytes):
        return _Value("bytes", len(value)), value
    if isinstance(value, str):
        return _text(name, value)
    if isinstance(value, bool | int | float):
        kind = next(each.__name__ for each in (bool, int, float) if isinstance(value, each))
        if kind == "int" and not -(1 << 63) <= value < 1 << 63:
            _refuse(name, "a whole number of more than 64 bits, with its sign: give a float, bytes or text")
        return _Value(kind, _NUMBERS[kind].size), _NUMBERS[kind].pack(value)
    dtype = _dtype(name, value)
    shape = tuple(map(int, value.shape))
    if len(shape) > _MOST_AXES or math.prod(n or 1 for n in shape) > LARGEST:
        _refuse(name, f"of shape {shown(shape)}, and an array in an item has at most {_MOST_AXES} axes: reshape it")
    return _Value("array", math.prod(shape) * dtype.itemsize, dtype, shape), value


def _text(name: str, value: str) -> tuple[_Value, bytes]:
    try:
        memory = value.encode()
    except UnicodeEncodeError:
        _refuse(name, "text that UTF-8 cannot hold, as it has half of a surrogate pair: give bytes")
    return _Value("text", len(memory)), memory


def _dtype(name: str, value: Any) -> Dtype:
    """Return the dtype of an array. Raises InvalidSetting for anything else."""
    if isinstance(value, Mapping):
        example = shown(f"{name}.{next(iter(value), 'x')}")
        _refuse(name, f"{in_words(value)}: flatten it: a name for each array, as in {example}")
    if isinstance(value, bytearray | memoryview):
        _refuse(name, f"a {type(value).__name__}: give bytes(...) of it")
    if wrong := wrong_kind(value, name, ", bytes, text or a number"):
        _refuse(name, wrong)
    word = word_of(value)
    if word not in DTYPES:
        cure = "give its real and its imaginary part, each under a name" if "complex" in word else "convert it to one"
        _refuse(name, f"of {shown(word)[1:-1]}, and an item has {', '.join(DTYPES)}: {cure}")
    return DTYPES[word]


def _memory(name: str, value: Any, described: _Value) -> memoryview:
    """Return the bytes of what `_prepared` has returned, an array's in host memory."""
    if described.kind != "array":
        return memoryview(value)
    try:
        bits = host_bits(value)
    except Exception as error:  # a framework's array may raise any error
        raise InvalidSetting(f"{name!r} in the item cannot be read: {shown(str(error))[1:-1]}") from error
    if bits.dtype != described.dtype.numpy or bits.nbytes != described.nbytes:
        _refuse(name, f"{in_words(value)}, and is another array once it is read: give it as np.asarray(...)")
    memory: NDArray[Any] = bits.view(np.uint8)  # bfloat16 and float8 give no memoryview themselves
    if described.dtype.name == "bool" and memory.max(initial=0) > 1:  # true as other bits, in a view of other numbers
        memory = (memory != 0).view(np.uint8)
    return view(memory)


def _of_entry(entry: Fields, most: int) -> tuple[str, _Value]:
    """Return the name and the value that an entry of the header describes."""
    name = entry.text("name", LONGEST_NAME)
    if not name:
        raise CorruptData("the item: a name is empty: another program wrote it")
    kind = entry.one_of("kind", _KINDS)
    if kind in _NUMBERS:
        return name, _Value(kind, _NUMBERS[kind].size)
    if kind != "array":
        return name, _Value(kind, entry.whole("nbytes", 0, most))
    dtype = DTYPES[entry.one_of("dtype", tuple(DTYPES))]
    where = f"the item: the shape of {name!r}"
    shape = tuple(whole(n, where) for n in entry.sequence("shape", _MOST_AXES))
    whole(math.prod(n or 1 for n in shape), where)  # NumPy makes no array of more, even of one without items
    return name, _Value(kind, whole(math.prod(shape) * dtype.itemsize, where, 0, most), dtype, shape)


def _decoded(name: str, value: _Value, memory: NDArray[np.uint8]) -> Any:
    """Return a value of its bytes, (value.nbytes,)."""
    if value.kind == "array":
        if value.dtype.name == "bool" and memory.max(initial=0) > 1:
            raise CorruptData(f"the item: {name!r} has truth values that are neither 0 nor 1: it is damaged")
        return memory.view(value.dtype.numpy).reshape(value.shape)
    if value.kind == "bytes":
        return memory.tobytes()
    if value.kind == "text":
        try:
            return str(memory.data, "utf-8") if memory.size else ""
        except UnicodeDecodeError:
            raise CorruptData(f"the item: {name!r} is text that is no UTF-8: it is damaged") from None
    (number,) = _NUMBERS[value.kind].unpack(memory.data)
    return bool(whole(number, f"the item: {name!r}", 0, 1)) if value.kind == "bool" else number
