"""What users hand over by mistake: one line that says what it is and what to give instead, and nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers.harness import aggregating, newest_losses
from helpers.servers import free_port, running_server

import kvps
from kvps.config import JobConfig
from kvps.store import Store

ZEROS = {"W": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}
ONES = {name: np.ones_like(array) for name, array in ZEROS.items()}
SETTINGS: dict[str, Any] = {"optimizer": kvps.SGD(lr=1.0), "worker_timeout_ms": 60_000}


def _message(call: Callable[[], object], error: type[Exception] = kvps.UsageError) -> str:
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- losses --------------------------------------------------------------------------------------------------------


def test_a_loss_may_be_any_one_number(store: Store) -> None:
    torch = pytest.importorskip("torch")
    half = [0.5, np.float32(0.5), np.array([0.5]), np.array([[0.5]], np.float32), np.float16(0.5), np.ma.array([0.5])]
    half += [torch.tensor(0.5), torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor(0.5, requires_grad=True)]
    job = store.create_job("job", ZEROS, transport="redis", **SETTINGS)
    with aggregating(job), job.join("w0") as session:
        for clock, loss in enumerate([*half, None], 1):
            session.pull()
            assert session.push(ONES, loss) == clock
            assert clock == 1 or newest_losses(job)["w0"] == 0.5, "each push brings what is said of the one before"


WRONG_LOSSES: list[tuple[Any, str]] = [
    (np.array([0.5, 0.5]), "not ndarray of shape (2,)"),
    (np.array([]), "not ndarray of shape (0,)"),
    (np.array(["0.5"]), "not ndarray of shape (1,)"),
    (np.ma.array([0.5], mask=[True]), "not MaskedArray of shape (1,)"),
    ("0.5", "not str"),
    (b"0.5", "not bytes"),
    ([0.5], "not a list of float"),
    ({"loss": 0.5}, "not a dict with 'loss'"),
    (np.complex64(1), "not complex64"),
    (np.True_, "not bool"),
    (lambda: 0.5, "not function"),
    (10**400, "not int"),
]


def test_a_loss_that_is_no_number_is_refused_before_anything_is_sent(store: Store) -> None:
    job = store.create_job("job", ZEROS, transport="redis", **SETTINGS)
    with job.join("w0") as session:
        session.pull()
        for loss, words in WRONG_LOSSES:
            assert f"the loss must be one number, {words}" in _message(partial(session.push, ONES, loss))
        assert job.state().members["w0"].accepted == 0
        assert not list(store.client.scan("kvps:*:g:*"))
        assert session.push(ONES, 0.5) == 1, "the push may be made again"


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, np.float32("nan"), 1e-320, 1e300])
def test_any_float_is_shown_as_it_is(store: Store, loss: float) -> None:
    """A run that diverges is seen to diverge, by whoever reads the traces."""
    from kvps_cli.output import loss_text
    from kvps_cli.train.progress import Display

    job = store.create_job("job", ZEROS, transport="redis", **SETTINGS)
    with aggregating(job), job.join("w0") as session:
        for _ in range(2):
            session.pull()
            session.push(ONES, loss)
    np.testing.assert_allclose(newest_losses(job)["w0"], loss, rtol=1e-5)
    assert f"loss {loss_text(float(loss))}" in Display(job).line()


# -- arrays --------------------------------------------------------------------------------------------------------

MASKED = np.ma.array(np.ones(3, np.float32), mask=[False, True, False])
RECORDS = np.zeros(3, [("x", np.float32)])
WRONG_ARRAYS: list[tuple[Callable[[], object], str]] = [
    (lambda: MASKED, "is a masked array, and would lose its mask: give it .filled(0)"),
    (lambda: np.ma.ones(3, np.float32), "is a masked array"),
    (lambda: {"x": ONES["b"]}, "is a dict with 'x': give each array in it a name of its own, as in 'b.x'"),
    (lambda: [1.0, 2.0, 3.0], "is a list of float, float, float: give an array, as by np.asarray(..., np.float32)"),
    (lambda: (1.0,) * 3, "is a tuple of float, float, float: give an array"),
    (lambda: [0.0] * 1000, "is a list of float, float, float, float, float, ...: give an array"),
    (lambda: 1.5, "is float: give an array"),
    (lambda: None, "is None: give an array"),
    (lambda: "b.npy", "is str: give an array"),
    (lambda: np.ones(3), "is float64: kvps moves float32, convert it with .astype('float32')"),
    (lambda: np.ones(3, ">f4"), "is >f4: kvps moves float32, convert it with .astype('float32')"),
    (lambda: np.ones(3, bool), "is bool: kvps moves float32, convert it with .astype('float32')"),
    (lambda: np.ones(3, np.complex64), "is complex64: kvps moves float32, give its .real and .imag"),
    (lambda: RECORDS, "is an array of records: give each of its fields (x) a name of its own, as in 'b.x'"),
    (lambda: np.array(["1"] * 3), "is an array of <U1: give one of numbers, as by np.asarray(..., np.float32)"),
    (lambda: np.array([1.0, None, 2.0]), "is an array of object: give one of numbers, as by np.asarray("),
    (lambda: _torch().ones(3, dtype=_torch().float64), "is float64: kvps moves float32, convert it with .float()"),
    (lambda: _torch().ones(3).to_sparse(), "is sparse: kvps moves whole arrays, give its .to_dense()"),
    (lambda: _torch().ones(3, device="meta"), "is on the device meta and has no values"),
    (lambda: _torch().nn.Linear(1, 3), "is Linear: give an array"),
    (
        lambda: _torch().masked.masked_tensor(_torch().ones(3), _torch().ones(3) > 0),
        "is a masked tensor, and would lose its mask",
    ),
    (lambda: _sparse(), "is sparse: kvps moves whole arrays, give its .toarray()"),
    (lambda: _Foreign(), "is _Foreign of <dtype: 'float32'>: give an array, as by np.asarray(..., np.float32)"),
]


def _torch() -> Any:
    return pytest.importorskip("torch")


def _sparse() -> Any:
    return pytest.importorskip("scipy.sparse").csr_matrix(np.ones((1, 3), np.float32))


class _Foreign:
    """An array of a framework with names of its own for its dtypes."""

    dtype, shape = "<dtype: 'float32'>", (3,)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        return np.ones(3, np.float32)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_what_is_no_float32_array_is_named_with_its_cure(store: Store) -> None:
    wrong = [(make(), words) for make, words in WRONG_ARRAYS]
    for array, words in wrong:
        message = _message(partial(store.create_job, "job", ZEROS | {"b": array}), kvps.LayoutMismatch)
        assert message.startswith(f"parameter 'b' {words}")
    assert store.jobs() == []
    job = store.create_job("job", ZEROS, transport="redis", **SETTINGS)
    with job.join("w0") as session:
        session.pull()
        for array, words in wrong:
            for hand_over in (partial(session.push, ONES | {"b": array}), partial(session.put, "b", array)):
                assert _message(hand_over, kvps.LayoutMismatch).startswith(f"gradient 'b' {words}")
        assert session.push(ONES) == 1, "nothing of it was kept"


def test_a_masked_array_in_place_of_a_buffer_is_refused(store: Store) -> None:
    """Also a masked view of the buffer itself."""
    job = store.create_job("job", ZEROS, transport="shm", **SETTINGS)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        grads = session.buffers()
        for array in grads.values():
            array.fill(1)
        masked = np.ma.array(grads["b"], mask=[True, False, False], copy=False)
        assert "would lose its mask" in _message(lambda: session.push(grads | {"b": masked}))
        assert session.push(grads | {"b": masked.filled(0)}) == 1
        assert session.pull()["b"].tolist() == [0, -1, -1]


class _Labelled:
    """An array with labels, as a pandas.Series: it has a `get`, and it is not CuPy's."""

    def __init__(self) -> None:
        self.dtype, self.shape = np.dtype(np.float32), (3,)

    def get(self, label: object) -> object:
        raise AssertionError(label)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        return np.ones(3, np.float32)


