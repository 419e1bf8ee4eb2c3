"""One node of `kvps host`: its password, and the last one that leaves."""

from __future__ import annotations

import pytest
from helpers.clusters import node_ports

from kvps.connection.client import Client
from kvps.connection.slots import SLOTS, Address
from kvps.errors import InvalidSetting
from kvps.server import cluster_node, private_server
from kvps.server.data_host import DataHost


def test_any_password_is_one_word_of_the_settings() -> None:
    address = Address("127.0.0.1", *node_ports(1))
    password = 'a "b\\ c\n\x7fd'
    with cluster_node.started(address, password, None), Client(cluster_node.url_of(address, password)) as client:
        assert client.call("PING")


@pytest.mark.slow
def test_who_is_left_alone_keeps_all_slots_and_says_so() -> None:
    """The others may have given it theirs while it waited for its turn to give its own."""
    address, ended = Address("127.0.0.1", *node_ports(1)), list[bool]()
    with cluster_node.started(address, None, None), Client(cluster_node.url_of(address, None)) as client:
        host = DataHost(address, None)
        host.come(None)
        client.call("SET", "kvps:kept", 1)
        assert not host.leave(lambda: ended.append(True), resets=True)
        assert client.call("EXISTS", "kvps:kept")
        assert int(client.call("CLUSTER INFO")["cluster_slots_assigned"]) == SLOTS
    assert not ended


def test_an_address_that_is_none_is_refused_in_a_line() -> None:
    with pytest.raises(InvalidSetting, match="a port from 1 to 55535"):
        cluster_node.parse_listen("127.0.0.1:60000")
    for parse in (cluster_node.parse_listen, lambda text: private_server.tcp_url("unix:///s", text)):
        with pytest.raises(InvalidSetting, match="--listen wants HOST:PORT"):
            parse("127.0.0.1:" + "9" * 5000)
