"""Arrays over TLS: the same connections, behind a certificate that is checked."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.certificates import AUTHORITY, authority_file
from helpers.commands import kvps_run
from helpers.harness import aggregating, gradient, model, plain_loop, work
from helpers.waiting import eventually

import kvps


@pytest.fixture
def tls_url(server_url: str, tmp_path: Path) -> Iterator[str]:
    """The server behind a process's end of TLS, as stunnel or a cloud's proxy is."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    AUTHORITY.issue_cert("localhost").configure_cert(context)
    loop = asyncio.new_event_loop()

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
        target.close()

    writers: list[asyncio.StreamWriter] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        behind = await asyncio.open_unix_connection(server_url.removeprefix("unix://"))
        writers.append(behind[1])
        await asyncio.gather(copy(reader, behind[1]), copy(behind[0], writer), return_exceptions=True)

    server = loop.run_until_complete(asyncio.start_server(relay, "localhost", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"rediss://localhost:{server.sockets[0].getsockname()[1]}?ssl_ca_certs={authority_file(tmp_path)}"

    async def end() -> None:
        server.close()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end(), loop).result(120)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_training_over_tls_is_the_same(tls_url: str) -> None:
    with kvps.connect(tls_url) as store:
        job = store.create_job("tls", model(), workers=2, shards=2, optimizer=kvps.SGD(lr=0.05))
        with aggregating(job):
            work(job, 5, lambda session, params, round_: gradient(params, session.rank, round_), 2)
            assert eventually(lambda: job.state().version == 5)
        expected = plain_loop(model(), 2, 5, 0.05)
        for name, value in job.snapshot()[1].items():
            assert value.tobytes() == expected[name].tobytes(), name
        store.remove_job("tls")


def test_chunks_over_tls(tls_url: str) -> None:
    """More bytes than a TLS record, a socket's buffer or a window of replies holds."""
    params = {"x": np.random.default_rng(0).normal(size=3_000_000).astype(np.float32)}
    with kvps.connect(tls_url) as store:
        job = store.create_job("tls", params)
        assert job.snapshot()[1]["x"].tobytes() == params["x"].tobytes()
        store.remove_job("tls")


def test_a_server_that_cannot_prove_who_it_is(tls_url: str) -> None:
    with pytest.raises(kvps.NoServer, match="unable to get local issuer certificate"):
        kvps.connect(tls_url.partition("?")[0])


@pytest.mark.slow
def test_kvps_cli_checks_the_host_name(tls_url: str) -> None:
    """redis-cli and valkey-cli do not, so they are not used for TLS, though one may be on the PATH."""
    done = kvps_run("cli", "--redis", tls_url, "ping")
    assert (done.returncode, done.stdout) == (0, "PONG\n"), done.stderr
    done = kvps_run("cli", "--redis", tls_url.replace("localhost", "127.0.0.1"), "ping")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "certificate is not valid for '127.0.0.1'" in done.stderr