def test_other_arrays_that_lose_nothing_are_taken(store: Store, tmp_path: Any) -> None:
    torch = _torch()
    row = np.ones((1, 3), np.float32).view(np.matrix)
    mapped = np.memmap(tmp_path / "b", np.float32, "w+", shape=(3,))
    mapped[:] = 1
    transposed = np.asfortranarray(np.ones((2, 3), np.float32))
    job = store.create_job("job", {"W": transposed, "b": row}, transport="redis", **SETTINGS)
    grads = [
        {"W": torch.ones(3, 2).T, "b": row},
        {"W": torch.nn.Parameter(torch.ones(2, 3)), "b": row[:, ::-1]},
        {"W": transposed, "b": torch.ones(1, 3)},
    ]
    with aggregating(job), job.join("w0") as session:
        for each in grads:
            session.pull()
            session.push(each)
        assert (session.pull()["b"] == -2).all()
    job = store.create_job("flat", {"b": mapped}, transport="redis", **SETTINGS)
    with aggregating(job), job.join("w0") as session:
        for each in (_Labelled(), mapped):
            session.pull()
            session.push({"b": each})
        assert (session.pull()["b"] == -1).all()


WRONG_MAPPINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: [ONES["W"]], "not a list of ndarray: give each array a name, as in {'W': array}"),
    (lambda: ONES["W"], "not ndarray of shape (2, 3): give each array a name"),
    (lambda: "model.npz", "not str: np.load(...) reads such a mapping from an .npz file"),
    (lambda: _torch().nn.Linear(1, 3), "not Linear: kvps.torch.parameters(model) makes one of a model"),
    (lambda: _torch().nn.Linear(1, 3).parameters(), "not generator: kvps.torch.parameters(model)"),
    (lambda: 3, "not int: give each array a name"),
]


