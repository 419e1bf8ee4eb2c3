"""What the environment adds to a URL: the files for TLS, and the file with the password."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from helpers.certificates import authority_file, issued, tls_server
from helpers.commands import kvps_run
from helpers.harness import aggregating, gradient, model, plain_loop, work
from helpers.servers import free_port, running_server
from helpers.waiting import eventually

import kvps
from kvps.connection import credentials
from kvps.connection.credentials import read_password
from kvps.connection.sockets import connection_settings

SECRET = "opensesame"
URL = "rediss://localhost:1"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The files of a certificate authority and of a client, which the environment names."""
    certificate, key = issued(tmp_path, "client")
    found = {"KVPS_TLS_CA": authority_file(tmp_path), "KVPS_TLS_CERT": certificate, "KVPS_TLS_KEY": key}
    for variable, file in found.items():
        monkeypatch.setenv(variable, str(file))
    return found


def _of_tls(settings: dict[str, Any]) -> list[str]:
    return [settings.get(name, "") for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")]


def test_the_environment_names_the_files(files: dict[str, Path], tmp_path: Path) -> None:
    assert _of_tls(connection_settings(URL)) == list(map(str, files.values()))
    for url in ("redis://localhost:1", "unix:///nowhere"):
        assert _of_tls(connection_settings(url)) == ["", "", ""], "the environment may be set for other commands"


def test_the_files_of_the_url_go_first(files: dict[str, Path], tmp_path: Path) -> None:
    certificate, key = issued(tmp_path, "other")
    named = _of_tls(connection_settings(f"{URL}?ssl_certfile={certificate}&ssl_keyfile={key}"))
    assert named == [str(files["KVPS_TLS_CA"]), str(certificate), str(key)]
    assert "ssl_ca_certs" not in connection_settings(f"{URL}?ssl_ca_path={tmp_path}")


def test_the_certificate_is_checked_unless_the_url_says_otherwise(files: dict[str, Path]) -> None:
    checked = connection_settings(URL)
    assert (checked["ssl_cert_reqs"], checked["ssl_check_hostname"]) == ("required", True)
    assert connection_settings(f"{URL}?ssl_check_hostname=false")["ssl_check_hostname"] is False


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("KVPS_TLS_CA", "none.pem", r"authority, none\.pem, cannot be read: No such file"),
        ("KVPS_TLS_CA", ".", "cannot be read: Is a directory"),
        ("KVPS_TLS_CA", "client.key", "holds no certificate"),
        ("KVPS_TLS_CERT", "none.pem", r"certificate, none\.pem, cannot be read"),
        ("KVPS_TLS_CERT", "", r"client\.key is the key of no client certificate"),
        ("KVPS_TLS_KEY", "none.key", r"key, none\.key, cannot be read"),
        ("KVPS_TLS_KEY", "", "without a file for its key"),
        ("KVPS_TLS_KEY", "other.key", "must be one certificate and its own key"),
    ],
)
def test_files_that_cannot_be_used(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    issued(tmp_path, "other")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, value)
    with pytest.raises(kvps.InvalidSetting, match=says):
        kvps.connect(URL)


def test_jobs_on_a_server_that_asks_for_a_certificate(files: dict[str, Path], tmp_path: Path) -> None:
    """One trains; the other has more bytes than a TLS record, a socket's buffer or a window of replies holds."""
    large = {"x": np.random.default_rng(0).normal(size=3_000_000).astype(np.float32)}
    with tls_server(tmp_path) as url, kvps.connect(url) as store:
        assert store.create_job("large", large).snapshot()[1]["x"].tobytes() == large["x"].tobytes()
        job = store.create_job("tls", model(), workers=2, optimizer=kvps.SGD(lr=0.05))
        with aggregating(job):
            work(job, 3, lambda session, params, round_: gradient(params, session.rank, round_), 2)
            assert eventually(lambda: job.state().version == 3)
        expected = plain_loop(model(), 2, 3, 0.05)
        assert {name: array.tobytes() for name, array in job.snapshot()[1].items()} == {
            name: array.tobytes() for name, array in expected.items()
        }


