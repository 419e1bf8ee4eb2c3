"""Models with something unusual in them: trained, or refused in a line that says what to do."""

from __future__ import annotations

import pickle

import pytest
import torch
from helpers.harness import aggregating
from torch import nn
from torch.utils.checkpoint import checkpoint

import kvps
import kvps.torch
from kvps.store import Store


class Checkpointed(nn.Module):
    """A layer that is used in two checkpointed blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self._reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_overlap(store: Store, reentrant: bool) -> None:
    """The re-entrant one runs a backward of its own for each block, so a gradient is added to after it was sent."""
    model = Checkpointed(reentrant)
    job = store.create_job("job", kvps.torch.parameters(model), workers=1, worker_timeout_ms=60_000)
    with kvps.torch.join(job, model, "w0", overlap=True) as worker:
        worker.pull()
        loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        if reentrant:
            with pytest.raises(kvps.WrongOrder, match=r"second backward\(\) or .* use_reentrant=False, or"):
                loss.backward()
        else:
            loss.backward()
            assert worker.step(loss) == 1


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_empty_parameters_are_trained(store: Store, transport: str) -> None:
    model = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 2), nn.Linear(2, 1))
    job = store.create_job("job", kvps.torch.parameters(model), workers=1, transport=transport)
    with aggregating(job), kvps.torch.join(job, model, "w0") as worker:
        for _ in range(2):
            worker.pull()
            model(torch.ones(3, 4)).sum().backward()
            worker.step()
    assert kvps.torch.load(job, model) == 2


def test_a_worker_is_not_pickled(store: Store) -> None:
    model = nn.Linear(2, 1)
    job = store.create_job("job", kvps.torch.parameters(model), workers=1, worker_timeout_ms=60_000)
    with kvps.torch.join(job, model, "w0") as worker, pytest.raises(kvps.KvpsError, match="hand over the job"):
        pickle.dumps(worker)
