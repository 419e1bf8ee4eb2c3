"""The private server's life: who shares it, who ends it, and what is said when it cannot be had."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import kvps_run
from helpers.faults import halted_server
from helpers.waiting import eventually, processes_of
from kvps_cli.serve.server import client_arguments

import kvps
from kvps.machine.address import outward_address
from kvps.machine.paths import runtime_dir, server_program
from kvps.server import private_server
from kvps.store import Store

# -- who ends it ----------------------------------------------------------------------------------------------


def test_stores_of_one_process_share_the_server(home: Path) -> None:
    a, b = kvps.connect(), kvps.connect()
    assert a.started_server
    assert b.started_server
    a.close()
    a.close()
    assert b.jobs() == []
    b.close()
    assert private_server.running() is None
    with kvps.connect() as again:
        assert again.started_server


def test_the_server_of_the_environment_comes_before_it(
    store: Store, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for every command: else a script looked on another server than `kvps jobs`."""
    store.create_job("there", {"x": np.zeros(1, np.float32)})
    monkeypatch.setenv("KVPS_REDIS_URL", store.url)
    with kvps.connect() as found:
        assert found.jobs() == ["there"]
    with kvps.connect(data_dir=home / "data") as private:
        assert private.jobs() == [], "only the private server keeps its data there"
    monkeypatch.setenv("KVPS_REDIS_URL", "")
    with kvps.connect() as private:
        assert private.jobs() == []


@pytest.mark.slow
def test_it_ends_though_a_forked_child_lives(home: Path) -> None:
    """The one child's close ends nothing; the other holds the guard's input open."""
    code = """if True:
        import os, kvps
        store = kvps.connect()
        if os.fork() == 0:
            store._server.stop()
            os._exit(0)
        os.wait()
        ours, theirs = os.pipe()
        if os.fork() == 0:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
        print(store.jobs(), flush=True)
        store.close()
        print("closed", kvps.server.private_server.running(), flush=True)
        os.close(theirs)
        os.wait()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "closed None"], done.stderr


def test_the_guard_ends_with_its_server(home: Path) -> None:
    with kvps.connect() as store:
        assert private_server.stop()
        assert eventually(lambda: processes_of(home) == []), processes_of(home)
        assert eventually(lambda: not store.started_server)


# -- what is said when it cannot be had -----------------------------------------------------------------------


def test_a_runtime_directory_on_a_full_disk_is_named(home: Path) -> None:
    (home / f"url.{os.getpid()}").symlink_to("/dev/full")
    words = f"{home}/url cannot be written .No space left on device.: make room, or set KVPS_RUNTIME_DIR"
    with pytest.raises(kvps.ServerUnfit, match=words):
        kvps.connect()
    assert eventually(lambda: processes_of(home) == []), "it ends the server that it had started"


@pytest.mark.slow
def test_a_taken_port_is_said_with_the_servers_own_words(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = kvps_run("up", "digits", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "could not be started: " in done.stderr
    assert "Address already in use" in done.stderr


@pytest.mark.parametrize("lasting", [True, False])
def test_a_server_program_that_is_none(home: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool) -> None:
    begin = private_server.start if lasting else kvps.connect
    monkeypatch.setenv("KVPS_SERVER", "/nope")
    with pytest.raises(kvps.NoServer, match="KVPS_SERVER=/nope"):
        begin()
    (home / "text").write_text("not a program")
    (home / "text").chmod(0o700)
    monkeypatch.setenv("KVPS_SERVER", str(home / "text"))
    with pytest.raises(kvps.NoServer, match="Exec format error"):
        begin()


def test_a_logout_does_not_take_the_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPS_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert tmp_path not in runtime_dir().parents


def test_a_server_with_data_that_refuses_one_start_is_started_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Redis 7.0.15 does that was killed while it wrote its append-only file anew."""
    program, mark = home / "server", home / "refused"
    once = f"[ -e {mark} ] || {{ touch {mark}; exit 1; }}"
    program.write_text(f'#!/bin/sh\n{once}\nexec {server_program()} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("KVPS_SERVER", str(program))
    with kvps.connect(data_dir=home / "data") as store:
        assert store.jobs() == []
    mark.unlink()
    with pytest.raises(kvps.NoServer, match="could not be started"):
        kvps.connect()


def test_a_relative_runtime_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("KVPS_RUNTIME_DIR", "run")
    with kvps.connect() as store:
        assert store.url == f"unix://{home}/run/redis.sock"


@pytest.mark.slow
def test_a_server_that_refuses_is_not_replaced(home: Path) -> None:
    """Full, or asking for another password: its jobs would be buried by a second server in its place."""
    with kvps.connect() as store:
        store.client.call("CONFIG", "SET", "maxclients", "1")
        with pytest.raises(kvps.TooManyClients, match="raise that"):
            kvps.connect()
        store.client.call("CONFIG", "SET", "maxclients", "1000")
        store.client.call("CONFIG", "SET", "requirepass", "other")
        for ask in (kvps.connect, private_server.start, private_server.stop, private_server.running):
            with pytest.raises(kvps.NoServer, match=r"does not answer \(.*uthentication"):
                ask()
        store.client.call("CONFIG", "SET", "requirepass", "")
        (home / "url").unlink()
        with pytest.raises(kvps.NoServer, match="url is gone"):
            kvps.connect()


@pytest.mark.slow
def test_a_server_that_does_not_let_itself_end(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvps.connect() as store:
        store.client.call("ACL", "SETUSER", "default", "-shutdown")
        with pytest.raises(kvps.NoServer, match="no permissions"):
            private_server.stop()
        monkeypatch.setattr(private_server, "running", lambda: store.url)  # as if it were stopped or ended right after
        with halted_server(store.client), pytest.raises(kvps.NoServer, match="does not answer"):
            private_server.stop()
    assert private_server.stop()


# -- what is typed elsewhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "place"),
    [("[::1]:6400", "[::1]:6400"), ("10.0.0.1:6400", "10.0.0.1:6400"), ("0.0.0.0:1", f"{outward_address()}:1")],
)
def test_the_line_to_join_by(listen: str, place: str) -> None:
    line = private_server.join_line("unix:///s?password=a%2Fb", listen)
    assert re.fullmatch(rf"KVPS_REDIS_URL=redis://kvps:[0-9a-f]{{64}}@{re.escape(place)} kvps worker", line)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h?password=x", "-h h"),
        ("redis://me:x@h:7/2", "-h h -p 7 -n 2 --user me"),
        ("redis://:x@[::1]:7", "-h ::1 -p 7"),
        ("unix:///p%20q?db=1&password=x", "-s /p q -n 1"),
        ("unix://me:x@/p", "-s /p --user me"),
    ],
)
def test_the_password_is_not_in_the_arguments_of_redis_cli(url: str, expected: str) -> None:
    arguments, environment = client_arguments(url)
    assert " ".join(arguments) == expected
    assert environment == {"REDISCLI_AUTH": "x"}


