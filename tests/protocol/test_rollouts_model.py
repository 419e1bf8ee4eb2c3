"""Experience, explored: it keeps its invariants at small bounds, and each missing check breaks the one named here."""

from __future__ import annotations

from typing import Any

import pytest
from protocol.rollouts_model import Rollouts, explored
from protocol.rollouts_scripts import MUTANTS
from protocol.rollouts_state import Faults

pytestmark = pytest.mark.slow  # no script follows it yet

ONE = {"actors": 1}
LEAST = {"actors": 1, "prompts": 1}
FREE = {"actors": 1, "prompts": 0}
TWO = {"learners": 2, "takeovers": 1}
GROUP = {"group": 2, "prompts": 1}
BATCH = {"least": 2, "takes": 2}
SMALL: list[dict[str, Any]] = [
    {"lost": 1},
    {"late": 1, **ONE},
    {"kills": 1, "prompts": 1},
    {"kills": 1, **GROUP},
    {"evictions": 1, "late": 1, **LEAST},
    {"evictions": 1, "sweeps": 1, **LEAST},
    {"fails": 1, "late": 1, **LEAST},
    {"crashes": 1, "lost": 1, **LEAST},
    {"restarts": 1, "lost": 1, **LEAST},
    {"losses": 1, **LEAST},
    {"late": 1, **TWO, **LEAST},
    {"rejects": 1, "fails": 1, "late": 1, **LEAST},
    {"backs": 2, "fails": 1, "late": 1, **LEAST},
    {"empties": 2, "lags": 1, "staleness": 1, **LEAST},
    {"empties": 1, "halves": 1, **GROUP},
    {"empties": 1, "halves": 1, "again": False, **GROUP},
    {"capacity": 2, "takes": 2},
    {"capacity": 4, "takes": 2, "insists": True, "group": 2, **ONE},
    {"lapses": 1, "lost": 1, **LEAST},
    {"lapses": 1, "backs": 1, "late": 1, **LEAST},
    {"lapses": 1, "hasty": 1, "rejects": 1, **LEAST},
    {"losses": 1, **GROUP, **ONE},
    {"empties": 2, "lost": 1, **LEAST},
    {"lapses": 1, **BATCH, "capacity": 2, **GROUP},
    {"lost": 1, "late": 1, **FREE},
    {"evictions": 1, "empties": 1, **FREE},
]
LARGE: list[dict[str, Any]] = [
    {"kills": 1},
    {"late": 1},
    {"losses": 1, "late": 1, **LEAST},
    {"losses": 1, "empties": 2, "lags": 1, "staleness": 1, **LEAST},
    {"quits": 1, "group": 2},
    {"evictions": 1, "late": 1, **GROUP, **ONE},
    {"restarts": 1, **GROUP},
    {"kills": 1, "group": 2, "capacity": 2},
    {"group": 2, "prompts": 2, "actors": 3, "capacity": 2},
    {"group": 2, "prompts": 3, "capacity": 2},
    {"empties": 1, "again": False, "group": 2},
    {**TWO, "lost": 1},
    {"restarts": 1, **TWO, **LEAST},
    {"lapses": 2, **TWO, **LEAST},
    {"lapses": 1, "late": 1, **TWO, **LEAST},
    {"lapses": 1, "backs": 1, "fails": 1, "late": 1, **LEAST},
    {"losses": 1, "empties": 2, **LEAST},
    {"empties": 2, "late": 1, **LEAST},
    {"empties": 1, **BATCH},
    {"prompts": 3, **BATCH},
]

ACTOR, LEARNER = "an actor in order is told {}", "a learner in order is told {}"
BOUND = "there are more items than the bound"
BYTES = "an item has no bytes, or another's"
DEPOSED = "a deposed learner's {} does something"
ENDED = "an incarnation that has ended does something"
HOLDS = "an incarnation that has ended holds a prompt"
LATE = "an actor is told that an accepted item came too late"
NO_END = "the job cannot end"
NO_FATE = "an item that was acknowledged has no fate"
NOT_ALL = "a version does not name all that it was trained on"
NO_NAME = "an item names a version of which nobody knows the name"
OFFERS = "room is reserved for an incarnation that has ended"
OUT = "a prompt is out though its lot is whole"
PART = "a part of a lot has a fate of its own"
PROMPT = "a prompt is closed without a fate, or has its fate and is open"
ROOM = "room is reserved for what is not to come"
STALE = "a lot is taken that is too stale"
TWICE = "an item is there twice, or after its fate"
TWO_HOLDERS = "a prompt has two holders, or an actor two prompts"
AFTER_REJECT = {"rejects": 1, "fails": 1, "late": 1, **LEAST}
AFTER_LAPSE = {"lapses": 1, "hasty": 1, "rejects": 1, **LEAST}
AFTER_BACK = {"backs": 2, "fails": 1, "late": 1, **LEAST}
DROPPED = {"empties": 1, "again": False, **GROUP, **ONE}

