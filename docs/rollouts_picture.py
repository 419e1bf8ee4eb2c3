"""Draws docs/images/rollouts-staleness.svg: what examples/cartpole.py learns at four bounds of staleness, in real runs
on this machine. Run by `make picture`.

Each line is the mean return of the last 100 episodes over the steps that were trained on: a thin one is that of a
seed, a thick one their mean. The legend says how old items were when they were trained on: actors go as far ahead as
the bound lets them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
IMAGE = Path(__file__).parent / "images" / "rollouts-staleness.svg"
BOUNDS, SEEDS, VERSIONS = (0, 1, 4, 16), (0, 1), 100
COLOURS = ("#22303c", "#2f7ebc", "#d98b2b", "#a32a10")
_LINE = re.compile(r"version (\d+): (\d+) steps, mean return ([\d.]+), staleness ([\d.]+), [\d.]+ s")
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "kvps", "font.family": "sans-serif", "font.size": 9}

Curve = dict[int, tuple[float, float]]
"""Steps -> mean return, staleness."""


def run(bound: int, seed: int) -> Curve:
    """Train with one bound and one seed, until it is solved or for VERSIONS versions."""
    command = [sys.executable, str(ROOT / "examples" / "cartpole.py"), f"--max-staleness={bound}", f"--seed={seed}"]
    done = subprocess.run([*command, f"--versions={VERSIONS}"], stdout=subprocess.PIPE, text=True, check=True)
    print(f"max_staleness {bound}, seed {seed}: {done.stdout.splitlines()[-1]}", flush=True)
    return {int(steps): (float(mean), float(late)) for _, steps, mean, late in _LINE.findall(done.stdout)}


def drawn(curves: dict[int, list[Curve]]) -> Figure:
    """Return the figure of all curves: one that was solved stays where it was."""
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    steps = sorted({step for each in curves.values() for curve in each for step in curve if step % 10_240 == 0})
    for colour, (bound, each) in zip(COLOURS, curves.items(), strict=True):
        means = [np.interp(steps, list(curve), [mean for mean, _ in curve.values()]) for curve in each]
        late = np.mean([late for curve in each for _, late in curve.values()])
        label = f"max_staleness {bound}: {late:.1f} versions old"
        for mean in means:
            axes.plot(steps, mean, color=colour, lw=0.6, alpha=0.5)
        axes.plot(steps, np.mean(means, 0), color=colour, lw=2, label=label)
    axes.axhline(475, color="#b4bfc9", lw=0.8, ls="--")
    axes.annotate("solved: 475", (steps[0], 475), (0, -10), textcoords="offset points", color="#6b7883")
    axes.set(xlabel="steps that were trained on", ylabel="mean return of 100 episodes", ylim=(0, 510), xlim=(0, None))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    return figure


if __name__ == "__main__":
    with rc_context(_STYLE):
        drawn({bound: [run(bound, seed) for seed in SEEDS] for bound in BOUNDS}).savefig(IMAGE, metadata={"Date": None})
