"""What users hand over by mistake: one line that says what it is and what to give instead, and nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import aggregating

import kvps
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
            assert clock == 1 or job.traces()["w0"].loss == 0.5, "each push brings what is said of the one before"


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (np.array([0.5, 0.5]), "not ndarray of shape (2,)"),
        (np.array([]), "not ndarray of shape (0,)"),
        (np.array(["0.5"]), "not ndarray of shape (1,)"),
        (np.ma.array([0.5], mask=[True]), "not MaskedArray of shape (1,)"),
        ("0.5", "not str"),
        (b"0.5", "not bytes"),
        ([0.5], "not a list of float"),
        ({"loss": 0.5}, "not a dict with 'loss'"),
        (1j, "not complex"),
        (np.complex64(1), "not complex64"),
        (True, "not bool"),
        (np.True_, "not bool"),
        (lambda: 0.5, "not function"),
        pytest.param(10**400, "not int", id="10**400"),
    ],
)
def test_a_loss_that_is_no_number_is_refused_before_anything_is_sent(store: Store, loss: object, words: str) -> None:
    job = store.create_job("job", ZEROS, transport="redis", **SETTINGS)
    with job.join("w0") as session:
        session.pull()
        message = _message(lambda: session.push(ONES, loss))  # type: ignore[arg-type]
        assert message.startswith("the loss must be one number, ")
        assert words in message
        assert job.state().members["w0"].accepted == 0
        assert not list(store.client.scan("kvps:*:g:*"))
        assert session.push(ONES, 0.5) == 1, "the push may be made again"


def test_a_loss_of_what_was_put_is_refused_before_the_rest_is_sent(store: Store) -> None:
    job = store.create_job("job", ZEROS, transport="redis", **SETTINGS)
    with aggregating(job), job.join("w0") as session:
        session.pull()
        session.put("W", ONES["W"])
        _message(lambda: session.push({"b": ONES["b"]}, "low"))  # type: ignore[arg-type]
        assert session.push({"b": ONES["b"]}) == 1
        assert (session.pull()["W"] == -1).all()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, np.float32("nan"), 1e-320, 1e300])
def test_any_float_is_shown_as_it_is(store: Store, loss: float) -> None:
    """A run that diverges is seen to diverge, by whoever reads the traces."""
    from kvps.cli.display import Display

    job = store.create_job("job", ZEROS, transport="redis", **SETTINGS)
    with aggregating(job), job.join("w0") as session:
        for _ in range(2):
            session.pull()
            session.push(ONES, loss)
    (trace,) = job.traces().values()
    np.testing.assert_allclose(trace.loss, loss, rtol=1e-5)
    display = Display(job, {})
    display.observe(job.state())
    assert f"loss {float(loss):.4f}" in display.line(job.state(), job.traces())
