"""Servers whose certificate has a name, while a cluster or Sentinels tell clients an address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.certificates import authority_file, issued
from helpers.clusters import Cluster, running_cluster
from helpers.harness import model
from helpers.sentinels import NAME, watched_servers
from helpers.waiting import eventually

import kvps

pytestmark = pytest.mark.slow
FACT = "its certificate is for localhost, and not for 127.0.0.1"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The files of a certificate for localhost alone, of its key and of its authority."""
    folder = tmp_path_factory.mktemp("certificates")
    return *issued(folder, "localhost"), authority_file(folder)


@pytest.fixture(autouse=True)
def environment(files: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that trusts the authority, and waits without end for what may pass."""
    monkeypatch.setenv("KVPS_TLS_CA", str(files[2]))
    monkeypatch.setenv("KVPS_PATIENCE", "0")


@pytest.fixture(scope="module")
def cluster(files: tuple[Path, Path, Path]) -> Iterator[Cluster]:
    """Two masters that announce their addresses."""
    with running_cluster(masters=2, replicas=0, certificate=files) as found:
        yield found


def _announcing(cluster: Cluster, kind: str, name: str) -> str:
    """Have the nodes announce something else, and wait until all know it. Return a URL with the certificate's name."""
    for node in cluster.nodes:
        node.ask("CONFIG SET", "cluster-preferred-endpoint-type", kind)
        node.ask("CONFIG SET", "cluster-announce-hostname", name)
    hosts = {"ip": "127.0.0.1", "unknown-endpoint": None, "hostname": name or "?"}
    told = [[hosts[kind]] * 2] * 2
    assert eventually(lambda: [[row[2][0] for row in cluster.slots(node)] for node in cluster.nodes] == told)
    return f"rediss://localhost:{cluster.nodes[0].port}"


@pytest.mark.parametrize("kind", ["ip", "hostname"])
def test_nodes_that_announce_no_name_of_their_certificate(cluster: Cluster, kind: str) -> None:
    says = rf"^rediss://127.0.0.1:\d+ is where the cluster says that a node is, but {FACT}: .* \(cluster-announce-host"
    with pytest.raises(kvps.ServerUnfit, match=says) as refused:
        kvps.connect(_announcing(cluster, kind, ""))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("kind", "name"), [("hostname", "localhost"), ("unknown-endpoint", "")])
def test_nodes_that_announce_the_name_of_their_certificate(cluster: Cluster, kind: str, name: str) -> None:
    with kvps.connect(_announcing(cluster, kind, name)) as store:
        job = store.create_job(f"by-{kind}", model(), shards=4)
        assert [array.tobytes() for array in job.snapshot()[1].values()] == [a.tobytes() for a in model().values()]


def test_a_host_of_the_url_that_the_certificate_has_not(cluster: Cluster) -> None:
    with pytest.raises(kvps.NoServer, match=rf"does not prove that it is this server: {FACT}: write such a name in"):
        kvps.connect(_announcing(cluster, "ip", "").replace("localhost", "127.0.0.1"))


def test_sentinels_that_name_an_address(files: tuple[Path, Path, Path]) -> None:
    with watched_servers(certificate=files, replicas=0) as watched:
        url = watched.url.replace("redis", "rediss", 1).replace("127.0.0.1", "localhost")
        says = rf"^the Sentinels at {url} name the master 127.0.0.1, but {FACT}: .* \(resolve-hostnames yes"
        with pytest.raises(kvps.ServerUnfit, match=says.replace("+", r"\+")):
            kvps.connect(url)
        for node in watched.sentinels:
            node.ask("SENTINEL REMOVE", NAME)
            node.ask("SENTINEL CONFIG", "SET", "resolve-hostnames", "yes")
            node.ask("SENTINEL CONFIG", "SET", "announce-hostnames", "yes")
            node.ask("SENTINEL MONITOR", NAME, "localhost", watched.servers[0].port, 2)
        with kvps.connect(url) as store:
            assert store.jobs() == []
