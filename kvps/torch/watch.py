"""Notices when a model no longer trains what its job has: a parameter that came, went, or was unfrozen since join."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from kvps.errors import LayoutMismatch, some_of
from kvps.torch.model import Parameters
from kvps.torch.names import in_job, named_parameters

_requires_grad = attrgetter("requires_grad")


class ModelWatch:
    """A model as it was when its worker joined. `params` are the job's names -> the parameters that it trains.

    `check` compares objects by identity, without a name: for a model that is as before this costs microseconds.
    """

    def __init__(self, model: torch.nn.Module, params: Parameters) -> None:
        self._model = model
        self._params = params
        self._since_join = list(named_parameters(model).values())  # held, so that no other object gets their ids
        self._remember()

    def check(self) -> None:
        """Raise LayoutMismatch, which says what to do, unless the model trains what it did when its worker joined. A
        parameter of the job that is frozen now is one without a gradient, and no error."""
        held = self._present()
        is_same = len(held) == len(self._held) and all(map(is_, held, self._held))
        if not is_same or any(map(_requires_grad, self._frozen)):
            self._compare()
            self._remember()

    def _remember(self) -> None:
        modules = [vars(module) for module in self._model.modules()]
        self._registers: list[dict[str, Any]] = [m[kind] for m in modules for kind in ("_parameters", "_modules")]
        self._held = self._present()
        of_job = set(map(id, self._params.values()))
        self._frozen = [parameter for parameter in self._model.parameters() if id(parameter) not in of_job]

    def _present(self) -> list[Any]:
        """Return all modules in the model and their parameters, with None for a bias that is none."""
        return list(chain.from_iterable(map(dict.values, self._registers)))

    def _compare(self) -> None:
        now = named_parameters(self._model, each_name=True)
        of_job = in_job(now, self._params)
        numbers, since_join = set(map(id, self._params.values())), set(map(id, self._since_join))
        others = {name: p for name, p in now.items() if name not in of_job and id(p) not in numbers}
        trained = {name: id(p) in since_join for name, p in others.items() if p.requires_grad}
        changed = {name: now[name] for name, other in of_job.items() if now[name] is not self._params[other]}
        _refuse(
            [name for name, was_there in trained.items() if was_there],
            "unfrozen after join, and not in the job",
            "unfreeze before create_job, or freeze again with requires_grad_(False)",
        )
        _refuse(
            [name for name, parameter in changed.items() if id(parameter) in numbers],
            "tied after join to another parameter, and the job has both",
            "tie them before create_job",
        )
        _refuse(
            list(changed),
            "replaced after join, and the job trains the parameter before",
            "copy into that one, as load_state_dict does without assign=True, or leave and join again",
        )
        _refuse(
            [name for name in self._params if name not in set(of_job.values())],
            "trained by the job, and no longer in the model",
            "put it back, or create a job without it",
        )
        _refuse(list(trained), "new since join, and not in the job", "add it before create_job, or freeze it")


def _refuse(names: list[str], what: str, cure: str) -> None:
    if names:
        raise LayoutMismatch(f"{what}: {some_of(names)}; {cure}")
