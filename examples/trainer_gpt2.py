"""A small GPT-2 of Hugging Face's transformers, trained by its Trainer. Four lines are kvps's.

kvps run -w 2 -- python trainer_gpt2.py

The text is that of Python's own help pages, and the first weights are random. Alone it runs too.
"""

from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset, Subset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, get_cosine_schedule_with_warmup

import kvps.torch

STEPS, BATCH, CONTEXT = 40, 8, 32
SETTINGS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "train_sampling_strategy": "sequential",
    "logging_steps": 10,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, **dropouts))


def make_optimizer(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return adamw, get_cosine_schedule_with_warmup(adamw, STEPS // 10, STEPS)


class Text(Dataset[dict[str, torch.Tensor]]):
    """Pieces of the text, in an order drawn once."""

    def __init__(self) -> None:
        text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "ignore")))
        pieces = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        self._pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(2))]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._pieces[number], "labels": self._pieces[number]}


def main() -> None:
    model, text = make_model(), Text()
    adamw, schedule = make_optimizer(model)
    with kvps.torch.Optimizer(adamw, model, schedule, steps=STEPS, clip_norm=1.0) as optimizer:
        mine = Subset(text, range(optimizer.rank, len(text), optimizer.workers))
        arguments = TrainingArguments(f"build/trainer-{optimizer.rank}", max_grad_norm=0.0, **SETTINGS)
        trainer = Trainer(model, arguments, train_dataset=mine, optimizers=(optimizer, schedule))
        ended = trainer.train()
        if optimizer.rank == 0:
            print(f"loss {ended.training_loss:.3f}, version {optimizer.job.state().version}")


if __name__ == "__main__":
    main()
