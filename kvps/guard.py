"""Ends an embedded server when the process that started it is gone, however that ended.

Run by file name, not imported: it must start at once and needs nothing but the standard library. Its standard
input brings the server's settings, a line "end", and then nothing until the starter's end closes it. The guard
itself is a child the server does not outlive: the kernel sends it SIGTERM (Linux).
"""

import ctypes
import signal
import subprocess
import sys


def main() -> int:
    binary = sys.argv[1]
    settings = b""
    while (line := sys.stdin.buffer.readline()) != b"end\n":
        if not line:  # the starter is gone before it had said all
            return 1
        settings += line
    server = subprocess.Popen([binary, "-"], stdin=subprocess.PIPE, preexec_fn=_end_with_guard)
    assert server.stdin is not None
    server.stdin.write(settings)
    server.stdin.close()
    sys.stdin.buffer.read()
    server.terminate()
    try:
        server.wait(timeout=5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    return 0


def _end_with_guard() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; the guard has one thread, which is its life


if __name__ == "__main__":
    sys.exit(main())
