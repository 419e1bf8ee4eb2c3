"""What optimizers are tried with: whoever adds a rule adds it here."""

from __future__ import annotations

from kvps.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    DelayedNesterov,
    Lion,
    NAdam,
    ParameterGroup,
    RMSprop,
    Yogi,
)
from kvps.optim.schedules import TableLR

OPTIMIZERS = [
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9, dampening=0.25, maximize=True),
    Adagrad(lr=0.1, weight_decay=0.01, lr_decay=0.1),
    Adadelta(lr=0.5, weight_decay=0.01),
    RMSprop(lr=0.01, weight_decay=0.01),
    RMSprop(lr=0.01, momentum=0.9, centered=True),
    Adam(lr=0.1, weight_decay=0.01),
    Adam(lr=0.1, amsgrad=True),
    AdamW(lr=0.1),
    NAdam(lr=0.1, weight_decay=0.01),
    NAdam(lr=0.1, weight_decay=0.01, decoupled_weight_decay=True),
    Adamax(lr=0.1, weight_decay=0.01),
    Lion(lr=0.01, weight_decay=0.1),
    Yogi(lr=0.1, weight_decay=0.01),
    DelayedNesterov(lr=0.1, every=3),
    DelayedNesterov(lr=0.1, every=2, c=0.3, maximize=True),
]
"""Each rule, and each way in which it steps."""
GROUPED = Adam(
    lr=0.1,
    groups=(
        ParameterGroup(["b", "s*"], weight_decay=0.1, amsgrad=True),
        ParameterGroup("V", lr=TableLR([0.1, 0.01]), maximize=True),
    ),
)
"""Groups of the parameters of `large_model`, which need different state."""
