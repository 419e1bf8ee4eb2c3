"""Optimizers and reductions of the user's own that cannot be used are refused before the job is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvps
from kvps.store import Store

RULES = """
import sys
import numpy as np

class Plain:
    slots = ()
    def step(self, weights, gradient, state, out, state_out, lr, version, xp):
        self.compute(weights, gradient, state, out, state_out)
        xp.subtract(weights, gradient, out=out)
    def compute(self, weights, gradient, state, out, state_out):
        pass

class NoStep:
    slots = ()

class BadSlots(Plain):
    slots = ("the_momentum",)

class SlotsRaise(Plain):
    @property
    def slots(self):
        raise KeyError("slots")

class Arguments(Plain):
    def step(self, weights):
        pass

class Raises(Plain):
    def compute(self, weights, gradient, state, out, state_out):
        sys.exit("now")

class Forgets(Plain):
    def step(self, weights, gradient, state, out, state_out, lr, version, xp):
        out = weights - gradient

class ForgetsState(Plain):
    slots = ("m",)

class Writes(Plain):
    def compute(self, weights, gradient, state, out, state_out):
        weights -= gradient

class WritesState(Plain):
    slots = ("m",)
    def compute(self, weights, gradient, state, out, state_out):
        state["m"][:] = 1

class Norm(Plain):
    def compute(self, weights, gradient, state, out, state_out):
        gradient /= np.sqrt((gradient * gradient).sum())

class Counts(Plain):
    calls = 0
    def compute(self, weights, gradient, state, out, state_out):
        type(self).calls += 1
        gradient += self.calls

class LaterNaN(Plain):
    def step(self, weights, gradient, state, out, state_out, lr, version, xp):
        xp.divide(weights, np.float32(version - 3), out=out)

def nothing(contributions, weights, out, xp):
    pass

def whole(contributions, weights, out, xp):
    out[:] = sum(contributions) / np.abs(contributions[0]).max()

def first_two(contributions, weights, out, xp):
    xp.add(contributions[0], contributions[1], out=out)

def random(contributions, weights, out, xp):
    out[:] = np.random.random(len(out))

text = "mean"
"""


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("NoStep", "is no optimizer: it lacks the method step"),
        ("BadSlots", "slots must be a tuple of at most 8 names of letters and digits"),
        ("SlotsRaise", "failed: KeyError: 'slots' (bad_rules.py, line "),
        ("Arguments", "failed: TypeError: Arguments.step() takes 2 positional arguments but 9 were given"),
        ("Raises", "failed: SystemExit: now (bad_rules.py, line "),
        ("Forgets", "a trial on small arrays left NaN or Inf in out: write every item of it, in place"),
        ("ForgetsState", "left NaN or Inf in state_out['m']"),
        ("Writes", "failed: ValueError: output array is read-only (bad_rules.py, line "),
        ("WritesState", "failed: ValueError: assignment destination is read-only (bad_rules.py, line "),
        ("Norm", "gave other bits of out if the arrays are cut: compute each item by itself"),
        ("Counts", "gave other bits of out in a second call"),
        ("LaterNaN", "left NaN or Inf in out"),
    ],
)
def test_an_optimizer_that_cannot_be_used(store: Store, own_rules: Path, optimizer: str, words: str) -> None:
    _refused(store, own_rules, f"optimizer 'bad_rules:{optimizer}'", words, optimizer=f"bad_rules:{optimizer}:lr=0.1")


@pytest.mark.parametrize(
    ("reduction", "words"),
    [
        ("nothing", "left NaN or Inf in out: write every item of it, in place"),
        ("whole", "gave other bits of out if the arrays are cut"),
        ("first_two", "failed: IndexError: list index out of range (bad_rules.py, line "),
        ("random", "gave other bits of out in a second call"),
        ("text", "is no function"),
        ("none", "has no 'none'"),
    ],
)
def test_a_reduction_that_cannot_be_used(store: Store, own_rules: Path, reduction: str, words: str) -> None:
    _refused(store, own_rules, f"reduction 'bad_rules:{reduction}'", words, reduction=f"bad_rules:{reduction}")


def _refused(store: Store, folder: Path, title: str, words: str, **settings: str) -> None:
    (folder / "bad_rules.py").write_text(RULES)
    with pytest.raises(kvps.InvalidSetting) as caught:
        store.create_job("job", {"x": np.zeros(2, np.float32)}, **settings)
    assert str(caught.value).startswith(title)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert store.jobs() == []


def test_what_is_right_is_not_refused(store: Store, own_rules: Path) -> None:
    (own_rules / "bad_rules.py").write_text(RULES)
    store.create_job("job", {"x": np.zeros(2, np.float32)}, optimizer="bad_rules:Plain:lr=0.1")
    settings = {"optimizer": "own_rules:Momentum:lr=0.1", "reduction": "own_rules:median"}
    store.create_job("another", {"x": np.zeros(2, np.float32)}, **settings)
