"""Optimizers as settings, which are stored with the job as JSON.

This room has only what a user chooses; `kvps.update_rules` computes the steps.
"""

from kvps.optimizers.base import Optimizer, ParameterGroup
from kvps.optimizers.custom import CustomOptimizer, custom
from kvps.optimizers.reading import from_json, parse
from kvps.optimizers.rules import (
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
