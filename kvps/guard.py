"""Ends an embedded server when the process that started it is gone, however that ended; and ends with the server.

Run by file name, not imported: it must start at once and needs nothing but the standard library. Its standard
input brings the server's settings, a line "end", and then nothing until the starter's end closes it. SIGTERM says
the same where a forked child of the starter holds that input open. The guard itself is a child the server does not
outlive: the kernel sends it SIGTERM (Linux). A second argument is a directory that is of no use without the server.
"""

import ctypes
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable


def main() -> int:
    over: queue.SimpleQueue[None] = queue.SimpleQueue()  # the one queue that a signal handler may put to
    signal.signal(signal.SIGTERM, lambda *_: over.put(None))
    binary = sys.argv[1]
    settings = b""
    while (line := sys.stdin.buffer.readline()) != b"end\n":
        if not line:  # the starter is gone before it had said all
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
    except BrokenPipeError:  # it is gone already, and has said why
        return 1
    # os.read, for the interpreter's end would stumble over a thread that holds the lock of sys.stdin.
    waits: tuple[Callable[[], object], ...] = (lambda: os.read(0, 1), server.wait)
    for wait in waits:
        threading.Thread(target=_then, args=(wait, over), daemon=True).start()
    over.get()
    server.terminate()
    try:
        server.wait(timeout=5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if len(sys.argv) > 2:
        shutil.rmtree(sys.argv[2], ignore_errors=True)
    return 0


def _then(wait: Callable[[], object], over: queue.SimpleQueue[None]) -> None:
    wait()
    over.put(None)


def _end_with_guard() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; the thread it means is the main one, which stays


if __name__ == "__main__":
    sys.exit(main())
