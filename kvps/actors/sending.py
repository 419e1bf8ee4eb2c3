"""Experience on its way out: what an actor sends to the learner of a published job."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

from kvps.arrays.item_forms import differ
from kvps.arrays.items import Encoded, encode
from kvps.config.rollouts import Rollouts, rollouts_of
from kvps.errors import InvalidSetting, KvpsError, UsageError, WorkerEvicted, WrongOrder, not_to_be_pickled
from kvps.job import Job
from kvps.machine.process import identity
from kvps.parsing import whole
from kvps.protocol.answers import ServerRestarted
from kvps.protocol.keys import check_new_name
from kvps.protocol.recovery import await_history
from kvps.protocol.rollout_scripts import NewItem, RolloutScripts
from kvps.session.heartbeat import Heartbeat, Signs

log = logging.getLogger("kvps.actor")

T = TypeVar("T")
Versions = int | Sequence[tuple[int, int]]
"""The version that an item was made on; or spans, each a position in it and the version from there on."""
_LOOK_MS = 1_000  # for room or a prompt, between two looks


class Here(Protocol):
    """The weights that an actor has: `Watch`."""

    version: int

    def name_of(self, version: int) -> str | None:
        """Return the staged name of a version that was read here, None for another one."""


class ActorRollouts:
    """The experience that one actor sends to the learner: `Watch.rollouts`. One thread at a time uses it.

    The actor enters with the first call, and gives signs of life from then on. Its prompt, and the room that it has
    reserved, are given back when it is closed, or silent for the job's `worker_timeout_ms`: it enters anew then. What
    was accepted stays.
    """

    def __init__(self, job: Job, name: str, here: Here) -> None:
        """`name` is the actor's, "" for one of its own."""
        self.name = check_new_name("actor", name) if name else f"a-{secrets.token_hex(4)}"
        self._job = job
        self._here = here
        self._scripts = RolloutScripts(job.access.scripts, job.name)
        self._incarnation = ""
        self._seq = 0  # of the last item that was begun
        self._unit: int | None = None  # the prompt that it has
        self._heart: Heartbeat | None = None
        self._closed = False
        self._replaced = ""  # why no incarnation begins any more

    def __reduce__(self) -> tuple[Any, ...]:
        raise not_to_be_pickled(
            f"the actor {self.name!r} of job {self._job.name!r} belongs to its process",
            "hand over the store, and watch there",
        )

    @cached_property
    def settings(self) -> Rollouts:
        """What the learner has set. Raises UsageError if the job takes no experience."""
        return rollouts_of(self._job.name, self._job.config.metadata.rollouts)

    def put(self, item: Mapping[str, Any], version: Versions, unit: int | None = None) -> str | None:
        """Send an item: name -> array, bytes, text or number, up to 64 MiB. Return its id once it is accepted: then it
        has exactly one fate, which the log names.

        `version` is that of the weights that made it, or spans [(0, 17), (120, 18)] for one that was made across an
        update; `unit` is the prompt that it answers, by default the one that this actor has. The call waits for room.
        It returns None, and says so in the log, if the item is not accepted: its prompt is not this actor's any more,
        the version is far too old, or the job has ended. Raises InvalidSetting for what is no item, another form than
        that of the first ones, or a version that was never read here; WorkerEvicted if another process has this
        actor's name; ServerLost, ServerFull.
        """
        spans = list(version) if isinstance(version, Sequence) else [(0, version)]
        if not spans:
            raise InvalidSetting("version names none: say which one made the item, policy.version, or spans of several")
        settings = self.settings
        if unit is None and settings.prompts and (unit := self._unit) is None:
            raise WrongOrder("this actor has no prompt: call next_unit, and put what answers it")
        if unit is not None and not settings.prompts:
            raise InvalidSetting(f"unit is {unit}, and job {self._job.name!r} hands out no prompts")
        encoded = encode(item, spans)
        base = min(each for _, each in spans)
        if (name := self._here.name_of(base)) is None:
            raise InvalidSetting(f"version {base} was not read here: say which version the watch had, policy.version")
        if not self._reserve(encoded.nbytes, retries=not settings.prompts):
            self._say_refused("its prompt is closed, or the job has ended")
            return None
        return self._send(encoded, NewItem(self._seq, unit, base, name, encoded.nbytes, 0, "", encoded.form))

    def next_unit(self, wait: float | None = None) -> int | None:
        """Return the prompt that this actor is to answer, from 0 to prompts * epochs: the one that it has, as long as
        more items are needed, or the next one. Waits up to `wait` seconds, for None as long as it takes. None if there
        is none in that time, if all have had their fate, or if the job is stopped or suspended. Raises UsageError,
        WorkerEvicted if another process has this actor's name."""
        deadline = None if wait is None else time.monotonic() + wait
        if not self.settings.prompts:
            raise UsageError(f"job {self._job.name!r} hands out no prompts: its learner says how many there are")
        seen = {self._job.access.keys.turns: "0-0"}
        while True:
            found = self._called(lambda: self._scripts.prompt(self.name, self._incarnation))
            if found.unit is not None or found.done or found.ends:
                self._unit = found.unit
                return found.unit
            if deadline is not None and time.monotonic() >= deadline:
                return None
            seen |= self._job.access.client.wait(seen, _LOOK_MS)

    def room(self, wait: float = 0.0) -> bool:
        """Return whether an item that is begun now, on the version that is newest here, has room and will still be
        fresh when the learner comes to it: actors wait rather than make what would be dropped. With `wait` the call
        waits up to so many seconds for room; what is missing may also be a newer version here, `Watch.update`."""
        deadline, seen = time.monotonic() + wait, {self._job.access.keys.turns: "0-0"}
        while not (there := self._has_room()) and (left_s := deadline - time.monotonic()) > 0:
            seen |= self._job.access.client.wait(seen, max(1, min(_LOOK_MS, round(1000 * left_s))))
        return there

    def _has_room(self) -> bool:
        keys, settings = self._job.access.keys, self.settings
        version = self._job.access.reader.round_state().version  # which raises JobNotFound
        numbers, items, waiting, taken = self._job.access.client.together(
            [
                ("HMGET", keys.rollouts, "offers", "bytes", "offered_bytes", "batch"),
                ("HLEN", keys.items),
                ("ZCARD", keys.waiting_lots),
                ("ZCARD", keys.taken_lots),
            ]
        )
        offers, held, offered, batch = (whole(n or 0, "rollouts", low=-1) for n in numbers)
        if items + offers >= settings.capacity or held + offered >= settings.capacity_bytes:
            return False
        if settings.max_staleness is None:
            return True
        ahead = (waiting + taken) // batch if batch else 0  # how much it takes at a time is known with its first call
        return bool(version + ahead - self._here.version <= settings.max_staleness)

    def close(self) -> None:
        """Give back what this actor has, and fall silent. Does nothing in a fork."""
        if not self._job.access.client.owner.is_here:
            return
        self._closed = True
        if self._heart:
            self._heart.stop()
        if self._incarnation:
            with suppress(KvpsError, ServerRestarted):
                self._scripts.quit(self.name, self._incarnation)
        self._incarnation = ""

    # -- one incarnation --------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Begin an incarnation, unless one lasts. Raises WrongOrder, WorkerEvicted."""
        self._job.access.client.owner.check()
        if self._closed:
            raise WrongOrder(f"the watch of job {self._job.name!r} is closed: open another one with Store.watch")
        if self._incarnation:
            return
        if self._replaced:
            raise WorkerEvicted(self._replaced)
        if self._heart:
            self._heart.stop()
        enter = partial(self._scripts.enter, self.name, secrets.token_hex(8), identity())
        self._incarnation, self._seq, self._unit = self._job.access.in_present_history(enter), 0, None
        self._heart = Heartbeat(self._job.access, self.name, self._signs(self._incarnation))
        self._heart.start()

    def _signs(self, incarnation: str) -> Signs:
        scripts = self._job.access.scripts
        return Signs(
            lambda _: self._scripts.beat(self.name, incarnation),
            lambda _: scripts.beat_of(self.name, incarnation),
        )

    def _called(self, call: Callable[[], T]) -> T:
        """Return what `call`, which runs a script, returns in the present incarnation; a new one if that has ended."""
        while True:
            self._enter()
            try:
                return call()
            except (WorkerEvicted, ServerRestarted) as error:
                self._end_by(error)

    def _end_by(self, error: WorkerEvicted | ServerRestarted) -> None:
        """End the incarnation here that has ended on the server; the next call begins another one. If another process
        has this actor's name now, that would end the other's, and so in turns: all calls raise WorkerEvicted then."""
        self._incarnation = ""
        if isinstance(error, ServerRestarted):
            await_history(self._job.access.server, self._job.access.scripts, self._job.name, 0)
        elif self._job.access.client.call("HEXISTS", self._job.access.keys.actors, self.name):
            self._replaced = (
                f"another process sends experience to job {self._job.name!r} as actor {self.name!r}: give each actor a "
                f"name of its own, or none"
            )
            log.warning("%s", self._replaced)
        else:
            log.warning("job %s: %s", self._job.name, error)

    def _reserve(self, nbytes: int, retries: bool) -> bool:
        """Reserve room for the next item, as soon as there is some. Return False if it is not to come: its prompt is
        closed, or the job has ended. With `retries` an incarnation that has ended is no reason."""
        seen = {self._job.access.keys.turns: "0-0"}
        while True:
            before = self._incarnation
            self._enter()
            if before and before != self._incarnation and not retries:
                return False
            self._seq += 1
            try:
                answer = self._scripts.offer(self.name, self._incarnation, self._seq, nbytes)
            except (WorkerEvicted, ServerRestarted) as error:
                self._end_by(error)
                if not retries:
                    return False
                continue
            if answer != "FULL":
                return answer == "OK"
            if self._job.access.reader.round_state().run.ends:
                return False
            seen |= self._job.access.client.wait(seen, _LOOK_MS)

    def _send(self, encoded: Encoded, item: NewItem) -> str | None:
        """Store the bytes of an item, and have it accepted."""
        access = self._job.access
        id = f"{self.name}.{self._incarnation}:{item.seq}"
        _, prefix = access.keys.item(id, access.layout.shards)
        chunks = [(f"{prefix}{number}", chunk) for number, chunk in enumerate(encoded.cut())]
        try:
            access.client.put(chunks)
            made = item._replace(chunks=len(chunks), digest=encoded.digest)
            if id := self._scripts.put(self.name, self._incarnation, made):
                return id
            why = "its prompt is closed, or its version far too old"
        except InvalidSetting as error:
            access.client.unlink([key for key, _ in chunks])
            raise InvalidSetting(
                f"this item has another form than the first ones of job {self._job.name!r}: "
                f"{differ(encoded.form, str(error))}"
            ) from None
        except WrongOrder as error:
            why = str(error)
        except (WorkerEvicted, ServerRestarted) as error:
            self._end_by(error)
            if access.client.call("HGET", access.keys.items, id):
                return id
            why = "the actor was taken for dead, or the server was restarted, before it was accepted"
        self._say_refused(why)
        return None

    def _say_refused(self, why: str) -> None:
        log.warning("job %s: an item of %s is not accepted: %s", self._job.name, self.name, why)
