"""How gradients become weights: what a user chooses, and the arithmetic of a step.

Optimizers (`rules`, or a class of the user's own), schedules and reductions are settings, stored with the job.
`update_rules` computes a step; `kvps_aggregator.step.reduce` reduces. The names here are those of optimizers.
"""

from kvps.optim.custom import CustomOptimizer, custom
from kvps.optim.optimizer import Optimizer, ParameterGroup
from kvps.optim.reading import from_json, parse
from kvps.optim.rules import (
    OPTIMIZERS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    DelayedNesterov,
    Lion,
    NAdam,
    RMSprop,
    Yogi,
)

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "CustomOptimizer",
    "DelayedNesterov",
    "Lion",
    "NAdam",
    "Optimizer",
    "ParameterGroup",
    "RMSprop",
    "Yogi",
    "custom",
    "from_json",
    "parse",
]
