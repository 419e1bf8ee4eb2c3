"""Processes that run one case after another on command, each over a pipe; and a server to measure on."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kvps.connection.sockets import connection_settings
from kvps.errors import KvpsError
from kvps.store import Store, connect
from kvps_bench.hosts import Host

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
spawning = multiprocessing.get_context("forkserver")  # as clean as new processes, without a second of imports each
spawning.set_forkserver_preload(["kvps_bench.roles"])


@dataclass(frozen=True)
class Place:
    """A server to measure on. `urls` is transport name -> URL of this one server; over "shm" the arrays go through
    shared memory."""

    store: Store
    urls: dict[str, str]


@dataclass(frozen=True)
class Lab:
    """What every bench is given: a server to measure on, names of its transports, the number of turns, and whether
    these are small."""

    place: Place
    transports: Sequence[str]
    turns: int
    quick: bool


@contextmanager
def place(url: str | None) -> Iterator[Place]:
    """Yield the server at `url`, or one started for the block, on a Unix socket and on a port of 127.0.0.1."""
    if url:
        with connect(url) as store:
            yield Place(store, {"unix": url, "shm": url} if url.startswith("unix:") else {"tcp": url})
        return
    with tempfile.TemporaryDirectory(prefix="kvps-bench-") as folder, _environment(KVPS_RUNTIME_DIR=folder):
        listen = f"127.0.0.1:{free_port()}"
        with connect(listen=listen) as store:
            # The administrator's URL: bare sockets and other systems use keys of their own.
            tcp = f"redis://:{connection_settings(store.url)['password']}@{listen}"
            yield Place(store, {"tcp": tcp, "unix": store.url, "shm": store.url})


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def free_port(most: int = 65_535) -> int:
    """Return a port of the loopback that nobody has, up to `most`."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            if (port := int(probe.getsockname()[1])) <= most:
                return port


class Member:
    """A process that makes an object by ``make(*arguments)``, a function of a module, and has its methods called."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, other = spawning.Pipe()
        with _environment(**ONE_THREAD):
            self.process = spawning.Process(target=_obey, args=(other, make, *arguments), daemon=True)
            self.process.start()
        other.close()
        self._answer()

    def begin(self, method: str, *arguments: Any) -> None:
        """Have the object call a method; `end` waits for the result. Raises KvpsError if the process has died."""
        try:
            self._pipe.send((method, arguments))
        except BrokenPipeError:  # the command line would take this for a closed standard output
            raise self._died() from None

    def end(self) -> Any:
        """Return the result of the call that `begin` started. Raises KvpsError with the error that it raised."""
        return self._answer()

    def __call__(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.end()

    def _answer(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise self._died() from None
        if kind == "error":
            raise KvpsError(f"a process of the benchmark failed: {value}")
        return value

    def _died(self) -> KvpsError:
        return KvpsError(f"a process of the benchmark died (exit code {self._exit_code()})")

    def _exit_code(self) -> int | None:
        return self.process.exitcode

    def dismiss(self) -> None:
        """Tell the process that no more calls come."""
        self._pipe.close()

    def close(self) -> None:
        """Wait until the process has ended; kill it after 10 s."""
        self.dismiss()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class HostMember(Member):
    """A member whose process runs on a host."""

    def __init__(self, host: Host, make: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, other = multiprocessing.Pipe()
        command = [sys.executable, "-m", __name__, str(other.fileno())]
        self._started = host.start(*command, pass_fds=[other.fileno()], env=os.environ | ONE_THREAD)
        other.close()
        self._pipe.send((make, arguments))
        self._answer()

    def _exit_code(self) -> int:
        return self._started.wait()

    def close(self) -> None:
        """Wait until the process has ended; after 10 s leave it to the end of its host."""
        self.dismiss()
        with suppress(subprocess.TimeoutExpired):
            self._started.wait(10)


@contextmanager
def crew(*makers: tuple[Any, ...]) -> Iterator[list[Member]]:
    """Yield a member for each ``(make, *arguments)``, or ``(host, make, *arguments)``; they end with the block."""
    members: list[Member] = []
    try:
        for make, *arguments in makers:
            members.append(HostMember(make, *arguments) if isinstance(make, Host) else Member(make, *arguments))
        yield members
    finally:
        for member in members:
            member.dismiss()
        for member in members:
            member.close()


def together(members: list[Member], method: str, *arguments: Any) -> list[Any]:
    """Have all members call the same method at once; return their results."""
    for member in members:
        member.begin(method, *arguments)
    return [member.end() for member in members]


def _obey(pipe: Connection, make: Callable[..., Any], *arguments: Any) -> None:
    made = None
    try:
        made = make(*arguments)
        pipe.send(("ok", None))
        while True:
            method, values = pipe.recv()
            pipe.send(("ok", getattr(made, method)(*values)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass
    except Exception:
        pipe.send(("error", traceback.format_exc(limit=-3)))
    finally:
        if made is not None and hasattr(made, "close"):
            made.close()


if __name__ == "__main__":
    _pipe = Connection(int(sys.argv[1]))
    _make, _arguments = _pipe.recv()
    _obey(_pipe, _make, *_arguments)
