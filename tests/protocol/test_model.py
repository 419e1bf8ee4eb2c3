"""The commit protocol, explored: it keeps its invariants at small bounds, and each check that matters is missed."""

from __future__ import annotations

from dataclasses import fields

import pytest
from protocol.bounds import DEEPEST, REDUNDANT, SEEN, SMALL, Case
from protocol.explored import CASES, stale, stamps
from protocol.model import MUTANTS, NO_FAULTS, Model, State, explore

# What shows only behind many steps is explored from where these lead.
AHEAD = {
    "join-waits": """\
w0 is evicted though it lives|w1.1 pulls version 0 for round 1|w1.1 pushes round 1
w1.1 pulls version 0 for round 2|w1.1 pushes round 2
plan 1 [w1:1, w1:2] of version 1 is opened
a0/s0 stages plan 1 [w1:1, w1:2]|a0/s0 says ready for plan 1 [w1:1, w1:2]: FLIPPED"""
}


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_nothing_is_broken_and_the_job_can_always_end(case: Case) -> None:
    result = explore(case.model)
    assert result.complete
    assert result.found == {}


def test_what_takes_long_to_explore_was_explored_with_this_model() -> None:
    """The larger bounds, and each check that others make too: without it nothing is broken."""
    known = stamps()
    due = [*CASES, *(case for case in DEEPEST if case.name in known)]
    assert [case.name for case in stale(due)] == [], "the model has changed since: make exhaustive"
    assert set(known) == {case.name for case in due}, "a stamp of a case that is not there: make exhaustive"


@pytest.mark.parametrize("mutants", SEEN)
def test_a_missing_check_is_seen(mutants: str) -> None:
    (shards, staleness), settings = SEEN[mutants]
    model = Case(shards, staleness, settings, frozenset(mutants.split())).model
    if schedule := AHEAD.get(mutants):
        model = begins_behind(schedule, model)
    assert explore(model, first=True).found


def test_every_mutant_is_judged() -> None:
    judged = {name for mutants in SEEN for name in mutants.split()} | set(REDUNDANT)
    assert judged | {"holder-retakes"} == set(MUTANTS)


OVERSLEPT = """\
w0.1 pulls version 0|w0.1 pushes|w1.1 pulls version 0|w1.1 pushes
plan 1 [w0:1, w1:1] of version 1 is opened
a0/s0 stages plan 1|a0/s0 says ready for plan 1 [w0:1, w1:1]: READY
a1/s1 finds w0:1 of plan 1|a1/s1 rejects w0:1
a0/s0 sees plan 2 [w1:1], needs a new term
a1/s0 takes term 2|a1/s0 stages plan 2|a1/s0 says ready for plan 2 [w1:1]: READY
a1/s1 stages plan 2|a1/s1 says ready for plan 2 [w1:1]: FLIPPED"""
"""a0 stages, then sleeps before it takes a new term for the plan without w0's; meanwhile a1 commits that one."""


@pytest.mark.slow
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_a_holder_that_overslept_does_not_commit_what_was_rejected(checked: bool) -> None:
    """Too deep to be found from the start: led there by hand, and explored from where a1's lease ends as well."""
    without = frozenset() if checked else frozenset({"holder-retakes", "holder-names"})
    model = Model(2, 0, NO_FAULTS._replace(takeovers=2, bad=2), without)
    found = explore(begins_behind(OVERSLEPT, model), first=not checked).found
    assert found == {} if checked else "a shard's visible bytes are not what was decided" in found


def begins_behind(schedule: str, model: Model) -> Model:
    """Return a model that begins behind the steps whose labels begin with those of a schedule."""
    state = model.start()
    for label in schedule.replace("\n", "|").split("|"):
        state = next(step.state for step in model.steps(state) if step.label.startswith(label))

    class Behind(Model):
        def start(self) -> State:
            return state

    return Behind(**{field.name: getattr(model, field.name) for field in fields(model) if field.init})
