"""Local steps: a worker's own optimizer steps several times between two pulls, and the worker pushes how far it came.

The pseudo-gradient is the weights that were pulled minus the weights now. The job's optimizer, the outer one, steps by
the mean of them: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv 2311.08105, 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from kvps.arrays.parts import fragment_of
from kvps.config import JobConfig
from kvps.errors import InvalidSetting, NotFinite, WrongOrder
from kvps.optim.reductions import MOST_WEIGHT
from kvps.torch.inner_optimizer import Inner, InnerOptimizer
from kvps.torch.model import Parameters

MOST_STEPS = 1_000_000


class LocalSteps:
    """The steps of one worker's present round: `steps` of them, of which some are `taken`, each by `inner` on the
    parameters `params`.

    It keeps one copy of the parameters, as pulled, in float32. `weight` is the sum of the steps' weights, None without
    any. With fragments, `part_of` is parameter -> fragment: a round is of one, and the worker goes on from its own
    weights of the others. Raises InvalidSetting unless `inner` steps exactly these parameters.
    """

    def __init__(
        self,
        params: Parameters,
        inner: Inner,
        steps: int,
        config: JobConfig,
        part_of: Mapping[str, str] | None = None,
    ) -> None:
        _check_steps(steps)
        fragments = max(1, config.fragments)
        if steps % fragments:
            raise InvalidSetting(f"the job's {fragments} fragments must divide local_steps, {steps}")
        self._part_of = part_of or {}
        self._params = params
        self.inner = InnerOptimizer(inner, params, begins_anew=config.unit_rounds is not None)
        self.steps = steps // fragments
        self._config = config
        self._pulled: dict[str, torch.Tensor] = {}
        self._pseudo: dict[str, torch.Tensor] = {}
        self._with_gradient = set[str]()  # parameters that had one in a step since they were pulled
        self._cleared = False  # whether a pull has cleared the gradients since the last step
        self.taken = 0
        self._part: str | None = None  # of the pseudo-gradient that is being pushed
        self.to_pull = ""  # the part whose weights the next round needs; "" is the whole model
        self.weight: int | None = None
        self._is_ahead = False  # whether the parameters have steps that the job lacks
        self._accepted = False  # whether all steps so far are in accepted contributions

    @property
    def under_way(self) -> bool:
        """Whether some steps of the round are taken, and not all."""
        return 0 < self.taken < self.steps

    @property
    def to_push(self) -> bool:
        """Whether a worker that leaves now has steps to push, with fragments also steps of earlier rounds. A part of a
        unit does not count: another worker gets the whole unit."""
        return self._is_ahead and (self.taken == self.steps or not self._config.units)

    def begin_unit(self, batches: int) -> None:
        """Begin a unit of data, of so many batches: the last one may have fewer. Steps of a unit that was not pushed
        count no more."""
        self.dropped()
        self.steps = batches

    def begin(self, anew: bool) -> None:
        """Begin the next step, whose gradients are cleared; or a round `anew`, whose weights, `to_pull`, are in the
        parameters now."""
        if anew:
            self.taken, self.weight, self._part = 0, None, None
            self._pseudo.clear()
            self._is_ahead = self._is_ahead and self.to_pull != ""
            for name, parameter in self._params.items():
                if self.to_pull in ("", self._part_of.get(name)):
                    self._pulled[name] = parameter.detach().to(torch.float32, copy=True)
                    self._with_gradient.discard(name)
            if self._config.unit_rounds:  # its state must not depend on the units that this worker did before
                self.inner.begin_anew()
        self._cleared = True

    def take(self, weight: int | None) -> bool:
        """Take one step, unless all were taken, and add its `weight`, if it has one. Return whether all are taken now.

        Raises WrongOrder, NotFinite; then nothing has changed.
        """
        if self.taken < self.steps:
            counts = self._counts()
            self.to_pull = ""  # until the push of this round is accepted
            self._cleared = self._accepted = False
            self._is_ahead = True
            if counts:
                self.inner.step()
            self.taken += 1
            if weight:
                self.weight = min(MOST_WEIGHT, weight + (self.weight or 0))
        return self.taken == self.steps

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
        if not spoilt:
            self._with_gradient.update(grads)
        return not spoilt

    def part(self, round_: int) -> str:
        """Return the part that a worker pushes which has done so many rounds: the fragment whose turn it is."""
        return fragment_of(round_, self._config.fragments) if self._config.fragments > 1 else ""

    def pseudo_gradient(self, part: str) -> tuple[str, dict[str, torch.Tensor]]:
        """Return a part, and name -> weights pulled minus weights now of its parameters, float32, in the copy's memory.
        If called again they are the same, whatever the `part`: a push may have been accepted. In a job of `missing`
        "skip", parameters are left out that had no gradient in any step."""
        self._part = part if self._part is None else self._part
        for name in [name for name in self._pulled if self._part in ("", self._part_of.get(name))]:
            pulled = self._pulled.pop(name)  # an interrupt loses an array, and the push then says which
            self._pseudo[name] = pulled.sub_(self._params[name].detach())
        skips = self._config.skips_missing
        named = {name: d for name, d in self._pseudo.items() if not skips or name in self._with_gradient}
        return self._part, named

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the state of `inner`. It is {} if a step is in no accepted contribution, because only what those have
        made of it may go on, and where it begins anew in each unit."""
        return self.inner.state() if self._accepted and not self._config.unit_rounds else {}

    def dropped(self) -> None:
        """Note that the steps since the last pull do not count: the next round begins with a pull."""
        self.taken, self._part, self._is_ahead = 0, None, False
        self._pulled.clear()
        self._pseudo.clear()

    def pushed(self) -> dict[str, torch.Tensor]:
        """Note that the pseudo-gradient was accepted. Return name -> parameter as it is now, float32, in its memory."""
        self.to_pull, self._part = self._part or "", None
        self._is_ahead = self.to_pull != ""
        self.taken = 0
        self._accepted = True
        as_pushed = {name: memory.copy_(self._params[name].detach()) for name, memory in self._pseudo.items()}
        self._pseudo.clear()
        return as_pushed


def _spoilt(grads: Mapping[str, torch.Tensor]) -> str:
    """Return the name of the first gradient that holds NaN or Inf, "" if none does.

    The sums come first, because they cost less than a check of each item. With NaN or Inf in it, no sum is finite.
    """
    values = {name: grad.coalesce().values() if grad.is_sparse else grad for name, grad in grads.items()}
    home = next(iter(values.values())).device
    sums = torch.stack([value.sum().to(home, torch.float32) for value in values.values()])
    if torch.isfinite(sums).all():
        return ""
    return next((name for name, value in values.items() if not torch.isfinite(value).all()), "")


def _check_steps(steps: object) -> None:
    """Raise InvalidSetting unless `steps` is a number of steps."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
        raise InvalidSetting(f"local_steps must be a whole number from 1 to {MOST_STEPS}, not {steps!r}")