# -- the password ---------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL, without a password, of a server that wants the password of the file that the environment names."""
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    monkeypatch.setenv("KVPS_REDIS_PASSWORD_FILE", str(file))
    port = free_port()
    with running_server("--port", str(port)) as admin:
        with redis.Redis.from_url(admin, protocol=2) as client:
            client.config_set("requirepass", SECRET)
        yield f"redis://localhost:{port}"


def test_a_password_from_a_file(locked: str, tmp_path: Path) -> None:
    with kvps.connect(locked) as store:
        assert store.jobs() == []
        assert SECRET not in f"{store.url} {store!r} {store.client!r}"
    done = kvps_run("jobs", "--redis", locked)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for url in (locked.replace("//", "//:wrong@"), locked.replace("//", "//nobody@")):
        done = kvps_run("jobs", "--redis", url)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert "refuses the login" in done.stderr
        assert SECRET not in done.stderr
    assert "password" not in connection_settings("unix:///nowhere"), "the private server has a password of its own"


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [(SECRET, 0o640, "can be read by others"), ("", 0o600, "must hold one line"), (None, 0, "No such file")],
)
def test_a_password_file_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, mode: int, says: str
) -> None:
    file = tmp_path / "password"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    monkeypatch.setenv("KVPS_REDIS_PASSWORD_FILE", str(file))
    with pytest.raises(kvps.InvalidSetting, match=says) as caught:
        kvps.connect("redis://localhost:1")
    assert SECRET not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of root's")
@pytest.mark.parametrize(("mode", "user", "accepted"), [(0o440, 10001, True), (0o440, 0, False), (0o444, 10001, False)])
def test_a_file_of_roots_may_be_read_by_the_group_that_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, user: int, accepted: bool
) -> None:
    """This is how Kubernetes gives a secret to a process that is not root."""
    file = tmp_path / "password"
    file.write_text(SECRET)
    file.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if accepted:
        assert read_password(file) == SECRET
    else:
        advice = rf"chmod 600 {file}" if user == 0 else "its owner must chmod 440 it"
        with pytest.raises(kvps.InvalidSetting, match=f"can be read by others: {advice}"):
            read_password(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user's")
@pytest.mark.parametrize("user", [0, 10001])
@pytest.mark.parametrize("owner", [0, 1000])
@pytest.mark.parametrize(("mode", "accepted"), [(0o444, True), (0o464, False), (0o446, False)])
def test_a_secret_of_compose_may_be_read_by_all_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, user: int, accepted: bool
) -> None:
    """It has the owner that it has on the host."""
    file = tmp_path / "secrets" / "password"
    file.parent.mkdir()
    file.write_text(SECRET)
    file.chmod(mode)
    os.chown(file, owner, owner)
    monkeypatch.setattr(credentials, "_SECRETS", file.parent)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if accepted:
        assert read_password(file) == SECRET
    else:
        with pytest.raises(kvps.InvalidSetting, match="can be read by others"):
            read_password(file)


def test_a_server_is_lost_and_not_its_password_file(locked: str, tmp_path: Path) -> None:
    """The file is read when a client is made, and may be gone later."""
    with kvps.connect(locked) as store:
        (tmp_path / "password").unlink()
        store.client.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no")
        assert store.jobs() == []


@pytest.mark.slow
def test_the_password_is_in_no_environment_and_no_command_line(locked: str, tmp_path: Path) -> None:
    show = "import os, pathlib; print(os.environ, [p.read_bytes() for p in pathlib.Path('/proc').glob('*/cmdline')])"
    done = kvps_run("run", "-vv", "-w", "1", "--redis", locked, "--", "python", "-c", show)
    assert "KVPS_REDIS_URL" in done.stdout
    assert SECRET not in done.stdout + done.stderr
    done = kvps_run("cli", "--redis", locked, "ping")
    assert (done.stdout, done.stderr) == ("PONG\n", "")
