"""The private server by hand, and redis-cli on it."""

from __future__ import annotations

import os
from contextlib import suppress

import typer

from kvps.cli import connect, options
from kvps.cli.output import say
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

app = typer.Typer(help="Your own private Redis server, when it shall outlive a command.", no_args_is_help=True)


@app.command()
def start(listen: options.Listen = None, data_dir: options.DataDir = None) -> None:
    """Start the private server, to run until kvps server stop."""
    url = private_server.start(listen, data_dir)
    say(f"private server {redacted(url)} runs until: kvps server stop")
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
    """Say whether the private server runs, and where."""
    url = private_server.running()
    if url is None:
        raise NoServer("no private server runs: kvps server start")
    print(redacted(url))


def cli(context: typer.Context, redis: options.Redis = None) -> None:
    """Open redis-cli on the server; what follows is passed to it, as in: kvps cli hgetall 'kvps:{digits}:clock'."""
    url = redis or private_server.running()
    if url is None:
        raise NoServer("no private server runs: start one with kvps up, kvps aggregator start or kvps server start")
    command, environment = client_command(url)
    os.execvpe(command[0], [*command, *context.args], os.environ | environment)


def client_command(url: str) -> tuple[list[str], dict[str, str]]:
    """The redis-cli command for `url`, and the environment that holds its password, which ps would show.

    Raises NoServer without a redis-cli, InvalidSetting.
    """
    settings = connection_settings(url)
    command = [client_program(), *(["--tls"] if url.startswith("rediss:") else [])]
    for name, option in _OPTIONS.items():
        if name in settings:
            command += [option, str(settings[name])]
    return command, {"REDISCLI_AUTH": settings["password"]} if "password" in settings else {}
