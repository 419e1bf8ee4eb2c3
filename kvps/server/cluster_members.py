"""The nodes of a cluster: who is in it and has which slots, how a node comes in, and how it is forgotten."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from kvps.connection.client import Client
from kvps.connection.cluster import ClusterClient
from kvps.connection.slots import SLOTS, Address
from kvps.errors import KvpsError, ServerError, ServerUnfit
from kvps.server.cluster_node import url_of
from kvps.server.server_process import comes_true

log = logging.getLogger("kvps.host")

_AGREE_S = 60.0  # until all nodes have heard of a new one, or of a slot's new place
_LOOK_AGAIN_S = 0.1
_TURN = "kvps:moving-slots"  # the key whose holder alone moves slots
_TURN_MS = 30_000


@dataclass(frozen=True)
class Member:
    """A node as one line of CLUSTER NODES tells it.

    `migrating` and `importing` are slot -> the id of the other node, for slots on the way; only the node itself tells
    them.
    """

    id: str
    address: Address
    flags: frozenset[str]
    slots: tuple[int, ...]
    migrating: Mapping[int, str] = field(default_factory=dict)
    importing: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_master(self) -> bool:
        return "master" in self.flags

    @property
    def is_met(self) -> bool:
        """Whether it is more than an address that has not answered yet."""
        return not self.flags & {"handshake", "noaddr"}

    @property
    def is_away(self) -> bool:
        """Whether the node that was asked does not reach it."""
        return bool(self.flags & {"fail", "fail?", "noaddr"})

    @classmethod
    def of(cls, line: str, asked: Address) -> Member:
        """Read one line. A node that does not know its own address was asked at `asked`."""
        name, address, flags, _, _, _, _, _, *slots = line.split()
        host, _, port = address.partition("@")[0].rpartition(":")
        served, moving = list[int](), {">": dict[int, str](), "<": dict[int, str]()}
        for text in slots:
            if move := re.fullmatch(r"\[(\d+)-([<>])-(\w+)\]", text):
                moving[move[2]][int(move[1])] = move[3]
            else:
                first, _, last = text.partition("-")
                served += range(int(first), int(last or first) + 1)
        place = Address(host or asked.host, int(port))
        return cls(name, place, frozenset(flags.split(",")), tuple(served), moving[">"], moving["<"])


class Members:
    """The nodes of the cluster that `seed` is a node of, with a connection to each. All have the same password."""

    def __init__(self, seed: Address, password: str | None) -> None:
        self.password = password
        self._seed = seed
        self._clients: dict[Address, Client] = {}

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def at(self, address: Address) -> Client:
        """Return the connection to a node."""
        if address not in self._clients:
            self._clients[address] = Client(url_of(address, self.password))
        return self._clients[address]

    def all(self, seed: Address | None = None) -> list[Member]:
        """Return the nodes as the seed, or another node, sees them."""
        asked = seed or self._seed
        return [Member.of(line, asked) for line in self.at(asked).call("CLUSTER", "NODES").splitlines() if line]

    def me(self, address: Address | None = None) -> Member:
        """Return what the seed, or another node, says of itself."""
        return next(member for member in self.all(address) if "myself" in member.flags)

    def masters(self) -> list[Member]:
        """Return all masters that are there, each as it tells itself. Raises ServerUnfit if one that has slots is away,
        and ServerLost if one has just died."""
        masters = list[Member]()
        for member in self.all():
            if not member.is_master or not member.is_met:
                continue
            itself = None if member.is_away else self.me(member.address)
            if itself and itself.id == member.id:  # another node may have its address now
                masters.append(itself)
            elif member.slots:
                raise ServerUnfit(
                    f"the node at {member.address} is away, and has {len(member.slots)} slots: start it again (with "
                    f"its --data-dir it has them still), or end all hosts and begin anew"
                )
        return masters

    def info(self, address: Address | None = None) -> dict[str, str]:
        """Return CLUSTER INFO of the seed, or of another node."""
        info: dict[str, str] = self.at(address or self._seed).call("CLUSTER INFO")
        return info

    # -- who comes, and who goes ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Give a node that knows no other all slots."""
        node = self.at(self._seed)
        node.call("CLUSTER ADDSLOTSRANGE", 0, SLOTS - 1)
        if not comes_true(lambda: self.info()["cluster_state"] == "ok", _AGREE_S):
            raise ServerUnfit("the node does not serve its slots")

    def meet(self, other: Address) -> None:
        """Bring this host's node, the seed, into the cluster of another node; wait until all know each other."""
        me = self.me().id
        self.at(self._seed).call("CLUSTER MEET", other.host, other.port)

        def agreed() -> bool:
            known = [member for member in self.all(other) if member.is_met and not member.is_away]
            mine = {member.id for member in self.all() if member.is_met and not member.is_away}
            if me not in {member.id for member in known} or not {member.id for member in known} <= mine:
                return False
            seen = [{member.id for member in self.all(node.address) if member.is_met} for node in known]
            return all(me in ids for ids in seen) and self.info()["cluster_state"] == "ok"

        if not comes_true(agreed, _AGREE_S):
            raise ServerUnfit(f"the nodes do not become one cluster with {self._seed}: each must reach every other")

    def forget(self, gone: Sequence[str]) -> None:
        """Have every node that is there forget nodes that serve nothing."""
        for member in self.all():
            if member.id in gone or member.is_away or not member.is_met:
                continue
            for name in gone:
                with suppress(ServerError):  # it has forgotten it already, or is away
                    self.at(member.address).call("CLUSTER FORGET", name)

    def forget_dead(self) -> None:
        """Forget masters that have died and serve no slot, as a host that was killed while it joined."""
        dead = [member.id for member in self.all() if {"master", "fail"} <= member.flags and not member.slots]
        if dead:
            self.forget(dead)

    # -- one at a time --------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self) -> Iterator[Callable[[], None]]:
        """Wait until no other host moves slots; yield a function that keeps the turn, to be called now and then.

        A host that is killed loses its turn after 30 seconds.
        """
        me, logged = self.me().id, False
        with ClusterClient(url_of(self._seed, self.password)) as cluster, ExitStack() as stack:
            while not self._take(cluster, me):
                if not logged:
                    log.info("another host is moving slots: this one waits for it")
                    logged = True
                time.sleep(_LOOK_AGAIN_S)
            stack.callback(lambda: self._give_back(cluster, me))
            kept = time.monotonic()

            def keep() -> None:
                nonlocal kept
                if time.monotonic() - kept < _TURN_MS / 5000:
                    return
                if not self._take(cluster, me):
                    raise KvpsError("another host has begun to move slots, because this one was silent for too long")
                kept = time.monotonic()

            yield keep

    def _take(self, cluster: Client, me: str) -> bool:
        """Take or keep the turn; return whether it is ours. A repeat after a cut finds what the first try wrote."""
        if cluster.call("GET", _TURN) == me and cluster.call("PEXPIRE", _TURN, _TURN_MS):
            return True
        cluster.call("SET", _TURN, me, "NX", "PX", _TURN_MS)
        return bool(cluster.call("GET", _TURN) == me)

    def _give_back(self, cluster: Client, me: str) -> None:
        with suppress(KvpsError):  # it expires
            if cluster.call("GET", _TURN) == me:
                cluster.call("DEL", _TURN)


def check_cluster(seed: Address, password: str | None) -> None:
    """Make sure that a cluster that serves all its slots answers there. Raises NoServer, ServerUnfit."""
    url = url_of(seed, password)
    with Client(url) as client:
        if not client.preflight():
            raise ServerUnfit(
                f"{seed} is a server of its own and no node of a cluster: start the first host with kvps host --listen"
            )
    with Members(seed, password) as members:
        state = members.info()
        members.masters()
    if state["cluster_state"] != "ok":
        raise ServerUnfit(
            f"the cluster at {seed} does not serve all slots ({state['cluster_slots_ok']} of {SLOTS}): mend it first"
        )
