"""Which node of a cluster has which keys: hash slots, the map of slots, and the keys of commands. Pure."""

from __future__ import annotations

from binascii import crc_hqx
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvps.connection.resp import ANY_BYTES, Command

SLOTS = 16384
_KEYLESS = frozenset(
    ["HELLO", "INFO", "PING", "TIME", "SCAN", "SCRIPT LOAD", "BGREWRITEAOF", "WAIT", "CLUSTER SLOTS", "MULTI", "EXEC"]
)
ASKING = ("ASKING",)
NAMELESS = "?"  # the host of a node that is to announce a name (cluster-preferred-endpoint-type hostname), but has none
_MANY_KEYS = frozenset(["EXISTS", "UNLINK", "DEL", "MGET", "TOUCH"])


class Address(NamedTuple):
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Range(NamedTuple):
    """The slots from `first` to `last`, with their master and its replicas."""

    first: int
    last: int
    master: Address
    replicas: tuple[Address, ...]


class SlotMap:
    """The nodes of a cluster at one instant, as one of them saw it."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = sorted(ranges)
        self._firsts = [range_.first for range_ in self._ranges]
        self.masters = list(dict.fromkeys(range_.master for range_ in self._ranges))

    @classmethod
    def of(cls, reply: Sequence[Any], asked: Address) -> SlotMap:
        """Return the map from the reply to CLUSTER SLOTS of the node `asked`. A node that does not know its own address
        says none, and means the one it was asked at."""

        def address(node: Sequence[Any]) -> Address:
            host, port, _, *facts = node
            if host == NAMELESS:
                host = dict(zip(facts[0][::2], facts[0][1::2], strict=True))["ip"]
            return Address(str(host or asked.host), int(port))

        return cls(
            [
                Range(int(first), int(last), address(master), tuple(map(address, replicas)))
                for first, last, master, *replicas in reply
            ]
        )

    @property
    def nodes(self) -> list[Address]:
        """All masters and replicas."""
        return list(dict.fromkeys([*self.masters, *(node for range_ in self._ranges for node in range_.replicas)]))

    def range_of(self, slot: int) -> Range | None:
        """Return the range that has a slot; None while no master serves it."""
        index = bisect_right(self._firsts, slot) - 1
        return self._ranges[index] if index >= 0 and slot <= self._ranges[index].last else None

    def master_of(self, slot: int) -> Address | None:
        """Return the master that serves a slot; None while there is none."""
        range_ = self.range_of(slot)
        return range_.master if range_ else None


def slot_of(key: str) -> int:
    """Return the hash slot of a key: CRC-16 (XMODEM) of what its first braces hold, or of all of it (cluster spec)."""
    begin = key.find("{")
    end = key.find("}", begin + 1)
    tagged = key[begin + 1 : end] if 0 <= begin < end - 1 else key
    return crc_hqx(tagged.encode("utf-8", ANY_BYTES), 0) % SLOTS


def keys_of(command: Command) -> Sequence[str]:
    """Return the keys of a command as kvps sends it; none for a command that any node can answer."""
    name, *arguments = command
    if name in _KEYLESS:
        return ()
    if name in _MANY_KEYS:
        return arguments
    if name == "EVALSHA":
        return arguments[2 : 2 + arguments[1]]
    if name == "XREAD":
        rest = arguments[arguments.index("STREAMS") + 1 :]
        return rest[: len(rest) // 2]
    return arguments[:1]


def asking(commands: Sequence[Command]) -> list[Command]:
    """Return commands for a node that is being given their slot: each needs ASKING before it, a MULTI only one."""
    sent: list[Command] = []
    inside = False
    for command in commands:
        if not inside:
            sent.append(ASKING)
        inside = command[0] == "MULTI" or (inside and command[0] != "EXEC")
        sent.append(command)
    return sent
