"""Hosts made of namespaces: what each has of its own, its link, and that none outlives its maker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from helpers.waiting import eventually
from kvps_bench.hosts import Host, Network, NoHosts

from kvps.machine import process

_RECEIVE = """
import socket
listening = socket.create_server(("0.0.0.0", 5000))
print("listens", flush=True)
came, _ = listening.accept()
got = 0
while data := came.recv(1 << 20):
    got += len(data)
print(got)
"""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[3])) as to:
    to.sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture
def two() -> Iterator[Sequence[Host]]:
    try:
        with Network(2, 80e6) as made:
            yield made
    except NoHosts as why:
        pytest.skip(str(why))


def test_a_host_has_its_own_name_processes_network_and_memory(two: Sequence[Host]) -> None:
    here = f"/dev/shm/kvps-hosts-{os.getpid()}"
    names = [host.run("hostname").strip() for host in two]
    assert names == [host.name for host in two] == ["kvps0", "kvps1"]
    two[0].run("touch", here)
    assert two[0].run("ls", "/dev/shm").strip() == Path(here).name
    assert two[1].run("ls", "/dev/shm").strip() == ""
    assert not Path(here).exists()
    assert len(two[0].run("sh", "-c", "echo /proc/[0-9]*").split()) == 2, "its first process, and sh"


def test_a_link_holds_its_rate_and_counts_what_passes(two: Sequence[Host]) -> None:
    sent = 4_000_000
    receiver = two[1].start(sys.executable, "-c", _RECEIVE, stdout=subprocess.PIPE, text=True)
    assert receiver.stdout
    assert receiver.stdout.readline() == "listens\n"
    before, began = two[1].counted(), time.monotonic()
    two[0].run(sys.executable, "-c", _SEND, two[1].address, str(sent), "10")
    assert receiver.communicate(timeout=120)[0].strip() == str(sent)
    took = time.monotonic() - began
    assert took > 0.8 * 8 * sent / 80e6, "faster than 80 Mbit/s"
    assert sent < two[1].counted()[1] - before[1] < 1.1 * sent
    assert two[1].counted()[0] - before[0] < 0.1 * sent


_MAKE = """
import time
from kvps_bench.hosts import Network
with Network(1) as [host]:
    sleeper = host.start("sleep", "1000")
    print(sleeper.pid, host._first.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
def test_nothing_is_left_when_the_process_that_made_hosts_is_killed(two: Sequence[Host]) -> None:
    maker = subprocess.Popen([sys.executable, "-c", _MAKE], stdout=subprocess.PIPE, text=True)
    assert maker.stdout
    pids = [int(word) for word in maker.stdout.readline().split()]
    assert all(process.runs(pid) for pid in pids)
    maker.kill()
    maker.communicate()
    assert eventually(lambda: not any(process.runs(pid) for pid in pids))


def test_hosts_that_cannot_be_made_are_one_line_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # /usr/sbin is searched too, where ip and tc are
    with pytest.raises(NoHosts, match=r"these programs, which are not there: .*unshare, nsenter"):
        Network(1)
