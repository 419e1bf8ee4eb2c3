"""A process that has imported everything and forks children on demand.

A fresh Python with NumPy costs a second, a fork some milliseconds. The zygote is its own process with one thread,
because its driver may have more threads. It speaks JSON lines: {"fork": spec} -> {"pid", "mark"},
{"kill": pid, "signal": n} -> {"sent": bool}, and {"died": pid, "status": n} whenever a child has ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from kvps.machine import process


class Death(NamedTuple):
    """The end of a child: by `signal`, or by itself with `code`."""

    pid: int
    signal: int
    code: int


class Zygote:
    """The driver's handle of the zygote. What children print goes to the file `log`."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._deaths: deque[Death] = deque()
        self._rest = b""
        root = Path(__file__).parent.parent
        paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "chaos.zygote"],
                env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                start_new_session=True,
            )

    def fork(self, spec: dict[str, Any]) -> tuple[int, str]:
        """Fork a child that does what `spec` says; return its pid and its `process.mark`."""
        reply = self._ask({"fork": spec})
        return reply["pid"], reply["mark"]

    def kill(self, pid: int, number: int = signal.SIGKILL) -> bool:
        """Send a child a signal; return False if it had ended before."""
        return bool(self._ask({"kill": pid, "signal": number})["sent"])

    def deaths(self, timeout_s: float) -> list[Death]:
        """Return the children that have ended since the last call; wait up to `timeout_s` for the first."""
        deadline = time.monotonic() + timeout_s
        while not self._deaths and (left := deadline - time.monotonic()) > 0:
            self._read(left)
        out = list(self._deaths)
        self._deaths.clear()
        return out

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        while True:
            for reply in self._read(10):
                return reply

    def _read(self, timeout_s: float) -> list[dict[str, Any]]:
        """Read the zygote's lines: keep deaths, return replies."""
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return []
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:
            raise RuntimeError(f"the zygote ended: {self.log.read_text()[-2000:]}")
        *lines, self._rest = (self._rest + data).split(b"\n")
        replies = [json.loads(line) for line in lines]
        for reply in (r for r in replies if "died" in r):
            status = reply["status"]
            by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            self._deaths.append(Death(reply["died"], by, 0 if by else os.WEXITSTATUS(status)))
        return [r for r in replies if "died" not in r]

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()  # the zygote then kills its children and ends
        self._process.wait()
        self._process.stdout.close()


def main() -> None:
    from chaos import roles

    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()

    def say(**words: Any) -> None:
        outbox.write(json.dumps(words).encode() + b"\n")
        outbox.flush()

    rest = b""
    while True:
        ready, _, _ = select.select([inbox, woken], [], [])
        if woken in ready:
            with suppress(BlockingIOError):
                os.read(woken, 4096)
            while children:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                children.discard(pid)
                say(died=pid, status=status)
        if inbox not in ready:
            continue
        data = os.read(inbox.fileno(), 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for request in map(json.loads, lines):
            if "fork" in request:
                held, go = os.pipe()  # the child waits until its mark is known: a zombie has none
                if not (pid := os.fork()):
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(go)
                    os.read(held, 1)
                    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
                    os.dup2(2, 1)
                    for end in (held, woken, wake):
                        os.close(end)
                    roles.play(request["fork"])
                children.add(pid)
                mark = process.mark(pid)
                os.close(held)
                os.close(go)
                say(pid=pid, mark=mark)
            else:
                pid, sent = request["kill"], request["kill"] in children
                if sent:
                    os.kill(pid, request["signal"])
                say(sent=sent)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
