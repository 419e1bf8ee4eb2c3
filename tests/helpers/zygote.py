"""A process that has imported everything and read the digits, and forks Python commands on demand.

A Python that imports NumPy, Redis and the commands costs a second of processor time, a fork some
milliseconds. `Popen` is `subprocess.Popen`, but has Python commands forked, if nothing about them is unusual.

The zygote has one thread and no connection. It forks with CLONE_PARENT, so that the new process is a child of the one
that asked, which waits for it and signals it as if it had started it itself. The new process has the arguments, the
environment (both in /proc too), directory, streams, session and signals of a fresh one. It has a zygote of its own, a
fork of the first, which forks the Python commands that it starts in turn: there, `subprocess.Popen` is `Popen`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import termios
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import redis.utils
from helpers.paths import TESTS
from kvps_cli.supervise import SAME_BITS
from kvps_workers import digits

from kvps.machine import process

# What each process of the tests has in its environment: scripts that tests start import helpers too. With threads as
# workers have them, kvps verify need not begin again as a fresh interpreter.
for _name, _value in SAME_BITS.items():
    os.environ.setdefault(_name, _value)
if str(TESTS) not in (_paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), *_paths]))
_ENVIRONMENT = dict(os.environ)
# For each connection redis-py reads its version from its metadata anew, which takes a millisecond.
redis.utils.get_lib_version = cache(redis.utils.get_lib_version)

_PACKAGES = ("kvps", "kvps_aggregator", "kvps_workers", "kvps_monitor", "kvps_cli")
_LIBRARIES = (
    "kvps_bench.cli",
    "kvps_simulate.validate",
    "prometheus_client",
    "starlette.applications",
    "textual.app",
    "typer._adapters",  # a command loads it, and Pydantic with it, when it reads its first option
    "uvicorn",
)
_STREAMS = {"stdin", "stdout", "stderr", "text", "encoding", "errors", "bufsize", "pass_fds"}
_OPTIONS = _STREAMS | {"env", "cwd", "start_new_session", "umask"}
_ENDING_WITH_PARENT = process.ending_with_this([])[:-1]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ROOM = 1 << 14  # bytes in /proc for the arguments of a forked process, and as many for its environment
_MOST_BYTES = 1 << 17  # of a request
_HIGH_FD = 800  # above those that a command is given, and below 1,024, which is often the limit
_CLONE = {("linux", "x86_64"): 56, ("linux", "aarch64"): 220}.get((sys.platform, os.uname().machine), 0)
_CLONE_PARENT = 0x8000
_FreshPopen = subprocess.Popen  # which is `Popen` in forked processes, and in tests that ask for `forked`
_libc = ctypes.PyDLL(None, use_errno=True)  # it keeps the GIL, as a fork must


@dataclass
class _Request:
    """A Python command to be forked. `streams` are the numbers that the fds sent with it get there."""

    command: list[str]
    environment: dict[str, str]
    directory: str
    streams: list[int]
    session: bool
    umask: int
    parent: int  # the process that it ends with, or 0

    @classmethod
    def of(cls, command: Any, options: Mapping[str, Any]) -> _Request | None:
        """Return the request for a command that Popen is given; None if it must be a fresh interpreter or is none."""
        if not _CLONE or isinstance(command, str | bytes) or not options.keys() <= _OPTIONS:
            return None
        words, parent = [os.fspath(word) for word in command], 0
        if words[: len(_ENDING_WITH_PARENT)] == _ENDING_WITH_PARENT:
            words, parent = words[len(_ENDING_WITH_PARENT) + 1 :], os.getpid()
        environment = dict(options.get("env") or os.environ)
        directory = os.path.abspath(options.get("cwd") or ".")
        if words[0] != sys.executable or not _runs_code(words) or not os.path.isdir(directory):
            return None
        if _read_at_start(environment) != _read_at_start(_ENVIRONMENT):
            return None
        streams = [0, 1, 2, *options.get("pass_fds", ())]
        session, umask = bool(options.get("start_new_session")), options.get("umask", -1)
        return cls(words, environment, directory, streams, session, umask, parent)


def _runs_code(words: Sequence[str]) -> bool:
    """Return whether the words are of a Python that runs a module, code or a script with no option but -P."""
    code = words[2:] if words[1:2] == ["-P"] else words[1:]
    return bool(code) and (code[0] in ("-m", "-c") or not code[0].startswith("-"))


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python and NumPy read when they start: a fork does not read them again."""
    read = (name for name in environment if name.startswith("PYTHON") and name != "PYTHONUNBUFFERED")
    return {name: environment.get(name, "") for name in (*read, "OMP_NUM_THREADS")}


