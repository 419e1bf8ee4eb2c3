"""Connections to the masters of a Redis or Valkey cluster, with the methods of an `ArrayPool`.

Each key goes to the master that has its slot. A node that does not have it (any more) says where it is: MOVED for good,
ASK while a slot is on its way to another node. Arrays go to all nodes at once, and come from all at once: a thread a
node.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from redis.exceptions import AskError, ClusterDownError, MovedError, ReadOnlyError, RedisError, ResponseError

from kvps.arrays.digest import Buffers
from kvps.connection.cluster_nodes import ClusterNodes
from kvps.connection.lane import Lane
from kvps.connection.replicas import IF_ANY, NONE, Copies
from kvps.connection.resp import Command, granted
from kvps.connection.slots import ASKING, Address, asking, keys_of
from kvps.connection.sockets import CONNECTION_CUT, ChunkGone, Put, Stored

_MOST_HOPS = 8  # redirections of one command; a topology at rest needs one
_EVERYWHERE = frozenset(["SCRIPT LOAD", "ACL SETUSER"])  # what each node keeps for itself
_AT_ONCE = frozenset(["MULTI", "WAIT"])
Item = tuple[str, memoryview]


class ClusterPool:
    """Connections to all masters. `url` is that of any node. May be used from several threads."""

    def __init__(self, url: str) -> None:
        self.nodes = ClusterNodes(url)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.nodes.closed

    def copies_of(self, key: str, copies: Copies) -> Copies:
        """Return which copies there must be of what is stored under a key, where `copies` may be IF_ANY."""
        return Copies(min(1, self.nodes.replicas(key))) if copies == IF_ANY else copies

    # -- commands ---------------------------------------------------------------------------------------------

    def exchange(
        self, commands: Sequence[Command], gets: Sequence[Item] = (), key: str | None = None
    ) -> tuple[list[Any], list[bool]]:
        """Send commands to the nodes that have their keys, and return the replies. What must be done at one instant, or
        waits, goes to one node in one piece: all its keys are in one slot. The node of `key` answers commands
        that have none."""
        assert not gets, "a cluster's arrays are not in the slot of the job"
        if commands[0][0] in _EVERYWHERE:
            return self._everywhere(commands), []
        if len(commands) > 1 and any(map(_at_once, commands)):
            return self._at_once(commands, key), []
        replies: list[Any] = [None] * len(commands)
        for address, numbers in self.nodes.by_node([(keys_of(command) or (key,))[0] for command in commands]).items():
            with self.nodes.using(address) as pool:
                node_replies = pool.exchange([commands[number] for number in numbers])[0]
            for number, reply in zip(numbers, node_replies, strict=True):
                replies[number] = self._followed([commands[number]], [reply], address)[0]
        return replies, []

    def _at_once(self, commands: Sequence[Command], key: str | None) -> list[Any]:
        first = next((name for command in commands for name in keys_of(command)), key)
        address = self.nodes.any_master() if first is None else self.nodes.master(first)
        with self.nodes.using(address) as pool:
            return self._followed(commands, pool.exchange(commands)[0], address)

    def _followed(self, commands: Sequence[Command], replies: list[Any], asked: Address) -> list[Any]:
        """Return the replies to commands, sent again to where their first redirection says, as often as one does."""
        for _ in range(_MOST_HOPS):
            errors = [reply for reply in replies if isinstance(reply, ResponseError)]
            if any(isinstance(error, (ClusterDownError, ReadOnlyError)) for error in errors):
                self.nodes.forget_map()
            redirection = next((error for error in errors if isinstance(error, AskError)), None)
            if redirection is None:
                break
            asked = self.nodes.redirected(redirection, asked)
            sent = list(commands) if isinstance(redirection, MovedError) else asking(commands)
            with self.nodes.using(asked) as pool:
                pairs = zip(sent, pool.exchange(sent)[0], strict=True)
            replies = [reply for command, reply in pairs if command is not ASKING]
        return replies

    def _everywhere(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands to every node. Return the replies of one, or those of the first that refused."""
        replies: list[Any] = []
        slot_map = self.nodes.slot_map()
        nodes = slot_map.nodes if commands[0][0] == "ACL SETUSER" else slot_map.masters
        for address in nodes:
            with self.nodes.using(address) as pool:
                replies = pool.exchange(commands)[0]
            if any(isinstance(reply, ResponseError) for reply in replies):
                break
        return replies

    # -- arrays -----------------------------------------------------------------------------------------------

    @contextmanager
    def putting(self, stored: Stored | None = None, copies: Copies = NONE) -> Iterator[Put]:
        """Like `ArrayPool.putting`, on all nodes at once. No thread sends any more when the block is left."""
        lanes: dict[Address, Lane] = {}
        failed: RedisError | None = None

        def put(key: str, value: Buffers) -> None:
            nonlocal failed
            try:
                address = self.nodes.master(key)
            except RedisError as error:
                failed = failed or error
                return
            if address not in lanes:
                lanes[address] = Lane(self.nodes.pool(address), stored, self.copies_of(key, copies))
            lanes[address].send(key, value)

        def flush() -> None:
            for lane, reached in [(lane, lane.mark()) for lane in lanes.values()]:
                lane.wait(reached)

        try:
            yield Put(put, flush)
            for lane in lanes.values():
                lane.end()
            for address, lane in lanes.items():
                try:
                    with self.nodes.using(address):
                        lane.result()
                except RedisError as error:
                    # A cut connection comes first: what was refused may have its reason in that.
                    failed = error if isinstance(error, CONNECTION_CUT) else failed or error
        except BaseException:  # an interrupt too: the caller may change its arrays after that, and send them again
            for lane in lanes.values():
                lane.drop()
            for lane in lanes.values():
                lane.join()
            raise
        if failed:
            raise failed
        for address, lane in lanes.items():
            for key, value, redirection in lane.refused:
                self._put_redirected(key, value, redirection, address, copies)
                if stored:
                    stored(key)

    def _put_redirected(self, key: str, value: Buffers, error: ResponseError, asked: Address, copies: Copies) -> None:
        copies = self.copies_of(key, copies)
        _, *confirmed = granted(self._followed([("SET", key, list(value)), *copies.asked()], [error], asked))
        copies.check(confirmed)

    def getting(self, items: Sequence[Item]) -> Generator[None, None, None]:
        """Like `ArrayPool.getting`, from all nodes at once.

        If the keys are on several nodes, the next buffer may be written while this one is in use: buffers of several
        shards must differ. The keys of one shard are on one node.
        """
        groups = self.nodes.by_node([key for key, _ in items])
        if len(groups) == 1:
            yield from self._stream(next(iter(groups)), items)
            return
        filled: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        closed = threading.Event()

        def fill(address: Address, numbers: list[int]) -> None:
            try:
                for number, _ in zip(numbers, self._stream(address, [items[n] for n in numbers]), strict=True):
                    filled.put(number)
                    if closed.is_set():
                        return
            except BaseException as error:
                filled.put(error)

        with ThreadPoolExecutor(len(groups), "kvps-get") as threads:
            try:
                for address, numbers in groups.items():
                    threads.submit(fill, address, numbers)
                there: set[int] = set()
                for number in range(len(items)):
                    while number not in there:
                        outcome = filled.get()
                        if isinstance(outcome, BaseException):
                            raise outcome
                        there.add(outcome)
                    yield
            finally:
                closed.set()

    def _stream(self, address: Address, items: Sequence[Item]) -> Generator[None, None, None]:
        """GET each key of a node into its buffer. A key that has moved is got from where it is."""
        number = 0
        while number < len(items):
            try:
                with self.nodes.using(address) as pool:
                    for _ in pool.getting(items[number:]):
                        yield
                        number += 1
            except AskError as error:
                self._get_redirected(*items[number], error, address)
                yield
                number += 1

    def _get_redirected(self, key: str, target: memoryview, error: ResponseError, asked: Address) -> None:
        """GET a key from where an error sends this, and from there as often as it is sent on."""
        redirection: ResponseError | None = error
        for _ in range(_MOST_HOPS):
            assert redirection
            asked = self.nodes.redirected(redirection, asked)
            first = () if isinstance(redirection, MovedError) else (ASKING,)
            if (redirection := self._get_one(key, target, first, asked)) is None:
                return
        raise error

    def _get_one(self, key: str, target: memoryview, first: Sequence[Command], node: Address) -> AskError | None:
        """GET a key from a node. Return where that sends this, or None if the buffer is filled. Raises ChunkGone."""
        try:
            with self.nodes.using(node) as pool:
                if not pool.exchange(first, [(key, target)])[1][0]:
                    raise ChunkGone("a chunk is gone")
                return None
        except AskError as redirection:
            return redirection

    def close(self) -> None:
        """Close all connections."""
        self.nodes.close()


def _at_once(command: Command) -> bool:
    """Return whether a command is about those beside it, or keeps them waiting."""
    return command[0] in _AT_ONCE or (command[0] == "XREAD" and command[1] == "BLOCK")
