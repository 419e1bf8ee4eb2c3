"""The user's own private server: found if it runs, started if not, out of reach for other users.

It listens on a Unix socket in a directory of mode 0700, and on a TCP port only if asked to. The port needs a password,
which is kept in a file of mode 0600 beside the socket and never in a command line. The server keeps nothing on disk. It
ends when the process that started it has left and no other process uses it (see `watchdog`), or some time after that;
unless `start` started it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
from redis.connection import ConnectionPool

from kvps.connection.server_errors import too_many_clients
from kvps.connection.slots import Address
from kvps.connection.sockets import KINDS, ClientRefused, client_name, connection_settings, counts_as_user
from kvps.errors import NoServer, ServerUnfit
from kvps.machine import memory, process
from kvps.machine.address import host_and_port, outward_address
from kvps.machine.child_process import ChildProcess
from kvps.machine.files import make_directory, private
from kvps.machine.paths import runtime_dir, server_program, socket_path
from kvps.protocol.acl import rules
from kvps.server.server_process import LOAD_S, START_S, comes_true, last_lines, launched, quoted
from kvps.transport.shared_memory import folder_of, forget

_REPLY_S = 2.0
_NOTE, _LOCK = "url", "lock"  # files beside the socket
_STAYS, _KILLS = "stays", "kills"
_JOINING = "kvps"  # the user for TCP
_LISTEN = "--listen wants HOST:PORT, as in 0.0.0.0:6400"
_EVERYWHERE = {"0.0.0.0": socket.AF_INET, "*": socket.AF_INET, "::": socket.AF_INET6}  # hosts of --listen: their family


@dataclass
class Server:
    """A private server. `guard` is the process that ends it when it is not used; None if it was running already.

    `lasting` says that `start` started it, and `keeps` that it keeps its data. `stays_s` is for how many seconds it may
    stay after its last use. `kills` is how many processes the kernel had killed for want of memory before it began.
    """

    url: str
    guard: ChildProcess | None = None
    lasting: bool = False
    keeps: bool = False
    stays_s: float = 0.0
    kills: int = 0
    users: int = 1  # in this process
    _starter: int = field(default_factory=os.getpid)

    @property
    def started_here(self) -> bool:
        """Whether this process, and not one that forked it, started the server, and the server runs."""
        return self.guard is not None and self._starter == os.getpid() and self.guard.poll() is None

    def used_by_others(self) -> bool:
        """Return whether kvps is connected in other processes, apart from processes that a launcher ends."""
        try:
            with _connection(self.url) as connection:
                clients = connection.client_list()
        except redis.exceptions.RedisError:  # if it runs, it is too busy to say
            return self.started_here
        return any(name != client_name() and counts_as_user(name) for name in (client["name"] for client in clients))

    def leave(self, stays: bool = False) -> None:
        """Count one user in this process less. After the last, end the server, or leave it to other processes, or with
        `stays` to its guard for `stays_s`.

        A server that another process started is not ended.
        """
        if not self.started_here:
            self.stop()
            return
        with ExitStack() as stack:
            with suppress(ServerUnfit, OSError):  # the directory is gone: no other process finds the server
                stack.enter_context(alone())  # a process that was about to connect has; a later one starts anew
            self.stop(stays)

    def stop(self, stays: bool = False) -> None:
        """Do what `leave` does, for a caller within `alone`. Does nothing in a fork."""
        if self._starter != os.getpid():
            return
        with _counting:
            self.users -= 1
            if self.users > 0 or not self.guard:
                return
            if self.started_here and (stays or self.used_by_others()):
                _hand_over(self.guard)
            else:
                _end(self.guard)
            self.guard = None
            if _started.get(self.url) is self:
                del _started[self.url]


_started: dict[str, Server] = {}  # by this process, or by the one that forked it
_handed_over: list[ChildProcess] = []  # guards that are still children of this process
_counting = threading.RLock()


def _count_anew() -> None:
    """Replace the lock in a fork, because another thread of the parent may have held it."""
    global _counting
    _counting = threading.RLock()


os.register_at_fork(after_in_child=_count_anew)


def running() -> str | None:
    """Return the URL of the user's private server, or None if it does not run."""
    server = _found()
    return server.url if server else None


def found() -> str | None:
    """Return the URL of the user's private server, or None if it does not run. This counts as a use: one that is about
    to end has ended, and one that stays does so for some time longer."""
    with alone():
        return running()


