"""The guard of a private server: it ends the server once its starter has left and no process uses it.

The guard is run by file name, not imported: it must start at once and needs only the standard library. Its arguments
are the server program, the server's Unix socket, the lock that a process holds while it looks for a server, for how
many seconds the server stays after its last use, and optionally a directory that is of no use without the server.

On standard input the guard reads the server's settings and a line "end". After that, a byte means that the starter has
left, and so does the end of the input, which comes when the starter ends in any way. From then on the guard checks
whether any process is connected through kvps, or has looked for the server, and ends the server when none is or has
for that time. SIGTERM ends the server at once. The guard ends with the server, and the server with the guard: the
kernel sends it SIGTERM (Linux).
"""

import ctypes
import fcntl
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_LOOK_AGAIN_S, _LOOK_AT_LEAST_S = 0.2, 2.0
_REPLY_S = 2.0
_LEFT, _END = "left", "end"
_USER = re.compile(rb" name=kvps-(?!child-)")
_NOT_OURS = re.compile(rb"-(NOAUTH|WRONGPASS|NOPERM)")  # another program has changed its password or ACL


def main() -> int:
    binary, address, lock, stays_s, *useless = sys.argv[1:]
    events: queue.SimpleQueue[str] = queue.SimpleQueue()  # of all queues, a signal handler may put only to this one
    signal.signal(signal.SIGTERM, lambda *_: events.put(_END))
    settings = b""
    while (line := sys.stdin.buffer.readline()) != b"end\n":
        if not line:  # the starter ended before it had sent all settings
            return 1
        settings += line
    try:
        server = subprocess.Popen([binary, "-"], stdin=subprocess.PIPE, preexec_fn=_end_with_guard)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    assert server.stdin is not None
    try:
        server.stdin.write(settings)
        server.stdin.close()
    except BrokenPipeError:  # the server has ended already, and has said why
        return 1
    # os.read: a thread that holds the lock of sys.stdin makes the interpreter's exit fail.
    waits: tuple[tuple[Callable[[], object], str], ...] = ((lambda: os.read(0, 1), _LEFT), (server.wait, _END))
    for wait, word in waits:
        threading.Thread(target=_then, args=(wait, events, word), daemon=True).start()
    password = re.search(rb"^requirepass (\S+)$", settings, re.MULTILINE)
    if events.get() == _LEFT:
        _await_unused(events, lock, address, password[1] if password else b"", float(stays_s))
    server.terminate()
    try:
        server.wait(timeout=5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    for path in useless:
        shutil.rmtree(path, ignore_errors=True)
    return 0


def _await_unused(events: "queue.SimpleQueue[str]", lock: str, address: str, password: bytes, stays_s: float) -> None:
    """Wait until no process has used the server for `stays_s`, or it is told to end.

    Then this keeps the lock: a process that looks for a server waits until the guard has ended, and finds none.
    """
    looked, used_at = None, time.monotonic()
    while True:
        try:
            held = os.open(lock, os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError:  # the directory is gone, so no other process can find the server
            if not _has_clients(address):
                return
        else:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a process is about to connect
                used_at = time.monotonic()
            else:
                before, looked = looked, os.fstat(held).st_mtime_ns  # a process that looks for the server touches it
                if before not in (None, looked) or _is_used(address, password):
                    used_at = time.monotonic()
                elif time.monotonic() - used_at >= stays_s:
                    return
            os.close(held)
        with suppress(queue.Empty):
            if events.get(timeout=min(max(_LOOK_AGAIN_S, stays_s / 10), _LOOK_AT_LEAST_S)) == _END:
                return


def _is_used(address: str, password: bytes) -> bool:
    """Return whether kvps is connected; processes that a launcher ends do not count, a server too busy to say does."""
    asked = b"CLIENT LIST\r\nQUIT\r\n"
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_REPLY_S)
            client.connect(address)
            client.sendall(b"AUTH %b\r\n%b" % (password, asked) if password else asked)
            reply = b"".join(iter(lambda: client.recv(1 << 16), b""))
    except (FileNotFoundError, ConnectionRefusedError):
        return _has_clients(address)
    except OSError:
        return True
    listed = b" addr=" in reply
    return bool(_USER.search(reply)) if listed else not _NOT_OURS.match(reply)


def _has_clients(address: str) -> bool:
    """Return whether processes are connected to a socket, also if it was deleted since. Only Linux says so."""
    try:
        with open("/proc/net/unix", errors="replace") as sockets:
            return any(line.rstrip("\n").endswith(f" {address}") and line.split()[5] == "03" for line in sockets)
    except OSError:
        return False


def _then(wait: Callable[[], object], events: "queue.SimpleQueue[str]", word: str) -> None:
    wait()
    events.put(word)


def _end_with_guard() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, of the guard's main thread, which stays


if __name__ == "__main__":
    sys.exit(main())
