"""How gradients become weights: what a user chooses, and the arithmetic of a step.

Optimizers (one of `rules`, or a class of the user's own), schedules and reductions are settings, stored with the job.
An optimizer computes its step; `kvps_aggregator.step.reduce` reduces. The names here are those of optimizers; each rule
is imported here, which makes it known by its `kind`.
"""

from kvps.optim.custom import CustomOptimizer, custom
from kvps.optim.optimizer import OPTIMIZERS, Optimizer, ParameterGroup
from kvps.optim.reading import from_json, parse
from kvps.optim.rules.adadelta import Adadelta
from kvps.optim.rules.adagrad import Adagrad
from kvps.optim.rules.adam import Adam, AdamW
from kvps.optim.rules.adamax import Adamax
from kvps.optim.rules.delayed_nesterov import DelayedNesterov
from kvps.optim.rules.lion import Lion
from kvps.optim.rules.nadam import NAdam
from kvps.optim.rules.rmsprop import RMSprop
from kvps.optim.rules.sgd import SGD
from kvps.optim.rules.yogi import Yogi

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
