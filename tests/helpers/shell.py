"""A program `kvps` for shells of tests: it and the Pythons that it starts are forked from the zygote."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.commands import KVPS
from helpers.zygote import Popen

_MOST_BYTES = 1 << 17  # of what a command is
# It hands over its arguments, environment, directory and streams, and ends as the command does.
_KVPS = f"""#!{sys.executable} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
    end.connect({{address!r}})
    request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(end, [request], [0, 1, 2])
    sys.exit(int(end.recv(32)))
"""


@contextmanager
def kvps_in(folder: Path) -> Iterator[None]:
    """Make a program `kvps` in a folder, which works until the block ends."""
    address = str(folder / "forks")
    program = folder / "kvps"
    program.write_text(_KVPS.format(address=address))
    program.chmod(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        serving = threading.Thread(target=_serve, args=(listening,))
        serving.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            serving.join()


def _serve(listening: socket.socket) -> None:
    running: list[threading.Thread] = []
    while True:
        try:
            end, _ = listening.accept()
        except OSError:  # it is shut down
            break
        running.append(threading.Thread(target=_run, args=(end,)))
        running[-1].start()
    for each in running:
        each.join()


def _run(end: socket.socket) -> None:
    """Run the command that is asked for, and answer with its exit code."""
    with end:
        data, fds, _, _ = socket.recv_fds(end, _MOST_BYTES, 3)
        arguments, environment, directory = json.loads(data)
        streams = dict(zip(("stdin", "stdout", "stderr"), fds, strict=True))
        try:
            process = Popen([*KVPS, *arguments], env=environment, cwd=directory, **streams)
        finally:
            for fd in fds:
                os.close(fd)
        end.send(str(process.wait() & 0xFF).encode())
