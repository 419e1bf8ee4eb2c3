"""The model of replication: nothing that is acknowledged with durability replicated is lost. Weaker rules lose."""

from __future__ import annotations

from dataclasses import replace

import pytest
from protocol.replication import MUTANTS, Model, explore

KILLED_WITH_ANOTHER = Model(2, planned=False, added=1, writes=1)


@pytest.mark.parametrize(
    "model",
    [
        Model(1),
        Model(2, writes=1),
        Model(2, promotions=1),
        Model(3, writes=1, promotions=1),
        Model(2, planned=False),
        KILLED_WITH_ANOTHER,
    ],
)
def test_nothing_that_was_acknowledged_is_lost(model: Model) -> None:
    states, broken = explore(model)
    assert states > 500
    assert not broken


@pytest.mark.parametrize("name", MUTANTS)
def test_a_weaker_rule_loses(name: str) -> None:
    model = KILLED_WITH_ANOTHER if name == "more may be attached" else Model(3 if name == "all but one" else 2)
    assert explore(replace(model, rule=MUTANTS[name]))[1]


def test_one_confirmation_was_enough_for_one_replica() -> None:
    assert not explore(Model(1, MUTANTS["one"]))[1]


def test_a_replica_that_is_added_while_the_old_master_lives_on_is_not_covered() -> None:
    """The old master then has as many replicas as before, without the one that was promoted: docs/run.md says so."""
    assert explore(Model(2, added=1, writes=1, promotions=1))[1]
