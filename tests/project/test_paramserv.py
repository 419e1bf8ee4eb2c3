"""examples/paramserv.py: SystemDS's options as loops over sessions, each held against a plain loop of NumPy."""

from __future__ import annotations

import re
import runpy
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.arrays import assert_same_bits
from helpers.paths import ROOT

import kvps

WORKERS, EPOCHS = 3, 4


@pytest.fixture
def example(server_url: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setenv("KVPS_REDIS_URL", server_url)
    found = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "paramserv.py")))
    found.train.__globals__["EPOCHS"] = EPOCHS  # as a script it has more
    return found


def _batches(example: SimpleNamespace, rank: int, scheme: str = "random") -> list[np.ndarray]:
    """The batches that a worker has in all epochs."""
    session = SimpleNamespace(rank=rank, config=SimpleNamespace(workers=WORKERS))
    return [rows for epoch in range(EPOCHS) for rows in example.batches_of(session, epoch, scheme)]


def _plain(example: SimpleNamespace, each: list[list[np.ndarray]]) -> dict[str, np.ndarray]:
    """BSP with one push for each of these batches: the mean of the workers' gradients makes a step."""
    params = {name: np.array(array) for name, array in example.START.items()}
    for batches in zip(*each, strict=True):
        grads = [example.gradient(params, rows) for rows in batches]
        for name in params:
            summed = grads[0][name] + grads[1][name] + grads[2][name]
            params[name] = params[name] - np.float32(example.LR) * (summed / np.float32(WORKERS))
    return params


@pytest.mark.parametrize("scheme", kvps.partitions.SCHEMES)
def test_a_scheme_is_a_loop_over_the_rows_of_a_partition(example: SimpleNamespace, scheme: str) -> None:
    each = [_batches(example, rank, scheme) for rank in range(WORKERS)]
    assert_same_bits(example.train(partial(example.scheme, scheme=scheme)), _plain(example, each))


@pytest.mark.parametrize("every", [1, 4, None], ids=["BATCH", "NBATCHES", "EPOCH"])
def test_freq_is_a_larger_batch(example: SimpleNamespace, every: int | None) -> None:
    """Of 11 batches an epoch the last push has fewer; a push has the mean over all its samples."""
    each = []
    for rank in range(WORKERS):
        batches = _batches(example, rank)
        epochs = [batches[first : first + 11] for first in range(0, len(batches), 11)]
        each.append([np.concatenate(own[i : i + (every or 11)]) for own in epochs for i in range(0, 11, every or 11)])
    assert_same_bits(example.train(partial(example.freq, every=every)), _plain(example, each))


@pytest.mark.parametrize("weighting", [False, True])
def test_models_are_averaged(example: SimpleNamespace, weighting: bool) -> None:
    """Each worker's model after its own steps counts alike, or by the samples that it has seen."""
    said: dict[str, Any] = {"optimizer": kvps.SGD(lr=1.0)} | ({"reduction": "weighted"} if weighting else {})
    found = example.train(partial(example.model_avg, every=4, weighting=weighting), **said)
    params = {name: np.array(array, np.float64) for name, array in example.START.items()}
    each = [_batches(example, rank) for rank in range(WORKERS)]
    for epoch in range(EPOCHS):
        for first in range(0, 11, 4):
            models, samples = [], []
            for batches in each:
                model, rounds = dict(params), batches[11 * epoch : 11 * (epoch + 1)][first : first + 4]
                for rows in rounds:
                    model = {name: model[name] - 0.2 * grad for name, grad in example.gradient(model, rows).items()}
                models.append(model)
                samples.append(sum(map(len, rounds)) if weighting else 1)
            assert len(set(samples)) == (2 if weighting and first == 8 else 1)
            params = {
                name: sum(n * model[name] for n, model in zip(samples, models, strict=True)) / sum(samples)
                for name in params
            }
    for name, array in params.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4)


@pytest.mark.slow
def test_it_runs_as_a_script(example: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "paramserv.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(example.EACH)
    for line in lines:
        slope, offset = re.findall(r"\d\.\d\d", line)
        assert (abs(float(slope) - 3) < 0.2, abs(float(offset) - 2) < 0.1) == (True, True), line
