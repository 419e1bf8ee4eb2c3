"""What the examples with other libraries are compared with. Each is run as a program, and leaves the weights and, under
"come", how far all have come: the Euclidean norm of their way.

python libraries.py trainer FILE       a rank of transformers' Trainer with DistributedDataParallel, as torchrun runs it
python libraries.py lightning FILE     a plain loop of PyTorch that averages the gradients of two workers
python libraries.py accelerate FILE    the same, each with the mean of two batches, clipped
python libraries.py jax FILE           the same with optax, whose adamw steps
python libraries.py jax-local FILE     the mean of two workers that optax trains between
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from helpers.ddp import weights_of
from helpers.paths import ROOT
from torch.utils.data import Subset

WORKERS = 2


def example(name: str) -> Any:
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trainer(file: str) -> None:
    there = example("trainer_gpt2")
    model, text, steps, size = there.make_model(), there.Text(), there.STEPS, there.BATCH
    # Rank r of DistributedDataParallel has each second batch, and worker r of the example each second sample.
    order = [
        WORKERS * (batch * size + i) + rank for batch in range(steps) for rank in range(WORKERS) for i in range(size)
    ]
    arguments = there.TrainingArguments(f"{file}.d", max_grad_norm=1.0, ddp_backend="gloo", **there.SETTINGS)
    run = there.Trainer(model, arguments, train_dataset=Subset(text, order), optimizers=there.make_optimizer(model))
    start = weights_of(model)
    ended = run.train()
    if run.is_world_process_zero():
        assert isinstance(run.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        _save(file, model, start, loss=ended.training_loss)


def lightning(file: str) -> None:
    there = example("lightning_digits")
    model, data = there.Digits(), there.make_data()
    start = weights_of(model)
    _mean_loop(model, there, lambda rank, batch: [model.loss_of(data[_rows(rank, batch, there.BATCH)])], len(data))
    _save(file, model, start)


def accelerate(file: str) -> None:
    there = example("accelerate_digits")
    model, data = there.make_model(), there.make_data()
    start = weights_of(model)

    def losses(rank: int, step: int) -> list[torch.Tensor]:
        batches = range(there.ACCUMULATED * step, there.ACCUMULATED * (step + 1))
        parts = [data[_rows(rank, batch, there.BATCH)] for batch in batches]
        return [torch.nn.functional.cross_entropy(model(x), y) / len(parts) for x, y in parts]

    _mean_loop(model, there, losses, len(data) // there.ACCUMULATED, clip_norm=1.0)
    _save(file, model, start)


def jax(file: str, local: bool = False) -> None:
    there = example("jax_optax")
    each, update = there.jax.tree.map, there.jax.jit(there.adamw.update)
    start = mean = there.make_params()
    states = [there.adamw.init(start) for _ in range(WORKERS)]
    for round_ in range(there.STEPS // there.LOCAL_STEPS if local else there.STEPS):
        ends = []
        for rank in range(WORKERS):
            if local:
                params = mean
                for number in range(there.LOCAL_STEPS * round_, there.LOCAL_STEPS * (round_ + 1)):
                    _, params, states[rank] = there.local_step(params, states[rank], there.rows_of(rank, number))
                ends.append(params)
            else:
                ends.append(there.clipped_gradient(mean, there.rows_of(rank, round_))[1])
        average = each(lambda *of: sum(of) / WORKERS, *ends)
        if local:
            mean = average
        else:
            updates, states[0] = update(average, states[0], mean)
            mean = there.optax.apply_updates(mean, updates)
    start, end = there.kvps.jax.parameters(start), there.kvps.jax.parameters(mean)
    np.savez(file, **end, come=_distance(start, end))


def _distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum((one[name] - other[name]) ** 2) for name in other)))


def _save(file: str, model: torch.nn.Module, start: dict[str, np.ndarray], **more: float) -> None:
    end = weights_of(model)
    np.savez(file, **end, come=_distance(start, end), **more)


def _rows(rank: int, batch: int, size: int) -> slice:
    return slice(WORKERS * batch * size + rank, WORKERS * (batch + 1) * size, WORKERS)


def _mean_loop(
    model: torch.nn.Module,
    there: Any,
    losses: Callable[[int, int], list[torch.Tensor]],
    samples: int,
    clip_norm: float = float("inf"),
) -> None:
    optimizer = there.make_optimizer(model)
    for _ in range(there.EPOCHS):
        for step in range(samples // WORKERS // there.BATCH):
            gradients = []
            for rank in range(WORKERS):
                optimizer.zero_grad()
                for loss in losses(rank, step):
                    loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                gradients.append([p.grad for p in model.parameters()])
            for parameter, *each in zip(model.parameters(), *gradients, strict=True):
                parameter.grad = sum(each) / WORKERS
            optimizer.step()


PROGRAMS: dict[str, Callable[[str], None]] = {
    "trainer": trainer,
    "lightning": lightning,
    "accelerate": accelerate,
    "jax": jax,
    "jax-local": lambda file: jax(file, local=True),
}
if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2])
