"""The examples with other libraries as tests run them, and what they are compared with: two processes of
DistributedDataParallel over gloo that train the same model on the same batches.

python libraries.py copy NAME FOLDER [ARGUMENT]      a copy of an example under `kvps run`, which leaves its losses
python libraries.py RANK WORKERS FOLDER NAME PORT    a rank of what it is compared with: it leaves its losses, and rank
                                                     0 the weights, in weights.npz

NAME is an example, or jax_optax-local. Losses are in losses-<rank>.npy: all that PyTorch's cross_entropy returned, or
that a script with JAX said to its job.

JAX has no DistributedDataParallel. There the ranks are processes of optax that average their gradients over gloo; with
local steps, what each has come to.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.ddp import weights_of
from helpers.pages import example_of
from helpers.paths import ROOT
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

WORKERS = 2
Weights = dict[str, np.ndarray]
_cross_entropy = nn.functional.cross_entropy
_losses: list[float] = []


def _noted(*arguments: Any, **keywords: Any) -> torch.Tensor:
    loss = _cross_entropy(*arguments, **keywords)
    _losses.append(loss.item())
    return loss


# -- DistributedDataParallel ------------------------------------------------------------------------------------------


def trainer(there: Any, rank: int) -> Weights:
    """Trainer with DistributedDataParallel, as torchrun runs it."""
    model, text, steps, size = there.make_model(), there.Text(), there.STEPS, there.BATCH
    # Rank r of DistributedDataParallel has each second batch, and worker r of the example each second sample.
    order = [WORKERS * (batch * size + i) + r for batch in range(steps) for r in range(WORKERS) for i in range(size)]
    arguments = there.TrainingArguments(f"build/{rank}", max_grad_norm=1.0, ddp_backend="gloo", **there.SETTINGS)
    run = there.Trainer(model, arguments, train_dataset=Subset(text, order), optimizers=there.make_optimizer(model))
    run.train()
    assert isinstance(run.model_wrapped, DistributedDataParallel)
    return weights_of(model)


def lightning(there: Any, rank: int) -> Weights:
    model = there.Digits()
    _train(model.layers, there, rank)
    return weights_of(model)


def accelerate(there: Any, rank: int) -> Weights:
    model = there.make_model()
    _train(model, there, rank, there.ACCUMULATED, clip_norm=1.0)
    return weights_of(model)


def _train(layers: nn.Module, there: Any, rank: int, accumulated: int = 1, clip_norm: float = float("inf")) -> None:
    data = there.make_data()
    loader = DataLoader(Subset(data, range(rank, len(data), WORKERS)), there.BATCH)
    together, optimizer = DistributedDataParallel(layers), there.make_optimizer(layers)
    for _ in range(there.EPOCHS):
        for number, (images, labels) in enumerate(loader, 1):
            with together.no_sync() if number % accumulated else nullcontext():
                (nn.functional.cross_entropy(together(images), labels) / accumulated).backward()
            if number % accumulated == 0:
                nn.utils.clip_grad_norm_(layers.parameters(), clip_norm)
                optimizer.step()
                optimizer.zero_grad()


# -- optax ------------------------------------------------------------------------------------------------------------


def jax(there: Any, rank: int) -> Weights:
    params = there.make_params()
    state, update = there.adamw.init(params), there.jax.jit(there.adamw.update)
    for number in range(there.STEPS):
        loss, grads = there.clipped_gradient(params, there.rows_of(rank, number))
        _losses.append(float(loss))
        updates, state = update(_mean(there, grads), state, params)
        params = there.optax.apply_updates(params, updates)
    return dict(there.kvps.jax.parameters(params))


def jax_local(there: Any, rank: int) -> Weights:
    params = there.make_params()
    state = there.adamw.init(params)
    for number in range(there.STEPS):
        loss, params, state = there.local_step(params, state, there.rows_of(rank, number))
        if number % there.LOCAL_STEPS == there.LOCAL_STEPS - 1:
            _losses.append(float(loss))
            params = _mean(there, params)
    return dict(there.kvps.jax.parameters(params))


def _mean(there: Any, tree: Any) -> Any:
    """Return the mean of all ranks' trees."""

    def of_leaf(leaf: Any) -> Any:
        total = torch.from_numpy(np.array(leaf))
        distributed.all_reduce(total)
        return there.jnp.asarray(total.numpy()) / WORKERS

    return there.jax.tree.map(of_leaf, tree)


# -- as programs ------------------------------------------------------------------------------------------------------

RANKS = {
    "trainer_gpt2": trainer,
    "lightning_digits": lightning,
    "accelerate_digits": accelerate,
    "jax_optax": jax,
    "jax_optax-local": jax_local,
}


def rank(number: str, workers: str, folder: str, name: str, port: str) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": workers}
    os.environ.update(place, RANK=number, LOCAL_RANK=number)
    distributed.init_process_group("gloo")
    weights = RANKS[name](example_of(name.partition("-")[0]), int(number))
    distributed.destroy_process_group()
    _leave_losses(folder, number)
    if number == "0":
        np.savez(Path(folder, "weights.npz"), **weights)


def copy(name: str, folder: str, *arguments: str) -> None:
    if name.startswith("jax"):
        _note_losses_of_jax()
    sys.argv = [str(ROOT / "examples" / f"{name}.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
    _leave_losses(folder, os.environ["KVPS_RANK"])


def _note_losses_of_jax() -> None:
    from kvps.jax import JaxSession

    step = JaxSession.step

    def noted(session: JaxSession, grads: Any, loss: Any) -> int:
        _losses.append(float(loss))
        return step(session, grads, loss)

    JaxSession.step = noted  # type: ignore[method-assign]


def _leave_losses(folder: str, rank: str) -> None:
    np.save(Path(folder, f"losses-{rank}.npy"), _losses)


def losses_in(folder: Path) -> np.ndarray:
    """Return all losses, (WORKERS, as many as each process had); one that had one more has it after its training."""
    each = [np.load(folder / f"losses-{rank}.npy") for rank in range(WORKERS)]
    return np.array([losses[: min(map(len, each))] for losses in each])


if __name__ == "__main__":
    nn.functional.cross_entropy = _noted
    copy(*sys.argv[2:]) if sys.argv[1] == "copy" else rank(*sys.argv[1:])
