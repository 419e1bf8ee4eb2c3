"""Commands that a server does not know, or a user may not run: what kvps needs is said, and no text of a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from helpers.clusters import Cluster, running_cluster
from helpers.harness import model
from helpers.sentinels import watched_servers
from helpers.servers import running_server

import kvps
from kvps.errors import NotPermitted
from kvps.protocol import lua_scripts
from kvps.store import Store

NOT_KNOWN = r"does not know {}, which kvps needs: it is renamed or disabled there \(rename-command in redis\.conf\)"
RIGHT = "does not let this user run {}: use a user whose role may (kvps acl), or give it +{}"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("SCRIPT", NOT_KNOWN.format("SCRIPT")),
        ("EVALSHA", NOT_KNOWN.format("EVALSHA")),
        ("HMGET", NOT_KNOWN.format("a command of its scripts")),
        ("INFO", NOT_KNOWN.format("INFO")),
    ],
)
def test_a_command_that_was_renamed_is_named(command: str, words: str) -> None:
    with running_server("--rename-command", command, "hidden") as url, pytest.raises(kvps.ServerUnfit, match=words):
        _train(url)


def _train(url: str) -> None:
    with kvps.connect(url) as store:
        store.create_job("job", model(), transport="redis").join()


FEW = ("ACL", "SETUSER", "few", "on", ">secret", "~*", "&*", "+@all", "-@dangerous")
"""A user that may do what managed servers let their users do."""


@contextmanager
def few_rights(store: Store, *rights: str) -> Iterator[Store]:
    """Such a user, with some rights more or less."""
    store.client.call(*FEW, *rights)
    try:
        with kvps.connect(store.url.replace("unix://", "unix://few:secret@")) as few:
            yield few
    finally:
        store.client.call("ACL", "DELUSER", "few")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
def test_a_right_that_is_missing_on_several_servers_is_named(kind: str) -> None:
    with running_cluster(replicas=0) if kind == "cluster" else watched_servers() as servers:
        for server in servers.nodes if isinstance(servers, Cluster) else servers.servers:
            server.ask(*FEW)
        url = servers.url.replace("://", "://few:secret@")
        with kvps.connect(servers.url) as store, kvps.connect(url) as few:
            store.create_job("job", model(), transport="redis")
            assert few.job("job").state().version == 0
            for act in (_create, lambda few: few.job("job").join()):
                with pytest.raises(NotPermitted, match=r"give it \+info"):
                    act(few)


def _create(few: Store) -> object:
    return few.create_job("another", model(), transport="redis")


@pytest.mark.parametrize(
    ("rights", "act", "words"),
    [
        ((), _create, RIGHT.format("INFO", "info")),
        ((), lambda few: few.job("job").join(), "or give it +info"),
        (("+info", "-evalsha"), lambda few: few.job("job").join(), RIGHT.format("EVALSHA", "evalsha")),
        (("+info", "-script"), lambda few: few.job("job").join(), "start there, or give this user +script|load"),
        (("-hgetall",), lambda few: few.job("job"), RIGHT.format("HGETALL", "hgetall")),
    ],
)
def test_a_right_that_is_missing_is_named(
    store: Store, rights: tuple[str, ...], act: Callable[[Store], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lua_scripts, "_LOAD_S", 0.1)
    store.create_job("job", model(), transport="redis")
    store.client.call("SCRIPT FLUSH")
    with few_rights(store, *rights) as few, pytest.raises(NotPermitted) as refused:
        act(few)
    assert words in str(refused.value)


def test_who_may_not_run_info_may_read_jobs(store: Store) -> None:
    store.create_job("job", model(), transport="redis")
    with few_rights(store) as few:
        assert (few.jobs(), few.server_name) == (["job"], store.server_name)
        assert few.client.redis_version() == store.client.redis_version()
        job = few.job("job")
        version, weights = job.snapshot()
    assert version == 0
    for name, array in model().items():
        np.testing.assert_array_equal(weights[name], array)
