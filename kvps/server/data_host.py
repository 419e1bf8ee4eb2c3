"""A host's part in a cluster: its node comes into the cluster with an even share of the slots, and gives them back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvps.connection.slots import Address
from kvps.errors import InvalidSetting, counted
from kvps.server.cluster_members import Members
from kvps.server.slots_mover import SlotsMover

log = logging.getLogger("kvps.host")

_LOOK_AGAIN_S = 0.2


class DataHost:
    """This host's node, which runs at `address`. All nodes of the cluster have the same password.

    `seen` is called with how many of how many slots have moved.
    """

    def __init__(
        self, address: Address, password: str | None, seen: Callable[[int, int], None] = lambda moved, of: None
    ) -> None:
        self._address = address
        self._password = password
        self._seen = seen

    def come(self, other: Address | None) -> None:
        """Begin a cluster, or join that of another node and take a share of its slots.

        A node that has kept its files is in its cluster already, and has its slots. Raises ServerUnfit, ServerError.
        """
        with self._members() as members:
            me = members.me()
            if len(members.all()) > 1:
                self._come_back(members, bool(me.slots))
            elif other is None:
                if not me.slots:
                    members.begin()
                log.info("a node at %s has all slots", self._address)
            elif me.slots:
                raise InvalidSetting(
                    "this --data-dir holds a cluster of its own: leave out --join, or give another --data-dir"
                )
            else:
                members.meet(other)
                self._take_share(members)

    def _come_back(self, members: Members, has_slots: bool) -> None:
        """Wait until the cluster that the node was in is there again."""
        logged = False
        while members.info()["cluster_state"] != "ok":
            if not logged:
                log.info("the node at %s is back; it waits for the other nodes of its cluster", self._address)
                logged = True
            time.sleep(_LOOK_AGAIN_S)  # a poll: nodes announce nothing to clients
        if has_slots:
            with members.turn() as keep:
                SlotsMover(members, keep).end_interrupted()
            log.info("a node at %s is back, with %s", self._address, counted(len(members.me().slots), "slot"))
        else:
            self._take_share(members)

    def _take_share(self, members: Members) -> None:
        began = time.monotonic()
        with members.turn() as keep:
            members.forget_dead()
            me = members.me().id
            log.info("a node at %s has joined; it takes its share of the slots", self._address)
            holders = [member.id for member in members.masters() if member.slots or member.id == me]
            SlotsMover(members, keep, self._seen).rebalance(holders)
        slots, nodes, took = len(members.me().slots), len(holders), time.monotonic() - began
        share = f"{counted(slots, 'slot')}, one of {counted(nodes, 'node')}"
        log.info("the node at %s has %s (%.1f s)", self._address, share, took)

    def is_last(self) -> bool:
        """Return whether no other node could take the slots of this one."""
        with self._members() as members:
            return bool(members.me().slots) and not _others(members)

    def leave(self, end_others: Callable[[], None], resets: bool) -> bool:
        """Give the slots to the other masters, evenly, and have all nodes forget this one. Return False if this has
        become the last host, and keeps all slots.

        `end_others` ends what works with this node, once it has no slots. With `resets` the node forgets its cluster
        too, so that its files begin anew. Raises ServerUnfit, ServerError.
        """
        began = time.monotonic()
        with self._members() as members:
            if not _others(members):  # it has not come into the cluster yet, or all others have left
                return not members.me().slots
            log.info("the node at %s gives its slots to the other nodes; Ctrl-C again ends it at once", self._address)
            # It is forgotten within the turn: the next host to move slots tells all masters, and needs their answers.
            with members.turn() as keep:
                holders = _others(members)
                if not holders and members.me().slots:  # the others have left meanwhile, and gave it theirs
                    return False
                moved = SlotsMover(members, keep, self._seen).rebalance(holders) if holders else 0
                given = counted(moved, "slot"), counted(len(holders), "node"), time.monotonic() - began
                log.info("given to others: %s, to %s (%.1f s)", *given)
                end_others()
                members.forget([members.me().id])
            if resets:
                members.at(self._address).call("CLUSTER RESET", "HARD")
        return True

    def _members(self) -> Members:
        return Members(self._address, self._password)


def _others(members: Members) -> list[str]:
    """Return the ids of the other masters that have slots."""
    me = members.me().id
    return [member.id for member in members.masters() if member.slots and member.id != me]
