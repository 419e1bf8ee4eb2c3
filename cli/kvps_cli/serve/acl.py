"""`kvps acl`: the rules of a server's ACL for one role."""

from __future__ import annotations

import secrets
import shlex
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import typer

from kvps.connection.credentials import read_password
from kvps.errors import InvalidSetting
from kvps.protocol.acl import READ_ONLY_KEYS, ROLES, check_jobs, rules
from kvps_cli import connect, options
from kvps_cli.output import say

_OLD = dict.fromkeys(
    ("evaluator", "worker", "actor", "host"), "this user may write every key of the job, its weights too"
) | {"reader": "this user may run no script, so a read that is slower than the commits cannot keep its version"}


def acl(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of a job, or PREFIX* for all whose names begin so.")],
    role: Annotated[str, typer.Option(metavar="ROLE", help=f"One of {', '.join(ROLES)}: see docs/security.md.")],
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the user.", show_default="kvps-JOB-ROLE")
    ] = None,
    password_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the user's password.", show_default="a new one")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Set the user on the server, and print its URL.")] = False,
    redis: options.Redis = None,
) -> None:
    """Print the rules of a user with one role, as a command for redis-cli."""
    if role not in ROLES:
        raise InvalidSetting(f"--role must be one of {', '.join(ROLES)}, not {role!r}")
    check_jobs(job)
    name = f"kvps-{job}-{role}" if user is None else user
    if not name or not name.isascii() or not name.isprintable() or " " in name:
        raise InvalidSetting(f"--user must be printable ASCII without spaces, not {name!r}")
    if name == "default":
        raise InvalidSetting("--user default is the server's own user, whom everybody would lose: choose another name")
    password = secrets.token_urlsafe(24) if password_file is None else read_password(password_file)
    with connect.existing_store(redis) as store:
        version = store.client.redis_version()
        words = ["ACL SETUSER", name, *rules(role, job, version)]
        words.insert(3, f">{password}")
        if version < READ_ONLY_KEYS and role in _OLD:
            say(f"this server has no keys that may only be read (Redis 7.0 has): {_OLD[role]}")
        if not apply:
            print(" ".join(words))
            return
        store.client.call(*words)
        print(f"export KVPS_REDIS_URL={shlex.quote(url_for(store.url, name, password))}")


def url_for(url: str, user: str, password: str) -> str:
    """Return the URL of a server for another user."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    kept = [pair for pair in parse_qsl(parts.query) if pair[0] not in ("username", "password")]
    login = f"{quote(user, safe='')}:{quote(password, safe='')}"
    return urlunsplit(parts._replace(netloc=f"{login}@{place}", query=urlencode(kept)))
