"""The bounds at which the model of the commit protocol is explored, and where each missing check shows."""

from __future__ import annotations

from typing import Any, NamedTuple

from protocol.model import ASP, NO_FAULTS, Model


class Case(NamedTuple):
    """A model with just the faults and sizes that are named. `without` names the checks that its scripts leave out."""

    shards: int
    staleness: int
    settings: dict[str, Any]
    without: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        sizes = {"S": self.shards, "s": self.staleness, **self.settings}
        return ",".join(
            [*(f"{name}={value}" for name, value in sizes.items()), *(f"-{m}" for m in sorted(self.without))]
        )

    @property
    def model(self) -> Model:
        faults = {name: value for name, value in self.settings.items() if name in NO_FAULTS._fields}
        sizes = {name: value for name, value in self.settings.items() if name not in faults}
        return Model(self.shards, self.staleness, NO_FAULTS._replace(**faults), self.without, **sizes)


def case(shards: int, staleness: int, **settings: Any) -> Case:
    return Case(shards, staleness, settings)


ROUNDS = {"units": 3, "units_per_round": 2}

# Every run of the tests explores these.
SMALL = [
    case(1, 0, evictions=1, workers=3),
    case(2, 0, kills=1, lost=1),
    case(2, 0, takeovers=1),
    case(1, 0, units=2, kills=1),
    case(1, 0, units=2, workers=3),
    case(1, ASP, units=2, kills=1),
    case(1, 0, workers=1, losses=1),
    case(1, 0, workers=1, losses=1, kills=1, rounds=1),
    case(1, 0, workers=1, losses=1, bad=1, rounds=1),
    case(1, 0, workers=1, losses=1, rounds=1, joined=False),
    case(1, 0, workers=1, removals=2, rounds=1),
    case(1, 0, removals=1, rounds=1),
    case(1, 0, workers=1, removals=2, rounds=1, units=1),
    case(1, 0, forks=1, kills=1, lost=1),
    case(1, 0, quorum=1, evictions=1),
    case(1, 0, quorum=2, drops=True, workers=3, kills=1, rounds=1),
    case(2, 0, quorum=1, drops=True, bad=1, rounds=1),
    case(1, 0, **ROUNDS, kills=1, backups=1),
    case(1, 0, **ROUNDS, bad=1, backups=1),
    case(2, 0, **ROUNDS, bad=1),
    case(1, 0, stops=1, kills=1, lost=1),
    case(1, 0, stops=1, bad=1, joined=False),
    case(1, 1, stops=1),
    case(1, ASP, stops=1),
    case(1, 0, stops=1, quorum=1, rounds=1, evictions=1),
    case(1, 0, stops=1, units=2),
    case(1, 0, stops=1, **ROUNDS),
    case(1, 0, stops=1, pauses=1),
    case(1, 0, stops=1, workers=1, losses=1, rounds=1),
]
# These were explored with the model as it is: see `explored.json`.
LARGE = [
    case(1, 0, kills=1, evictions=1, joined=False),
    case(1, 0, kills=1, evictions=1, lost=1),
    case(1, 0, kills=1, takeovers=1, lost=1),
    case(1, 1, evictions=1),
    case(1, ASP, evictions=1, lost=1, max_pending=1),
    case(2, ASP, lost=1),
    case(1, 0, kills=1, evictions=1, bad=1),
    case(1, 1, kills=1, bad=1),
    case(1, 1, bad=1, rounds=3),
    case(2, 0, late=1, bad=1),
    case(2, 0, lost=1, bad=1),
    case(2, 0, takeovers=1, bad=1),
    case(1, 0, units=2, evictions=1),
    case(1, 0, units=2, lost=1, bad=1),
    case(1, 1, units=2, evictions=1),
    case(2, 0, units=1, kills=1, bad=1),
    case(1, ASP, workers=1, losses=1),
    case(1, 0, workers=1, losses=1, units=2),
    case(1, 0, workers=1, failovers=1),
    case(1, 0, quorum=1, kills=1, evictions=1, lost=1),
    case(1, 0, quorum=1, drops=True, evictions=1),
    case(1, 0, quorum=1, drops=True, evictions=1, lost=1),
    case(1, 0, quorum=1, drops=True, units=2, kills=1, lost=1),
    case(1, ASP, quorum=2, evictions=1, lost=1),
    case(2, 0, quorum=1, takeovers=1),
    case(1, 0, quorum=2, workers=3, kills=1, evictions=1, rounds=1),
    case(1, 0, **ROUNDS, kills=1, lost=1, backups=1),
    case(1, 0, **ROUNDS, evictions=1, backups=1),
    case(1, 0, **ROUNDS, bad=1, kills=1),
    case(2, 0, units=2, units_per_round=1, takeovers=1),
    case(1, 0, units=2, units_per_round=2, workers=3, backups=2, evictions=1),
    case(1, 1, units=3, units_per_round=1, kills=1, backups=1),
    case(1, 1, units=4, units_per_round=2, evictions=1, backups=1),
    case(1, 0, units=2, units_per_round=2, workers=1, losses=1),
    case(1, 0, units=1, units_per_round=1, losses=1, backups=1),
]
# `make exhaustive` explores these too: hours, and gigabytes each. A test asks that those with a stamp have a fresh one.
DEEPEST = [
    case(1, 0, workers=1, failovers=2),
    case(1, 0, failovers=1),
    case(1, 1, failovers=1, rounds=1),
    case(1, 0, workers=1, failovers=1, takeovers=1, rounds=1),
    case(2, 0, workers=1, failovers=1, rounds=1),
    case(2, 0, workers=1, failovers=1),
    case(1, 0, workers=1, failovers=1, bad=1, kills=1),
    case(1, 0, workers=1, failovers=1, units=1),
    case(1, 0, kills=1, evictions=1, takeovers=1, lost=1, bad=1),
    case(1, 1, kills=1, evictions=1, lost=1),
    case(1, 1, evictions=1, rounds=3),
    case(1, ASP, takeovers=1, bad=1),
    case(2, 0, evictions=1, takeovers=1),
    case(2, 1, takeovers=1),
    case(2, 1, bad=1),
    case(1, 0, units=2, kills=1, evictions=1),
    case(1, ASP, units=3, kills=1),
    case(1, 0, workers=1, losses=1, kills=1),
    case(1, 0, workers=1, losses=1, units=1, kills=1),
    case(1, 0, units=2, kills=1, lost=1, bad=1),
    case(2, ASP, units=2, kills=1),
    case(1, 0, losses=1, rounds=1),
    case(1, ASP, losses=1, rounds=1),
    case(1, 0, losses=1, units=1),
    case(1, 0, workers=1, losses=2, rounds=1),
    case(1, 0, workers=1, losses=1, takeovers=1),
    case(1, 0, workers=1, losses=1, takeovers=1, rounds=1, late=1),
    case(1, 0, workers=1, losses=1, lost=1, evictions=1, rounds=1, joined=False),
    case(1, 1, workers=1, losses=1, bad=1),
    case(2, 0, workers=1, losses=1, rounds=1),
    case(1, 0, workers=1, removals=3, rounds=1, kills=1),
    case(1, ASP, removals=2, rounds=1, late=1),
    case(2, 0, removals=1, rounds=1, takeovers=1),
    case(1, 0, quorum=1, losses=1, rounds=1),
    case(1, 0, quorum=1, drops=True, losses=1, rounds=1),
    case(1, 0, quorum=1, drops=True, kills=1, bad=1, takeovers=1),
]

