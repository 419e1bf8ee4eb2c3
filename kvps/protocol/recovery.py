"""Goes on after a server was restarted, or a replica was promoted: it may have lost its last writes.

A job's history ends there. A new one begins with what the server still has, see ``lua/recover.lua``; until then every
script of the job answers ServerRestarted and writes nothing.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any, Protocol

from kvps.errors import ServerError
from kvps.protocol.scripts import JobScripts

log = logging.getLogger("kvps.recovery")


class Server(Protocol):
    """What is asked of a server here, see `kvps.connection.client.Client`."""

    def call(self, *command: Any) -> Any: ...
    def run_id(self) -> str: ...


LOOK_S = 0.02  # between two looks at a server that writes its file anew


def file_is_whole(server: Server) -> bool:
    """Whether the server's append-only file, if it keeps one, was written anew since the server was started.

    If nobody has, this call has the server begin to. Of a file that ends in the middle of a transaction Redis drops the
    last command alone (Valkey 9 drops all of it). What stands before it in that transaction stays in the file, and the
    start after this one runs it together with the next transaction behind it.
    """
    while True:
        told = server.call("INFO", "persistence")
        if told["aof_rewrite_in_progress"] or told["aof_rewrite_scheduled"]:
            return False
        if not told["aof_enabled"]:
            return True
        if told["aof_last_rewrite_time_sec"] >= 0:  # it has ended; if it failed, no other will do better now
            if told["aof_last_bgrewrite_status"] != "ok":
                log.warning("the server could not write its append-only file anew: see its log")
            return True
        try:
            server.call("BGREWRITEAOF")
        except ServerError as error:
            told = server.call("INFO", "persistence")
            if not told["aof_rewrite_in_progress"]:  # else another was quicker to ask
                log.warning("the server does not write its append-only file anew: %s", error)
                return True


def begin_history(server: Server, scripts: JobScripts, job: str, newest: int) -> None:
    """Begin the job's new history, unless another did. `newest` is the version that the caller remembers.

    Call it when `file_is_whole`. Raises JobNotFound, ServerLost.
    """
    version, history = scripts.recover(server.run_id(), secrets.token_hex(4), newest)
    log.warning("job %s: its server was restarted: history %s from version %d", job, history, version)


def await_history(server: Server, scripts: JobScripts, job: str, newest: int) -> None:
    """Have a new history begun as soon as it may. Raises JobNotFound, ServerLost."""
    while not file_is_whole(server):
        time.sleep(LOOK_S)
    begin_history(server, scripts, job, newest)
