"""A worker's own optimizer, which takes its local steps, and its state, from which its next process goes on."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from kvps.errors import CorruptData, InvalidSetting
from kvps.torch.model import Parameters, check_steps_all

log = logging.getLogger("kvps.session")
_STORED = (torch.float32, torch.float64, torch.int64)


class InnerOptimizer:
    """An optimizer of torch.optim that steps the parameters `params`. With `begins_anew` it can go back to its state as
    it is now. Raises InvalidSetting unless it steps exactly these."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Parameters, begins_anew: bool = False) -> None:
        _check_inner(optimizer, params)
        self._optimizer = optimizer
        self._params = params
        self._untried = set[str]()  # parameters that have a restored state, and were not stepped with it
        self._fresh: dict[Any, Any] = {}  # the state before that one
        self._first = copy.deepcopy(optimizer.state_dict()["state"]) if begins_anew else {}

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self._optimizer).__name__

    @property
    def is_new(self) -> bool:
        """Whether it has no state yet."""
        return not self._optimizer.state

    def step(self) -> None:
        """Step once. The optimizer starts anew if it needs what a restored state lacks: one of the same class and other
        settings has stored that, as Adam without amsgrad."""
        tried = {name for name in self._untried if self._params[name].grad is not None}
        before = {name: p.detach().clone() for name, p in self._params.items()} if tried else {}
        try:
            self._optimizer.step()
        except KeyError as error:
            if not before:
                raise
            log.warning(
                "the inner %s starts anew: the state that the worker left lacks %s, which its settings now need",
                self.kind,
                error,
            )
            with torch.no_grad():  # it may have stepped some groups of parameters already
                for name, value in before.items():
                    self._params[name].copy_(value)
            self._load(self._fresh)
            self._untried.clear()
            self._optimizer.step()
        self._untried -= tried
        if not self._untried:
            self._fresh = {}

    def begin_anew(self) -> None:
        """Go back to the first state; learning rates and other settings stay."""
        self._load(copy.deepcopy(self._first))

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the state in host memory: "<its class>:<name>:<parameter>" -> array.

        {} for a state that is neither numbers nor arrays of the parameters' shapes.
        """
        state = {
            f"{self.kind}:{name}:{parameter}": value
            for parameter, p in self._params.items()
            for name, value in self._optimizer.state.get(p, {}).items()
            if value is not None
        }
        fits = all(_fits(value, self._params[name.split(":", 2)[2]]) for name, value in state.items())
        return {name: _hosted(value) for name, value in state.items()} if fits else {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> bool:
        """Give it the state that `state` returned. Return False for {}, and for that of another class.

        Raises CorruptData for what fits no parameter.
        """
        numbers = {id(p): n for n, p in enumerate(p for g in self._optimizer.param_groups for p in g["params"])}
        states: dict[int, dict[str, torch.Tensor]] = {}
        for whole, array in state.items():
            kind, _, rest = whole.partition(":")
            name, _, parameter = rest.partition(":")
            value = torch.from_numpy(array.copy())
            if parameter not in self._params or not _fits(value, self._params[parameter]):
                raise CorruptData(f"the stored state of the inner optimizer has {whole!r}, which fits no parameter")
            if kind == self.kind:
                states.setdefault(numbers[id(self._params[parameter])], {})[name] = value
        if states:
            self._fresh = self._optimizer.state_dict()["state"]
            self._load(states)
            self._untried = {name for name, p in self._params.items() if numbers[id(p)] in states}
        return bool(states)

    def _load(self, state: Mapping[Any, Any]) -> None:
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": state})


def _fits(value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a value of a state can be stored: a number, or an array of floats or of int64 in its parameter's
    shape. A flag is neither: PyTorch makes floats of what an optimizer loads."""
    if isinstance(value, torch.Tensor):
        return value.shape in (torch.Size(), parameter.shape) and (
            value.is_floating_point() or value.dtype == torch.int64
        )
    return isinstance(value, float) or (type(value) is int and -(2**63) <= value < 2**63)


def _hosted(value: Any) -> NDArray[Any]:
    """Return a number or tensor in host memory; float32 for shorter floats, which loses nothing."""
    tensor = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None).detach().cpu()
    return (tensor if tensor.dtype in _STORED else tensor.float()).numpy()


def _check_inner(inner: object, params: Parameters) -> None:
    """Raise InvalidSetting unless `inner` is an optimizer that steps the trained parameters and nothing else."""
    if not isinstance(inner, torch.optim.Optimizer):
        raise InvalidSetting(f"inner must be an optimizer of torch.optim, not {type(inner).__name__}")
    if isinstance(inner, torch.optim.LBFGS):
        raise InvalidSetting("inner must step without a closure, and LBFGS needs one: take another optimizer")
    check_steps_all(inner, params, "inner")
