"""What the environment adds to a server's URL: the files for TLS, and the file that holds the password."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvps.errors import InvalidSetting

CA, CERTIFICATE, KEY = "KVPS_TLS_CA", "KVPS_TLS_CERT", "KVPS_TLS_KEY"
"""The environment variables of the files for TLS; `kvps_cli.server_options` has an option for each."""
PASSWORD_FILE = "KVPS_REDIS_PASSWORD_FILE"
_MOST_PASSWORD = 512
_SECRETS = Path("/run/secrets")  # where Compose puts them

_WHAT = {
    "ssl_ca_certs": "the file of the certificate authority",
    "ssl_certfile": "the file of the client certificate",
    "ssl_keyfile": "the file of the client certificate's key",
}


def credentials(url: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return redis-py's settings of that URL, with what the environment adds to them. The URL's own go first.

    Raises InvalidSetting for a file that cannot be used.
    """
    completed = dict(settings)
    if not completed.get("password") and (file := password_file(url)):
        completed["password"] = read_password(file)
    if over_tls(url):
        _add_files(completed)
        tls_context(completed)
    return completed


def over_tls(url: str) -> bool:
    """Return whether a URL's connections use TLS."""
    return url.startswith(("rediss:", "rediss+sentinel:"))


def password_file(url: str) -> Path | None:
    """Return the file with the password of a URL that has none itself. A Unix socket is the private server's."""
    file = os.environ.get(PASSWORD_FILE)
    return Path(file) if file and not url.startswith("unix:") else None


def read_password(path: Path, what: str = "password") -> str:
    """Return the password that a file holds, without the end of its line; a message calls it `what`. Raises
    InvalidSetting.

    The file must be its owner's alone, as ssh asks of keys. A group may read a file of root's, as PostgreSQL allows it
    for keys: Kubernetes gives a secret to a process that is not root in no other way. Compose mounts a file with the
    owner that it has on the host, who is no user of the container, so all users there may read it.
    """
    try:
        status = path.stat()
        text = path.read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise InvalidSetting(f"the {what} file {path} cannot be read: {why}") from None
    of_root, theirs = status.st_uid == 0, status.st_uid != os.geteuid()
    is_secret = _SECRETS in path.absolute().parents
    if status.st_mode & (0o033 if is_secret else 0o037 if of_root and theirs else 0o077):
        advice = f"its owner must chmod {440 if of_root else 600} it" if theirs else f"chmod 600 {path}"
        raise InvalidSetting(f"the {what} file {path} can be read by others: {advice}")
    if not 0 < len(text) <= _MOST_PASSWORD or not text.isprintable() or " " in text:
        raise InvalidSetting(
            f"the {what} file {path} must hold one line of 1 to {_MOST_PASSWORD} characters without spaces"
        )
    return text


def _add_files(settings: dict[str, Any]) -> None:
    """Add the files that the environment names. A certificate and its key come from one place, so that they fit."""
    if not {"ssl_ca_certs", "ssl_ca_path", "ssl_ca_data"} & settings.keys() and (file := os.environ.get(CA)):
        settings["ssl_ca_certs"] = file
    if not {"ssl_certfile", "ssl_keyfile"} & settings.keys():
        named = {"ssl_certfile": os.environ.get(CERTIFICATE), "ssl_keyfile": os.environ.get(KEY)}
        settings |= {name: file for name, file in named.items() if file}


def tls_context(settings: Mapping[str, Any]) -> ssl.SSLContext:
    """Return a context with the files that the settings name. Raises InvalidSetting for one that cannot be used:
    redis-py would find that in the middle of a command."""
    authority, certificate, key = (settings.get(name) for name in _WHAT)
    for name, what in _WHAT.items():
        if name in settings:
            try:
                open(settings[name], "rb").close()
            except OSError as error:
                raise InvalidSetting(f"{what}, {settings[name]}, cannot be read: {error.strerror}") from None
    if key and not certificate:
        raise InvalidSetting(f"{key} is the key of no client certificate: name that too (--tls-cert or {CERTIFICATE})")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if authority or settings.get("ssl_ca_path"):
            context.load_verify_locations(authority, settings.get("ssl_ca_path"))
    except ssl.SSLError:
        raise InvalidSetting(f"{_WHAT['ssl_ca_certs']}, {authority}, holds no certificate in the PEM format") from None
    try:
        if certificate:
            # Without a password here, OpenSSL would ask the terminal for that of an encrypted key.
            context.load_cert_chain(certificate, key, settings.get("ssl_password") or "")
    except ssl.SSLError:
        files = f"{certificate} and {key}" if key else f"{certificate}, without a file for its key,"
        raise InvalidSetting(
            f"{files} cannot be used as the client certificate: they must be one certificate and its own key, in the "
            f"PEM format, and not encrypted unless the URL has ssl_password"
        ) from None
    return context
