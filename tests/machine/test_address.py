"""The address that `--listen 0.0.0.0` tells others, and whose an address is."""

from __future__ import annotations

import sys

import pytest
from kvps_bench.hosts import Network, NoHosts

from kvps.machine.address import addresses_of, is_of_this_host

_PRINT = "import sys; from kvps.machine.address import outward_address; print(outward_address())"


@pytest.fixture
def host():
    try:
        with Network(1) as hosts:
            yield hosts[0]
    except NoHosts as why:
        pytest.skip(str(why))


@pytest.mark.slow
def test_the_address_on_the_way_to_others_is_named_and_without_a_way_the_name(host) -> None:
    assert host.run(sys.executable, "-c", _PRINT).strip() == host.address
    host.run("ip", "route", "del", "default")
    assert host.run(sys.executable, "-c", _PRINT).strip() == host.name


def test_a_name_has_addresses_and_an_address_is_its_own() -> None:
    assert addresses_of("10.1.2.3") == {"10.1.2.3"}
    assert addresses_of("::1") == {"::1"}
    assert addresses_of("localhost") <= {"127.0.0.1", "::1"}
    assert addresses_of("localhost")
    assert addresses_of("a" * 300) == set()


def test_the_addresses_of_a_host_are_its_own_and_those_of_another_are_not(host) -> None:
    ask = "import sys; from kvps.machine.address import is_of_this_host as own; print([own(a) for a in sys.argv[1:]])"
    asked = host.run(sys.executable, "-c", ask, host.address, "127.0.0.1", "10.78.0.77")
    assert asked.strip() == "[True, True, False]"
    assert not is_of_this_host(host.address)
