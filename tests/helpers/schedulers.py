"""Each scheduler of PyTorch that depends on its step alone, for an optimizer of one group or of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

STEPS = 18
FORMULAS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 5, 0.5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 12),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 20, 0.001),
}
"""Those that kvps has as a formula."""
EVALUATED: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 10], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 20, 2.0),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=STEPS + 2, cycle_momentum=False),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, 0.01, 0.3, step_size_up=4, mode="exp_range", gamma=0.99, cycle_momentum=False
    ),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(step / 8, 1.0)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 16)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 6), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, 0.02, anneal_epochs=8),
}
SCHEDULERS = FORMULAS | EVALUATED
