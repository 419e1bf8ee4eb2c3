"""Evaluation of a PyTorch model beside the training: in the evaluator of a run, a script ends here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvps import launch
from kvps.job import Job
from kvps.launch import EvaluatorContext
from kvps.machine import launcher
from kvps.torch.loading import fill_with

Evaluate = Callable[[torch.nn.Module, Job], Mapping[str, Any]]


def evaluates(model: torch.nn.Module, *, name: str = "") -> Callable[[Evaluate], Evaluate]:
    """Decorate the function that evaluates `model`: it gets the model and the job, which it may stop, and returns
    figures, as in ``{"loss": 0.12}``.

    In the evaluator of ``kvps run --eval-every N`` it fills the model with each N-th version and calls the function in
    evaluation mode and without gradients, reports what it returns, and after the job's last version ends the process,
    or goes on to the next job of a script that has several; `name` is that of a job that the script names.
    In a worker, and without `kvps run`, this changes nothing. So put it before the job is joined, and before
    `Optimizer`. Buffers that the job does not have stay as they are in the model: `load` says which. Raises
    LayoutMismatch for a model that is not the job's.
    """

    def decorate(evaluate: Evaluate) -> Evaluate:
        if launcher.evaluates():
            with launch.from_env() as run:
                assert isinstance(run, EvaluatorContext)
                job = run.next_job(name)

                def figures(weights: Mapping[str, Any]) -> Mapping[str, Any]:
                    fill_with(job, model, weights)
                    model.eval()
                    with torch.no_grad():
                        return evaluate(model, job)

                run.evaluates(job)(figures)
        return evaluate

    return decorate
