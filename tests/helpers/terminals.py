"""Commands on a terminal of their own."""

from __future__ import annotations

import os
import pty
import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from helpers.zygote import Popen

_END_S = 300


class Terminal:
    """A terminal of 24 lines and its command, which it leads."""

    def __init__(self, command: Sequence[str], columns: int, environment: Mapping[str, str]) -> None:
        self._screen, end = pty.openpty()
        size = {"TERM": "xterm-256color", "LINES": "24", "COLUMNS": str(columns)}
        self.process = Popen(
            command,
            stdin=end,
            stdout=end,
            stderr=end,
            env={**os.environ, **size, **environment},
            start_new_session=True,
        )
        os.close(end)
        self.output = ""

    def until(self, words: str) -> None:
        """Read until these words have been drawn."""
        while words not in self.output:
            assert self._read(), self.output

    def press(self, keys: str) -> None:
        """Type these keys."""
        os.write(self._screen, keys.encode())

    def end(self) -> int:
        """Read until the command has ended. Return its exit code."""
        while self._read():
            pass
        return self.process.wait(_END_S)

    def vanish(self) -> int:
        """Close the terminal, as when its window is closed. Return the command's exit code."""
        os.close(self._screen)
        self._screen = -1
        return self.process.wait(_END_S)

    def close(self) -> None:
        """End the command, if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self._screen >= 0:
            os.close(self._screen)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._screen], [], [], _END_S)
        try:
            piece = os.read(self._screen, 1 << 16) if ready else b""
        except OSError:  # the command has closed the other end
            piece = b""
        self.output += piece.decode(errors="replace")
        return bool(piece)


@contextmanager
def on_a_terminal(command: Sequence[str], columns: int = 80, **environment: str) -> Iterator[Terminal]:
    """Run a command on a terminal inside the block, and end it behind the block."""
    terminal = Terminal(command, columns, environment)
    try:
        yield terminal
    finally:
        terminal.close()
