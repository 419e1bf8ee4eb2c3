"""A small GPT on characters, and the text that every machine has: the sources of Python's own library.

Pre-norm blocks as in Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, without dropout.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

_CHARACTERS = 128  # ASCII; others count as "?"
_MOST_TEXT = 4_000_000
_HELD_OUT = 200_000  # characters at the end that nobody trains on


@dataclass(frozen=True)
class Size:
    """The shape of the model, and of a worker's batch: `batch` sequences of `context` characters."""

    layers: int = 4
    width: int = 192
    context: int = 32
    batch: int = 1


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and added to what came in: (batch, context, width) float32."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = width // 32
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, context, width))
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]


class SmallGpt(nn.Module):
    """Characters (batch, context) int64 -> logits (batch, context, 128) float32. The same weights for the same seed."""

    def __init__(self, size: Size, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.token, self.place = nn.Embedding(_CHARACTERS, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, _CHARACTERS)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.token(x) + self.place.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(inside)))  # type: ignore[no-any-return]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each next character of x, (batch, context + 1), in nats."""
        return cross_entropy(self(x[:, :-1]), x)

    @torch.no_grad()
    def held_out(self, text: torch.Tensor, size: Size) -> float:
        """Return the loss on 128 sequences of the end of the text, the same ones at each call."""
        starts = np.linspace(len(text) - _HELD_OUT, len(text) - size.context - 1, 128).astype(int)
        return self.loss(torch.stack([text[start : start + size.context + 1] for start in starts])).item()


def cross_entropy(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the logits for each next character of x, (batch, context + 1)."""
    return functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())


def text() -> torch.Tensor:
    """Return characters as numbers below 128, (n,) int64: the library's modules by name, at most 4 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    whole = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:_MOST_TEXT]
    data = np.frombuffer(whole, np.uint8)
    return torch.from_numpy(np.where(data < _CHARACTERS, data, ord("?")).astype(np.int64))


def batches(text: torch.Tensor, size: Size, rank: int) -> Iterator[torch.Tensor]:
    """Yield the batches of one worker without end, (batch, context + 1), from anywhere but the end of the text."""
    rng = np.random.default_rng((7, rank))
    while True:
        starts = rng.integers(0, len(text) - _HELD_OUT - size.context, size.batch)
        yield torch.stack([text[start : start + size.context + 1] for start in starts])
