"""The task protocol: what a worker trains. Also finds a task by its name.

A task is written once, over `xp`, which is NumPy or CuPy:

    class Mine:
        batch_size, epochs, lr = 32, 10, 0.1
        units_per_round = 6                                # may be left out, as units_lr: see `CheckedTask`
        def parameters(self, seed): ...                    # name -> float32 NumPy array
        def data(self, rank, workers, xp): ...             # arrays with one row a sample
        def gradient(self, params, batch, xp): ...         # (loss, name -> gradient)
        def evaluate(self, params, xp): ...                # {"loss": ..., "accuracy": ..., and any other figures}
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Protocol, runtime_checkable

from kvps.arrays.inputs import in_words, one_number
from kvps.errors import InvalidTask, TaskFailed, UsageError
from kvps.optim import user_code

BUILT_IN = {"digits": "kvps_workers.digits:Digits"}
UNITS_PER_ROUND = 4
"""Of how many batches a version is made, for a task that does not say it."""


@runtime_checkable
class Task(Protocol):
    """A training problem. `batch_size`, `epochs` and `lr` are the defaults if the user gives none."""

    batch_size: int
    epochs: int
    lr: float

    def parameters(self, seed: int) -> Mapping[str, Any]:
        """Return the initial parameters, name -> float32 NumPy array; the same for the same seed."""

    def data(self, rank: int, workers: int, xp: ModuleType) -> tuple[Any, ...]:
        """Return the training samples of worker `rank` of `workers`: arrays of equal length, one row a sample."""

    def gradient(
        self, params: Mapping[str, Any], batch: tuple[Any, ...], xp: ModuleType
    ) -> tuple[float, Mapping[str, Any]]:
        """Return the mean loss of a batch (rows of `data`), and its gradient, name -> float32 array."""

    def evaluate(self, params: Mapping[str, Any], xp: ModuleType) -> Mapping[str, float]:
        """Return figures over samples that no worker trains on: `loss`, and others (`accuracy`). Each is one number."""


class CheckedTask:
    """A task whose calls are checked: an error in it, or a wrong result, becomes TaskFailed, in one line.

    units_per_round  of how many batches a version is made where batches are handed out as units; a task may have it
    units_lr         the rate for plain SGD on their mean, at staleness 0; `lr` if the task has none
    """

    def __init__(self, name: str, task: Task) -> None:
        self._name = name
        self._task = task
        self.batch_size, self.epochs, self.lr = task.batch_size, task.epochs, task.lr
        self.units_per_round: int = getattr(task, "units_per_round", UNITS_PER_ROUND)
        self.units_lr: float = getattr(task, "units_lr", self.lr)
        for setting in ("batch_size", "epochs", "units_per_round"):
            value = getattr(self, setting)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidTask(f"task {name!r}: {setting} must be a whole number from 1, not {value!r}")
        for setting in ("lr", "units_lr"):
            rate = getattr(self, setting)
            if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate < math.inf:
                raise InvalidTask(f"task {name!r}: {setting} must be a finite Python number from 0, not {rate!r}")

    def parameters(self, seed: int) -> Mapping[str, Any]:
        """See `Task`."""
        with blamed(self._name):
            params = self._task.parameters(seed)
        return params if isinstance(params, Mapping) else self._wrong("parameters", "name -> array", params)

    def data(self, rank: int, workers: int, xp: ModuleType) -> tuple[Any, ...]:
        """See `Task`."""
        with blamed(self._name):
            data = self._task.data(rank, workers, xp)
        if not isinstance(data, tuple | list) or not data or not all(hasattr(array, "shape") for array in data):
            self._wrong("data", "a tuple of arrays", data)
        with blamed(self._name):
            lengths = [len(array) for array in data]
        if len(set(lengths)) > 1:
            self._fail(f"data({rank}, {workers}) must return arrays of equal length, not {lengths}")
        if lengths[0] == 0:
            self._fail(f"data({rank}, {workers}) returned no samples: take fewer workers, or give each some")
        return tuple(data)

    def gradient(
        self, params: Mapping[str, Any], batch: tuple[Any, ...], xp: ModuleType
    ) -> tuple[float, Mapping[str, Any]]:
        """See `Task`."""
        with blamed(self._name):
            pair = self._task.gradient(params, batch, xp)
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], Mapping):
            self._wrong("gradient", "(loss, name -> gradient)", pair)
        return self._number("gradient", "loss", pair[0]), pair[1]

    def evaluate(self, params: Mapping[str, Any], xp: ModuleType) -> Mapping[str, float]:
        """See `Task`; the figures in its order."""
        with blamed(self._name):
            figures = self._task.evaluate(params, xp)
        if not isinstance(figures, Mapping) or "loss" not in figures:
            self._wrong("evaluate", '{"loss": ...}', figures)
        for name in figures:
            if not isinstance(name, str):
                self._fail(f"evaluate must name its figures in text, not {name!r}")
        return {name: self._number("evaluate", name, value) for name, value in figures.items()}

    def _number(self, method: str, what: str, value: Any) -> float:
        try:
            return one_number(value, f"the {what} that {method} returned")
        except UsageError as error:
            self._fail(str(error))

    def _wrong(self, method: str, wanted: str, returned: Any) -> NoReturn:
        self._fail(f"{method} must return {wanted}, not {in_words(returned)}")

    def _fail(self, message: str) -> NoReturn:
        raise TaskFailed(f"task {self._name!r} failed: {message}")


def load_task(name: str) -> CheckedTask:
    """Return the task called `name`: built in, or ``module:attribute`` of a module in the current directory.

    The attribute is a task or the class of one. Only the current directory is searched, so that a name from Redis
    cannot make a worker import anything else. Raises InvalidTask, TaskFailed.
    """
    if name in BUILT_IN:
        module_name, _, attribute = BUILT_IN[name].partition(":")
        return _instance(name, getattr(importlib.import_module(module_name), attribute))
    if not user_code.NAME.fullmatch(name) or name.partition(":")[0].endswith(".py"):
        raise InvalidTask(f"task {name!r} {_unlike_a_task(name)}")
    return _instance(name, user_code.load("task", name, InvalidTask))


def _unlike_a_task(name: str) -> str:
    """Return why a name cannot be that of a task, and what the user probably meant."""
    where, _, attribute = name.partition(":")
    path = Path(where)
    if path.suffix == ".py" or path.name != where:  # a file's name
        change = "" if str(path.parent) == "." else f"change to {path.parent} and "
        task = f"{path.stem}:{attribute}" if attribute else f"{path.stem}:NAME, with the name of its class"
        return f"names a file, and a task is module:attribute: {change}say {task}"
    module, dot, last = where.rpartition(".")
    if dot and not attribute and module.isidentifier() and last.isidentifier():
        return f"lacks a colon: say {module}:{last}"
    return (
        f"is unknown{user_code.near(name, BUILT_IN)}: built in are {', '.join(BUILT_IN)}; your own is "
        f"module:attribute, for a module in this directory"
    )


def blamed(name: str) -> AbstractContextManager[None]:
    """Turn an error of the task inside the block into TaskFailed, in one line that says where in the task."""
    return user_code.blamed("task", name, TaskFailed)


def _instance(name: str, attribute: Any) -> CheckedTask:
    with blamed(name):
        try:
            task = attribute() if isinstance(attribute, type) else attribute
        except ImportError as error:  # it says what to install
            raise InvalidTask(f"task {name!r}: {error}") from None
    if not isinstance(task, Task):
        wanted = ("batch_size", "epochs", "lr", "parameters", "data", "gradient", "evaluate")
        missing = [n for n in wanted if not hasattr(task, n)]
        raise InvalidTask(f"task {name!r} is no task: it lacks {', '.join(missing)}")
    return CheckedTask(name, task)
