"""`kvps server` starts and stops the private server by hand; `kvps cli` opens redis-cli on a server."""

from __future__ import annotations

import os
from contextlib import suppress

import typer

from kvps.connection.client import Client
from kvps.connection.credentials import password_file
from kvps.connection.sockets import connection_settings
from kvps.connection.urls import redacted
from kvps.errors import KvpsError, NoServer
from kvps.machine.paths import client_program
from kvps.server import private_server
from kvps_cli import connect, options
from kvps_cli.output import print_json, say
from kvps_cli.serve import line_client

_OPTIONS = {"path": "-s", "host": "-h", "port": "-p", "db": "-n", "username": "--user"}

app = typer.Typer(
    help="Run your private server by hand, so that it outlives a command.", no_args_is_help=True, add_completion=False
)


@app.command()
def start(listen: options.Listen = None, data_dir: options.DataDir = None) -> None:
    """Start the private server. It runs until kvps server stop."""
    url = private_server.start(listen, data_dir)
    say(f"private server {_name(url)} at {redacted(url)} runs until: kvps server stop")
    say("look inside: kvps cli")
    if listen:
        say(f"join from elsewhere: {private_server.join_line(url, listen)}")


@app.command()
def stop(yes: options.Yes = False) -> None:
    """Stop the private server. Its jobs are lost unless it keeps its data (--data-dir)."""
    jobs = ""
    with suppress(KvpsError), connect.existing_store(None) as store:  # a full or busy server is stopped too
        jobs = ", ".join(connect.busy_jobs(store))
    if jobs:
        options.confirm("kvps server stop", f"End the private server, and with it the jobs at work on it ({jobs})", yes)
    if not private_server.stop():
        raise NoServer("no private server runs")
    say("private server ended" + (f"; these jobs were at work on it: {jobs}" if jobs else ""))


@app.command()
def status(as_json: options.AsJson = False) -> None:
    """Say whether the private server runs. Its URL goes to stdout, its name and version to stderr."""
    url = connect.existing_url(None)
    if as_json:
        print_json({"url": redacted(url), "server": _name(url)})
        return
    print(redacted(url), flush=True)
    say(f"private server {_name(url)}")


def _name(url: str) -> str:
    with Client(url) as client:
        return client.server_name()


def cli(context: typer.Context, redis: options.Redis = None) -> None:
    """Open redis-cli on the server. It gets all arguments, as in: kvps cli hgetall 'kvps:{digits}:clock'.

    A small built-in client takes its place if neither redis-cli nor valkey-cli is on the PATH, and for TLS: they do not
    check the host name in the server's certificate. It also does for a password that stands in a file, and for a master
    that Sentinels name.
    """
    url = connect.existing_url(redis)
    program = client_program()
    if program is None or not url.startswith(("redis:", "unix:")) or password_file(url):
        line_client.run(url, context.args)
        return
    arguments, environment = client_arguments(url)
    os.execvpe(program, [program, *arguments, *context.args], os.environ | environment)


def client_arguments(url: str) -> tuple[list[str], dict[str, str]]:
    """Return redis-cli's arguments, and an environment with the password: ps shows arguments. Raises InvalidSetting."""
    settings = connection_settings(url)
    arguments = [
        word for name, option in _OPTIONS.items() if name in settings for word in (option, str(settings[name]))
    ]
    return arguments, {"REDISCLI_AUTH": settings["password"]} if "password" in settings else {}
