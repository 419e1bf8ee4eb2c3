"""Planted faults, which the judge must catch, or the other runs prove nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from typing import Any

from chaos.arena import Arena
from helpers.digits_job import run_workers
from helpers.internals import replaced
from helpers.servers import running_server
from kvps_aggregator.step import reduce
from kvps_workers.contributions import Contributions

from kvps.connection.client import Client
from kvps.protocol import scripts
from kvps.protocol.lua_scripts import compose, read_sources
from kvps.session.session import Session
from kvps.session.units import Units
from kvps.store import Store
from same_bits.ways import Run
from same_bits.workers import DIGITS, members

_LUA = resources.files("kvps.protocol") / "lua"


@contextmanager
def _without(script: str, pattern: str) -> Iterator[None]:
    """Take a part out of a script within the block."""
    text, found = re.subn(pattern, "", _LUA.joinpath(f"{script}.lua").read_text())
    assert found == 1, f"{script}.lua must hold exactly once: {pattern}"
    changed = compose(script, text, read_sources(_LUA / "include"))
    with replaced(scripts, "SCRIPTS", {**scripts.SCRIPTS, script: changed}):
        yield


@contextmanager
def _another_order() -> Iterator[None]:
    """An aggregator adds the gradients of a version in the opposite order."""
    real = reduce._total

    def total(contributions: Any, out: Any, xp: Any) -> None:
        real(reversed([each.copy() for each in contributions]), out, xp)

    with replaced(reduce, "_total", total):
        yield


@contextmanager
def _a_unit_twice() -> Iterator[None]:
    """Workers do the batch of unit 20 again in the place of unit 21."""
    real = Contributions.compute

    def compute(self: Contributions, params: Any, number: int) -> Any:
        return real(self, params, 20 if number == 21 else number)

    with replaced(Contributions, "compute", compute):
        yield


@contextmanager
def _an_old_version() -> Iterator[None]:
    """Workers compute the units of version 5 on version 3, and neither their session nor push minds."""
    real, third = Session.pull, dict[str, Any]()

    def pull(self: Session, part: str = "") -> dict[str, Any]:
        params = real(self, part)
        if self.version == 3:
            third.update({name: array.copy() for name, array in params.items()})
        if self.version == 4:
            self._membership.version = 3
        return third if self._membership.version == 3 else params

    with (
        _without("push", r" or base < round - [\w.]+"),
        replaced(Units, "oldest_base", lambda self, unit: 0),
        replaced(Session, "pull", pull),
    ):
        yield


FAULTS: Mapping[str, Callable[[], Any]] = {
    "another order of reduction": _another_order,
    "a unit twice": _a_unit_twice,
    "a unit on an old version": _an_old_version,
}


def planted(arena: Arena) -> Iterator[Run]:
    """Train with each fault."""
    with running_server() as url, Store(Client(url)) as store:
        for number, (what, fault) in enumerate(FAULTS.items()):
            job = DIGITS.create(store, f"fault-{number}", workers=1)
            with fault():
                run_workers(job, *members(job, 3, arena.random))
            yield Run("three workers on threads", DIGITS, DIGITS.problems(job), fault=what)
