"""A run that optuna-dashboard shows: a study whose trials are trainings, two at a time, each of about a second."""

from __future__ import annotations

import sys
import time

import optuna
from watched import Regression

NAME, STORAGE = sys.argv[1:]
STEPS, STEP_S = 20, 0.05


def objective(trial):
    """Train with the trial's learning rate; return the last loss."""
    lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    samples, weights = Regression(trial.number), Regression.start()
    for step in range(STEPS):
        loss, gradient = samples.loss_and_gradient(weights)
        weights -= lr * gradient
        trial.report(loss, step)
        time.sleep(STEP_S)
    return loss


if __name__ == "__main__":
    study = optuna.create_study(study_name=NAME, storage=STORAGE, direction="minimize")
    study.optimize(objective, n_jobs=2)