BREAKS: dict[str, tuple[str, dict[str, Any]]] = {  # mutants: what they break, and where
    "restart": ("something is done before anybody has seen the restart", {"restarts": 1, **LEAST}),
    "end-offers": (OFFERS, {"evictions": 1, **LEAST}),
    "end-prompts": (HOLDS, {"evictions": 1, **LEAST}),
    "enter-ends": (HOLDS, {"kills": 1, **LEAST}),
    "enter-repeat": ("an incarnation is entered twice", {"late": 1, **LEAST}),
    "enter-number": ("bytes are changed under a name", {"losses": 1, **LEAST}),
    "offer-inc": (ENDED, {"evictions": 1, **FREE}),
    "offer-past": (ROOM, {"late": 1, **FREE}),
    "offer-given-up": (ACTOR.format("OFFER"), {"fails": 1, "late": 1, **LEAST}),
    "offer-repeat": (ACTOR.format("PAST"), {"lost": 1, **LEAST}),
    "offer-earlier": (NO_END, {"fails": 1, **LEAST}),
    "offer-full": (BOUND, {}),
    "offer-taken": (BOUND, {}),
    "offer-offers": (BOUND, {}),
    "offer-lowest": (NO_END, {**GROUP, **ONE}),
    "offer-held": (NO_END, {"quits": 1, "group": 2}),
    "offer-any": (BOUND, {"group": 2, "prompts": 3, "actors": 3}),
    "offer-whole": (BOUND, {}),
    "offer-nearly": (BOUND, {}),
    "put-inc put-offer": (ENDED, {"evictions": 1, **FREE}),
    "put-offer": (BOUND, {"fails": 1, "late": 1, **LEAST}),
    "put-repeat": (LATE, {"lost": 1, **LEAST}),
    "put-repeat put-offer": (TWICE, {"lost": 1, **FREE}),
    "put-fate": (ACTOR.format("OFFER"), {"lost": 1, **FREE}),
    "put-fate put-offer": (TWICE, {"lost": 1, **FREE}),
    "put-base": (
        "an item names a version that it was not made on",
        {"losses": 1, "empties": 2, "lags": 1, **FREE},
    ),
    "put-old": (ACTOR.format("BASE"), {"empties": 2, **LEAST}),
    "put-old put-unknown": (NO_NAME, {"empties": 2, **LEAST}),
    "put-few": ("an item is refused that is not too stale", {"empties": 1, "staleness": 1, **LEAST}),
    "put-old-first": (LATE, {"empties": 2, "lost": 1, **LEAST}),
    "put-old-offer": (ROOM, {"empties": 2, **LEAST}),
    "put-old-repeat": (ACTOR.format("OFFER"), {"empties": 2, "lost": 1, **LEAST}),
    "put-prompt": ("a prompt ends twice", DROPPED),
    "put-closed": (ROOM, DROPPED),
    "put-whole": (OUT, LEAST),
    "prompt-inc": (ENDED, {"evictions": 1, **LEAST}),
    "prompt-repeat": (TWO_HOLDERS, {"lost": 1, **ONE}),
    "prompt-held": (TWO_HOLDERS, {"prompts": 1}),
    "prompt-whole": (OUT, LEAST),
    "prompt-free": (NO_END, {"empties": 1, **LEAST}),
    "prompt-closed": ("a prompt that is closed is out", LEAST),
    "claim-term": (DEPOSED.format("claim"), {"late": 1, **TWO, **LEAST}),
    "claim-back": (NO_END, {"crashes": 1, **LEAST}),
    "claim-own": (LEARNER.format("TAKEN"), {"evictions": 1, **LEAST}),
    "claim-keeps": (LEARNER.format("TAKEN"), {"lapses": 1, **LEAST}),
    "claim-there": (LEARNER.format("TAKEN"), {"lapses": 1, "lost": 1, **LEAST}),
    "claim-whole": ("a lot is taken that is not whole", {"losses": 1, **GROUP, **ONE}),
    "claim-past": (NO_END, {"lapses": 1, "backs": 1, "late": 1, **LEAST}),
    "claim-accepted": (NO_FATE, {"evictions": 1, **ONE}),
    "claim-evicts": (NO_END, {"kills": 1, "prompts": 1}),
    "take-term": (DEPOSED.format("take"), {**TWO, **LEAST}),
    "take-claimed": (NO_END, {"crashes": 1, "hasty": 1, **LEAST}),
    "take-full": (NO_END, {**BATCH, **ONE}),
    "take-last": (NO_END, {**BATCH, "capacity": 3, **LEAST}),
    "take-stale": (STALE, {"empties": 1, **LEAST}),
    "take-fresh": ("an item is dropped that is not too stale", LEAST),
    "take-part": ("a lot is taken that is not whole", {**GROUP, **ONE}),
    "take-taken": ("a learner is given what it has taken already", {"insists": True, "takes": 2, "capacity": 2, **ONE}),
    "take-repeat": (NO_END, {"lost": 1, **LEAST}),
    "take-past": (NO_END, {"backs": 1, "late": 1, **LEAST}),
    "drop-again": (PROMPT, {"empties": 1, **LEAST}),
    "drop-closes": (PROMPT, DROPPED),
    "drop-holder": ("a prompt that is closed is out", DROPPED),
    "drop-log": (NO_FATE, {"empties": 1, **LEAST}),
    "settle-term": (DEPOSED.format("settle"), {"backs": 1, **TWO, **LEAST}),
    "settle-claimed": ("what is settled is not taken", AFTER_LAPSE),
    "settle-taken": ("what is settled is not taken", AFTER_BACK),
    "settle-whole": (PART, {"halves": 1, **GROUP, **ONE}),
    "settle-repeat": (LEARNER.format("TAKEN"), {"backs": 1, "lost": 1, **LEAST}),
    "settle-past": (LEARNER.format("TAKEN"), {"backs": 1, "late": 1, **LEAST}),
    "settle-planned ready-taken": (NOT_ALL, AFTER_REJECT),
    "settle-closes": (PROMPT, {"rejects": 1, **LEAST}),
    "publish-term": (DEPOSED.format("publish"), {**TWO, **LEAST}),
    "publish-taken ready-taken": (NOT_ALL, AFTER_REJECT),
    "publish-anew": (LEARNER.format("TAKEN"), {"lapses": 1, **LEAST}),
    "publish-claimed ready-claimed ready-taken": (
        "a version is trained on what an earlier term has taken",
        AFTER_LAPSE,
    ),
    "publish-whole": (PART, {"halves": 1, **GROUP, **ONE}),
    "publish-stale": ("a version is trained on what is too stale", {"empties": 1, **LEAST}),
    "publish-first": ("a call that is refused writes something", {"empties": 1, **LEAST}),
    "ready-term": (DEPOSED.format("ready"), {**TWO, **LEAST}),
    "ready-fates": (TWICE, LEAST),
    "ready-closes": (PROMPT, LEAST),
    "recover-incs": (BYTES, {"losses": 1, **LEAST}),
    "recover-terms": (LEARNER.format("TAKEN"), {"losses": 1, **LEAST}),
    "free-fate": (BYTES, {"sweeps": 1, **LEAST}),
    "free-offers": (BYTES, {"sweeps": 1, **LEAST}),
}
DEAR = ("put-base", "offer-held")  # of these mutants, seconds each
REDUNDANT = {  # a mutant that breaks nothing alone: who makes its check too, and with which others it breaks something
    "put-unknown": ("a base is refused before that is older than all names that are kept", "put-old put-unknown"),
    "publish-claimed": ("ready looks who has claimed", "publish-claimed ready-claimed ready-taken"),
    "ready-claimed": ("publish looks who has claimed", "publish-claimed ready-claimed ready-taken"),
    "put-inc": ("an incarnation that ends gives its offers back", "put-inc put-offer"),
    "settle-planned": ("ready looks again whether the plan's items are taken", "settle-planned ready-taken"),
    "publish-taken": ("ready looks whether the plan's items are taken", "publish-taken ready-taken"),
    "ready-taken": ("publish and settle look", "settle-planned ready-taken"),
}
SAVES: dict[str, dict[str, Any]] = {  # they break nothing
    "drop-part": {"empties": 1, **GROUP},  # the lot is dropped as soon as it is whole
    "claim-repeat": {"lapses": 1, "backs": 1, "late": 1, **LEAST},  # what it names is there until a later number
}