@contextmanager
def ensured(listen: str | None = None, data_dir: Path | None = None, stays_s: float = 0.0) -> Iterator[Server]:
    """Yield the user's private server; start it if it does not run.

    Connect within the block: until it ends, no process checks whether the server is used. `listen` is HOST:PORT of a
    TCP port to open too, `data_dir` is where the server keeps its data, `stays_s` for how many seconds it stays after
    its last use if it is left to do that. Raises NoServer, ServerUnfit, InvalidSetting.
    """
    with alone():
        with _counting:
            server = _found()
            if server is None:
                server = _start(listen, data_dir, lasting=False, stays_s=stays_s)
                _started[server.url] = server
            elif listen or data_dir:
                raise NoServer(
                    f"your private server runs already: end what started it, or kvps server stop, to use "
                    f"{'--listen' if listen else '--data-dir'}"
                )
            elif (ours := _started.get(server.url)) and ours.started_here:
                server = ours
                server.users += 1
        try:
            yield server
        except BaseException:
            server.stop()
            raise


def start(listen: str | None = None, data_dir: Path | None = None) -> str:
    """Start the private server to stay until `stop`; return its URL. Raises NoServer if it runs or cannot."""
    with alone():
        if running():
            raise NoServer("your private server runs already: kvps server status")
        return _start(listen, data_dir, lasting=True).url


def stop() -> bool:
    """End the private server, whichever process started it; False if none ran. Raises NoServer if it does not end."""
    with alone():
        url = running()
        if url is None:
            return False
        pid, keeps, reason = None, True, "it does not end"
        try:
            with _connection(url) as connection:
                pid = int(connection.info("server")["process_id"])
                keeps = connection.info("persistence")["aof_enabled"]
                connection.execute_command("SHUTDOWN", "NOSAVE")
        except redis.exceptions.ResponseError as error:
            raise NoServer(f"your private server refuses to end: {error}") from None
        except redis.exceptions.RedisError as error:
            # A server that ends cuts the connection, so an error matters only if the server still runs.
            reason = f"it does not end ({error})"
        if not comes_true(lambda: not _answers(url) and not (pid and process.runs(pid)), START_S):
            raise NoServer(f"the private server could not be ended: {reason}")
        if not keeps:
            forget(folder_of(url))
        return True


def why_lost(url: str) -> str:
    """Return what to tell users of the private server at `url` when it has ended for good.

    Return "" if it runs, if it keeps its data and may be started again, or if the URL is another server's.
    """
    if not url.startswith("unix:"):
        return ""
    path = connection_settings(url)["path"]
    noted = _noted(Path(path).parent)
    if noted is None or noted.keeps or connection_settings(noted.url)["path"] != path or _listens(url):
        return ""
    short = f" ({memory.ran_out()} since it was started)" if memory.kills() > noted.kills else ""
    return (
        f"the private server has ended, by kvps server stop or by a signal{short}, and its jobs with it: start this "
        f"again"
    )


def join_line(url: str, listen: str) -> str:
    """Return the command to type on another machine to work on this server's jobs."""
    return f"KVPS_REDIS_URL={tcp_url(url, listen)} kvps worker"


def tcp_url(url: str, listen: str) -> str:
    """Return the URL of the private server at `url` for the TCP port that it was started with, for a user that may not
    administer it."""
    host, port = host_and_port(listen, _LISTEN)
    if host in _EVERYWHERE:
        host = outward_address(_EVERYWHERE[host])
    password = _joining_password(connection_settings(url)["password"])
    return f"redis://{_JOINING}:{password}@{Address(host, port)}"


def _joining_password(administrators: str) -> str:
    """Return the password of the user for TCP, which does not show the administrator's."""
    return hashlib.blake2s(administrators.encode(), person=b"join").hexdigest()


def _start(listen: str | None, data_dir: Path | None, lasting: bool, stays_s: float = 0.0) -> Server:
    folder = runtime_dir()
    binary = server_program()
    url, log = f"unix://{quote(str(socket_path(folder)))}", folder / "redis.log"
    settings = {
        "port": "0",
        "unixsocket": quoted(str(socket_path(folder))),
        "unixsocketperm": "700",
        "save": '""',
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
        "dir": quoted(str(folder)),
        "logfile": quoted(str(log)),
        "daemonize": "no",
    }
    if data_dir:
        settings |= {"dir": quoted(str(_own_directory(data_dir))), "appendonly": "yes", "appendfsync": "everysec"}
    if _listens(url):
        raise NoServer(f"your private server runs, but {folder / _NOTE} is gone: end it, before you start another")
    if not data_dir:
        forget(folder_of(url))  # left by a server whose guard was killed
    if listen:
        host, port = host_and_port(listen, _LISTEN)
        password = secrets.token_urlsafe(24)
        settings |= {"bind": "0.0.0.0" if host == "*" else host, "port": str(port), "requirepass": password}
        may = " ".join(rules("operator", "*"))
        settings[f"user {_JOINING}"] = f"{may} >{_joining_password(password)}"
        url += f"?password={password}"
    guard = [sys.executable, "-I", "-S", str(Path(__file__).with_name("watchdog.py")), binary]
    guard += [str(socket_path(folder)), str(folder / _LOCK), f"{stays_s:g}"]
    # The shared memory of a server that keeps nothing is of no use without it: the guard deletes it.
    command = [binary, "-"] if lasting else guard + ([] if data_dir else [str(folder_of(url))])
    words = [word for word, holds in (("lasting", lasting), ("keeps", data_dir)) if holds]
    words += [f"{_STAYS}={stays_s:g}"] if stays_s else []
    words += [f"{_KILLS}={memory.kills()}"]
    patience_s = LOAD_S if data_dir else START_S
    # Redis 7.0 that was killed while it wrote its file anew refuses its next start, and no other one.
    for last in (False, True) if data_dir else (True,):
        try:
            child = launched(command, settings, log, guarded=not lasting)
        except OSError as error:
            raise NoServer(f"the private server could not be started: {error}") from None
        try:
            if not comes_true(lambda: _answers(url, loading=False), patience_s, child):
                raise NoServer(f"the private server could not be started: {last_lines(log) or 'it does not answer'}")
            _write_private(folder / _NOTE, f"{url}\n{' '.join(words)}")
            break
        except BaseException as error:
            refused = isinstance(error, NoServer) and child.poll() is not None
            _end(child)
            if last or not refused:
                raise
    return Server(url, None if lasting else child, lasting, bool(data_dir), stays_s)


