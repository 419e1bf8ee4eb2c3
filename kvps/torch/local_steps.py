"""Local steps: a worker's own optimizer steps several times between two pulls, and the worker pushes how far it came.

The pseudo-gradient is the weights that were pulled minus the weights now. The job's optimizer, the outer one, steps by
the mean of them: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv 2311.08105, 2023.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from kvps.arrays.parts import fragment_of
from kvps.config import AUTO, JobConfig
from kvps.errors import CorruptData, InvalidSetting, NotFinite, WrongOrder
from kvps.reductions import MOST_WEIGHT
from kvps.session.round_timer import RoundTimer
from kvps.torch.model import Parameters

log = logging.getLogger("kvps.session")
MOST_STEPS = 1_000_000
_STORED = (torch.float32, torch.float64, torch.int64)


class LocalSteps:
    """The steps of one worker's present round: `steps` of them, each by `inner` on the parameters `params`; with "auto"
    as many as the job's `round_ms` lets it take.

    It keeps one copy of the parameters, as pulled, in float32. `weight` is the sum of the steps' weights, None without
    any; in a job whose rounds end by the clock, a step without a weight weighs 1. With fragments, `part_of` is
    parameter -> fragment: a round is of one, and the worker goes on from its own weights of the others. Raises
    InvalidSetting unless `inner` steps exactly these parameters, and for "auto" in a job without `round_ms`.
    """

    def __init__(
        self,
        params: Parameters,
        inner: torch.optim.Optimizer,
        steps: int | str,
        config: JobConfig,
        part_of: Mapping[str, str] | None = None,
    ) -> None:
        _check_steps(steps, config)
        _check_inner(inner, params)
        fragments = max(1, config.fragments)
        if fragments > 1 and (isinstance(steps, str) or steps % fragments):
            raise InvalidSetting(f"the job's {fragments} fragments must divide local_steps, {steps}")
        self._part_of = part_of or {}
        self._params = params
        self._inner = inner
        self._steps = steps if isinstance(steps, str) else steps // fragments
        self._config = config
        self._timer = RoundTimer(config) if steps == AUTO else None
        self._over = False
        self._pulled: dict[str, torch.Tensor] = {}
        self._pseudo: dict[str, torch.Tensor] = {}
        self._cleared = False  # whether a pull has cleared the gradients since the last step
        self._taken = 0
        self._part: str | None = None  # of the pseudo-gradient that is being pushed
        self.to_pull = ""  # the part whose weights the next round needs; "" is the whole model
        self.weight: int | None = None
        self._is_ahead = False  # whether the parameters have steps that the job lacks
        self._accepted = False  # whether all steps so far are in accepted contributions
        self._untried = set[str]()  # parameters whose restored state `inner` has not stepped with
        self._fresh: dict[Any, Any] = {}  # the state of `inner` before that one

    @property
    def under_way(self) -> bool:
        """Whether some steps of the round are taken, and not all."""
        return self._taken > 0 and not self._over

    @property
    def to_push(self) -> bool:
        """Whether a worker that leaves now has steps to push, with fragments also those of earlier rounds. A part of a
        unit does not count: another worker gets the whole unit."""
        return self._is_ahead and (self._over or not self._config.units)

    @property
    def hands_out_units(self) -> bool:
        """Whether a worker may come back after its last round, to compute the units of dead workers."""
        return bool(self._config.units)

    def begin(self, anew: bool, age_s: Callable[[], float]) -> None:
        """Begin the next step, whose gradients are cleared; or a round `anew`, whose weights, `to_pull`, are in the
        parameters now. `age_s` returns how long ago their version was committed."""
        if anew:
            self._taken, self._over, self.weight, self._part = 0, False, None, None
            self._pseudo.clear()
            self._is_ahead = self._is_ahead and self.to_pull != ""
            for name, parameter in self._params.items():
                if self.to_pull in ("", self._part_of.get(name)):
                    self._pulled[name] = parameter.detach().to(torch.float32, copy=True)
            if self._timer:
                self._timer.begin(age_s)
        self._cleared = True

    def take(self, weight: int | None) -> bool:
        """Take one step, unless all were taken, and add its `weight`, if it has one. Return whether all are taken now.

        Raises WrongOrder, NotFinite; then nothing has changed.
        """
        if not self._over:
            counts = self._counts()
            self.to_pull = ""  # until the push of this round is accepted
            self._cleared = self._accepted = False
            self._is_ahead = True
            if counts:
                self._step()
            self._taken += 1
            if weight := weight or (1 if self._config.timed_rounds else None):
                self.weight = min(MOST_WEIGHT, weight + (self.weight or 0))
            self._over = self._timer.over() if self._timer else self._taken == self._steps
        return self._over

    def _step(self) -> None:
        """Have `inner` step. It starts anew if it needs what a restored state lacks: that was stored by one of the same
        class and other settings, as Adam without amsgrad."""
        before = {name: p.detach().clone() for name, p in self._params.items()} if self._untried else {}
        try:
            self._inner.step()
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
            self._inner.step()
        self._untried -= {name for name, p in self._params.items() if p.grad is not None}

    def _counts(self) -> bool:
        """Return whether the step is to be taken: a gradient with NaN would stay in the state of `inner` for good."""
        if not self._cleared:
            raise WrongOrder("step() needs a pull() before it: between local steps that clears the gradients")
        grads = {name: p.grad for name, p in self._params.items() if p.grad is not None}
        if not grads:
            raise WrongOrder("no parameter has a gradient: call loss.backward() between pull() and step()")
        spoilt = _spoilt(grads)
        if spoilt and self._config.nonfinite == "reject":
            raise NotFinite(
                f"gradient {spoilt!r} holds NaN or Inf, and no step was taken: mend it, or leave this batch out and "
                f"pull()"
            )
        return not spoilt

    def part(self, round_: int) -> str:
        """Return the part that a worker pushes which has done so many rounds: the fragment whose turn it is."""
        return fragment_of(round_, self._config.fragments) if self._config.fragments > 1 else ""

    def pseudo_gradient(self, part: str) -> tuple[str, dict[str, torch.Tensor]]:
        """Return a part, and name -> weights pulled minus weights now of its parameters, float32, in the copy's memory.
        If called again they are the same, whatever the `part`: a push may have been accepted."""
        self._part = part if self._part is None else self._part
        for name in [name for name in self._pulled if self._part in ("", self._part_of.get(name))]:
            pulled = self._pulled.pop(name)  # an interrupt loses an array, and the push then says which
            self._pseudo[name] = pulled.sub_(self._params[name].detach())
        return self._part, dict(self._pseudo)

    @property
    def kind(self) -> str:
        """The name of the inner optimizer's class."""
        return type(self._inner).__name__

    @property
    def is_new(self) -> bool:
        """Whether the inner optimizer has no state yet."""
        return not self._inner.state

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the inner optimizer's state in host memory: "<its class>:<name>:<parameter>" -> array.

        {} if a step is in no accepted contribution, because only what those have made of it may go on. {} also for a
        state that is neither numbers nor arrays of the parameters' shapes.
        """
        found = {
            f"{self.kind}:{name}:{parameter}": value
            for parameter, p in self._params.items()
            for name, value in self._inner.state.get(p, {}).items()
            if value is not None
        }
        fits = all(_fits(value, self._params[name.split(":", 2)[2]]) for name, value in found.items())
        return {name: _hosted(value) for name, value in found.items()} if fits and self._accepted else {}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> bool:
        """Give the inner optimizer the state that `state` returned. Return False for {}, and for that of another class.

        Raises CorruptData for what fits no parameter.
        """
        numbers = {id(p): n for n, p in enumerate(p for g in self._inner.param_groups for p in g["params"])}
        found: dict[int, dict[str, torch.Tensor]] = {}
        for whole, array in state.items():
            kind, _, rest = whole.partition(":")
            name, _, parameter = rest.partition(":")
            value = torch.from_numpy(array.copy())
            if parameter not in self._params or not _fits(value, self._params[parameter]):
                raise CorruptData(f"the stored state of the inner optimizer has {whole!r}, which fits no parameter")
            if kind == self.kind:
                found.setdefault(numbers[id(self._params[parameter])], {})[name] = value
        if found:
            self._fresh = self._inner.state_dict()["state"]
            self._load(found)
            self._untried = {name for name, p in self._params.items() if numbers[id(p)] in found}
        return bool(found)

    def _load(self, state: Mapping[Any, Any]) -> None:
        self._inner.load_state_dict(self._inner.state_dict() | {"state": state})

    def dropped(self) -> None:
        """Note that the pseudo-gradient came late and will never count: the next round begins with a pull."""
        self._taken, self._over, self._part, self._is_ahead = 0, False, None, False
        self._pulled.clear()
        self._pseudo.clear()

    def pushed(self) -> None:
        """Note that the pseudo-gradient was accepted."""
        self.to_pull, self._part = self._part or "", None
        self._is_ahead = self.to_pull != ""
        self._taken, self._over = 0, False
        self._accepted = True
        self._pseudo.clear()


def _spoilt(grads: Mapping[str, torch.Tensor]) -> str:
    """Return the name of the first gradient that holds NaN or Inf, "" if none does.

    The sums come first, because they cost less than a look at each item. With NaN or Inf in it, no sum is finite.
    """
    values = {name: grad.coalesce().values() if grad.is_sparse else grad for name, grad in grads.items()}
    home = next(iter(values.values())).device
    sums = torch.stack([value.sum().to(home, torch.float32) for value in values.values()])
    if torch.isfinite(sums).all():
        return ""
    return next((name for name, value in values.items() if not torch.isfinite(value).all()), "")


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


def _check_steps(steps: object, config: JobConfig) -> None:
    """Raise InvalidSetting unless `steps` is a number of steps, or "auto" in a job whose rounds end by the clock."""
    if steps == AUTO and isinstance(steps, str):
        if not config.timed_rounds:
            raise InvalidSetting(
                "local_steps='auto' ends rounds with those of the job, and this job's do not end by the clock: create "
                "it with local_steps='auto' and round_ms, or give a number"
            )
    elif isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
        raise InvalidSetting(f"local_steps must be a whole number from 1 to {MOST_STEPS}, or auto, not {steps!r}")


def _check_inner(inner: object, params: Parameters) -> None:
    """Raise InvalidSetting unless `inner` is an optimizer that steps the trained parameters and nothing else."""
    if not isinstance(inner, torch.optim.Optimizer):
        raise InvalidSetting(f"inner must be an optimizer of torch.optim, not {type(inner).__name__}")
    if isinstance(inner, torch.optim.LBFGS):
        raise InvalidSetting("inner must step without a closure, and LBFGS needs one: take another optimizer")
    stepped = {id(p) for group in inner.param_groups for p in group["params"] if p.requires_grad}
    for name, parameter in params.items():
        if id(parameter) not in stepped:
            raise InvalidSetting(
                f"inner does not step {name!r}, which requires a gradient: give it that, or freeze it with "
                f"requires_grad_(False)"
            )
    if len(stepped) > len(params):
        raise InvalidSetting("inner steps tensors that are no parameters of the model: make them parameters")
