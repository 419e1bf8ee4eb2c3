"""A cluster for the tests of its client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.clusters import Cluster, running_cluster

from kvps.connection.cluster import ClusterClient


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three masters without replicas. A test may move slots; it leaves no slot on its way."""
    with running_cluster("--unixsocket", "s", masters=3, replicas=0) as found:
        yield found


@pytest.fixture
def client(cluster: Cluster) -> Iterator[ClusterClient]:
    """A client that has the map of slots."""
    with ClusterClient(cluster.url, patience_s=20) as found:
        found.preflight()
        yield found