# -- what the children of up inherit --------------------------------------------------------------------------

TASK = "from helpers.tasks import Good as Task\n"


@pytest.mark.slow
def test_modules_of_the_user_do_not_stand_in_for_others(home: Path, tmp_path: Path) -> None:
    for name in ("redis.py", "random.py", "typer.py"):
        (tmp_path / name).write_text("raise RuntimeError('not meant')\n")
    (tmp_path / "mine.py").write_text(TASK)
    kvps_command = [str(Path(sys.executable).with_name("kvps")), "up", "mine:Task"]
    done = subprocess.run(kvps_command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr


# -- data that outlive it -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_with_a_data_directory_goes_on_where_it_was(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    with kvps.connect(data_dir=data) as store:
        store.create_job("job", {"x": np.full(3, 7, np.float32)})
        with pytest.raises(kvps.NoServer, match="to use --data-dir"):
            kvps.connect(data_dir=data)
    assert data.stat().st_mode & 0o777 == 0o700
    assert private_server.running() is None
    with kvps.connect() as store:
        assert store.jobs() == [], "without the directory it keeps nothing"
    assert kvps_run("server", "start", "--data-dir", str(data)).returncode == 0
    with kvps.connect() as store:
        assert not store.ends_unused
        np.testing.assert_array_equal(store.job("job").snapshot()[1]["x"], np.full(3, 7, np.float32))
    assert private_server.stop()


@pytest.mark.slow
def test_a_data_directory_that_is_none(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    done = kvps_run("server", "start", "--data-dir", str(file))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"--data-dir {file} cannot hold" in done.stderr
    done = kvps_run("up", "digits", "--redis", "redis://h", "--data-dir", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--data-dir is for the private server" in done.stderr