def rollouts(settings: dict[str, Any], mutants: str = "") -> Rollouts:
    faults = {name: value for name, value in settings.items() if name in Faults._fields}
    sizes = {name: value for name, value in settings.items() if name not in faults}
    return Rollouts(Faults(**faults), frozenset(mutants.split()), **sizes)


@pytest.mark.parametrize("settings", SMALL, ids=str)
def test_nothing_is_broken_and_every_run_can_end(settings: dict[str, Any]) -> None:
    result = explored(rollouts(settings))
    assert result.complete
    assert result.found == {}


@pytest.mark.slow
@pytest.mark.parametrize("settings", LARGE, ids=str)
def test_nothing_is_broken_at_larger_bounds(settings: dict[str, Any]) -> None:
    test_nothing_is_broken_and_every_run_can_end(settings)


@pytest.mark.parametrize("mutants", [pytest.param(m, marks=pytest.mark.slow) if m in DEAR else m for m in BREAKS])
def test_a_missing_check_breaks_what_it_is_for(mutants: str) -> None:
    broken, settings = BREAKS[mutants]
    assert broken in explored(rollouts(settings, mutants), limit=40_000, first=True).found  # some mutants never end


@pytest.mark.parametrize("mutant", REDUNDANT)
def test_a_check_that_others_make_too_is_not_missed(mutant: str) -> None:
    """Alone it breaks nothing; but what the others do not break without it they break with it."""
    _, together = REDUNDANT[mutant]
    broken, settings = BREAKS[together]
    others = set(together.split()) - {mutant}
    assert explored(rollouts(settings, mutant)).found == {}
    assert broken not in explored(rollouts(settings, " ".join(others))).found