def _hand_over(child: ChildProcess) -> None:
    """Leave it to the guard to end the server when no process uses it any more."""
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.write(b"\n")  # closing is not enough: a forked child of ours may hold this end of the pipe too
        child.stdin.close()
    _handed_over[:] = [guard for guard in (*_handed_over, child) if guard.poll() is None]


def _end(child: ChildProcess) -> None:
    """End the guard, and with it its server; or end a lasting server."""
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.close()
    child.terminate()  # closing is not enough: a forked child of ours may hold this end of the pipe too
    child.wait()


def _found() -> Server | None:
    """Return the running server as one that another process started; None if none runs."""
    server = _noted(runtime_dir())
    return server if server and _answers(server.url) else None


def _noted(folder: Path) -> Server | None:
    """Return the server that was started last with its socket in this directory."""
    try:
        url, _, words = (folder / _NOTE).read_text().partition("\n")
    except OSError:
        return None
    said = {name: value for name, _, value in (word.partition("=") for word in words.split())}
    stays_s, kills = float(said.get(_STAYS, 0)), int(said.get(_KILLS, 0))
    return Server(url, lasting="lasting" in said, keeps="keeps" in said, stays_s=stays_s, kills=kills)


def _own_directory(path: Path) -> Path:
    """Return the directory for data, made with mode 0700: gradients and weights are private. Raises ServerUnfit."""
    try:
        make_directory(path)
        with tempfile.TemporaryFile(dir=path):
            return path.resolve()
    except OSError as error:
        raise ServerUnfit(f"--data-dir {path} cannot hold the server's data: {error.strerror}") from None


def _answers(url: str, loading: bool = True) -> bool:
    """Return whether the server runs; `loading` is the answer for one that still loads its data. It counts as gone only
    if nothing listens on its socket, because another server in its place would hide its jobs. Raises NoServer or
    TooManyClients if it listens and does not answer.
    """
    if not _listens(url):
        return False
    try:
        with _connection(url) as connection:
            return bool(connection.ping())
    except redis.exceptions.BusyLoadingError:
        return loading
    except ClientRefused:
        raise too_many_clients(url) from None
    except redis.exceptions.RedisError as error:
        if not _listens(url):  # the server has ended since
            return False
        raise NoServer(
            f"your private server does not answer ({error}): wait, or end it, before you start another"
        ) from None


def _listens(url: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_REPLY_S)
        try:
            probe.connect(connection_settings(url)["path"])
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # its queue is full, or it is slow
            pass
        return True


def _connection(url: str) -> Any:
    settings = connection_settings(url) | {"socket_timeout": _REPLY_S, "decode_responses": True}
    return redis.Redis.from_pool(ConnectionPool(connection_class=KINDS["unix"], **settings))


def _write_private(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with _written(path):
        with open(fresh, "w", opener=private) as file:
            file.write(text + "\n")
        fresh.replace(path)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Name the file that the block writes if the disk has no room. Raises ServerUnfit."""
    try:
        yield
    except OSError as error:
        raise ServerUnfit(
            f"{path} cannot be written ({error.strerror}): make room, or set KVPS_RUNTIME_DIR to another directory"
        ) from None


@contextmanager
def alone() -> Iterator[None]:
    """Let one process at a time look for the server and start it, so that two commands begun together share one."""
    path = runtime_dir() / _LOCK
    with _written(path):
        path.touch(0o600)
    with open(path, "w", opener=private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a fork made meanwhile has it open too
