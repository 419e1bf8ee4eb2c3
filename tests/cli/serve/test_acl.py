"""`kvps acl`, and runs of commands that each have the user of their role."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import Started, kvps_run, refused
from helpers.digits_job import proved
from helpers.harness import aggregating, await_version, work_on
from helpers.servers import free_port

import kvps
from kvps.server import private_server
from kvps.store import Store

Start = Callable[..., Started]
ONE = {"w": np.zeros(8, np.float32)}


@pytest.fixture
def users(store: Store, raw: Any, home: Path) -> Any:
    """A function that makes a user with `kvps acl --apply` and returns its URL."""

    def url(job: str, role: str) -> str:
        done = kvps_run("acl", job, "--role", role, "--apply", "--redis", store.url)
        assert done.returncode == 0, done.stderr
        name, _, found = done.stdout.rstrip("\n").partition("=")
        assert name == "export KVPS_REDIS_URL"
        (url,) = shlex.split(found)
        return url

    yield url
    names = [name for name in raw.acl_users() if name != "default"]
    raw.acl_deluser(*names)


@pytest.mark.slow
def test_the_printed_line_is_a_command_that_makes_the_user(store: Store, raw: Any, home: Path) -> None:
    done = kvps_run("acl", "mine", "--role", "worker", "--redis", store.url)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:4] == ["ACL", "SETUSER", "kvps-mine-worker", "reset"]
    assert raw.acl_users() == ["default"], "nothing was changed"
    raw.execute_command(*words)
    assert raw.acl_deluser("kvps-mine-worker") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mine", "--role", "admin"], "reader, evaluator, worker, actor, aggregator, learner"),
        (["a b", "--role", "worker"], "job name 'a b'"),
        (["mine", "--role", "worker", "--user", "default"], "choose another name"),
        (["mine", "--role", "worker", "--password-file", "open"], "chmod 600"),
        (["mine", "--role", "worker", "--password-file", "empty"], "one line of 1 to"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.slow
def test_usage_errors(store: Store, raw: Any, home: Path, arguments: list[str], words: str) -> None:
    Path("open").write_text("x\n")
    Path("open").chmod(0o644)
    Path("empty").touch(0o600)
    assert words in refused("acl", *arguments, "--redis", store.url, "--apply")
    assert raw.acl_users() == ["default"]


@pytest.mark.slow
def test_a_password_of_ones_own_and_a_user_who_may_not_set_users(store: Store, users: Any) -> None:
    store.create_job("mine", ONE)
    Path("secret").write_text("s3cret@:/\n")
    Path("secret").chmod(0o600)
    done = kvps_run(
        *("acl", "mine", "--role", "reader", "--user", "ann", "--password-file", "secret", "--apply"),
        KVPS_REDIS_URL=store.url,
    )
    url = done.stdout.rstrip().partition("=")[2]
    assert "ann:s3cret%40%3A%2F@" in url
    with kvps.connect(url) as theirs:
        assert theirs.job("mine").state().version == 0
    line = refused("acl", "mine", "--role", "operator", "--apply", "--redis", url, code=1)
    assert "does not let this user " in line
    assert "s3cret" not in line


@pytest.mark.slow
def test_what_a_reader_may_not_do_is_said_in_one_line(store: Store, users: Any) -> None:
    store.create_job("mine", ONE)
    store.create_job("other", ONE)
    url = users("mine", "reader")
    for command in ("status other", "rm mine --yes", "jobs", "create digits --job new --quiet"):
        assert "does not let this user " in refused(*command.split(), "--redis", url, code=1)
    assert kvps_run("status", "mine", "--redis", url).returncode == 0
    assert store.jobs() == ["mine", "other"]


@pytest.mark.slow
def test_a_learner_and_an_actor_with_their_own_passwords(store: Store, users: Any) -> None:
    learner, reader = users("policy", "learner"), users("policy", "reader")
    with kvps.connect(learner) as theirs, theirs.publisher("policy", ONE) as policy:
        assert policy.publish({"w": np.ones_like(ONE["w"])}) == 1
        with kvps.connect(reader) as ours, ours.watch("policy") as watch:
            assert watch.update() == 1
            assert watch.arrays["w"].tobytes() == np.ones_like(ONE["w"]).tobytes()
    for url, command in ((reader, "stop policy"), (learner, "queue"), (learner, "status other")):
        assert "does not let this user " in refused(*command.split(), "--redis", url, code=1)
    assert store.jobs() == ["policy"]


@pytest.mark.slow
def test_an_ssp_run_with_kills_with_every_process_under_its_own_role(store: Store, users: Any, start: Start) -> None:
    submitter, aggregator = users("mine", "submitter"), users("mine", "aggregator")
    worker, reader = users("mine", "worker"), users("mine", "reader")
    settings = ["--workers", "2", "--staleness", "2", "--epochs", "60", "--worker-timeout", "2", "--lease", "1"]
    done = kvps_run("create", "digits", "--job", "mine", *settings, "--redis", submitter)
    assert done.returncode == 0, done.stderr

    def aggregate() -> Started:
        return start("aggregator", "start", "--job", "mine", "--redis", aggregator)

    def train(name: str) -> Started:
        return start("worker", "--job", "mine", "--id", name, "--redis", worker)

    job = store.job("mine")
    serving, workers = aggregate(), [train("w0"), train("w1")]
    await_version(job, 20)
    serving.end(signal.SIGKILL)
    serving = aggregate()
    await_version(job, 60)
    workers[1].end(signal.SIGKILL)
    workers[1] = train("w1")
    saved = kvps_run("checkpoint", "save", "mine", "--redis", reader)
    assert saved.returncode == 0, saved.stderr
    assert [one.wait() for one in workers] == [0, 0]
    assert serving.wait() == 0
    proved(job)
    done = kvps_run("status", "mine", "--redis", reader)
    assert "finished" in done.stdout


@pytest.mark.slow
def test_who_joins_from_elsewhere_cannot_administer_the_server(home: Path) -> None:
    """The user of --listen trains, but writes no file and runs no script of its own; the administrator's password is
    not in the line."""
    address = f"127.0.0.1:{free_port()}"
    assert kvps_run("server", "start", "--listen", address).returncode == 0
    url = private_server.running()
    assert url
    try:
        joining = private_server.tcp_url(url, address)
        with kvps.connect(url) as ours, kvps.connect(joining) as theirs:
            assert ours.url.partition("password=")[2] not in joining
            for command in (
                *("CONFIG SET dir /tmp", "CONFIG GET *", "SAVE", "BGSAVE", "FLUSHALL", "KEYS *", "EVAL return 0"),
                *("SHUTDOWN NOSAVE", "ACL LIST", "CLIENT LIST", "GET another"),
            ):
                with pytest.raises(kvps.errors.NotPermitted):
                    theirs.client.call(*command.split())
            job = theirs.create_job("mine", ONE, transport="redis")
            with aggregating(job):
                assert work_on(job, "w0", 3) == [1, 2, 3]
                await_version(job, 3)
            theirs.remove_job("mine")
            assert ours.jobs() == []
    finally:
        private_server.stop()
