"""One optimizer step on a stretch of arrays. Pure: reads weights and state, writes the next ones elsewhere.

The aggregator steps by it on what it reduced.

Every operation is elementwise and in float32, in the order of PyTorch's single-tensor optimizers. So a run can be
compared with DistributedDataParallel, and cutting a shard into stretches changes no bit.

    weights, gradient, out: (n,) float32;  state, state_out: slot name -> (n,) float32
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from kvps.arrays.layout import Array
from kvps.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    CustomOptimizer,
    DelayedNesterov,
    Lion,
    NAdam,
    Optimizer,
    RMSprop,
    Yogi,
)

State = Mapping[str, Array]
_f = np.float32
_SMALLEST = np.finfo(np.float32).smallest_subnormal
_HALF_OF_MOST = np.finfo(np.float32).max / _f(2)


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
    if settings.maximize:
        xp.multiply(gradient, _f(-1), out=gradient)
    _RULES[type(settings)](xp, settings, lr, step, weights, gradient, state, out, state_out)


def prepare(optimizer: Optimizer) -> None:
    """Import an optimizer of the user's own now, and not at the first step. Raises InvalidSetting."""
    for settings in optimizer.variants:
        if isinstance(settings, CustomOptimizer):
            _ = settings.rule


def _sgd(xp: Any, s: SGD, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State) -> None:
    """``b = mu*b + (1-d)*g``; ``p = p - lr*b``, or with Nesterov ``p = p - lr*(g + mu*b)``. (torch.optim.SGD)"""
    _decay(xp, g, w, s.weight_decay, out)
    if s.momentum:
        buf = state_out["momentum"]
        xp.multiply(state["momentum"], _f(s.momentum), out=buf)
        damped = step > 1 and s.dampening
        xp.add(buf, xp.multiply(g, _f(1 - s.dampening), out=out) if damped else g, out=buf)
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
    """``h = h + g*g``; ``p = p - lr/(1 + (t-1)*lr_decay)*g/(sqrt(h) + eps)``. (torch.optim.Adagrad)"""
    _decay(xp, g, w, s.weight_decay, out)
    total = state_out["sum"]
    xp.multiply(g, g, out=out)
    xp.add(state["sum"], out, out=total)
    scale = xp.sqrt(total, out=out)
    xp.add(scale, _f(s.eps), out=scale)
    xp.divide(g, scale, out=g)
    xp.multiply(g, _f(lr / (1 + (step - 1) * s.lr_decay)), out=g)
    xp.subtract(w, g, out=out)


def _adadelta(
    xp: Any, s: Adadelta, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State
) -> None:
    """``h = rho*h + (1-rho)g*g``; ``d = sqrt(a + eps)/sqrt(h + eps)*g``; ``a = rho*a + (1-rho)d*d``; ``p = p - lr*d``.
    (torch.optim.Adadelta)"""
    _decay(xp, g, w, s.weight_decay, out)
    square, total = state_out["square"], state_out["delta"]
    _second_moment(xp, state["square"], g, s.rho, square, out)
    xp.add(square, _f(s.eps), out=out)
    xp.sqrt(out, out=out)
    xp.add(state["delta"], _f(s.eps), out=total)
    xp.sqrt(total, out=total)
    xp.divide(total, out, out=total)
    change = xp.multiply(total, g, out=g)
    _second_moment(xp, state["delta"], change, s.rho, total, out)
    xp.multiply(change, _f(lr), out=change)
    xp.subtract(w, change, out=out)


def _rmsprop(
    xp: Any, s: RMSprop, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State
) -> None:
    """``h = a*h + (1-a)g*g``; ``p = p - lr*g/(sqrt(h) + eps)``. Centered, it is ``sqrt(h - m*m)`` with
    ``m = m + (1-a)(g-m)``; with momentum, ``b = mu*b + g/(...)`` and ``p = p - lr*b``. (torch.optim.RMSprop)

    Where rounding makes the variance ``h - m*m`` negative, it is 0 here and NaN in PyTorch."""
    _decay(xp, g, w, s.weight_decay, out)
    square = state_out["square"]
    _second_moment(xp, state["square"], g, s.alpha, square, out)
    scale = square
    if s.centered:
        mean = state_out["mean"]
        _first_moment(xp, state["mean"], g, s.alpha, mean)
        xp.subtract(square, xp.multiply(mean, mean, out=out), out=out)
        scale = xp.maximum(out, _f(0), out=out)
    xp.sqrt(scale, out=out)
    xp.add(out, _f(s.eps), out=out)
    change = xp.divide(g, out, out=g)
    if s.momentum:
        buf = state_out["momentum"]
        xp.multiply(state["momentum"], _f(s.momentum), out=buf)
        change = xp.add(buf, change, out=buf)
    xp.multiply(change, _f(lr), out=out)
    xp.subtract(w, out, out=out)


