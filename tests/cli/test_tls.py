"""The options for TLS, on a real server with a private authority, and what is refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.certificates import STRANGER, authority_file, issued, tls_server
from helpers.commands import TINY, kvps_run, refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all certificates here."""
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The URL of a server that asks for a client certificate."""
    with tls_server(folder) as found:
        yield found


@pytest.fixture(scope="module")
def options(folder: Path) -> dict[str, str]:
    """The three options with files that this server and this client accept."""
    certificate, key = issued(folder, "client")
    return {"--tls-ca": str(authority_file(folder)), "--tls-cert": str(certificate), "--tls-key": str(key)}


def _words(url: str, options: dict[str, str]) -> list[str]:
    return ["--redis", url, *(word for pair in options.items() for word in pair)]


@pytest.mark.slow
def test_a_command_with_all_three(url: str, options: dict[str, str]) -> None:
    done = kvps_run("jobs", "--json", *_words(url, options))
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    done = kvps_run("cli", *_words(url, options), "ping")
    assert (done.returncode, done.stdout) == (0, "PONG\n"), done.stderr


@pytest.mark.parametrize("wrong", ["authority", "host name", "no certificate"])
def test_what_is_refused(url: str, options: dict[str, str], folder: Path, wrong: str) -> None:
    given, says = dict(options), "a client certificate, name one with --tls-cert"
    if wrong == "authority":
        given["--tls-ca"] = str(authority_file(folder, STRANGER))
        says = "does not prove that it is this server"
    elif wrong == "host name":
        url, says = url.replace("localhost", "127.0.0.1"), "its certificate is for localhost, and not for 127.0.0.1"
    else:
        del given["--tls-cert"], given["--tls-key"]
    assert says in refused("jobs", *_words(url, given), code=1)


@pytest.mark.slow
def test_an_expired_certificate_is_refused(options: dict[str, str], tmp_path: Path) -> None:
    with tls_server(tmp_path, expired=True) as url:
        assert "certificate has expired" in refused("jobs", *_words(url, options), code=1)


def test_options_that_cannot_be_used(options: dict[str, str], tmp_path: Path) -> None:
    away = str(tmp_path / "away.pem")
    words = _words("rediss://h", options | {"--tls-ca": away})
    assert f"{away}, cannot be read: No such file" in refused("jobs", *words)
    for words in (_words("redis://h", options), ["--tls-ca", options["--tls-ca"]]):
        assert "--tls-ca is for a server with TLS" in refused("jobs", *words)


@pytest.mark.slow
def test_the_processes_of_a_command_have_the_files_too(url: str, options: dict[str, str]) -> None:
    words = _words(url, options)
    done = kvps_run("up", "digits", "-w", "2", *TINY, *words)
    assert done.returncode == 0, done.stderr
    assert "test loss" in done.stdout
    assert '"state": "finished"' in kvps_run("status", "digits", "--json", *words).stdout
    verified = kvps_run("verify", "digits", *words)
    assert verified.returncode == 0, verified.stderr
