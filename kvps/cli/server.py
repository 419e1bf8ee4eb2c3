"""The private server by hand, and a look inside with redis-cli."""

from __future__ import annotations

import os
from contextlib import suppress

import typer

from kvps.cli import connect, line_client, options
from kvps.cli.output import say
from kvps.connection.client import Client
from kvps.connection.sockets import connection_settings, redacted
from kvps.errors import KvpsError, NoServer
from kvps.machine.paths import client_program
from kvps.server import private_server

_OPTIONS = {
    "path": "-s",
    "host": "-h",
    "port": "-p",
    "db": "-n",
    "username": "--user",
    "ssl_ca_certs": "--cacert",
    "ssl_certfile": "--cert",
    "ssl_keyfile": "--key",
}

app = typer.Typer(help="Your own private server, when it shall outlive a command.", no_args_is_help=True)


@app.command()
def start(listen: options.Listen = None, data_dir: options.DataDir = None) -> None:
    """Start the private server, to run until kvps server stop."""
    url = private_server.start(listen, data_dir)
    say(f"private server {_name(url)} at {redacted(url)} runs until: kvps server stop")
    say("look inside: kvps cli")
    if listen:
        say(f"join from elsewhere: {private_server.join_line(url, listen)}")


@app.command()
def stop() -> None:
    """End the private server. Its jobs are gone with it, unless it keeps its data (--data-dir)."""
    jobs = list[str]()
    with suppress(KvpsError), connect.existing_store(None) as store:  # one that is full or busy ends all the same
        jobs = connect.at_work(store)
    if not private_server.stop():
        raise NoServer("no private server runs")
    ended = "private server ended"
    say(f"{ended}; these jobs were at work on it: {', '.join(jobs)}" if jobs else ended)


@app.command()
def status() -> None:
    """Say whether the private server runs, what it is, and where: the URL alone on stdout."""
    url = private_server.running()
    if url is None:
        raise NoServer("no private server runs: kvps server start")
    print(redacted(url), flush=True)
    say(f"private server {_name(url)}")


def _name(url: str) -> str:
    with Client(url) as client:
        return client.server_name()


def cli(context: typer.Context, redis: options.Redis = None) -> None:
    """Open redis-cli on the server; what follows is passed to it, as in: kvps cli hgetall 'kvps:{digits}:clock'.

    Without redis-cli or valkey-cli on the PATH, a small line client stands in for it.
    """
    url = redis or private_server.running()
    if url is None:
        raise NoServer("no private server runs: start one with kvps up, kvps aggregator start or kvps server start")
    program = client_program()
    if program is None:
        line_client.run(url, context.args)
        return
    arguments, environment = client_arguments(url)
    os.execvpe(program, [program, *arguments, *context.args], os.environ | environment)


def client_arguments(url: str) -> tuple[list[str], dict[str, str]]:
    """redis-cli's arguments for `url`, and the environment that holds its password, which ps would show.

    Raises InvalidSetting.
    """
    settings = connection_settings(url)
    arguments = ["--tls"] if url.startswith("rediss:") else []
    for name, option in _OPTIONS.items():
        if name in settings:
            arguments += [option, str(settings[name])]
    return arguments, {"REDISCLI_AUTH": settings["password"]} if "password" in settings else {}