def test_what_is_no_mapping_of_arrays(store: Store) -> None:
    for make, words in WRONG_MAPPINGS:
        message = _message(partial(store.create_job, "job", make()), kvps.LayoutMismatch)
        assert message.startswith(f"parameters must be a mapping of names to float32 arrays, {words}")
    assert store.jobs() == []
    job = store.create_job("job", ZEROS, transport="redis", **SETTINGS)
    with job.join("w0") as session:
        session.pull()
        for make, words in WRONG_MAPPINGS:
            message = _message(partial(session.push, make()), kvps.LayoutMismatch)
            assert message.startswith(f"gradients must be a mapping of names to float32 arrays, {words}")
        assert session.push(ONES) == 1


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": 0.1}, "no setting 'lr': give optimizer=kvps.SGD(lr=0.1)"),
        ({"learning_rate": 0.1}, "no setting 'learning_rate': give optimizer=kvps.SGD(lr=0.1)"),
        ({"beta1": 0.9}, "no setting 'beta1': give optimizer=kvps.Adam(beta1=0.9)"),
        (
            {"topology": "bsp"},
            "no setting 'topology': give the settings that the name stood for, as docs/other-systems.md",
        ),
        ({"stalenes": 1}, "no setting 'stalenes': did you mean staleness?"),
        ({"data": 2}, "no setting 'data': there are staleness, workers, shards, optimizer, "),
        ({"config": JobConfig(), "workers": 2}, "workers is in config: give either config or single settings"),
        ({"config": {"workers": 2}}, "config must be a kvps.JobConfig, not a dict with 'workers'"),
    ],
)
def test_a_setting_that_is_none(
    store: Store, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], words: str
) -> None:
    """The call that the user made is named, with what would do."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.delenv("KVPS_RANK", raising=False)
    monkeypatch.setenv("KVPS_REDIS_URL", store.url)
    calls: dict[str, Callable[[], object]] = {
        "create_job": lambda: store.create_job("job", ZEROS, **settings),
        "kvps.local": lambda: kvps.local(ZEROS, url=store.url, **settings),
        "create_job()": lambda: kvps.from_env().create_job(ZEROS, **settings),
    }
    for name, call in calls.items():
        message = _message(call, kvps.InvalidSetting)
        assert message.startswith(f"{name.removesuffix('()')}: ")
        alone = "give single settings and no config" if name == "create_job()" and "config" in settings else words
        assert alone in message
    assert store.jobs() == []


# -- what is slower than it need be --------------------------------------------------------------------------------

LARGE = {"x": np.zeros(1 << 18, np.float32)}


@pytest.mark.parametrize(
    ("settings", "params", "words"),
    [
        ({}, LARGE, ""),
        ({"shards": 2}, ZEROS, ""),
        ({"shards": 2}, LARGE, "shared memory is for shards=1"),
        ({"weight_format": "bf16"}, LARGE, "and weight_format='fp32'"),
        ({"gradient_format": "bf16"}, ZEROS, "gradient_format bf16 is for slow links"),
        ({"gradient_format": "topk:0.01", "transport": "redis"}, LARGE, "gradient_format topk:0.01 is for slow links"),
    ],
)
def test_what_is_chosen_and_slower_is_said_in_one_line(
    store: Store, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], params: Any, words: str
) -> None:
    store.create_job("job", params, **settings)
    assert len(caplog.messages) == bool(words), caplog.messages
    assert words in "".join(caplog.messages)
    assert "\n" not in "".join(caplog.messages)


def test_a_short_format_for_workers_elsewhere_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Other machines may reach a server that listens on TCP; one on the loopback address they do not."""
    port = free_port()
    with running_server("--port", str(port)) as url, kvps.connect(url) as store:
        store.create_job("job", ZEROS, gradient_format="int8")
        assert not caplog.messages
        for number, host in enumerate(("127.0.0.1", "localhost")):
            with kvps.connect(f"redis://{host}:{port}") as near:
                near.create_job(f"near{number}", ZEROS, gradient_format="int8")
        assert len(caplog.messages) == 2