BACKUPS = ROUNDS | {"backups": 1}
LOSSES = {"workers": 1, "losses": 1, "rounds": 1}
REMOVALS = {"workers": 1, "removals": 2, "rounds": 1}
FAILOVERS = {"workers": 1, "failovers": 1}
DROPS = {"quorum": 1, "drops": True}
SEEN = {  # the mutant, and where it shows
    "free-synced": ((1, 0), FAILOVERS),
    "stage-synced": ((1, 0), FAILOVERS),
    "push-synced": ((1, 0), FAILOVERS),
    "own-synced": ((1, 0), FAILOVERS | {"takeovers": 1, "rounds": 1}),
    "push-repeat": ((1, 0), {"lost": 1}),
    "push-sequence": ((1, 0), {"lost": 1}),
    "push-incarnation": ((1, 0), {"evictions": 1}),
    "push-state": ((1, 0), {"evictions": 1}),
    "push-full": ((1, ASP), {"max_pending": 1}),
    "join-own": ((1, 1), {"evictions": 1, "rounds": 3}),
    "join-others": ((1, 0), {"evictions": 1}),
    "join-plan": ((1, 0), {"evictions": 1}),
    "join-pending": ((1, 0), {"evictions": 1}),
    "push-late": ((1, 0), DROPS),
    "push-late-plan": ((1, 0), DROPS),
    "push-late-repeat": ((1, 0), DROPS | {"lost": 1}),
    "push-late-first": ((1, 0), DROPS | {"lost": 1}),
    "push-weight-sum": ((1, 0), {}),
    "push-weight-sum-once": ((1, 0), {"lost": 1}),
    "push-weight-sum-late": ((1, 0), DROPS),
    "join-weight-sum": ((1, 0), {"evictions": 1}),
    "plan-quorum": ((1, 0), {"quorum": 2}),
    "plan-present": ((1, 0), {"quorum": 2, "kills": 1}),
    "session-own": ((1, 0), {"quorum": 1, "max_pending": 2}),
    "session-dropped": ((1, 0), DROPS),
    "session-round": ((1, 0), DROPS),
    "push-round": ((1, 0), DROPS),
    "join-waits": ((1, 1), {"evictions": 2, "rounds": 4}),
    "leave-incarnation": ((1, 0), {"evictions": 1}),
    "leave-drains": ((1, 0), {}),
    "evict-drains": ((1, 0), {"evictions": 1}),
    "evict-keeps": ((1, 0), {"evictions": 1}),
    "plan-open": ((1, 0), {"bad": 1}),
    "plan-early": ((1, 0), {"joined": False}),
    "plan-waits": ((1, 0), {}),
    "ready-term": ((1, 0), {"takeovers": 1}),
    "ready-plan": ((2, 0), {"bad": 1}),
    "ready-all": ((2, 0), {}),
    "ready-gone": ((1, 0), {}),
    "reject-clears": ((2, 0), {"bad": 1}),
    "reject-skip": ((1, 0), {"bad": 1}),
    "reject-waits": ((1, 0), {"evictions": 1, "bad": 1}),
    "reject-plan reject-member": ((1, 0), {"lost": 1, "bad": 1}),
    "acquire-clears": ((2, 0), {"takeovers": 1}),
    "acquire-clears ready-digest": ((2, 0), {"takeovers": 1}),
    "holder-restages": ((2, 0), {"late": 1, "bad": 1}),
    "session-bound": ((1, 0), {}),
    "session-fork": ((1, 0), {"forks": 1}),
    "push-pushed": ((1, 0), {"units": 2}),
    "next-unit-state": ((1, 0), {"units": 2, "evictions": 1}),
    "next-unit-same": ((1, 0), {"units": 2, "lost": 1}),
    "join-unit": ((1, 0), {"units": 2, "kills": 1}),
    "leave-unit": ((1, 0), {"units": 1, "kills": 1}),
    "evict-unit": ((1, 0), {"units": 1, "kills": 1}),
    "ready-done": ((1, 0), {"units": 1}),
    "ready-frees": ((1, 0), {"units": 1, "bad": 1}),
    "next-unit-ahead": ((1, 0), ROUNDS),
    "plan-units": ((1, 0), ROUNDS),
    "plan-order": ((1, 0), ROUNDS),
    "plan-round": ((1, 1), ROUNDS),
    "session-cached": ((1, 0), ROUNDS),
    "push-unit-base session-cached": ((1, 0), ROUNDS),
    "push-unit-twice": ((1, 0), BACKUPS),
    "push-unit-repeat": ((1, 0), BACKUPS | {"lost": 1}),
    "unit-shared": ((1, 0), BACKUPS | {"evictions": 1}),
    "unit-pushed": ((1, 0), BACKUPS | {"evictions": 1}),
    "ready-over": ((1, 0), ROUNDS | {"bad": 1}),
    "reject-again": ((1, 0), ROUNDS | {"bad": 1}),
    "reject-closes": ((1, 0), ROUNDS | {"bad": 1}),
    "stop-round": ((1, 0), {"stops": 1}),
    "stop-restart": ((1, 0), {"workers": 1, "losses": 1, "rounds": 1, "stops": 1}),
    "stop-id": ((1, 0), {"workers": 1, "removals": 2, "rounds": 1, "stops": 1}),
    "push-stop": ((1, 0), {"stops": 1}),
    "push-stop-repeat": ((1, 0), {"stops": 1, "lost": 1}),
    "next-unit-stop": ((1, 0), {"stops": 1} | ROUNDS),
    "plan-pause": ((1, 0), {"pauses": 1}),
    "free-owner": ((1, 0), {"takeovers": 1}),
    "push-restart": ((1, 0), LOSSES),
    "ready-restart": ((1, 0), LOSSES),
    "leave-restart": ((1, 0), LOSSES),
    "free-restart": ((1, 0), LOSSES),
    "join-restart": ((1, 0), LOSSES | {"joined": False}),
    "next-unit-restart": ((1, 0), LOSSES | {"units": 1}),
    "evict-restart": ((1, 0), LOSSES | {"evictions": 1}),
    "plan-restart": ((1, 0), LOSSES),
    "reject-restart": ((1, 0), LOSSES | {"bad": 1}),
    "acquire-restart": ((1, 0), LOSSES | {"takeovers": 1}),
    "recover-whole": ((1, 0), LOSSES),
    "leave-lost": ((1, 0), LOSSES | {"joined": False}),
    "recover-unit": ((1, 0), LOSSES | {"units": 1}),
    "recover-keeps": ((1, 0), LOSSES | {"bad": 1}),
    "recover-plan": ((1, 0), LOSSES),
    "recover-terms": ((1, 0), LOSSES),
    "recover-workers": ((1, 0), LOSSES),
    "join-id": ((1, 0), REMOVALS),
    "evict-id": ((1, 0), REMOVALS),
    "plan-id": ((1, 0), REMOVALS),
    "acquire-id": ((1, 0), REMOVALS),
    "remove-id": ((1, 0), REMOVALS),
    "remove-bytes": ((1, 0), REMOVALS),
}
REDUNDANT = {  # the mutant, why nothing shows, and where that is looked at
    "plan-due": ("BSP has no other round in the inbox when a plan opens", (1, 0), {"evictions": 1, "bad": 1}),
    "ready-already": ("the plan is gone or another then", (2, 0), {"lost": 1}),
    "ready-digest": ("no term stages a plan twice", (2, 0), {"lost": 1}),
    "reject-term": (
        "if a former holder rejects a contribution of the open plan, the rejection still counts",
        (1, 0),
        {"takeovers": 1, "bad": 1},
    ),
    "reject-plan": ("a contribution that is in the open plan too is bad there too", (2, 0), {"lost": 1, "bad": 1}),
    "reject-member": ("the plan's id has changed with its members", (2, 0), {"lost": 1, "bad": 1}),
    "push-unit": ("a worker's unit changes only with its incarnation or state", (1, 0), {"units": 2, "evictions": 1}),
    "next-unit-incarnation": (
        "a replaced incarnation takes its successor's unit, and cannot push it",
        (1, 0),
        {"units": 2, "kills": 1},
    ),
    "push-unit-base": ("a session pulls if its weights are not of the unit's round", (1, 0), BACKUPS | {"lost": 1}),
    "push-history": ("the incarnations have ended with the history", (1, 0), LOSSES),
    "push-base": ("its history is another then, too", (1, ASP), LOSSES),
    "ready-history": ("the terms have ended with the history", (1, 0), LOSSES),
    "ready-head": ("the plan is another then, too", (1, 0), LOSSES),
    "session-forgotten": ("its sequence number does not follow, or it is rejoining", (1, ASP), LOSSES),
    "holder-names": ("a new holder reads what is committed", (1, 0), {"takeovers": 1, "lost": 1}),
    "push-id": ("incarnations carry a nonce", (1, 0), REMOVALS),
    "leave-id": ("incarnations carry a nonce", (1, 0), REMOVALS),
    "next-unit-id": ("incarnations carry a nonce", (1, 0), REMOVALS | {"units": 1}),
    "ready-id": ("terms carry a nonce", (1, 0), REMOVALS),
    "reject-id": ("terms carry a nonce", (1, 0), REMOVALS),
    "recover-id": ("any caller may end an earlier run of the server, and that is all it does", (1, 0), REMOVALS),
    "forget-id": (
        "a name that is free too early does no harm: the names of the bytes hold the job's id",
        (1, 0),
        REMOVALS,
    ),
    "holder-stale": ("a holder with old weights has an old term", (1, 0), {"takeovers": 1, "lost": 1}),
}
