"""Slots move evenly, while they are in use, and also after a move was interrupted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from helpers.clusters import Cluster, ClusterNode, running_cluster
from helpers.waiting import eventually
from hypothesis import given, settings
from hypothesis import strategies as st

import kvps
from kvps.connection.cluster import ClusterClient
from kvps.connection.slots import Address, slot_of
from kvps.server.cluster_members import Member, Members
from kvps.server.slots_mover import SlotsMover, fair_moves

# -- which slots move ---------------------------------------------------------------------------------------------

SIZES = st.lists(st.sampled_from([0, 0, 0, 1, 5, 1000]), max_size=40)


@settings(max_examples=40)
@given(st.lists(SIZES, min_size=1, max_size=5), st.data())
def test_the_shares_are_even_and_no_slot_moves_twice(sizes: list[list[int]], data: st.DataObject) -> None:
    held: dict[str, dict[int, int]] = {}
    for number, own in enumerate(sizes):
        held[f"n{number}"] = {100 * number + at: size for at, size in enumerate(own)}
    holders = data.draw(st.lists(st.sampled_from([*held, "new"]), min_size=1, unique=True))
    moves = fair_moves(held, holders)
    assert len({move.slot for move in moves}) == len(moves)
    after = Counter({node: len(slots) for node, slots in held.items()})
    for move in moves:
        assert move.slot in held[move.source]
        assert move.target in holders
        after[move.source] -= 1
        after[move.target] += 1
    assert max(after[node] for node in holders) - min(after[node] for node in holders) <= 1
    assert not any(after[node] for node in held if node not in holders)
    gained, lost = {move.target for move in moves}, {move.source for move in moves}
    assert not gained & lost, "no node takes slots and gives others"


def test_slots_with_keys_spread_too() -> None:
    """A job with three shards began on one node. With three nodes, each has one of them."""
    one = {"a": dict.fromkeys(range(300), 0) | {5: 1000, 70: 1001, 200: 999, 299: 10}}
    first = fair_moves(one, ["a", "b"])
    two = {"a": dict(one["a"]), "b": dict[int, int]()}
    for move in first:
        two["b"][move.slot] = two["a"].pop(move.slot)
    for move in fair_moves(two, ["a", "b", "c"]):
        two.setdefault(move.target, {})[move.slot] = two[move.source].pop(move.slot)
    assert sorted(len(slots) for slots in two.values()) == [100, 100, 100]
    assert sorted(sum(size > 900 for size in slots.values()) for slots in two.values()) == [1, 1, 1]


# -- what CLUSTER NODES says --------------------------------------------------------------------------------------


def test_a_line_of_a_node_is_read() -> None:
    line = "ab12 10.0.0.1:6379@16379,name,shard-id=ff myself,master - 0 0 3 connected 0-2 7 [8->-cd34] [9-<-ef56]"
    found = Member.of(line, Address("elsewhere", 1))
    assert found == Member(
        "ab12", Address("10.0.0.1", 6379), frozenset({"myself", "master"}), (0, 1, 2, 7), {8: "cd34"}, {9: "ef56"}
    )
    unknown = Member.of("ab12 :6379@16379 master,fail - 0 0 0 disconnected", Address("10.0.0.9", 1))
    assert unknown.address == Address("10.0.0.9", 6379)
    assert unknown.is_away


# -- on real nodes ------------------------------------------------------------------------------------------------

STAYS_MASTER = ("--cluster-allow-replica-migration", "no")  # as the nodes of `kvps host`, also without slots


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(*STAYS_MASTER, masters=3, replicas=0) as found:
        yield found


def _members(cluster: Cluster) -> Members:
    return Members(Address("127.0.0.1", cluster.nodes[0].port), None)


def _rebalance(cluster: Cluster, *holders: ClusterNode) -> int:
    with _members(cluster) as members, members.turn() as keep:
        return SlotsMover(members, keep).rebalance([node.id for node in holders])


def _is_quiet(cluster: Cluster) -> bool:
    with _members(cluster) as members:
        return not any(member.migrating or member.importing for member in members.masters())


@pytest.mark.slow
def test_all_slots_with_large_keys_go_and_come_back(cluster: Cluster) -> None:
    values = {f"{{large}}:{number}": f"{number}" * 300_000 for number in range(20)}
    values |= {f"small:{number}": str(number) for number in range(100)}
    first, *others = cluster.nodes
    with ClusterClient(cluster.url) as client:
        for key, value in values.items():
            client.call("SET", key, value)
        assert _rebalance(cluster, *others) > 5000
        assert not any(found[2][1] == first.port for found in cluster.slots())
        assert all(client.call("GET", key) == value for key, value in values.items())
        assert _rebalance(cluster, *cluster.nodes) > 5000
        assert all(client.call("GET", key) == value for key, value in values.items())
        assert _rebalance(cluster, *cluster.nodes) == 0, "they are even already"
        client.unlink(list(values))


@pytest.mark.slow
@pytest.mark.parametrize("done", ["importing", "migrating", "one key", "target"])
def test_a_move_that_was_interrupted_is_ended(cluster: Cluster, done: str) -> None:
    """A host was killed between two commands of a move. The next one to move slots ends it, and no key is lost."""
    keys = [f"{{{done}}}:{number}" for number in range(30)]
    slot = slot_of(keys[0])
    source = cluster.master_of(keys[0])
    target = cluster.other_than(source)
    with ClusterClient(cluster.url) as client:
        for key in keys:
            client.call("SET", key, "there")
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        if done != "importing":
            source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
        moved = {"one key": keys[:1], "target": keys}.get(done, [])
        if moved:
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *moved)
        if done == "target":
            target.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)
        _rebalance(cluster, *cluster.nodes)
        assert _is_quiet(cluster)
        assert all(client.call("GET", key) == "there" for key in keys)
        client.unlink(keys)


@pytest.mark.slow
def test_a_move_to_a_node_that_has_died_is_cancelled_and_the_node_forgotten() -> None:
    with running_cluster(*STAYS_MASTER, masters=3, replicas=0) as cluster:
        first, second, dead = cluster.nodes
        _rebalance(cluster, first, second)
        source = cluster.master_of("{gone}")
        source.ask("CLUSTER", "SETSLOT", slot_of("{gone}"), "MIGRATING", dead.id)
        dead.kill()
        with _members(cluster) as members:
            assert eventually(lambda: any("fail" in member.flags for member in members.all()))
            members.forget_dead()
            assert {member.id for member in members.all()} == {first.id, second.id}
        assert _rebalance(cluster, first, second) == 0
        assert _is_quiet(cluster)


@pytest.mark.slow
def test_a_dead_node_with_slots_is_said_in_one_line() -> None:
    with running_cluster(*STAYS_MASTER, masters=3, replicas=0) as cluster, _members(cluster) as members:
        dead = cluster.nodes[2]
        dead.kill()
        assert eventually(lambda: any("fail" in member.flags for member in members.all()))
        with pytest.raises(kvps.ServerUnfit, match=rf"^the node at 127.0.0.1:{dead.port} is away, and has [^\n]*$"):
            members.masters()