@pytest.mark.parametrize("mutant", SAVES)
def test_a_check_that_only_saves_work_breaks_nothing(mutant: str) -> None:
    assert explored(rollouts(SAVES[mutant], mutant)).found == {}


@pytest.mark.parametrize(("group", "least"), [(1, 2), (2, 4)])
def test_a_learner_that_insists_on_lots_needs_room_for_them(group: int, least: int) -> None:
    """A batch of K lots needs room for K - 1 lots, and for one item more than A actors can have without a whole lot."""
    batch = {"insists": True, "takes": 2, "group": group, **ONE}
    assert least == (2 - 1) * group + 1 * (group - 1) + 1
    assert NO_END in explored(rollouts({**batch, "capacity": least - 1})).found
    assert explored(rollouts({**batch, "capacity": least})).found == {}


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "sizes", [ONE, {"group": 2, **ONE}, {"prompts": 3, "group": 2, **ONE}, {"quits": 1, **ONE}], ids=str
)
def test_a_take_that_waits_for_lots_ends_whatever_the_capacity(capacity: int, sizes: dict[str, Any]) -> None:
    assert explored(rollouts({**BATCH, "capacity": capacity, **sizes})).found == {}


@pytest.mark.parametrize(("capacity", "ends"), [(1, True), (2, False)])
def test_without_prompts_a_take_waits_for_lots_as_long_as_they_have_room(capacity: int, ends: bool) -> None:
    """Nobody knows that no actor is to come, so a learner that shall end then waits for one lot."""
    found = explored(rollouts({**BATCH, "capacity": capacity, **FREE})).found
    assert list(found) == ([] if ends else [NO_END])


@pytest.mark.parametrize(
    "settings", [{"crashes": 1, "lapses": 1, **LEAST}, {"losses": 1, "rejects": 1, **LEAST}], ids=str
)
def test_learners_that_claim_first_need_nobody_to_look_who_has_claimed(settings: dict[str, Any]) -> None:
    mutants = "take-claimed settle-claimed publish-claimed ready-claimed"
    assert explored(rollouts(settings, mutants)).found == {}


def test_every_mutant_is_judged() -> None:
    assert {name for mutants in BREAKS for name in mutants.split()} | set(SAVES) == set(MUTANTS)
    assert not set(BREAKS) & (set(REDUNDANT) | set(SAVES))
