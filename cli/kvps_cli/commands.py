"""The table of commands. A command's module is loaded when the command is called: none pays for another's libraries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import typer

from kvps.errors import UsageError
from kvps_cli import help_text, server_options


class _Entry(NamedTuple):
    """Where a command is.

    panel     its part of the help text
    place     MODULE:NAME below this package, of a function or of an app with commands of its own
    settings  for its parser
    """

    panel: str
    place: str
    settings: dict[str, Any] | None = None


_PARTS = "Parts, started one by one"
_TABLE = {
    "up": _Entry("Train", "train.up:up"),
    # Options after the program's name belong to the program, not to kvps run.
    "run": _Entry("Train", "train.run:run", {"allow_interspersed_args": False}),
    "scale": _Entry("Train", "train.scale:scale"),
    "stop": _Entry("Train", "train.control:stop"),
    "suspend": _Entry("Train", "train.control:suspend"),
    "pause": _Entry("Train", "train.control:pause"),
    "resume": _Entry("Train", "train.control:resume"),
    "set": _Entry("Train", "train.control:set_"),
    "create": _Entry(_PARTS, "train.create:create"),
    "worker": _Entry(_PARTS, "train.worker:worker"),
    "host": _Entry(_PARTS, "serve.host:host"),
    "aggregator": _Entry(_PARTS, "train.aggregator:app"),
    "submit": _Entry("Queue", "train.queue:submit"),
    "queue": _Entry("Queue", "train.queue:show"),
    "cancel": _Entry("Queue", "train.queue:cancel"),
    "jobs": _Entry("Jobs", "look.jobs:jobs"),
    "status": _Entry("Jobs", "look.status:status"),
    "graph": _Entry("Jobs", "look.graph:graph"),
    "top": _Entry("Jobs", "look.top:top"),
    "inspect": _Entry("Jobs", "look.inspect:inspect"),
    "log": _Entry("Jobs", "look.log:log"),
    "rollouts": _Entry("Jobs", "look.rollouts:rollouts"),
    "metrics": _Entry("Jobs", "look.metrics:metrics"),
    "timeline": _Entry("Jobs", "look.timeline:timeline"),
    "dashboard": _Entry("Jobs", "look.dashboard:dashboard"),
    "verify": _Entry("Jobs", "prove.verify:verify"),
    "rm": _Entry("Jobs", "serve.rm:rm"),
    "checkpoint": _Entry("Jobs", "prove.checkpoint:app"),
    "doctor": _Entry("Server", "serve.doctor:doctor"),
    "acl": _Entry("Server", "serve.acl:acl"),
    "cli": _Entry("Server", "serve.server:cli", {"allow_extra_args": True, "ignore_unknown_options": True}),
    "server": _Entry("Server", "serve.server:app"),
}


class Commands(help_text.Group):
    """The commands of `kvps`, loaded one by one. A list of all with their help loads all of them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Mapping[str, Any] = _LoadedCommands()  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Say what takes the place of a command that kvps no longer has. Raises UsageError."""
        if args and args[0] not in _TABLE:
            from kvps.config.gone import GONE

            if instead := GONE.get(f"kvps {args[0]}"):
                raise UsageError(f"there is no kvps {args[0]} any more: {instead}")
        return super().resolve_command(ctx, args)


class _LoadedCommands(Mapping[str, Any]):
    """Name -> command, which is made of its module when it is asked for."""

    def __iter__(self) -> Iterator[str]:
        return iter(_TABLE)

    def __len__(self) -> int:
        return len(_TABLE)

    def __getitem__(self, name: str) -> Any:
        return _command(name)


@cache  # the options of the connection are added to a module's app: once
def _command(name: str) -> Any:
    entry = _TABLE[name]
    module, _, attribute = entry.place.partition(":")
    app = getattr(import_module(f"{__package__}.{module}"), attribute)
    if not isinstance(app, typer.Typer):
        function, app = app, typer.Typer(add_completion=False)
        app.command(name, context_settings=entry.settings)(function)
    server_options.add_to(app)
    help_text.add_to(app)
    command: Any = typer.main.get_command(app)
    command.name, command.rich_help_panel = name, entry.panel
    return command
