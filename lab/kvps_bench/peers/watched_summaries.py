"""A run that TensorBoard shows: a training that writes its loss, its weights and its gradients as summaries."""

from __future__ import annotations

import sys
import time

import numpy as np
from tensorboardX import SummaryWriter
from watched import Regression

NAME, FOLDER = sys.argv[1:]
STEP_S, LR = 0.1, 0.05
HISTOGRAMS = 10  # steps between two histograms

if __name__ == "__main__":
    samples, weights, step = Regression(0), Regression.start(), 0
    with SummaryWriter(f"{FOLDER}/runs/{NAME}", flush_secs=1) as writer:
        while True:
            loss, gradient = samples.loss_and_gradient(weights)
            weights -= LR * gradient
            writer.add_scalar("loss", loss, step)
            writer.add_scalar("norm/gradient", float(np.linalg.norm(gradient)), step)
            writer.add_scalar("norm/weights", float(np.linalg.norm(weights)), step)
            if step % HISTOGRAMS == 0:
                writer.add_histogram("weights", weights, step)
                writer.add_histogram("gradient", gradient, step)
            step += 1
            time.sleep(STEP_S)
