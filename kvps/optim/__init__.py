"""How gradients become weights: what a user chooses, and the arithmetic of a step.

Optimizers (one of `rules`, or a class of the user's own), schedules and reductions are settings, stored with the job.
An optimizer computes its step; `kvps_aggregator.step.reduce` reduces. The names here are those of optimizers; each rule
is imported here, which makes it known by its `kind`.
"""

from kvps.optim.custom import CustomOptimizer as CustomOptimizer
from kvps.optim.custom import custom as custom
from kvps.optim.optimizer import OPTIMIZERS as OPTIMIZERS
from kvps.optim.optimizer import Optimizer as Optimizer
from kvps.optim.optimizer import ParameterGroup as ParameterGroup
from kvps.optim.reading import from_json as from_json
from kvps.optim.reading import parse as parse
from kvps.optim.rules.adadelta import Adadelta as Adadelta
from kvps.optim.rules.adagrad import Adagrad as Adagrad
from kvps.optim.rules.adam import Adam as Adam
from kvps.optim.rules.adam import AdamW as AdamW
from kvps.optim.rules.adamax import Adamax as Adamax
from kvps.optim.rules.delayed_nesterov import DelayedNesterov as DelayedNesterov
from kvps.optim.rules.lion import Lion as Lion
from kvps.optim.rules.nadam import NAdam as NAdam
from kvps.optim.rules.rmsprop import RMSprop as RMSprop
from kvps.optim.rules.sgd import SGD as SGD
from kvps.optim.rules.yogi import Yogi as Yogi
