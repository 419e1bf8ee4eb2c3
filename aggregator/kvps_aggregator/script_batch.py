"""Scripts of several jobs in one request to their server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kvps.connection.client import Client
from kvps.errors import KvpsError
from kvps.protocol.lua_scripts import Call
from kvps.protocol.scripts import ServerRestarted

Ask = Callable[[Call], None]
"""A function that runs one script by the given call (see `JobScripts.through`) and acts on the answer.

It must have no effect before that call, because it runs twice: first to learn its command, then to get the answer.
"""


class _Sent(Exception):
    """Raised by an `Ask`'s first call, to end it there. `command` is what it wants to send."""

    def __init__(self, command: Sequence[Any]) -> None:
        self.command = command


def in_one_request(client: Client, asks: Sequence[Ask]) -> None:
    """Run all `asks`. A KvpsError or ServerRestarted in one of them ends that one alone. Raises ServerLost."""
    replies = client.each([_command_of(ask) for ask in asks])
    for ask, reply in zip(asks, replies, strict=True):
        with suppress(KvpsError, ServerRestarted):
            ask(_Answer(client.call, reply))


def _command_of(ask: Ask) -> Sequence[Any]:
    def call(*command: Any) -> Any:
        raise _Sent(command)

    try:
        ask(call)
    except _Sent as sent:
        return sent.command
    raise AssertionError("it sends nothing")


class _Answer:
    """A call that knows its first reply. Further commands are sent: they load a script that the server has lost."""

    def __init__(self, call: Call, reply: Any) -> None:
        self._call = call
        self._replies = [reply]

    def __call__(self, *command: Any) -> Any:
        if not self._replies:
            return self._call(*command)
        reply = self._replies.pop()
        if isinstance(reply, Exception):
            raise reply
        return reply
