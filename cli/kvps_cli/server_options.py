"""The options of the connection, for TLS and for patience, which each command that has --redis gets."""

from __future__ import annotations

import os
from collections.abc import Iterable
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from kvps.connection.credentials import CA, CERTIFICATE, KEY, over_tls
from kvps.connection.patience import PATIENCE, PATIENCE_S
from kvps.errors import InvalidSetting
from kvps_cli.options import SERVER, is_given, redeclared

_Patience = Annotated[
    float | None,
    typer.Option(
        "--patience",
        envvar=PATIENCE,
        metavar="SECONDS",
        min=0,
        help="How long to wait for a Redis that does not answer, before this ends with an error. 0 has no limit.",
        show_default=f"{PATIENCE_S:g}",
        hidden=True,
        rich_help_panel=SERVER,
    ),
]
_FILES = {  # option: its environment variable, and its help
    "--tls-ca": (CA, "Certificate authority to trust for rediss://, besides those of this machine."),
    "--tls-cert": (CERTIFICATE, "Certificate of this client, if the server asks for one."),
    "--tls-key": (KEY, "Key of the client certificate, unless it is in the same file."),
}


def add_to(app: typer.Typer) -> None:
    """Give the options to each command of `app` that has --redis."""
    own = [_parameter(option, variable, help) for option, (variable, help) in _FILES.items()]
    own += [Parameter("patience", Parameter.KEYWORD_ONLY, default=None, annotation=_Patience)]

    def options(taken: Iterable[Parameter]) -> list[Parameter]:
        return [option for p in taken for option in ([p, *own] if p.name == "redis" else [p])]

    for command in app.registered_commands:
        if command.callback and "redis" in signature(command.callback).parameters:
            command.callback = redeclared(command.callback, options, _take)


def _take(context: typer.Context, values: dict[str, Any]) -> None:
    files = {option: values.pop(_name(option)) for option in _FILES}
    _check(context, [values["redis"], values.get("queue_redis")])
    given = {_FILES[option][0]: file for option, file in files.items()} | {PATIENCE: values.pop("patience")}
    # The connections of this process find them there, and so do those of the processes that it starts.
    os.environ.update({variable: str(value) for variable, value in given.items() if value is not None})


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _parameter(option: str, variable: str, help: str) -> Parameter:
    more: dict[str, Any] = {"metavar": "FILE", "resolve_path": True, "rich_help_panel": SERVER, "hidden": True}
    annotation = Annotated[Path | None, typer.Option(option, envvar=variable, help=help, **more)]
    return Parameter(_name(option), Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _check(context: typer.Context, urls: list[str | None]) -> None:
    """Raise InvalidSetting for an option on the command line that has no effect, because no URL is one for TLS.

    The environment may be set for other commands, so it is no error there.
    """
    for option in _FILES:
        if is_given(context, _name(option)) and not any(over_tls(url or "") for url in urls):
            raise InvalidSetting(f"{option} is for a server with TLS: give its URL with --redis rediss://HOST:PORT")