def _adam(
    xp: Any, s: Adam, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State
) -> None:
    """``m = m + (1-b1)(g-m)``; ``v = b2*v + (1-b2)g*g``;
    ``p = p - lr/(1-b1^t) * m / (sqrt(v)/sqrt(1-b2^t) + eps)``; with AMSGrad, of the largest v so far.
    (torch.optim.Adam and AdamW; Kingma and Ba, 2015)"""
    decoupled = isinstance(s, AdamW)
    _decay(xp, g, w, 0.0 if decoupled else s.weight_decay, out)
    m, v = state_out["m"], state_out["v"]
    _first_moment(xp, state["m"], g, s.beta1, m)
    _second_moment(xp, state["v"], g, s.beta2, v, g)
    if s.amsgrad:
        v = xp.maximum(state["vmax"], v, out=state_out["vmax"])
    scale = xp.sqrt(v, out=g)
    xp.divide(scale, _f(math.sqrt(1 - s.beta2**step)), out=scale)
    xp.add(scale, _f(s.eps), out=scale)
    change = xp.divide(m, scale, out=g)
    xp.multiply(change, _f(lr / (1 - s.beta1**step)), out=change)
    if decoupled:
        w = xp.multiply(w, _f(1 - lr * s.weight_decay), out=out)
    xp.subtract(w, change, out=out)


def _nadam(
    xp: Any, s: NAdam, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State
) -> None:
    """Moments as Adam's; with ``d = sqrt(v/(1-b2^t)) + eps`` and the momenta ``mu(t)``, whose product is ``M(t)``:
    ``p = p - lr*(1-mu(t))/(1-M(t)) * g/d - lr*mu(t+1)/(1-M(t+1)) * m/d``. (torch.optim.NAdam)"""
    _decay(xp, g, w, 0.0 if s.decoupled_weight_decay else s.weight_decay, out)
    m, v = state_out["m"], state_out["v"]
    _first_moment(xp, state["m"], g, s.beta1, m)
    _second_moment(xp, state["v"], g, s.beta2, v, out)
    product, following = _momenta(s.beta1, s.momentum_decay, step), _nadam_mu(s.beta1, s.momentum_decay, step + 1)

    def scale() -> Array:
        xp.divide(v, _f(1 - s.beta2**step), out=out)
        xp.sqrt(out, out=out)
        scale: Array = xp.add(out, _f(s.eps), out=out)
        return scale

    xp.divide(g, scale(), out=g)
    xp.multiply(g, _f(lr * (1 - _nadam_mu(s.beta1, s.momentum_decay, step)) / (1 - product)), out=g)
    if s.decoupled_weight_decay:
        w = xp.multiply(w, _f(1 - lr * s.weight_decay), out=out)
    xp.subtract(w, g, out=g)
    change = xp.divide(m, scale(), out=out)  # computed again: there is no third array to keep it in
    xp.multiply(change, _f(lr * following / (1 - product * following)), out=change)
    xp.subtract(g, change, out=out)


def _nadam_mu(beta1: float, decay: float, step: int) -> float:
    """Return the momentum of a step: ``b1 * (1 - 0.96^(t*decay)/2)``."""
    return float(beta1 * (1.0 - 0.5 * 0.96 ** (step * decay)))


@lru_cache(maxsize=256)
def _momenta(beta1: float, decay: float, step: int) -> float:
    """Return the product of the momenta of steps 1 to `step`, rounded to float32 after each, as PyTorch keeps it.

    Once it is below 2^-54 the rest changes nothing, because 1 minus it is 1.
    """
    product = _f(1)
    for each in range(1, step + 1):
        product *= _f(_nadam_mu(beta1, decay, each))
        if product < 2.0**-54:
            return 0.0
    return float(product)


def _adamax(
    xp: Any, s: Adamax, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State
) -> None:
    """``m = m + (1-b1)(g-m)``; ``u = max(b2*u, |g| + eps)``; ``p = p - lr/(1-b1^t) * m/u``. (torch.optim.Adamax)"""
    _decay(xp, g, w, s.weight_decay, out)
    m, largest = state_out["m"], state_out["u"]
    _first_moment(xp, state["m"], g, s.beta1, m)
    xp.multiply(state["u"], _f(s.beta2), out=largest)
    xp.absolute(g, out=g)
    xp.add(g, _f(s.eps), out=g)
    xp.maximum(largest, g, out=largest)
    change = xp.divide(m, largest, out=g)
    xp.multiply(change, _f(lr / (1 - s.beta1**step)), out=change)
    xp.subtract(w, change, out=out)


def _lion(
    xp: Any, s: Lion, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State
) -> None:
    """``c = b1*m + (1-b1)*g``; ``p = (1 - lr*wd)*p - lr*sign(c)``; ``m = b2*m + (1-b2)*g``. (Chen et al., 2023,
    algorithm 2)"""
    m = state_out["m"]
    xp.multiply(state["m"], _f(s.beta1), out=out)
    xp.add(out, xp.multiply(g, _f(1 - s.beta1), out=m), out=out)
    sign = _sign(xp, out, m)
    xp.multiply(state["m"], _f(s.beta2), out=m)
    xp.add(m, xp.multiply(g, _f(1 - s.beta2), out=g), out=m)
    xp.multiply(sign, _f(lr), out=sign)
    if s.weight_decay:
        w = xp.multiply(w, _f(1 - lr * s.weight_decay), out=g)
    xp.subtract(w, sign, out=out)


