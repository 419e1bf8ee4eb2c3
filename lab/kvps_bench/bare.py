"""The least that the same bytes cost: plain sockets that carry the same SETs and GETs to the same server, nothing else.

Chunks are as large as kvps's, sent from the array's memory and received into it; commands are pipelined. There is no
clock, commit, digest or arithmetic, and a barrier stands for the stream `turns`. One kind overwrites its names in every
round, which no system can do that must never show half of an array. The other kind takes fresh names and unlinks old
ones, as kvps does, so that the server has to find memory for all of them.
"""

from __future__ import annotations

import socket
from typing import Any

import numpy as np

from kvps.arrays.digest import view
from kvps.arrays.layout import CHUNK_BYTES
from kvps.connection.sockets import connection_settings
from kvps.errors import InvalidSetting

_OK = b"+OK\r\n"


class Socket:
    """A connection to a Redis server that can SET from and GET into one array, in chunks under `prefix`:<number>."""

    def __init__(self, url: str) -> None:
        settings = connection_settings(url)
        if url.startswith("rediss:"):
            raise InvalidSetting("bare sockets speak no TLS: measure on a redis:// or unix:// URL")
        if "path" in settings:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(settings["path"])
        else:
            self._socket = socket.create_connection((settings.get("host", "localhost"), settings.get("port", 6379)))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if password := settings.get("password"):
            self._socket.sendall(_command("AUTH", password))
            self._expect(_OK)

    def set(self, prefix: str, array: np.ndarray[Any, Any]) -> None:
        """SET all chunks of an array, and wait for every OK."""
        pieces = _chunks(array)
        for number, piece in enumerate(pieces):
            key = f"{prefix}:{number}".encode()
            self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, piece.nbytes))
            self._socket.sendall(piece)
            self._socket.sendall(b"\r\n")
        for _ in pieces:
            self._expect(_OK)

    def get(self, prefix: str, array: np.ndarray[Any, Any]) -> None:
        """GET all chunks into an array."""
        pieces = _chunks(array)
        asks = [_command("GET", f"{prefix}:{number}") for number in range(len(pieces))]
        ahead = 8
        self._socket.sendall(b"".join(asks[:ahead]))
        for number, piece in enumerate(pieces):
            self._expect(b"$%d\r\n" % piece.nbytes)
            self._fill(piece)
            self._expect(b"\r\n")
            if number + ahead < len(asks):
                self._socket.sendall(asks[number + ahead])

    def unlink(self, prefix: str, array: np.ndarray[Any, Any]) -> None:
        """UNLINK all chunks of an array, in one command."""
        names = [f"{prefix}:{number}" for number in range(len(_chunks(array)))]
        self._socket.sendall(_command("UNLINK", *names))
        self._expect(b":%d\r\n" % len(names))

    def close(self) -> None:
        self._socket.close()

    def _expect(self, reply: bytes) -> None:
        got = bytearray(len(reply))
        self._fill(memoryview(got))
        assert got == reply, f"{got!r} is not {reply!r}"

    def _fill(self, target: memoryview) -> None:
        got = 0
        while got < target.nbytes:
            n = self._socket.recv_into(target[got:])
            assert n, "the server closed the connection"
            got += n


def _chunks(array: np.ndarray[Any, Any]) -> list[memoryview]:
    memory = view(array)
    return [memory[i : i + CHUNK_BYTES] for i in range(0, memory.nbytes, CHUNK_BYTES)]


def _command(*words: str) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in map(str.encode, words))
