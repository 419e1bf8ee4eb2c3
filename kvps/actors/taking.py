"""Experience on its way in: what the learner of a published job takes, trains on, rejects or gives back."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from kvps.arrays.digest import digest_of
from kvps.arrays.items import decode
from kvps.arrays.layout import CHUNK_BYTES
from kvps.config.rollouts import Rollouts, rollouts_of
from kvps.connection.sockets import ChunkGone
from kvps.errors import (
    CorruptData,
    InvalidSetting,
    JobSuspended,
    LeaseLost,
    WrongOrder,
    counted,
    not_to_be_pickled,
    shown,
)
from kvps.job import Job
from kvps.parsing import whole_setting
from kvps.protocol.answers import ServerRestarted
from kvps.protocol.rollout_scripts import Record, RolloutScripts, Took, items_of

log = logging.getLogger("kvps.publish")

T = TypeVar("T")
_LOOK_MS = 1_000  # at most, between two looks for items, and for actors that have fallen silent
_MOST_REASON = 200


@dataclass(frozen=True)
class Item:
    """One item of experience, as an actor has put it.

    id       "<actor>.<incarnation>:<number>"
    data     name -> array (read-only), bytes, text or number
    version  the oldest version that it was made on
    spans    (position, version) of each stretch of it
    unit     the prompt that it answers; None where there are none
    """

    id: str
    data: dict[str, Any]
    version: int
    spans: tuple[tuple[int, int], ...]
    unit: int | None

    @property
    def actor(self) -> str:
        """Who made it."""
        return self.id.rpartition(":")[0].rpartition(".")[0]


class LearnerRollouts:
    """The experience that the learner has taken: `Publisher.rollouts`. One thread at a time uses it, beside the one
    that publishes.

    What is taken belongs to this learner until a version is trained on it, it is rejected, or it is given back. A lot
    is what has one fate: the items of one prompt, or one item where there are no prompts. Calls are numbered within a
    term, so that a late copy of one does nothing.
    """

    def __init__(self, job: Job, hold: Callable[[], None], settle: Callable[[], bool]) -> None:
        """`hold` makes sure that this learner holds the job, and has `claim` called if it does so under a new term; it
        raises LeaseLost if another one does. `settle` waits for the publish that is under way, and returns whether
        there was one."""
        self._job = job
        self._hold = hold
        self._settle = settle
        self._scripts = RolloutScripts(job.access.scripts, job.name)
        self._lock = threading.Lock()  # also `claim` runs on the thread that publishes
        self._term = ""
        self._number = 0  # of the last call in this term
        self._unsure = False  # whether a call has failed, which may have landed
        self._closed = False
        self._lots: dict[str, tuple[str, ...]] = {}  # taken: lot -> ids of its items
        self._planned = set[str]()  # of these, what a publish under way is trained on
        self._chunks: dict[str, int] = {}  # of the items that were read: in how many keys each is
        self._dead: list[tuple[int, list[str]]] = []  # keys of items that have had their fate, by shard

    def __reduce__(self) -> tuple[Any, ...]:
        raise not_to_be_pickled(
            f"what the learner of job {self._job.name!r} has taken belongs to its process",
            "hand over the store, and publish there",
        )

    @cached_property
    def settings(self) -> Rollouts:
        """How experience comes. Raises UsageError if the job takes none."""
        return rollouts_of(self._job.name, self._job.config.metadata.rollouts)

    def take(
        self, n: int | None = None, *, groups: int | None = None, wait: float | None = None, order: str = "oldest"
    ) -> list[Item]:
        """Take `n` items, or with prompts so many whole `groups`, and return them; items of a group lie together.

        `order` is "oldest", "newest" or "random". Items that are too stale for the next version are dropped first, and
        the log says so. Waits until as many are there, up to `wait` seconds: then it takes what there is. It takes
        fewer also where no more can come: no room is left, or all prompts are handed out. Returns [] if there is
        nothing, and for good if all prompts have had their fate or the job is stopped. With a `max_staleness` it waits
        for the publish that is under way, and raises what that raises. Raises InvalidSetting, JobSuspended, LeaseLost
        if another learner has taken over.
        """
        settings = self.settings
        lots = self._lots_of(settings, n, groups)
        if order not in ("oldest", "newest", "random"):
            raise InvalidSetting(f"order must be oldest, newest or random, not {order!r}")
        if settings.max_staleness is not None:
            self._settle()  # else what is fresh enough for the version under way may be too old for the next one
        deadline = math.inf if wait is None else time.monotonic() + wait
        seen = {self._job.access.keys.news: "0-0"}
        # Where nobody has looked for half of the timeout, all actors get a new start: a dead one would never be missed.
        look_ms = min(_LOOK_MS, self._job.config.worker_timeout_ms / 4)
        while True:
            over = time.monotonic() >= deadline
            took = self._numbered(partial(self._took, lots, 1 if over else lots, order))
            if took.lots and (items := self._read(took.lots)):
                return items
            if took.why == "more":
                continue
            if took.why == "stopped" and (run := self._job.state().run).state == "suspended":
                raise JobSuspended(f"job {self._job.name!r} was {run.why}")
            if over or took.why in ("done", "stopped") or (took.why == "held" and not self._settle()):
                return []
            left_ms = min(look_ms, 1000 * (deadline - time.monotonic()))
            seen |= self._job.access.client.wait(seen, max(1, round(left_ms)))

    def reject(self, items: Iterable[Item | str], reason: str) -> None:
        """Say that these items, whole groups, are not to be trained on. The log has the reason; their prompts have had
        their fate. Raises InvalidSetting for what is not taken, LeaseLost."""
        if not isinstance(reason, str) or not reason.strip() or len(reason) > _MOST_REASON or not reason.isprintable():
            raise InvalidSetting(f"reason must be printable text of 1 to {_MOST_REASON} characters")
        self._end(self.lots_of(items), reason)

    def give_back(self, items: Iterable[Item | str] | None = None) -> None:
        """Give items, whole groups, back, so that they wait as before; None gives back all that is taken and in no
        publish. Raises InvalidSetting for what is not taken, LeaseLost."""
        self._end([lot for lot in self.taken if lot not in self._planned] if items is None else self.lots_of(items), "")

    @property
    def taken(self) -> list[str]:
        """The lots that are taken."""
        with self._lock:
            return list(self._lots)

    def lots_of(self, items: Iterable[Item | str]) -> list[str]:
        """Return the lots of these items, which must be taken by this learner, and whole. Raises InvalidSetting."""
        ids = [item.id if isinstance(item, Item) else item for item in items]
        with self._lock:
            of = {id: lot for lot, each in self._lots.items() for id in each}
        for id in ids:
            if id not in of or of[id] in self._planned:
                has = "in a publish that is under way" if id in of else "not taken by this learner (any more)"
                raise InvalidSetting(f"item {shown(id)} is {has}: an item has one fate")
        if len(set(ids)) < len(ids):
            raise InvalidSetting("an item is named twice: it has one fate")
        lots = list(dict.fromkeys(of[id] for id in ids))
        if lacks := [lot for lot in lots if not set(self._lots[lot]) <= set(ids)]:
            raise InvalidSetting(f"of prompt {lacks[0]} some items are missing: those of one prompt have one fate")
        return lots

    # -- of the thread that publishes ---------------------------------------------------------------------------

    def claim(self, term: str) -> None:
        """Take items under this term of shard 0 from now on. What is taken is kept, as far as it is still there. Raises
        LeaseLost, ServerRestarted."""
        with self._lock:
            if term == self._term and not self._unsure:
                return
            number = self._number + 1 if term == self._term else 1
            kept = self._scripts.claim(term, number, [" ".join((lot, *ids)) for lot, ids in self._lots.items()])
            if gone := len({*self._lots} - self._planned - {*kept}):
                log.warning("job %s: %s that was taken is gone, or waits again", self._job.name, counted(gone, "lot"))
            self._lots = {lot: self._lots[lot] for lot in kept if lot in self._lots}
            self._planned &= set(self._lots)
            self._term, self._number, self._unsure = term, number, False

    def plan(self, lots: Sequence[str]) -> None:
        """Note that a publish is trained on these lots."""
        self._planned |= set(lots)

    def trained(self, lots: Sequence[str]) -> None:
        """Note that a version was made which is trained on these lots."""
        with self._lock:
            self._planned -= set(lots)
            for lot in lots:
                self._forget(lot)

    def refused(self, lots: Sequence[str]) -> None:
        """Give back the lots of a publish that has failed."""
        with self._lock:
            self._planned -= set(lots)
            there = [lot for lot in lots if lot in self._lots]
        if there:
            self._end(there, "")

    def close(self) -> None:
        """Have all calls raise WrongOrder from now on."""
        self._closed = True

    def dead_keys(self) -> list[tuple[int, list[str]]]:
        """Return the keys of items that have had their fate since the last call, by shard."""
        with self._lock:
            dead, self._dead = self._dead, []
            return dead

    # -- calls ------------------------------------------------------------------------------------------------

    def _numbered(self, call: Callable[[str, int], T]) -> T:
        """Return what `call` returns under the present term, with its next number. Raises WrongOrder."""
        while True:
            if self._closed:
                raise WrongOrder(
                    f"the publisher of job {self._job.name!r} is closed: open another with Store.publisher"
                )
            with self._lock:
                if self._term and not self._unsure:
                    self._number += 1
                    try:
                        return call(self._term, self._number)
                    except (LeaseLost, ServerRestarted):
                        self._unsure = True
                    except BaseException:
                        self._unsure = True
                        raise
            self._hold()

    def _took(self, most: int, least: int, order: str, term: str, number: int) -> Took:
        took = self._scripts.take(term, number, most, least, order)
        if not took.lots:
            self._number -= 1  # an empty answer uses no number
            return took
        keys = self._job.access.keys
        texts = self._job.access.client.call("HMGET", keys.lots, *took.lots)
        for lot, text in zip(took.lots, texts, strict=True):
            self._lots[lot] = items_of(text)
        return took

    def _end(self, lots: Sequence[str], reason: str) -> None:
        """Reject lots for a reason, or give them back."""
        self._job.access.client.owner.check()
        if not lots:
            return

        def end(term: str, number: int) -> bool:
            named = [lot for lot in lots if lot in self._lots]
            if named and not self._scripts.settle(term, number, reason, named):
                return False
            for lot in named:
                if reason:
                    self._forget(lot)
                self._lots.pop(lot, None)
            return True

        while not self._numbered(end):
            with self._lock:
                self._unsure = True  # an open plan is trained on them: under a new term it commits no more
            self._hold()

    def _forget(self, lot: str) -> None:
        """Note that a lot has had its fate."""
        access = self._job.access
        for id in self._lots.pop(lot, ()):
            shard, prefix = access.keys.item(id, access.layout.shards)
            self._dead.append((shard, [f"{prefix}{number}" for number in range(self._chunks.pop(id, 0))]))

    def _lots_of(self, settings: Rollouts, n: int | None, groups: int | None) -> int:
        """Return how many lots are asked for."""
        if (n is None) == (groups is None):
            raise InvalidSetting("take(n) takes so many items, take(groups=n) so many whole groups: give one of them")
        asked = whole_setting("n" if groups is None else "groups", n if groups is None else groups, 1)
        if groups is None and asked % settings.group:
            raise InvalidSetting(f"n is {asked}, and items come in groups of {settings.group}: take a multiple of it")
        lots = asked if groups is not None else asked // settings.group
        if lots * settings.group > settings.capacity:
            raise InvalidSetting(
                f"{lots * settings.group} items are asked for, and no more than {settings.capacity} can wait: make the "
                f"job with more capacity"
            )
        return lots

    def _read(self, lots: Sequence[str]) -> list[Item]:
        """Return the items of lots that were taken. A lot with an item that cannot be read is rejected."""
        try:
            return self._items([id for lot in lots for id in self._lots[lot]])
        except (CorruptData, ChunkGone) as error:
            if len(lots) > 1:
                return [item for lot in lots for item in self._read([lot])]
            log.warning("job %s: rejects %s: %s", self._job.name, lots[0], error)
            self._end(lots, f"damaged: {error}"[:_MOST_REASON])
            return []

    def _items(self, ids: Sequence[str]) -> list[Item]:
        """Read these items. Raises CorruptData, ChunkGone."""
        access = self._job.access
        if not ids:
            raise CorruptData("a lot without items")
        texts = access.client.call("HMGET", access.keys.items, *ids)
        records = [Record.of(text, id) for text, id in zip(texts, ids, strict=True)]
        values = [bytearray(record.nbytes) for record in records]
        gets = []
        for id, record, value in zip(ids, records, values, strict=True):
            _, prefix = access.keys.item(id, access.layout.shards)
            memory, starts = memoryview(value), range(0, record.nbytes, CHUNK_BYTES)
            gets += [(f"{prefix}{i}", memory[at : at + CHUNK_BYTES]) for i, at in enumerate(starts)]
            self._chunks[id] = len(starts)
        access.client.get(gets)
        return [_item(*each) for each in zip(ids, records, values, strict=True)]


def _item(id: str, record: Record, value: bytearray) -> Item:
    """Return the item of these bytes. Raises CorruptData."""
    memory = memoryview(value).toreadonly()
    if digest_of([memory]) != record.digest:
        raise CorruptData(f"item {id} has other bytes than when it was accepted")
    data, spans = decode(memory)
    return Item(id, data, record.base, tuple(spans), record.unit)
