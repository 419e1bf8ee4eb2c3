"""Moves slots between the masters of a cluster while jobs train, so that each has an even share of slots and bytes.

A slot moves in the way of all Redis versions: the target is told that it comes, the source that it goes; the keys go
over; then all masters are told its new place. Clients find each key on the side that has it. What an interrupted move
leaves behind, the next move ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvps.connection.resp import Command
from kvps.errors import ServerError
from kvps.server.cluster_members import Member, Members

_TOGETHER = 200  # empty slots that move at once
_KEYS = 8  # keys that move at once: arrays have up to 1 MiB each, and both servers do nothing else meanwhile
_SAMPLE = 100  # so many keys of a slot say how large all are
_IDLE_MS = 10_000


@dataclass(frozen=True)
class Move:
    """A slot that is to move, from one node's id to another's."""

    slot: int
    source: str
    target: str


def fair_moves(held: Mapping[str, Mapping[int, int]], holders: Sequence[str]) -> list[Move]:
    """Return the moves after which only `holders` have slots, no one more than one slot more than another.

    `held` is node -> slot -> the bytes of its keys. The moves also even out the bytes as well as whole slots can.
    """
    total = sum(map(len, held.values()))
    share, rest = divmod(total, len(holders))
    by_size = sorted(holders, key=lambda node: (-len(held.get(node, {})), node))
    goal = {node: share + (place < rest) for place, node in enumerate(by_size)}
    ideal = sum(sum(slots.values()) for slots in held.values()) / len(holders)
    given: list[tuple[int, int, str]] = []
    for node, slots in held.items():
        given += _given(node, slots, len(slots) - goal.get(node, 0), ideal if node in goal else 0.0)
    size = {node: sum(held.get(node, {}).values()) for node in goal}
    for nbytes, _, node in given:
        if node in size:
            size[node] -= nbytes
    room = {node: goal[node] - len(held.get(node, {})) for node in goal}
    room = {node: free for node, free in room.items() if free > 0}
    moves = []
    for nbytes, slot, source in sorted(given, key=lambda entry: (-entry[0], entry[1])):
        # A slot with keys goes where the fewest bytes are; empty slots fill one node after the other, so that they
        # stay few ranges.
        target = min(room, key=lambda node: (size[node], node)) if nbytes else next(iter(room))
        moves.append(Move(slot, source, target))
        size[target] += nbytes
        room[target] -= 1
        if not room[target]:
            del room[target]
    return moves


def _given(node: str, slots: Mapping[int, int], excess: int, ideal: float) -> list[tuple[int, int, str]]:
    """Return (bytes, slot, node) of the `excess` slots that a node gives away, so that it keeps about `ideal` bytes."""
    if excess <= 0:
        return []
    surplus = sum(slots.values()) - ideal
    full = sorted((slot for slot in slots if slots[slot]), key=lambda slot: (-slots[slot], slot))
    empty = [slot for slot in sorted(slots) if not slots[slot]]
    chosen = list[int]()
    for slot in full:
        if len(chosen) < excess and slots[slot] < 2 * surplus:  # it brings the node nearer to its ideal
            chosen.append(slot)
            surplus -= slots[slot]
    spare = excess - len(chosen)
    chosen += empty[len(empty) - min(spare, len(empty)) :]
    if (spare := excess - len(chosen)) > 0:  # there are not enough empty slots: the smallest others go too
        chosen += [slot for slot in reversed(full) if slot not in set(chosen)][:spare]
    return [(slots[slot], slot, node) for slot in chosen]


class SlotsMover:
    """Moves slots between the members of a cluster. `keep` is called now and then, see `Members.turn`; `seen`
    with how many of how many slots have moved."""

    def __init__(
        self, members: Members, keep: Callable[[], None], seen: Callable[[int, int], None] = lambda moved, of: None
    ) -> None:
        self._members = members
        self._keep = keep
        self._seen = seen

    def rebalance(self, holders: Sequence[str]) -> int:
        """Give these masters even shares of all slots, and no other master any; return how many slots have moved.

        Raises ServerError, ServerUnfit if a node does not answer, or refuses: then the next call goes on.
        """
        self.end_interrupted()
        masters = self._members.masters()
        held = {member.id: self._sizes_of(member) for member in masters}
        moves = fair_moves(held, holders)
        empty = [move for move in moves if not held[move.source][move.slot]]
        by_pair = sorted(empty, key=lambda move: (move.source, move.target, move.slot))
        batches = list[list[Move]]()
        for _, pair in groupby(by_pair, key=lambda move: (move.source, move.target)):
            together = list(pair)
            batches += [together[first : first + _TOGETHER] for first in range(0, len(together), _TOGETHER)]
        batches += [[move] for move in moves if held[move.source][move.slot]]
        done = 0
        self._seen(done, len(moves))
        for batch in batches:
            self._move(batch, masters)
            done += len(batch)
            self._seen(done, len(moves))
        return len(moves)

    def end_interrupted(self) -> None:
        """End the moves that a host began and did not end: finish those between two masters, cancel all others."""
        masters = self._members.masters()
        owner = {slot: member.id for member in masters for slot in member.slots}
        ids = {member.id for member in masters}
        for member in masters:
            on_the_way = [(slot, member.id, other) for slot, other in member.migrating.items()]
            on_the_way += [(slot, other, member.id) for slot, other in member.importing.items()]
            for slot, source, target in on_the_way:
                if owner.get(slot) == source and target in ids:
                    self._move([Move(slot, source, target)], masters)
                    owner[slot] = target
                else:
                    self._members.at(member.address).call("CLUSTER SETSLOT", slot, "STABLE")

    def _sizes_of(self, member: Member) -> dict[int, int]:
        """Return slot -> about how many bytes its keys have."""
        asked: list[Command] = [("CLUSTER COUNTKEYSINSLOT", slot) for slot in member.slots]
        counts = dict(zip(member.slots, self._ask(member, asked) if asked else [], strict=True))
        full = [slot for slot, count in counts.items() if count]
        keys_of_slots = self._ask(member, [("CLUSTER GETKEYSINSLOT", slot, _SAMPLE) for slot in full]) if full else []
        sizes = dict.fromkeys(member.slots, 0)
        for slot, keys in zip(full, keys_of_slots, strict=True):
            used = self._ask(member, [("MEMORY USAGE", key) for key in keys]) if keys else []
            sizes[slot] = 1 + sum(map(_size, used)) * counts[slot] // max(1, len(keys))
        return sizes

    def _move(self, moves: Sequence[Move], masters: Sequence[Member]) -> None:
        """Move slots from one master to one other."""
        self._keep()
        of = {member.id: member for member in masters}
        source, target = of[moves[0].source], of[moves[0].target]
        self._ask(target, [("CLUSTER SETSLOT", move.slot, "IMPORTING", source.id) for move in moves])
        self._ask(source, [("CLUSTER SETSLOT", move.slot, "MIGRATING", target.id) for move in moves])
        keys_of_moves = self._ask(source, [("CLUSTER GETKEYSINSLOT", move.slot, _KEYS) for move in moves])
        for move, keys in zip(moves, keys_of_moves, strict=True):
            while keys:
                self._keep()
                self._move_keys(source, target, keys)
                keys = self._members.at(source.address).call("CLUSTER GETKEYSINSLOT", move.slot, _KEYS)
        # The target first: from then on it serves the slot itself, and nobody is sent to and fro.
        for member in (target, source, *(m for m in masters if m.id not in (source.id, target.id))):
            self._ask(member, [("CLUSTER SETSLOT", move.slot, "NODE", target.id) for move in moves])

    def _move_keys(self, source: Member, target: Member, keys: Sequence[str]) -> None:
        password = self._members.password
        login = ("AUTH", password) if password else ()
        try:
            self._members.at(source.address).call(
                "MIGRATE", *target.address, "", 0, _IDLE_MS, "REPLACE", *login, "KEYS", *keys
            )
        except ServerError as error:
            raise ServerError(
                f"keys could not move from {source.address} to {target.address} ({error}): each node must reach every "
                f"other, with the same password and room for the keys"
            ) from None

    def _ask(self, member: Member, commands: Sequence[Command]) -> list[Any]:
        return self._members.at(member.address).gather(commands)


def _size(reply: object) -> int:
    """Return the bytes of a key; it may be gone by now."""
    return reply if isinstance(reply, int) else 0