class Zygote:
    """The handle of a zygote that ends with this process, or when the handle is closed."""

    def __init__(self, end: socket.socket, pid: int) -> None:
        self._end = end
        self._pid = pid
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def started(cls, modules: Sequence[str]) -> Zygote:
        """Start a zygote that has imported kvps and these modules too: with modules it is a fork of the one without."""
        end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = "from helpers import zygote; zygote.main()"
        with its_end:
            begun = (Popen if modules else _FreshPopen)(
                [sys.executable, "-P", "-c", code, str(its_end.fileno()), *modules, " " * _ROOM],
                env=_ENVIRONMENT | {"ROOM": " " * _ROOM},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its_end.fileno()],
            )
        begun.returncode = 0  # `close` waits for it; Popen would warn that it runs still
        return cls(end, begun.pid)

    def fork(self, request: _Request, fds: Sequence[int]) -> int:
        """Fork a child of this process; return its pid."""
        with self._lock:
            socket.send_fds(self._end, [json.dumps(asdict(request)).encode()], fds)
            return int(self._end.recv(32))

    def close(self) -> None:
        """End the zygote, and wait for its end. A fork of the owner leaves it alone."""
        if os.getpid() == self._owner:
            self._end.shutdown(socket.SHUT_RDWR)
            os.waitpid(self._pid, 0)


_own: Zygote | None = None  # of a forked process


@cache
def _zygote(modules: tuple[str, ...]) -> Zygote:
    if _own:
        return _own
    zygote = Zygote.started(modules)
    atexit.register(zygote.close)
    return zygote


