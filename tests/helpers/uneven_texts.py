"""A tiny GPT-2 that Trainer trains with SGD on texts of different lengths, by the recipe of docs/torch.md.

python uneven_texts.py FILE   alone: two texts a batch. Under `kvps run -w 2`: a copy has one of them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
from helpers.pages import python_in
from torch.utils.data import Subset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.optimization import get_constant_schedule

import kvps.torch

STEPS, LENGTH = 6, 16


def texts() -> list[dict[str, torch.Tensor]]:
    """Every second text is short, and filled up with what no loss counts."""
    generator, found = torch.Generator().manual_seed(2), []
    for number in range(2 * STEPS):
        ids = torch.randint(64, (LENGTH,), generator=generator)
        found.append(
            {"input_ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) >= (LENGTH, 4)[number % 2], -100)}
        )
    return found


def main(file: str) -> None:
    torch.manual_seed(1)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, **dropouts))
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    alone = "KVPS_JOB" not in os.environ
    how: dict[str, Any] = {"max_steps": STEPS, "train_sampling_strategy": "sequential", "max_grad_norm": 0.0}
    how |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    schedule = get_constant_schedule(sgd)
    arguments = TrainingArguments(f"{file}-{os.getpid()}", per_device_train_batch_size=2 if alone else 1, **how)
    if alone:
        Trainer(model, arguments, train_dataset=texts(), optimizers=(sgd, schedule)).train()
    else:
        (recipe,) = (code for code in python_in("docs/torch.md") if "num_items_in_batch" in code)
        exec(recipe[: recipe.index("with ")], there := {"kvps": kvps, "Trainer": Trainer})
        with there["ByTokens"](sgd, model, schedule, steps=STEPS, reduction="weighted") as optimizer:
            there["optimizer"] = optimizer
            mine = Subset(texts(), range(optimizer.rank, 2 * STEPS, 2))
            there["TokenTrainer"](model, arguments, train_dataset=mine, optimizers=(optimizer, schedule)).train()
            optimizer.finish()
            if optimizer.rank:
                return
    np.savez(file, **{name: p.detach().numpy() for name, p in model.named_parameters()})


if __name__ == "__main__":
    main(*sys.argv[1:])
