"""Publishing, explored: it keeps its invariants at small bounds, and each missing check breaks the one named here."""

from __future__ import annotations

from typing import Any

import pytest
from protocol.publishing_model import Publishing, explored
from protocol.publishing_scripts import MUTANTS, Faults

ONE = {"publishers": 1}
SMALL: list[dict[str, Any]] = [
    {"takeovers": 4, "lost": 1},
    {"takeovers": 2, "lost": 1, "late": 1, "fails": 1},
    {"takeovers": 2, "lost": 1, "kills": 1},
    {"takeovers": 2, "sweeps": 1, "calls": 3},
    {"takeovers": 3, "shards": 3},
    {"losses": 1, "takeovers": 1, "shards": 1},
    {"losses": 1, "lost": 1, "late": 1, **ONE},
    {"losses": 1, "sweeps": 1, "calls": 3, **ONE},
    {"watched": True, "takeovers": 2, "sweeps": 1, "cuts": 1},
    {"watched": True, "takeovers": 2, "calls": 3},
    {"watched": True, "losses": 1, **ONE},
    {"watched": True, "losses": 1, "calls": 3, "shards": 1, **ONE},
]
LARGE: list[dict[str, Any]] = [
    {"takeovers": 4, "lost": 1, "late": 1},
    {"takeovers": 4, "fails": 1, "late": 1},
    {"losses": 1, "takeovers": 2},
    {"losses": 1, "takeovers": 1, "sweeps": 1, "calls": 3, "shards": 1},
    {"watched": True, "losses": 1, "cuts": 1, **ONE},
]

EARLIER_RUN = "{} does something on the word of an earlier run"
IN_ORDER = "a publisher in order is told {}"
READ = "a watcher has something else than what it read"
REPLACED = "a version is made of a term that was replaced"
SWEPT = "a shard's visible bytes were swept or never staged"
TOLD = "a caller was told of a version that its content is not"
TWO_CALLS = "a version has shards of two calls"
CHANGED = "bytes are changed under a name that somebody was told"

BREAKS: dict[str, tuple[str, dict[str, Any]]] = {  # mutants: what they break, and where
    "publish-restart": (EARLIER_RUN.format("publish"), {"losses": 1, **ONE}),
    "publish-term": ("a deposed publisher opens a plan", {"takeovers": 2}),
    "publish-kept": ("a version notes another call than its bytes are of", {"takeovers": 2}),
    "publish-repeat": (IN_ORDER.format("PLAN"), {"late": 1, **ONE}),
    "publish-version publish-head": (IN_ORDER.format("PLAN"), {"late": 1, **ONE}),
    "publish-history recover-terms": (EARLIER_RUN.format("publish"), {"losses": 1, **ONE}),
    "publish-clears acquire-clears": (IN_ORDER.format("DIGEST"), {"takeovers": 2}),
    "ready-restart": (EARLIER_RUN.format("ready"), {"losses": 1, **ONE}),
    "ready-already": (IN_ORDER.format("NOPLAN"), {"lost": 1, **ONE}),
    "ready-term": (REPLACED, {"takeovers": 2}),
    "ready-term ready-plan": (IN_ORDER.format("DIGEST"), {"takeovers": 2}),
    "ready-already ready-plan ready-head": (TWO_CALLS, {"late": 1, **ONE}),
    "restages ready-digest": (TWO_CALLS, {"fails": 1, "late": 1, **ONE}),
    "ready-history recover-terms": (EARLIER_RUN.format("ready"), {"losses": 1, **ONE}),
    "acquire-clears": (REPLACED, {"takeovers": 2}),
    "recover-ready publish-clears acquire-clears": (IN_ORDER.format("DIGEST"), {"losses": 1, **ONE}),
    "free-owner": (SWEPT, {"takeovers": 4, "sweeps": 1}),
    "free-restart": (SWEPT, {"losses": 1, "sweeps": 1, "calls": 3, **ONE}),
    "take-first": (CHANGED, {"fails": 1, "late": 1, **ONE}),
    "load-early": (SWEPT, {"takeovers": 4, "sweeps": 1}),
    "load-kept": (READ, {"watched": True, "losses": 1, "shards": 1, **ONE}),
    "base-published": (READ, {"watched": True, "takeovers": 2}),
    "restages": (CHANGED, {"fails": 1, **ONE}),
    "already-mine": (TOLD, {"takeovers": 2}),
    "ready-ends": (TOLD, {"takeovers": 2}),
    "retry-blind": ("a call is committed twice", {"losses": 1, "lost": 1, **ONE}),
    "watch-term": (READ, {"watched": True, "losses": 1, "calls": 3, "shards": 1, **ONE}),
    "watch-twice": (READ, {"watched": True, "takeovers": 2, "cuts": 1}),
}
REDUNDANT = {  # a mutant that breaks nothing alone: who makes its check too, and with which others it breaks something
    "publish-version": ("a version has one head", "publish-version publish-head"),
    "publish-head": ("a head is of one version, and a restart gives new terms", "publish-version publish-head"),
    "publish-history": ("a restart gives new terms", "publish-history recover-terms"),
    "publish-clears": ("whoever publishes has taken all shards, and acquire clears", "publish-clears acquire-clears"),
    "ready-plan": ("a term and a version have one plan", "ready-term ready-plan"),
    "ready-head": ("a term and a version have one head", "ready-already ready-plan ready-head"),
    "ready-digest": ("a name has one content", "restages ready-digest"),
    "ready-history": ("a restart gives new terms", "ready-history recover-terms"),
    "recover-terms": ("publish and ready compare histories, free the run", "publish-history recover-terms"),
    "recover-ready": ("acquire and publish clear", "recover-ready publish-clears acquire-clears"),
}


def publishing(settings: dict[str, Any], mutants: str = "") -> Publishing:
    faults = {name: value for name, value in settings.items() if name in Faults._fields}
    sizes = {name: value for name, value in settings.items() if name not in faults}
    return Publishing(Faults(**faults), frozenset(mutants.split()), **sizes)


@pytest.mark.parametrize("settings", SMALL, ids=str)
def test_nothing_is_broken_and_every_call_can_end(settings: dict[str, Any]) -> None:
    result = explored(publishing(settings))
    assert result.complete
    assert result.found == {}


@pytest.mark.slow
@pytest.mark.parametrize("settings", LARGE, ids=str)
def test_nothing_is_broken_at_larger_bounds(settings: dict[str, Any]) -> None:
    test_nothing_is_broken_and_every_call_can_end(settings)


@pytest.mark.parametrize("mutants", BREAKS)
def test_a_missing_check_breaks_what_it_is_for(mutants: str) -> None:
    broken, settings = BREAKS[mutants]
    assert broken in explored(publishing(settings, mutants)).found


@pytest.mark.parametrize("mutant", REDUNDANT)
def test_a_check_that_others_make_too_is_not_missed(mutant: str) -> None:
    """Alone it breaks nothing; but what the others do not break without it they break with it."""
    _, together = REDUNDANT[mutant]
    broken, settings = BREAKS[together]
    others = set(together.split()) - {mutant}
    assert explored(publishing(settings, mutant)).found == {}
    assert broken not in explored(publishing(settings, " ".join(others))).found


def test_every_mutant_is_judged() -> None:
    assert {name for mutants in BREAKS for name in mutants.split()} == set(MUTANTS)
    assert not set(BREAKS) & set(REDUNDANT)
