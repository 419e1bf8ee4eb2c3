"""Servers that Sentinels watch: the URL, the search for the master, and failovers. All on real Sentinels."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.harness import aggregating, log_entries, model, plain_loop, work_on
from helpers.sentinels import NAME, Watched, watched_servers
from helpers.servers import free_port
from helpers.waiting import eventually
from kvps_cli.serve.acl import url_for

import kvps
from kvps.connection import sentinel
from kvps.connection.client import Client
from kvps.connection.sockets import connection_settings
from kvps.connection.urls import redacted
from kvps.transport.shared_memory import folder_of

PATIENT: dict[str, Any] = {"worker_timeout_ms": 60_000, "lease_ms": 1_000}
URL = "redis+sentinel://127.0.0.1:1,127.0.0.1:2/mymaster"
OF_MASTER, OF_SENTINEL = (
    "redis+sentinel://:wrong@127.0.0.1:{master}/mymaster",
    "redis+sentinel://:wrong@127.0.0.1:{sentinel}",
)


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """Servers and Sentinels with a password each."""
    with watched_servers(password="opensesame", sentinel_password="hush") as found:
        yield found


# -- the URL ------------------------------------------------------------------------------------------------------


def test_a_url_names_sentinels_a_master_and_a_login() -> None:
    url = "redis+sentinel://me:pw%40@a,b:7,[::1]:8/the%20name/3?sentinel_password=s%2Fs&sentinel_username=u&health_check_interval=9"
    plain, found = sentinel.split(url)
    assert plain == "redis://me:pw%40@sentinel/3?health_check_interval=9"
    assert found.places == [("a", 26379), ("b", 7), ("::1", 8)]
    assert str(found) == "the name of a:26379, b:7, [::1]:8"
    assert (found._settings["username"], found._settings["password"]) == ("u", "s/s")
    settings = connection_settings(url)
    assert (settings["username"], settings["password"], settings["db"]) == ("me", "pw@", 3)


@pytest.mark.parametrize(
    "rest",
    ["", "a", "a/", "/name", "a,/name", "a,b:hush/name", "a:99999/name", ":hush/x@a/name", "[::1/name", ":hush@/name"],
)
def test_a_malformed_url_is_refused_in_one_line_that_does_not_quote_it(rest: str) -> None:
    with pytest.raises(kvps.InvalidSetting, match=r"not a Redis URL.*redis\+sentinel://HOST:PORT,") as caught:
        kvps.connect(f"redis+sentinel://{rest}")
    assert "hush" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_both_passwords_are_hidden() -> None:
    url = "redis+sentinel://me:hush@a,b:1/name?sentinel_password=hush"
    assert redacted(url) == "redis+sentinel://me:***@a,b:1/name?sentinel_password=***"
    assert "hush" not in repr(Client(url))


def test_a_role_gets_a_url_of_the_same_sentinels() -> None:
    url = "redis+sentinel://me:hush@a,b:1/name/2?sentinel_password=s"
    assert url_for(url, "w", "x/") == "redis+sentinel://w:x%2F@a,b:1/name/2?sentinel_password=s"


def test_two_masters_do_not_share_memory() -> None:
    assert len({folder_of(url) for url in (URL, URL.replace("mymaster", "other"), URL.replace(":1", ":3"))}) == 3


# -- the search ---------------------------------------------------------------------------------------------------


def test_dead_and_silent_sentinels_cost_no_start(watched: Watched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        url = watched.url.replace("@", f"@127.0.0.1:{free_port()},127.0.0.1:{silent.getsockname()[1]},")
        with kvps.connect(url) as store:
            assert store.client.port() == watched.master.port
            sentinels = store.client._arrays._pool.connection_kwargs["sentinels"]
            assert sentinels.places[0][1] == watched.sentinels[0].port, (
                "the one that answered is asked first from now on"
            )


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (URL, r"no Sentinel answers at 127.0.0.1:1, 127.0.0.1:2: .*refused"),
        (f"{OF_MASTER}?sentinel_password=opensesame", r"no Sentinel answers at .*unknown command"),
        (f"{OF_SENTINEL}/another?sentinel_password=hush", "no Sentinel knows a master named 'another' "),
        (f"{OF_SENTINEL}/{NAME}", r"no Sentinel answers .*uthentication required"),
        (f"{OF_SENTINEL}/{NAME}?sentinel_password=hush", "refuses the login"),
    ],
)
def test_what_cannot_name_the_master_or_log_in_is_said_in_one_line(watched: Watched, url: str, words: str) -> None:
    places = {"master": watched.master.port, "sentinel": watched.sentinels[0].port}
    with pytest.raises(kvps.NoServer, match=words) as caught:
        kvps.connect(url.format(**places))
    assert not any(hidden in str(caught.value) for hidden in ("\n", "opensesame", "hush", "wrong"))


def test_a_sentinel_without_this_master_is_passed_over(watched: Watched) -> None:
    forgetful = watched.sentinels[0]
    forgetful.ask("SENTINEL REMOVE", NAME)
    try:
        with kvps.connect(watched.url) as store:
            assert store.client.port() == watched.master.port
    finally:
        watched.watch(forgetful)
    assert eventually(watched.is_whole)


def test_a_replica_is_not_taken_for_the_master(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = next(server for server in watched.servers if server is not watched.master)
    monkeypatch.setattr(sentinel.Sentinels, "master", lambda self: ("127.0.0.1", replica.port))
    monkeypatch.setenv("KVPS_PATIENCE", "0.1")
    with Client(watched.url) as client, pytest.raises(kvps.NoServer, match="is a replica"):
        client.preflight()


# -- failovers ----------------------------------------------------------------------------------------------------


@contextmanager
def _killed(watched: Watched) -> Iterator[None]:
    """Kill the master; after the block, wait until the other has taken its place, and start it again."""
    victim = watched.master
    victim.kill()
    yield
    assert eventually(lambda: watched.failed_over(victim))
    victim.start()
    assert eventually(watched.is_whole)


@pytest.mark.slow
def test_a_client_follows_the_master_and_a_start_waits_for_it(watched: Watched) -> None:
    with kvps.connect(watched.url) as store:
        before = store.client.run_id()
        with _killed(watched), kvps.connect(watched.url) as other:
            assert other.client.run_id() == store.client.run_id() != before
            with pytest.raises(
                kvps.ServerUnfit, match=r" 1 known replica cannot be reached, and may take over later: "
            ):
                store.create_job("job", model(), durability="replicated")  # the old master


@pytest.mark.slow
@pytest.mark.parametrize("bulk", [True, False])
def test_a_demoted_master_is_left(watched: Watched, bulk: bool) -> None:
    """Nobody cuts its connections here. The first write that it refuses must lead to the new master."""
    with kvps.connect(watched.url) as store:
        old = watched.master
        other = next(server for server in watched.servers if server is not old)
        old.ask("REPLICAOF", "127.0.0.1", other.port)
        if bulk:
            store.client.put([("a", [memoryview(b"a")])])
        else:
            store.client.call("SET", "a", "a")
        assert store.client.call("GET", "a") == "a"
        assert watched.master is other
        assert eventually(watched.is_whole)


@pytest.mark.slow
def test_a_job_trains_through_a_failover_to_the_same_bits(watched: Watched) -> None:
    """With durability replicated nothing is lost: BSP ends with the same bits as a loop without kvps."""
    with kvps.connect(watched.url) as store:
        job = store.create_job(
            "job", model(), workers=2, shards=2, optimizer=kvps.SGD(lr=0.05), durability="replicated", **PATIENT
        )
        with aggregating(job), ThreadPoolExecutor(2) as pool:
            workers = [pool.submit(work_on, job, f"w{number}", 40) for number in range(2)]
            assert eventually(lambda: job.state().version > 5)
            with _killed(watched):
                pass
            for worker in workers:
                worker.result()
            assert eventually(lambda: job.state().version == 40)
        expected = plain_loop(model(), 2, 40, 0.05)
        for name, value in job.snapshot()[1].items():
            assert value.tobytes() == expected[name].tobytes(), name
        assert [fields["lost"] for _, fields in log_entries(job) if fields["kind"] == "recover"] == ["0"]
        store.remove_job("job")
