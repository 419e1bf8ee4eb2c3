"""A small GPT on characters, trained by a recipe as it is published: two parameter groups, a warm-up, clipping.

kvps run -w 2 -- python gpt.py

The text is that of Python's own help pages. Alone it runs too, as the one worker of its own.
"""

import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

import kvps
import kvps.torch

STEPS, BATCH, CONTEXT = 200, 8, 64
CHARACTERS = 128  # ASCII


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.attention(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        heads = (array.transpose(1, 2) for array in (queries, keys, values))  # (batch, heads, length, width / heads)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Maps characters (batch, length) to logits of the next ones (batch, length, CHARACTERS)."""

    def __init__(self, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHARACTERS, bias=False)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.characters(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(hidden)))


def make_model(width: int = 64) -> GPT:
    """Return the same model in each call, with 120,192 parameters."""
    torch.manual_seed(1)
    return GPT(width)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    not_decayed = [p for p in model.parameters() if p.ndim == 1]  # biases and norms
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": not_decayed, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


def make_scheduler(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A warm-up over a tenth of the steps, then half a cosine down to a tenth of the learning rate."""
    warm_up = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_text() -> torch.Tensor:
    """Return some 460,000 characters."""
    return torch.tensor(list("\n".join(topics.values()).encode("ascii", "ignore")))


def batch_of(text: torch.Tensor, rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return characters (BATCH, CONTEXT) of one batch of a worker, and those that follow them."""
    rng = torch.Generator().manual_seed(1000 * number + rank)
    rows = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=rng) + torch.arange(CONTEXT)
    return text[rows], text[rows + 1]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def train(job: kvps.Job, worker_id: str, model: nn.Module, steps: int) -> None:
    text = make_text()
    with kvps.torch.join(job, model, worker_id) as worker:
        while worker.session.clock < steps:  # a copy that is started again goes on with its own next batch
            worker.pull()
            x, y = batch_of(text, worker.session.rank, worker.session.clock)
            loss = loss_of(model, x, y)
            loss.backward()
            worker.step(loss)


def main() -> None:
    model = make_model()
    adamw = make_optimizer(model)
    scheduler = make_scheduler(adamw, STEPS)
    optimizer = kvps.torch.optimizer(model, adamw, scheduler, steps=STEPS, clip_norm=1.0)
    with kvps.from_env() as me:
        job = me.create_job(kvps.torch.parameters(model), optimizer=optimizer)
        train(job, me.id, model, STEPS)
        if me.rank == 0:
            job.await_finished()
            kvps.torch.load(job, model)
            with torch.no_grad():
                losses = [loss_of(model, *batch_of(make_text(), 999, number)).item() for number in range(20)]
            print(f"{job.config.mode}: loss {sum(losses) / len(losses):.3f} nats a character")


if __name__ == "__main__":
    main()