def _yogi(
    xp: Any, s: Yogi, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State
) -> None:
    """``m = m + (1-b1)(g-m)``; ``v = v - (1-b2)*sign(v - g*g)*g*g``; ``p = p - lr*m/(sqrt(v) + eps)``. (Zaheer et al.,
    2018, algorithm 2)

    g*g counts at most as half of the largest number: v stays below it, and no infinite v makes NaN."""
    _decay(xp, g, w, s.weight_decay, out)
    m, v = state_out["m"], state_out["v"]
    _first_moment(xp, state["m"], g, s.beta1, m)
    square = xp.multiply(g, g, out=g)
    xp.minimum(square, _HALF_OF_MOST, out=square)
    sign = _sign(xp, xp.subtract(state["v"], square, out=v), out)
    xp.multiply(square, _f(1 - s.beta2), out=square)
    xp.subtract(state["v"], xp.multiply(sign, square, out=square), out=v)
    scale = xp.sqrt(v, out=out)
    xp.add(scale, _f(s.eps), out=scale)
    change = xp.divide(m, scale, out=g)
    xp.multiply(change, _f(lr), out=change)
    xp.subtract(w, change, out=out)


def _delayed_nesterov(
    xp: Any, s: DelayedNesterov, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State
) -> None:
    """``D = D + g``; every N-th time ``m = mu*m + D/N``, ``D = 0``; ``p = p - lr*(g/N + k*mu*m)``, where k is
    ``1 - c*N + c`` then and else ``c``. (Liu et al., 2024, algorithm 3)"""
    m, total, n = state_out["momentum"], state_out["buffer"], s.every
    xp.add(state["buffer"], g, out=total)
    if step % n:
        part = s.c
        xp.copyto(m, state["momentum"])
    else:
        part = 1 - s.c * n + s.c
        xp.divide(total, _f(n), out=total)
        xp.multiply(state["momentum"], _f(s.momentum), out=m)
        xp.add(m, total, out=m)
        total.fill(0)
    xp.divide(g, _f(n), out=g)
    if part:
        xp.add(g, xp.multiply(m, _f(part * s.momentum), out=out), out=g)
    xp.multiply(g, _f(lr), out=g)
    xp.subtract(w, g, out=out)


def _custom(
    xp: Any, s: CustomOptimizer, lr: float, step: int, w: Array, g: Array, state: State, out: Array, state_out: State
) -> None:
    """The user's own; see `kvps.optim.custom.Rule`."""
    s.step(w, g, state, out, state_out, lr, step, xp)


def _decay(xp: Any, g: Array, w: Array, weight_decay: float, scratch: Array) -> None:
    """Add the gradient of the L2 penalty, in place."""
    if weight_decay:
        xp.add(g, xp.multiply(w, _f(weight_decay), out=scratch), out=g)


def _sign(xp: Any, array: Array, scratch: Array) -> Array:
    """Replace each item by its sign, as c/|c|, which is exactly 1 or -1; a zero is divided by the smallest number, and
    stays one."""
    xp.absolute(array, out=scratch)
    xp.maximum(scratch, _SMALLEST, out=scratch)
    sign: Array = xp.divide(array, scratch, out=array)
    return sign


def _first_moment(xp: Any, before: Array, g: Array, decay: float, out: Array) -> None:
    """``out = before + (1-decay)*(g - before)``; as in torch.lerp from the nearer end, which may be g."""
    weight = _f(1 - decay)
    xp.subtract(g, before, out=out)
    if weight < 0.5:
        xp.add(xp.multiply(out, weight, out=out), before, out=out)
    else:
        xp.subtract(g, xp.multiply(out, _f(1) - weight, out=out), out=out)


def _second_moment(xp: Any, before: Array, g: Array, decay: float, out: Array, scratch: Array) -> None:
    """``out = decay*before + (1-decay)*g*g``; `scratch` may be `g`."""
    xp.multiply(g, g, out=scratch)
    xp.multiply(scratch, _f(1 - decay), out=scratch)
    xp.multiply(before, _f(decay), out=out)
    xp.add(out, scratch, out=out)


_RULES: dict[type[Optimizer], Callable[..., None]] = {
    SGD: _sgd,
    Adagrad: _adagrad,
    Adadelta: _adadelta,
    RMSprop: _rmsprop,
    Adam: _adam,
    AdamW: _adam,
    NAdam: _nadam,
    Adamax: _adamax,
    Lion: _lion,
    Yogi: _yogi,
    DelayedNesterov: _delayed_nesterov,
    CustomOptimizer: _custom,
}
