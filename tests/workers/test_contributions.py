"""The gradient of a round, held against a slow and plain definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from helpers.harness import any_floats, model
from helpers.tasks import Good
from kvps_workers.contributions import Contributions
from kvps_workers.task import CheckedTask

import kvps
from kvps.arrays.layout import Layout
from kvps.config import JobConfig, Metadata

LAYOUT = Layout.of(model())


class Drawn(Good):
    """A task whose gradient is any float32 arrays, which depend on the samples of the batch."""

    def data(self, rank: int, workers: int, xp: Any) -> Any:
        return (np.arange(22),)

    def gradient(self, params: Mapping[str, Any], batch: Any, xp: Any) -> Any:
        first = int(batch[0][0])
        grads = {p.name: any_floats(first, p.shape) if p.shape else np.float32(first) for p in LAYOUT.parameters}
        return float(first), {name: np.asarray(grad) for name, grad in grads.items()}


def _contributions(task: Any, procs: int) -> Contributions:
    config = JobConfig(batch_size=4, epochs=1, metadata=Metadata(procs))
    return Contributions(config, LAYOUT, CheckedTask("any", task), 0)


@pytest.mark.parametrize("procs", [1, 2, 3, 4, 5])
def test_it_is_the_mean_over_the_rows_in_float32_process_by_process(procs: int) -> None:
    contributions = _contributions(Drawn(), procs)
    for number in range(contributions.rounds.total):
        loss, grads = contributions.compute({}, number)
        rows = contributions.rounds.rows(number)
        parts = [part for part in np.array_split(rows, procs) if len(part)]
        losses, each = zip(*(Drawn().gradient({}, (part,), np) for part in parts), strict=True)
        weights = [len(part) / len(rows) for part in parts]
        assert loss == sum(weight * one for weight, one in zip(weights, losses, strict=True))
        for name, found in grads.items():
            terms = [np.float32(w) * grad[name] for w, grad in zip(weights, each, strict=True)]
            wanted = terms[0]
            for term in terms[1:]:
                wanted = wanted + term
            assert found.dtype == np.float32
            assert found.tobytes() == wanted.tobytes()
    assert contributions.rounds.total == 6


def test_the_gradients_of_the_task_are_left_as_they_are() -> None:
    """A task may return the same memory, or a view of its own state, each time."""

    class Same(Drawn):
        grad = model(1)

        def gradient(self, params: Mapping[str, Any], batch: Any, xp: Any) -> Any:
            return 1.0, self.grad

    _, grads = _contributions(Same(), 2).compute({}, 0)
    for name, array in model(1).items():
        np.testing.assert_array_equal(Same.grad[name], array)
        np.testing.assert_array_equal(grads[name], array)  # halves of it add up to it


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda grads: {"W": grads["W"]}, "gradients do not fit the job: missing b, scale"),
        (lambda grads: grads | {"more": grads["b"]}, "unknown more"),
        (lambda grads: grads | {"b": grads["b"].astype(np.float64)}, "gradient 'b' is float64"),
        (lambda grads: grads | {"b": grads["b"][1:]}, "gradient 'b' has shape (10,), the job's has (11,)"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused_as_a_push_would(change: Any, words: str) -> None:
    class Wrong(Drawn):
        def gradient(self, params: Mapping[str, Any], batch: Any, xp: Any) -> Any:
            loss, grads = super().gradient(params, batch, xp)
            return loss, change(grads)

    with pytest.raises(kvps.LayoutMismatch) as caught:
        _contributions(Wrong(), 2).compute({}, 0)
    assert words in str(caught.value)
