"""The rules of optimizers hardly depend on the kind of server: one will do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.clusters import running
from helpers.servers import BINARIES


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The URL of a server of the first kind."""
    with running(next(iter(BINARIES))) as url:
        yield url
