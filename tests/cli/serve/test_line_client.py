"""`kvps cli` without redis-cli: what it prints is what redis-cli prints."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
from helpers.commands import KVPS, kvps_run
from helpers.paths import program_on_path
from helpers.terminals import on_a_terminal
from kvps_cli.serve.line_client import parse, run
from kvps_cli.serve.server import client_arguments

import kvps
from kvps.store import Store

pytestmark = pytest.mark.usefixtures("forked")


def _cli(url: str, *arguments: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """`kvps cli` with nothing on the PATH."""
    return subprocess.run(
        [*KVPS, "cli", "--redis", url, *arguments], capture_output=True, env=os.environ | {"PATH": ""}, **more
    )


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with a key of every kind."""
    for command in (
        ("SET", "text", 'a "quoted"\\ line\n\t\a\b\x01 and ü'),
        ("HSET", "hash", "w0", "1", "w1", "2"),
        ("SADD", "set", "a"),
        ("XADD", "stream", "1-1", "kind", "commit"),
        ("XADD", "stream", "2-1", "kind", "plan"),
        ("ZADD", "sorted", "1.5", "a"),
        ("RPUSH", "list", *map(str, range(11))),
    ):
        store.client.call(*command)
    return store


COMMANDS = [
    ["get", "text"],
    ["get", "none"],
    ["getrange", "text", "0", "3"],
    ["strlen", "text"],
    ["hgetall", "hash"],
    ["-3", "hgetall", "hash"],
    ["-3", "hgetall", "none"],
    ["-3", "smembers", "set"],
    ["-3", "smembers", "none"],
    ["lrange", "list", "0", "-1"],
    ["lrange", "none", "0", "-1"],
    ["xrange", "stream", "-", "+"],
    ["-3", "zscore", "sorted", "a"],
    ["-3", "zrange", "sorted", "0", "-1", "withscores"],
    ["-3", "get", "none"],
    ["type", "text"],
    ["--scan", "--pattern", "s*m"],
]


def test_it_prints_what_redis_cli_prints_into_a_pipe(filled: Store, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    program = program_on_path("redis-cli")
    for command in COMMANDS:
        real = [program, *client_arguments(filled.url)[0], "--raw", *command]
        expected = subprocess.run(real, capture_output=True, stdin=subprocess.DEVNULL).stdout
        run(filled.url, command)
        assert capfdbinary.readouterr().out.rstrip(b"\n") == expected.rstrip(b"\n"), command


def test_options() -> None:
    options = parse(["-3", "--raw", "hgetall", "-3"])
    assert (options.protocol, options.words) == (3, ["hgetall", "-3"])
    with pytest.raises(kvps.InvalidSetting, match="--stat needs redis-cli"):
        parse(["--stat"])


@pytest.mark.slow
def test_a_command_without_redis_cli(filled: Store) -> None:
    assert _cli(filled.url, "hget", "hash", "w0").stdout == b"1\n"
    typed = _cli(filled.url, input=b'hget hash w0\n\nget "none"\nget "\nquit\nhget hash w1\n')
    assert typed.stdout.decode().splitlines() == ["1", "", "Invalid argument(s)"]
    done = _cli(filled.url, "--stat")
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)


@pytest.mark.slow
def test_a_user_and_a_password(store: Store) -> None:
    store.client.call("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@read", "+@connection", "+acl|whoami")
    try:
        url = store.url.replace("unix://", "unix://reader:secret@")
        assert _cli(url, "acl", "whoami").stdout == b"reader\n"
        assert b"no permissions" in _cli(url, "set", "x", "y").stdout
        done = _cli(url.replace("secret", "wrong"), "acl", "whoami")
        assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
        assert b"refuses the login" in done.stderr
    finally:
        store.client.call("ACL", "DELUSER", "reader")


@pytest.mark.slow
def test_a_terminal_has_a_prompt(filled: Store) -> None:
    with on_a_terminal([*KVPS, "cli", "--redis", filled.url], PATH="", TERM="dumb") as terminal:
        terminal.press("hget hash w1\n")
        terminal.until("\n2\r")
        assert f"{filled.url}> " in terminal.output
        terminal.press("quit\n")
        assert terminal.end() == 0


@pytest.mark.slow
def test_the_private_server_and_what_it_is(lasting: kvps.Store) -> None:
    done = kvps_run("server", "status")
    assert done.stdout.strip() == lasting.url
    assert done.stderr == f"private server {lasting.server_name}\n"
    assert kvps_run("cli", "ping", PATH="").stdout == "PONG\n"
