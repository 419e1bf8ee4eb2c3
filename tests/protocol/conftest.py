"""Here the server matters: every test runs on a server of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.clusters import running
from helpers.servers import BINARIES


@pytest.fixture(scope="session", params=list(BINARIES))
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server of each kind."""
    with running(request.param) as url:
        yield url
