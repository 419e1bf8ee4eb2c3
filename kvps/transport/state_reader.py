"""Reads what a job is at one instant, and pins versions so that they can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvps.arrays.digest import view
from kvps.arrays.layout import Array
from kvps.arrays.pieces import Chunk
from kvps.connection.client import WAIT_MS
from kvps.connection.resp import Command
from kvps.errors import NotPermitted
from kvps.protocol.answers import NextUnit, job_not_found, made_anew
from kvps.protocol.job_state import RoundState, State
from kvps.protocol.keys import following
from kvps.protocol.lua_scripts import with_scripts
from kvps.protocol.noted_versions import Pin
from kvps.protocol.plan import Contribution
from kvps.protocol.scripts import SCRIPTS
from kvps.transport.access import JobAccess

_PIN_MS = 5_000
_SLOW_BYTES_PER_MS = 50_000  # a pin outlives a read at 50 MB/s


class StateReader:
    """The reader of one job's state. Threads may share it."""

    def __init__(self, access: JobAccess) -> None:
        self._client = access.client
        self._keys = access.keys
        self._layout = access.layout
        self._experience = bool(access.config.metadata.rollouts)
        self._scripts = access.scripts

    def state(self, states: bool = False) -> State:
        """Return the job's state at one instant, with every member, and the states of workers and the experience if
        asked for. Raises JobNotFound."""
        return self._state(states=states)

    def round_state(self, worker: str = "") -> RoundState:
        """Return what a worker, or a reader, must know of the job, at one instant. Raises JobNotFound."""
        newest = ("XREVRANGE", self._keys.turns, "+", "-", "COUNT", 1)
        return self._round_state(worker, self._client.together([*self._asked(worker), newest]))

    def next_round_state(
        self, worker: str, state: RoundState, flat: Array | None, timeout_ms: int = WAIT_MS
    ) -> tuple[RoundState, bool]:
        """Return the next round state after `state`, as soon as it is there, or after `timeout_ms`.

        If the model is small, the weights of the version after `state` are read into `flat` in the same request.
        Returns also whether that worked and that version is the present one. Raises JobNotFound.
        """
        return self._next_round_state(worker, state, flat, timeout_ms, ())[:2]

    def next_unit(
        self, worker: str, incarnation: str, state: RoundState, flat: Array | None, timeout_ms: int
    ) -> tuple[RoundState, bool, NextUnit]:
        """Do `next_round_state`, and return also the unit that the worker got behind the wait, in the same request.
        Raises JobNotFound, WorkerEvicted."""
        request = self._scripts.unit_request(worker, incarnation)
        state, came, reply = with_scripts(
            self._client.call,
            SCRIPTS,
            lambda: self._next_round_state(worker, state, flat, timeout_ms, [request.command]),
        )
        return state, came, request.parse(reply)

    def _next_round_state(
        self, worker: str, state: RoundState, flat: Array | None, timeout_ms: int, first: Sequence[Command]
    ) -> tuple[RoundState, bool, Any]:
        """Do `next_round_state`, with at most one command behind the wait; return also the reply to that."""
        names = tuple(following(name) for name in state.names)
        small = flat is not None and self._layout.nbytes <= self._client.small_bytes
        gets = self._gets(names, flat) if flat is not None and small else []
        turns = self._keys.turns
        arrived, replies, came = self._client.wait_and_read(
            {turns: state.last_entry}, [*first, *self._asked(worker)], gets, timeout_ms
        )
        asked = replies[len(first) :]
        now = self._round_state(worker, [*asked, [(arrived.get(turns, state.last_entry), {})]])
        return now, small and came and now.names == names, replies[0]

    def _asked(self, worker: str) -> list[Command]:
        k = self._keys
        return [
            ("HGETALL", k.version),
            ("ZRANGE", k.rounds, 0, 0, "WITHSCORES"),
            ("HLEN", k.workers),
            ("HGET", k.workers, worker),
            ("HGET", k.clock, worker),
            ("ZSCORE", k.rounds, worker),
        ]

    def _round_state(self, worker: str, replies: Sequence[Any]) -> RoundState:
        self._check_there(replies[0])
        return RoundState.of(worker, self._layout.shards, *replies)

    def _state(self, *before: Command, states: bool = False) -> State:
        k = self._keys
        hashes = [("HGETALL", key) for key in (k.version, k.clock, k.skip, k.workers, k.units)]
        newest = ("XREVRANGE", k.commits, "+", "-", "COUNT", 1)
        others = [("HGETALL", k.states)] if states else []
        taken = [("HGETALL", key) for key in (k.rollouts, k.items, k.lots) if states and self._experience]
        replies = self._client.together([*before, *hashes, newest, *others, *taken])[len(before) :]
        self._check_there(replies[0])
        read = len(replies) - len(taken)
        return replace(State.of(self._layout.shards, *replies[:read]), experience=replies[read:])

    def asked(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies to `commands`, read at one instant, and the newest id in `turns`. Raises JobNotFound."""
        newest = ("XREVRANGE", self._keys.turns, "+", "-", "COUNT", 1)
        id, *replies, turns = self._client.together([("HGET", self._keys.version, "id"), *commands, newest])
        self._check_there({"id": id} if id else {})
        return [*replies, turns[0][0] if turns else "0-0"]

    def await_change(self, state: State) -> None:
        """Wait until a worker has joined or left, or a version is committed, after this `state`; one second at the
        most."""
        self._client.wait({self._keys.commits: state.last_entry})

    def inbox(self) -> list[Contribution]:
        """Return the accepted contributions that wait for their commit, oldest first."""
        entries = self._client.call("XRANGE", self._keys.inbox, "-", "+")
        return [Contribution.from_text(fields.get("contribution")) for _, fields in entries]

    def holders(self) -> list[str]:
        """Return for each shard the aggregator that holds its lease, or ""."""
        return self._of_shards(self._keys.lease)

    def terms(self) -> list[str]:
        """Return for each shard the term of its last holder, or ""."""
        return self._of_shards(self._keys.term)

    def _of_shards(self, key: Callable[[int], str]) -> list[str]:
        return [value or "" for value in self._client.call("MGET", *map(key, range(self._layout.shards)))]

    def _check_there(self, version: Mapping[str, str]) -> None:
        """Raise JobNotFound unless the job exists and has the id that is meant."""
        if not version:
            raise self._client.lacking(job_not_found(self._keys.job))
        if version.get("id") != self._keys.id:
            raise made_anew(self._keys.job)

    def held(self, arrays: int) -> State:
        """Return the job's state at one instant, and pin its version at that instant, for long enough to read `arrays`
        arrays of its size; unless another reader's pin holds another version, or this user may not pin. Raises
        JobNotFound."""
        pin = self._scripts.pinning(self._patience_ms(arrays))
        try:
            return with_scripts(self._client.call, SCRIPTS, lambda: self._state(pin, states=True))
        except NotPermitted:
            return self._state(states=True)

    def _patience_ms(self, arrays: int = 1) -> int:
        return _PIN_MS + arrays * self._layout.nbytes // _SLOW_BYTES_PER_MS

    def _pin(self, ms: int) -> Pin | None:
        """Pin a version and return the pin; None if this user may not, as a reader on Redis 6.2 (see `kvps acl`)."""
        try:
            return Pin.of(self._scripts.pin(ms), self._layout.shards)
        except NotPermitted:
            return None

    def _gets(self, names: Sequence[str], flat: Array, what: str = "w", part: str = "") -> list[tuple[str, memoryview]]:
        def key(c: Chunk) -> str:
            return self._keys.array(c.shard, what, names[c.shard], c.number)

        return [(key(c), view(flat[c.start : c.stop])) for c in self._layout.chunks_in(part)]
