"""One optimizer step on a stretch of arrays. Pure: reads weights and state, writes the next ones elsewhere.

The aggregator steps by it on what it reduced, and a task's worker in its local steps.

Every operation is elementwise and in float32, in the order of PyTorch's single-tensor optimizers. So a run can be
compared with DistributedDataParallel, and cutting a shard into stretches changes no bit.

    weights, gradient, out: (n,) float32;  state, state_out: slot name -> (n,) float32
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvps.arrays.layout import Array
from kvps.optimizers import SGD, Adagrad, Adam, AdamW, Optimizer

State = Mapping[str, Array]
_f = np.float32


def update(
    settings: Optimizer,
    lr: float,
    step: int,
    weights: Array,
    gradient: Array,
    state: State,
    out: Array,
    state_out: State,
    xp: Any = np,
) -> None:
    """Make step number `step`, counted from 1, with learning rate `lr`, on arrays of the module `xp`.

    `gradient` is overwritten, and `out` is scratch before it gets the result. So no rule makes a temporary array: a
    large one would be fresh memory, page by page, for every chunk.
    """
    _RULES[type(settings)](xp, settings, lr, step, weights, gradient, state, out, state_out)


def _sgd(xp: Any, s: SGD, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State) -> None:
    """``b = mu*b + g``; ``p = p - lr*b``, or with Nesterov ``p = p - lr*(g + mu*b)``. (torch.optim.SGD)"""
    _decay(xp, g, w, s.weight_decay, out)
    if s.momentum:
        buf = state_out["momentum"]
        xp.multiply(state["momentum"], _f(s.momentum), out=buf)
        xp.add(buf, g, out=buf)
        if s.nesterov:
            xp.multiply(buf, _f(s.momentum), out=out)
            xp.add(g, out, out=g)
        else:
            g = buf
    xp.multiply(g, _f(lr), out=out)
    xp.subtract(w, out, out=out)


def _adagrad(
    xp: Any, s: Adagrad, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State
) -> None:
    """``h = h + g*g``; ``p = p - lr*g/(sqrt(h) + eps)``. (torch.optim.Adagrad, lr_decay 0)"""
    _decay(xp, g, w, s.weight_decay, out)
    total = state_out["sum"]
    xp.multiply(g, g, out=out)
    xp.add(state["sum"], out, out=total)
    scale = xp.sqrt(total, out=out)
    xp.add(scale, _f(s.eps), out=scale)
    xp.divide(g, scale, out=g)
    xp.multiply(g, _f(lr), out=g)
    xp.subtract(w, g, out=out)


def _adam(
    xp: Any, s: Adam, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State
) -> None:
    """``m = m + (1-b1)(g-m)``; ``v = b2*v + (1-b2)g*g``;
    ``p = p - lr/(1-b1^t) * m / (sqrt(v)/sqrt(1-b2^t) + eps)``. (torch.optim.Adam and AdamW; Kingma and Ba, 2015)"""
    decoupled = isinstance(s, AdamW)
    _decay(xp, g, w, 0.0 if decoupled else s.weight_decay, out)
    m, v = state_out["m"], state_out["v"]
    xp.subtract(g, state["m"], out=m)
    xp.multiply(m, _f(1 - s.beta1), out=m)
    xp.add(m, state["m"], out=m)
    xp.multiply(g, g, out=g)
    xp.multiply(g, _f(1 - s.beta2), out=g)
    xp.multiply(state["v"], _f(s.beta2), out=v)
    xp.add(v, g, out=v)
    scale = xp.sqrt(v, out=g)
    xp.divide(scale, _f(math.sqrt(1 - s.beta2**step)), out=scale)
    xp.add(scale, _f(s.eps), out=scale)
    change = xp.divide(m, scale, out=g)
    xp.multiply(change, _f(lr / (1 - s.beta1**step)), out=change)
    if decoupled:
        w = xp.multiply(w, _f(1 - lr * s.weight_decay), out=out)
    xp.subtract(w, change, out=out)


def _decay(xp: Any, g: Array, w: Array, weight_decay: float, scratch: Array) -> None:
    """Add the gradient of the L2 penalty, in place."""
    if weight_decay:
        xp.add(g, xp.multiply(w, _f(weight_decay), out=scratch), out=g)


_RULES: dict[type[Optimizer], Callable[..., None]] = {SGD: _sgd, Adagrad: _adagrad, Adam: _adam, AdamW: _adam}