class Popen(_FreshPopen[Any]):
    """`subprocess.Popen`, whose Python commands are forked from a zygote that has imported `modules` too."""

    modules: tuple[str, ...] = ()

    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        self._request = None if rest else _Request.of(args, options)
        super().__init__(args, *rest, **options)

    def _execute_child(self, *given: Any) -> None:
        if self._request is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        pipes = given[10:16]
        fds = [number if fd == -1 else fd for number, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        try:
            self.pid = _zygote(self.modules).fork(self._request, [*fds, *self._request.streams[3:]])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def spawnv_passfds(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Start what multiprocessing spawns, in place of its function of this name; return the pid."""
    process = Popen([os.fsdecode(word) for word in args], pass_fds=tuple(passfds))
    process.returncode = 0  # multiprocessing waits for it
    return process.pid


def main() -> None:
    """Serve as a zygote, which sys.argv describes; never return."""
    end, *modules, _ = sys.argv[1:]
    gc.disable()  # a fork enables it
    for package in _PACKAGES:
        _import_whole(package)
    for module in (*_LIBRARIES, *modules):
        _import(module)
    with suppress(ImportError):
        digits._load()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a zygote is in its requester's group; a fork unblocks them
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(end)))


def _import_whole(package: str) -> None:
    """Import a package with all its modules, but for those of PyTorch and JAX, which may start threads, and those for
    which a library is missing."""
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.endswith("__main__") and not module.name.startswith(("kvps.torch", "kvps.jax")):
            _import(module.name)


def _import(module: str) -> None:
    with suppress(ImportError):
        importlib.import_module(module)


def _serve(end: socket.socket) -> NoReturn:
    """Fork what is asked for until nobody can ask any more, then exit."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one of the threads, and the locks of all"
    while True:
        data, fds, _, _ = socket.recv_fds(end, _MOST_BYTES, _HIGH_FD)
        if not data:
            os._exit(0)
        if not _clone():
            _become(_Request(**json.loads(data)), fds, end)
        for fd in fds:
            os.close(fd)


def _clone() -> int:
    """Fork a child of this process's parent."""
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = int(_libc.syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid:
        api.PyOS_AfterFork_Parent()
    else:
        api.PyOS_AfterFork_Child()
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def _become(request: _Request, fds: list[int], end: socket.socket) -> NoReturn:
    """Run the request's command in this process, a fork of a zygote. Its requester is answered when all is ready."""
    global _own
    try:
        if request.session:
            os.setsid()
        _own = _forked_zygote()
        ready = fcntl.fcntl(end.detach(), fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
        given = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for fd in fds]
        os.closerange(3, _HIGH_FD)
        for fd, number in zip(given, request.streams, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        if request.session and os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # who leads a session on a terminal hears when that is gone
        _take_on(request)
        os.write(ready, str(os.getpid()).encode())
        os.close(ready)
        code = _run(request.command[1:])
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _forked_zygote() -> Zygote:
    """Fork a zygote of this process, which must have one thread."""
    end, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not (pid := os.fork()):
        fd = os.dup2(its_end.detach(), _HIGH_FD, inheritable=False)
        end.detach()
        os.closerange(3, _HIGH_FD)
        _serve(socket.socket(fileno=fd))
    its_end.close()
    high = fcntl.fcntl(end.detach(), fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
    zygote = Zygote(socket.socket(fileno=high), pid)
    atexit.register(zygote.close)
    return zygote


def _take_on(request: _Request) -> None:
    """Give this process what a fresh one has from its start."""
    os.chdir(request.directory)
    if request.umask >= 0:
        os.umask(request.umask)
    os.environ.clear()  # first: the C library may still have pointers to what is overwritten
    _show(request)
    os.environ.update(request.environment)
    by_line = 1 if os.environ.get("PYTHONUNBUFFERED") else -1
    texts = (("stdin", 0, "r", -1), ("stdout", 1, "w", by_line), ("stderr", 2, "w", 1))
    for name, number, mode, buffering in texts:
        before = getattr(sys, name)
        text = open(number, mode, buffering, before.encoding, before.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    subprocess.Popen = Popen  # type: ignore[misc]
    gc.enable()
    if request.parent:
        process.die_with_parent(request.parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _show(request: _Request) -> None:
    """Write the command and its environment where /proc shows them."""
    places = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    arguments, arguments_end, environment, environment_end = map(int, places)
    variables = [f"{name}={value}" for name, value in request.environment.items()]
    for words, start, stop in ((request.command, arguments, arguments_end), (variables, environment, environment_end)):
        text = "".join(f"{word}\0" for word in words).encode(errors="surrogateescape")[: stop - start - 1]
        ctypes.memmove(start, text.ljust(stop - start, b"\0"), stop - start)


def _run(words: list[str]) -> int:
    """Run a module, code or a script with its arguments as Python does; return the exit code."""
    code = 0
    try:
        _run_main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            atexit.register(os.kill, os.getpid(), signal.SIGINT)
    # As the interpreter ends, but without freeing all that the zygote had imported, which takes the time of five forks.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    return code & 0xFF


def _run_main(words: list[str]) -> None:
    safe = words[0] == "-P"
    kind, *rest = words[safe:]
    if kind == "-m":
        place, sys.argv = os.getcwd(), rest
    elif kind == "-c":
        place, sys.argv = "", ["-c", *rest[1:]]
    else:
        place, sys.argv = str(Path(kind).resolve().parent), [kind, *rest]
    if not safe:
        sys.path.insert(0, place)
    if kind == "-m":
        if not hasattr(sys.modules.get(rest[0]), "__path__"):
            sys.modules.pop(rest[0], None)  # runpy warns of a module that is there before it runs
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        runpy.run_path(kind, run_name="__main__")
