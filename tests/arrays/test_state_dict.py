"""Published models: their bits go into flat words and come back, whatever dtypes, shapes and ties they have."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvps
from kvps.arrays.dtypes import DTYPES
from kvps.arrays.layout import DTYPE, Layout
from kvps.arrays.state_dict import pack, place, unpacked

torch = pytest.importorskip("torch")
BF16 = np.dtype(ml_dtypes.bfloat16)

dtypes = st.sampled_from(list(DTYPES))
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def states(draw: st.DrawFn) -> dict[str, np.ndarray[Any, Any]]:
    """Return a state of any dtypes and shapes, and of any bits: NaN with a payload is among them."""
    out = {"last word": np.ones(1, np.uint8)}  # so that there are items
    for number in range(draw(st.integers(1, 6))):
        shape, dtype = draw(shapes), DTYPES[draw(dtypes)]
        nbytes = int(np.prod(shape)) * dtype.itemsize
        raw = np.frombuffer(draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8)
        out[f"layer.{number}"] = (raw & 1 if dtype.name == "bool" else raw).copy().view(dtype.numpy).reshape(shape)
    return out


def flat_of(layout: Layout, state: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the words of a state by the definition of the layout, without a check for NaN."""
    out = b"".join(state[p.name].tobytes() + b"\0" * (4 * p.size - p.nbytes) for p in layout.parameters)
    return np.frombuffer(out, DTYPE)


