"""Slots of keys, and keys of commands, beside what a real cluster says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import redis
from helpers.clusters import Cluster
from helpers.harness import aggregating, gradient, model, work
from hypothesis import given, settings
from hypothesis import strategies as st

import kvps
from kvps.connection.cluster_pool import ClusterPool
from kvps.connection.slots import SLOTS, Address, SlotMap, keys_of, slot_of

_TEXT = st.text(st.sampled_from("{}ab/:") | st.characters(codec="utf-8"), max_size=12)


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[Any]:
    """One node of the cluster, asked directly."""
    with redis.Redis(port=cluster.nodes[0].port, protocol=2, decode_responses=True) as found:
        yield found


@pytest.mark.slow
@settings(max_examples=50)
@given(keys=st.lists(_TEXT, min_size=1, max_size=20))
def test_a_key_has_the_slot_that_the_server_says(node: Any, keys: list[str]) -> None:
    with node.pipeline(transaction=False) as asked:
        for key in keys:
            asked.execute_command("CLUSTER KEYSLOT", key)
        assert asked.execute() == [slot_of(key) for key in keys]


def test_a_name_that_is_no_text_has_a_slot(node: Any) -> None:
    assert slot_of(b"\xff{\xfe}".decode("utf-8", "surrogateescape")) == node.execute_command(
        "CLUSTER KEYSLOT", b"\xff{\xfe}"
    )


@pytest.mark.slow
def test_every_command_that_a_job_sends_goes_to_its_keys(
    cluster: Cluster, node: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A key that the client does not see sends the command to a wrong node, or a script to none."""
    sent: dict[tuple[Any, ...], Sequence[Any]] = {}
    exchange = ClusterPool.exchange

    def noted(self: ClusterPool, commands: Sequence[Any], *others: Any, **named: Any) -> Any:
        for command in commands if named.get("key") is None else ():  # with `key`, its own keys do not choose the node
            about = command[1] if command[0] == "EVALSHA" else len(command)
            sent.setdefault((command[0], about), command)
        return exchange(self, commands, *others, **named)

    monkeypatch.setattr(ClusterPool, "exchange", noted)
    with kvps.connect(cluster.url) as store:
        job = store.create_job("commands", model(), workers=2, shards=3, units=0, lease_ms=500)
        with aggregating(job):
            work(job, 3, lambda session, params, round_: gradient(params, session.rank, round_), workers=2)
            job.await_finished()
        store.restore_job(job.checkpoint(), "again")
        list(job.log())
        for name in ("commands", "again"):
            store.remove_job(name)
    assert len(sent) > 25
    for command in sent.values():
        words = [word if isinstance(word, (str, int, float)) else "value" for word in command]
        found = []
        with suppress(redis.ResponseError):  # the server refuses a command that has no keys
            found = node.execute_command("COMMAND GETKEYS", *str(words[0]).split(), *words[1:])
        assert list(keys_of(command)) == found, command
        if command[0] == "EVALSHA":
            assert re.search(r":never(:[0-9a-f]{16})?$", found[-1]), "see kvps/protocol/script_header.py"


def test_the_map_of_slots() -> None:
    reply = [[0, 99, ["10.0.0.1", 1, "a"], ["10.0.0.2", 2, "b"]], [200, SLOTS - 1, ["", 3, "c"]]]
    found = SlotMap.of(reply, asked=Address("here", 9))
    assert [found.master_of(slot) for slot in (0, 99, 100, 199, 200, SLOTS - 1)] == [
        *[Address("10.0.0.1", 1)] * 2,
        *[None] * 2,
        *[Address("here", 3)] * 2,
    ]
    assert found.masters == [Address("10.0.0.1", 1), Address("here", 3)]
    assert found.nodes == [*found.masters, Address("10.0.0.2", 2)]
    assert SlotMap([]).master_of(5) is None
