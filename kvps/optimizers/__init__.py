"""Optimizers as settings, which are stored with the job as JSON.

This room has only what a user chooses; `kvps_aggregator.step.optimizers` computes the steps.
"""

from kvps.optimizers.base import Optimizer, ParameterGroup
from kvps.optimizers.custom import CustomOptimizer, custom
from kvps.optimizers.reading import from_json, parse
from kvps.optimizers.rules import OPTIMIZERS, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Lion, NAdam, RMSprop

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "CustomOptimizer",
    "Lion",
    "NAdam",
    "Optimizer",
    "ParameterGroup",
    "RMSprop",
    "custom",
    "from_json",
    "parse",
]