def bits(state: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    arrays = {
        n: a.detach().contiguous().as_strided((a.numel(),), (1,)).view(torch.uint8).numpy()
        if isinstance(a, torch.Tensor)
        else a
        for n, a in state.items()
    }
    return {n: (str(state[n].dtype).split(".")[-1], tuple(state[n].shape), a.tobytes()) for n, a in arrays.items()}


def tensors_of(state: dict[str, np.ndarray[Any, Any]], fill: int) -> dict[str, torch.Tensor]:
    return {
        n: torch.full((max(1, a.nbytes),), fill, dtype=torch.uint8)[: a.nbytes]
        .view(getattr(torch, str(a.dtype)))
        .reshape(a.shape)
        for n, a in state.items()
    }


@given(states(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_bits_come_back_in_numpy_and_torch(state: dict[str, Any], strided: bool) -> None:
    layout = Layout.of_state(state)
    assert Layout.from_json(layout.to_json()) == layout
    flat = flat_of(layout, state)
    views = unpacked(layout, flat)
    assert list(views) == list(state)
    assert bits(views) == bits(state)
    assert not any(view.flags.writeable or view.flags.owndata for view in views.values())
    for target in ({n: np.empty_like(a) for n, a in state.items()}, tensors_of(state, 1)):
        if strided:  # every other row of a memory twice as long
            target = {n: every_other(a, a) for n, a in target.items()}
        place(layout, flat, target)
        assert bits(target) == bits(state)


def every_other(array: Any, between: Any) -> Any:
    """Return the same items in a memory twice as long, with those of `between` between them."""
    stack = torch.stack if isinstance(array, torch.Tensor) else np.stack
    return stack([array, between], array.ndim)[..., 0]


@given(states(), st.sampled_from(["numpy", "torch", "turned", "every other"]))
@settings(max_examples=150, deadline=None)
def test_a_state_is_packed_unless_it_is_not_finite(state: dict[str, Any], how: str) -> None:
    layout = Layout.of_state(state)
    with np.errstate(invalid="ignore"):  # NumPy warns of a signalling NaN that it casts
        bad = [n for n, a in state.items() if not np.isfinite(a.astype(np.float64)).all()]
    flat = np.full(layout.size, np.nan, DTYPE)
    given_: dict[str, Any] = state
    if how != "numpy":
        place(layout, flat_of(layout, state), given_ := tensors_of(state, 0))
    if how == "turned":
        given_ = {n: t.mT.contiguous().mT if t.ndim > 1 else t for n, t in given_.items()}
    if how == "every other":
        given_ = {n: every_other(t, t) for n, t in given_.items()}
    assert Layout.of_state(given_) == layout
    if bad:
        with pytest.raises(kvps.NotFinite, match=f"array '{bad[0]}' has NaN or Inf"):
            pack(layout, given_, flat)
    else:
        pack(layout, given_, flat)
        assert flat.tobytes() == flat_of(layout, state).tobytes()


class Tied(torch.nn.Module):
    """A model of several dtypes, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(5, 3, dtype=torch.bfloat16)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5, dtype=torch.bfloat16)
        self.head.weight = self.emb.weight


def test_a_module_with_tied_weights_is_stored_once_and_placed_whole() -> None:
    torch.manual_seed(1)
    model, other = Tied(), Tied()
    layout = Layout.of_state(model, shards=2)
    assert layout.tied == {"head.weight": "emb.weight"}
    assert [p.name for p in layout.parameters] == [n for n in model.state_dict() if n != "head.weight"]
    assert layout.parameters[0]._replace(name="") == ("", (5, 3), 0, "", "", "bfloat16")
    assert layout.numbers["norm.num_batches_tracked"] == 5
    assert Layout.from_json(layout.to_json()).tied == layout.tied
    assert layout.of_shards(3).tied == layout.tied
    flat = np.empty(layout.size, DTYPE)
    pack(layout, model, flat)
    views = unpacked(layout, flat)
    assert views["head.weight"] is views["emb.weight"]
    place(layout, flat, other)
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert other.head.weight is other.emb.weight
    apart = {n: t.clone() for n, t in Tied().state_dict().items()}
    place(layout, flat, apart, names=["emb.weight"])
    assert torch.equal(apart["head.weight"], model.emb.weight), "what is tied to it is brought along"
    assert not torch.equal(apart["head.bias"], model.head.bias), "others are left alone"
    pack(layout, apart | {"head.weight": apart["emb.weight"].clone()}, flat)  # the same bits elsewhere
    with pytest.raises(kvps.LayoutMismatch, match=r"array 'head\.weight' differs from 'emb\.weight', to which it was"):
        pack(layout, apart | {"head.weight": apart["emb.weight"] + 1}, flat)


def test_one_array_of_numpy_under_two_names_is_tied_and_arrays_without_items_are_not() -> None:
    w, none = np.ones(3, np.int16), torch.zeros(0)
    assert Layout.of_state({"a": w, "b": w, "c": w.copy()}).tied == {"b": "a"}
    assert not Layout.of_state({"w": w, "a": none, "b": none, "c": torch.zeros(0)}).tied
    t = torch.ones(4, 4)
    assert not Layout.of_state({"a": t, "b": t.T, "c": t[:2], "d": t.view(torch.int32)}).tied


@pytest.mark.parametrize("of_torch", [False, True])
def test_floats_of_more_bits_are_published_as_a_narrower_dtype(of_torch: bool) -> None:
    rng = np.random.default_rng(3)
    state = {
        "wide": rng.standard_normal((300, 1000)).astype(np.float32),
        "odd": rng.standard_normal((3, 3)),
        "half": rng.standard_normal(3).astype(np.float16),
        "eight": np.ones(3, ml_dtypes.float8_e5m2),
        "steps": np.array(7, np.int64),
    }
    given_: dict[str, Any] = state
    if of_torch:
        given_ = tensors_of(state, 0)
        place(Layout.of_state(state), flat_of(Layout.of_state(state), state), given_)
    layout = Layout.of_state(given_, dtype="bf16")
    assert [p.dtype for p in layout.parameters] == ["bfloat16", "bfloat16", "float16", "float8_e5m2", "int64"]
    flat = np.empty(layout.size, DTYPE)
    pack(layout, given_, flat)
    views = unpacked(layout, flat)
    wide = state["wide"].view(np.uint32)
    nearest = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)  # ties to even
    np.testing.assert_array_equal(views["wide"].view(np.uint16), nearest)
    np.testing.assert_array_equal(views["odd"], state["odd"].astype(np.float32).astype(BF16))
    place(layout, flat, given_)  # the model keeps float32, and has what was published
    for name, view in views.items():
        assert np.asarray(given_[name].float() if of_torch else given_[name], np.float64).tolist() == view.tolist()
    large = given_ | {"odd": np.full((3, 3), 1e6)}
    pack(layout, large, flat)
    with pytest.raises(kvps.NotFinite, match="array 'odd' has NaN or Inf as float16"):
        pack(Layout.of_state(large, dtype=torch.float16), large, flat)


W = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(5, BF16), "n": np.zeros((), np.int64)}
LAYOUT = Layout.of_state(W)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"a": W["a"], "n": W["n"]}, "arrays do not fit the job: missing b"),
    (W | {"x": W["a"]}, "arrays do not fit the job: unknown x"),
    (W | {"b": np.zeros(4, BF16)}, r"array 'b' has shape \(4,\), the job's has \(5,\)"),
    (W | {"n": np.zeros(1, np.int64)}, r"array 'n' has shape \(1,\), the job's has \(\)"),
    (W | {"n": np.zeros((), np.int32)}, "array 'n' is int32, the job's is int64"),
    (W | {"b": np.zeros(5, np.float16)}, "array 'b' is float16, the job's is bfloat16"),
    (W | {"n": 3}, "array 'n' is int: give an array"),
]


@pytest.mark.parametrize(("state", "words"), WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_written(state: dict[str, Any], words: str) -> None:
    flat = np.full(LAYOUT.size, 7, DTYPE)
    with pytest.raises(kvps.LayoutMismatch, match=words):
        pack(LAYOUT, state, flat)
    assert (flat == 7).all()
    with pytest.raises(kvps.LayoutMismatch, match=words):
        place(LAYOUT, flat, state)
    assert not W["a"].any()


def test_what_cannot_be_written_to_is_refused_before_anything_is_written() -> None:
    flat = np.full(LAYOUT.size, 7, DTYPE)
    jnp = pytest.importorskip("jax.numpy")
    fixed = W["a"].view()
    fixed.flags.writeable = False
    narrow = Layout.of_state({"w": np.zeros(3, np.float32)})
    wrong: list[tuple[Layout, dict[str, Any], str]] = [
        (LAYOUT, W | {"a": fixed}, "array 'a' is read-only: give a copy"),
        (LAYOUT, W | {"a": jnp.zeros((2, 3))}, "array 'a' is ArrayImpl, which cannot be written to"),
        (LAYOUT, W | {"a": torch.zeros(3).expand(2, 3)}, "array 'a' is expanded, and cannot be written to"),
        (narrow, {"w": torch.zeros(3).bfloat16()}, "or publish it with dtype='bfloat16'"),
    ]
    for layout, state, words in wrong:
        with pytest.raises(kvps.LayoutMismatch, match=words):
            place(layout, flat[: layout.size], state)
    assert not W["b"].any()
    with pytest.raises(kvps.LayoutMismatch, match="the job has no array x"):
        place(LAYOUT, flat, W, names=["a", "x"])
    with pytest.raises(kvps.LayoutMismatch, match="missing b"):
        place(LAYOUT, flat, {"a": W["a"]}, names=["a", "b"])
    with pytest.raises(kvps.LayoutMismatch, match="a model must be a module of PyTorch or a mapping"):
        place(LAYOUT, flat, [1.0])
    two = Layout.of_state({"a": np.zeros(2, np.int8), "b": np.zeros(2, np.int8)})
    one, words_ = np.zeros(2, np.int8), np.array([0, -1], np.int32).view(DTYPE)
    with pytest.raises(kvps.LayoutMismatch, match="arrays 'a' and 'b' are one in the model, and two in the job"):
        place(two, words_, {"a": one, "b": one})


def test_a_model_made_for_inference_is_written_to() -> None:
    with torch.inference_mode():
        model = torch.nn.Linear(2, 2)
    source = torch.nn.Linear(2, 2)
    layout = Layout.of_state(source)
    flat = np.empty(layout.size, DTYPE)
    pack(layout, source, flat)
    place(layout, flat, model)
    assert torch.equal(model.weight, source.weight)


@pytest.mark.parametrize(
    "names", [{"": W["a"]}, {"a\n": W["a"]}, {1: W["a"]}, {"__metadata__": W["a"]}, {}, {"a": torch.zeros(0)}]
)
def test_a_state_without_items_or_of_wrong_names_has_no_layout(names: dict[Any, Any]) -> None:
    with pytest.raises(
        kvps.LayoutMismatch, match=r"parameter names must be|no parameter may be|at least one parameter"
    ):
        Layout.of_state(names)


def test_a_layout_of_float32_is_stored_as_ever_and_another_trains_nothing() -> None:
    state = {"W": W["a"], "none": np.zeros((0, 2), np.float32), "b": np.zeros((), np.float32)}
    assert Layout.of_state(state).to_json() == Layout.of(state).to_json()
    with pytest.raises(kvps.LayoutMismatch, match="other dtypes than float32: it is published, and has no gradients"):
        LAYOUT.hosted(W, "gradient")
    assert (LAYOUT.trains, Layout.of_state(state).trains) == (False, True)


@pytest.mark.parametrize(
    ("place_", "value", "words"),
    [
        (("parameters", 1, "dtype"), "float128", "dtype must be one of"),
        (("parameters", 1, "dtype"), "float32", "dtype must be one of"),
        (("parameters", 1, "dtype"), ["int8"], "dtype must be one of"),
        (("parameters", 1, "dtype"), "float64", "start must be"),
        (("parameters", 2, "buffer"), "average", "dtype must be one of"),
        (("parameters", 0, "shape"), [0, 1 << 33, 1 << 33], "the items of 'a' must be"),
        (("tied",), {"x": "y"}, "tied arrays"),
        (("tied",), {"a": "b"}, "tied arrays"),
        (("tied",), {"x": ["a"]}, "tied arrays"),
        (("tied",), {"x\n": "a"}, "a tied name must be printable text"),
        (("tied",), ["a"], "tied must be an object"),
    ],
)
def test_a_stored_layout_of_anything_else_is_refused(place_: tuple[Any, ...], value: object, words: str) -> None:
    stored = json.loads(LAYOUT.to_json())
    within = stored
    for key in place_[:-1]:
        within = within[key]
    within[place_[-1]] = value
    with pytest.raises(kvps.CorruptData, match=words):
        Layout.from_json(json.dumps(stored))
