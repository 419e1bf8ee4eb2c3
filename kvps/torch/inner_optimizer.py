"""A worker's own optimizer, which takes its local steps, and its state, from which its next process goes on."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from kvps.arrays.inputs import in_words
from kvps.errors import CorruptData, InvalidSetting
from kvps.torch.model import Parameters, check_steps_all

log = logging.getLogger("kvps.session")
_STORED = (torch.float32, torch.float64, torch.int64)
Inner = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class InnerOptimizer:
    """An optimizer of torch.optim that steps the parameters `params`, or several, each of which steps some. With
    `begins_anew` it can go back to its state as it is now. Raises InvalidSetting unless they step exactly these."""

    def __init__(self, inner: Inner, params: Parameters, begins_anew: bool = False) -> None:
        self._optimizers = [inner] if isinstance(inner, torch.optim.Optimizer) else inner
        _check_inner(self._optimizers, params)
        self._params = params
        steps = {id(p): each for each in self._optimizers for group in each.param_groups for p in group["params"]}
        self._of = {name: steps[id(p)] for name, p in params.items() if id(p) in steps}
        self._untried = set[str]()  # parameters that have a restored state, and were not stepped with it
        self._fresh = list[dict[Any, Any]]()  # the states before that one
        self._first = copy.deepcopy(self._states()) if begins_anew else []

    @property
    def kind(self) -> str:
        """The name of its class."""
        return " and ".join(type(each).__name__ for each in self._optimizers)

    @property
    def is_new(self) -> bool:
        """Whether it has no state yet."""
        return not any(each.state for each in self._optimizers)

    def step(self) -> None:
        """Step once. The optimizer starts anew if it needs what a restored state lacks: one of the same class and other
        settings has stored that, as Adam without amsgrad."""
        tried = {name for name in self._untried if self._params[name].grad is not None}
        before = {name: p.detach().clone() for name, p in self._params.items()} if tried else {}
        try:
            self._step()
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
            self._step()
        self._untried -= tried
        if not self._untried:
            self._fresh = []

    def _step(self) -> None:
        for each in self._optimizers:
            each.step()

    def begin_anew(self) -> None:
        """Go back to the first state; learning rates and other settings stay."""
        self._load(copy.deepcopy(self._first))

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the state in host memory: "<its class>:<name>:<parameter>" -> array.

        {} for a state that is neither numbers nor arrays of the parameters' shapes.
        """
        state = {
            f"{type(optimizer).__name__}:{name}:{parameter}": value
            for parameter, optimizer in self._of.items()
            for name, value in optimizer.state.get(self._params[parameter], {}).items()
            if value is not None
        }
        fits = all(_fits(value, self._params[name.split(":", 2)[2]]) for name, value in state.items())
        return {name: _hosted(value) for name, value in state.items()} if fits else {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> bool:
        """Give it the state that `state` returned. Return False for {}, and for that of another class.

        Raises CorruptData for what fits no parameter.
        """
        stepped = [[id(p) for group in each.param_groups for p in group["params"]] for each in self._optimizers]
        numbers = {each: number for ids in stepped for number, each in enumerate(ids)}
        states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in self._optimizers]
        restored = set[str]()
        for whole, array in state.items():
            kind, _, rest = whole.partition(":")
            name, _, parameter = rest.partition(":")
            value = torch.from_numpy(array.copy())
            if parameter not in self._params or not _fits(value, self._params[parameter]):
                raise CorruptData(f"the stored state of the inner optimizer has {whole!r}, which fits no parameter")
            if parameter in self._of and kind == type(optimizer := self._of[parameter]).__name__:
                of_optimizer = states[self._optimizers.index(optimizer)]
                of_optimizer.setdefault(numbers[id(self._params[parameter])], {})[name] = value
                restored.add(parameter)
        if restored:
            self._fresh = self._states()
            self._load(states)
            self._untried = restored
        return bool(restored)

    def _states(self) -> list[dict[Any, Any]]:
        return [each.state_dict()["state"] for each in self._optimizers]

    def _load(self, states: Sequence[Mapping[Any, Any]]) -> None:
        for each, state in zip(self._optimizers, states, strict=True):
            each.load_state_dict(each.state_dict() | {"state": state})


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
    """Raise InvalidSetting unless `inner` are optimizers that step each trained parameter once, and nothing else."""
    if not isinstance(inner, list | tuple) or not all(isinstance(each, torch.optim.Optimizer) for each in inner):
        raise InvalidSetting(f"inner must be an optimizer of torch.optim, or a list of them, not {in_words(inner)}")
    if any(isinstance(each, torch.optim.LBFGS) for each in inner):
        raise InvalidSetting("inner must step without a closure, and LBFGS needs one: take another optimizer")
    groups = [group for each in inner for group in each.param_groups]
    check_steps_all(groups, params, "inner", "or to another one, as inner=[muon, adamw], ")
    if len(stepped := [id(p) for group in groups for p in group["params"]]) > len(set(stepped)):
        raise InvalidSetting("two optimizers of inner step the same parameter: give each its own")
