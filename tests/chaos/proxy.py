"""A TCP proxy in front of Redis that injects faults where a reply matters: at push.lua and ready.lua.

Of the requests that run one of these scripts, one in `one_in` meets one fault, chosen by the seed, and noted. A request
that was not forwarded never happened. One that was forwarded did happen, and only its reply is lost; kvps must cope
with both. After `limit` bytes of one connection, all its further bytes vanish, as large requests do on some links.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from dataclasses import dataclass
from typing import Any

from chaos import points
from kvps.protocol import scripts

FAULTS = {
    "cut in the reply": 5,
    "delayed": 4,
    "delayed beyond the timeout": 1,
    "reset before forwarding": 5,
    "reset after forwarding": 5,
    "reply swallowed": 1,
    "request swallowed": 1,
}


def serve(spec: dict[str, Any]) -> None:
    """Forward from `listen` (a port of this machine) to `target` (a port, or a Unix socket's path)."""
    asyncio.run(Proxy(spec).run())


class Proxy:
    """One proxy. `limit` is in bytes, 0 means no limit, and it may be changed while the proxy runs."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.port, self._target, self._notes = spec["listen"], spec["target"], spec.get("notes", "")
        self.limit = spec.get("limit", 0)
        self._one_in, self._timeout_s = spec.get("one_in", 0), spec.get("timeout_s", 1.5)
        self._random = random.Random(spec.get("seed", 0))
        self._shas = [scripts.SCRIPTS[name].sha.encode() for name in spec.get("scripts", ("push", "ready"))]

    async def run(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=512)
        async with server:
            await server.serve_forever()

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        to_server = None
        try:
            if isinstance(self._target, int):
                from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
            else:
                from_server, to_server = await asyncio.open_unix_connection(self._target)
            link = _Link(self, from_client, to_client, from_server, to_server)
            done = [asyncio.create_task(link.requests()), asyncio.create_task(link.replies())]
            await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.cancel()
            await asyncio.gather(*done, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the server is down, or the proxy ends: the client's connection ends too
        finally:
            for writer in (to_client, to_server):
                if writer:
                    writer.transport.abort()

    def fault(self, data: bytes) -> str:
        """Return the fault that this request meets, mostly none (""), and note it."""
        if not self._one_in or not any(sha in data for sha in self._shas) or self._random.randrange(self._one_in):
            return ""
        fault = self._random.choices(list(FAULTS), list(FAULTS.values()))[0]
        points.note(self._notes, f"{fault}\n".encode())
        return fault

    def delay(self, fault: str) -> float:
        if fault == "delayed":
            return self._random.uniform(0.001, 0.1)
        return self._timeout_s * 1.2 if fault.endswith("timeout") else 0.0

    def cut(self, size: int) -> int:
        return self._random.randrange(size)


@dataclass
class _Link:
    """One connection through the proxy. Where it matters, a client sends one request at a time."""

    proxy: Proxy
    from_client: asyncio.StreamReader
    to_client: asyncio.StreamWriter
    from_server: asyncio.StreamReader
    to_server: asyncio.StreamWriter
    fault: str = ""
    sent: int = 0

    async def requests(self) -> None:
        """Forward from the client to the server, until one of them ends or a fault ends the connection."""
        while data := await self.from_client.read(1 << 18):
            self.fault = self.proxy.fault(data)
            self.sent += len(data)
            if self.fault == "request swallowed" or 0 < self.proxy.limit < self.sent:
                continue
            if self.fault == "reset before forwarding":
                self._reset()
                return
            self.to_server.write(data)
            await self.to_server.drain()

    async def replies(self) -> None:
        """Forward from the server to the client."""
        while data := await self.from_server.read(1 << 18):
            fault, self.fault = self.fault, ""
            if fault == "reset after forwarding":
                self._reset()
                return
            if fault == "reply swallowed":
                continue
            await asyncio.sleep(self.proxy.delay(fault))
            if fault == "cut in the reply":
                self.to_client.write(data[: self.proxy.cut(len(data))])
                await self.to_client.drain()
                self.to_client.close()
                return
            self.to_client.write(data)
            await self.to_client.drain()

    def _reset(self) -> None:
        sock = self.to_client.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.to_client.transport.abort()
