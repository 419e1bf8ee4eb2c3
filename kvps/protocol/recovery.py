"""Begins a job's new history after a restart of the server, or the promotion of a replica, which may have lost writes.

The new history begins with the state that the server still has, see ``lua/recover.lua``. Until then every script of the
job answers ServerRestarted and writes nothing.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any, Protocol

from kvps.errors import NotPermitted, ServerError
from kvps.protocol.scripts import JobScripts

log = logging.getLogger("kvps.recovery")


class Server(Protocol):
    """The part of `kvps.connection.client.Client` that recovery needs."""

    def call(self, *command: Any) -> Any: ...
    def run_id(self) -> str: ...


LOOK_S = 0.02  # between two looks at a server that rewrites its file
_OTHERS_S = 0.2  # between two looks for the history that another process begins


def file_is_whole(server: Server) -> bool:
    """Return whether the server's append-only file, if it keeps one, was rewritten since the server was started.

    If no rewrite has begun, this call begins one. If the file ends in the middle of a transaction, Redis drops only the
    last command of it at its start (Valkey 9 drops the whole transaction). The commands before that stay in the file,
    and the next start runs them together with the transaction that follows in the file.
    """
    while True:
        persistence = server.call("INFO", "persistence")
        if persistence["aof_rewrite_in_progress"] or persistence["aof_rewrite_scheduled"]:
            return False
        if not persistence["aof_enabled"]:
            return True
        if persistence["aof_last_rewrite_time_sec"] >= 0:  # a rewrite has ended; if it failed, another would too
            if persistence["aof_last_bgrewrite_status"] != "ok":
                log.warning("the server could not write its append-only file anew: see its log")
            return True
        try:
            server.call("BGREWRITEAOF")
        except NotPermitted:
            return False  # another role's process, an aggregator, may
        except ServerError as error:
            persistence = server.call("INFO", "persistence")
            if not persistence["aof_rewrite_in_progress"]:  # else another process asked first
                log.warning("the server does not write its append-only file anew: %s", error)
                return True


def begin_history(server: Server, scripts: JobScripts, job: str, newest: int) -> None:
    """Begin the job's new history, unless another process did. `newest` is the newest version the caller remembers.

    Call it only once `file_is_whole` returns True. Raises JobNotFound, ServerLost.
    """
    version, history = scripts.recover(server.run_id(), secrets.token_hex(4), newest)
    log.warning("job %s: its server was restarted: history %s from version %d", job, history, version)


def await_history(server: Server, scripts: JobScripts, job: str, newest: int) -> None:
    """Wait until the server's file is whole, then begin a new history. If this user may not, give another process the
    time to do so. Raises JobNotFound, ServerLost."""
    while not file_is_whole(server):
        time.sleep(LOOK_S)
    try:
        begin_history(server, scripts, job, newest)
    except NotPermitted:
        time.sleep(_OTHERS_S)
