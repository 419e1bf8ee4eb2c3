"""The help of all commands: --help shows the options that most people use, --help-all shows all of them.

An option that --help leaves out is declared with `hidden=True`. A shell completes it all the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from inspect import Parameter
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvps.errors import counted
from kvps_cli.options import redeclared

WIDEST = 100
"""Columns of a help text on a wide terminal."""
_NAME_COLUMNS = 28  # the help of an option that is longer, with its placeholder, begins on the next line
_UNCUT = 1000  # characters: a first sentence that is longer would be cut
_ALL = "kvps.help-all"


def add_to(app: typer.Typer) -> None:
    """Have `app` and its commands show their help in this way."""
    app.info.cls = Group
    for command in app.registered_commands:
        command.cls = _Command
        if command.callback:
            command.callback = redeclared(command.callback, lambda taken: [*taken, _HELP_ALL], _forget_help_all)


def _forget_help_all(_: typer.Context, values: dict[str, Any]) -> None:
    del values["help_all"]


def _show_all(context: typer.Context, asked: bool) -> None:
    if asked:
        context.meta[_ALL] = True
        typer.echo(context.get_help(), color=context.color)
        raise typer.Exit


_HELP_ALL = Parameter(
    "help_all",
    Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--help-all", help="Show all options and exit.", callback=_show_all, is_eager=True)
    ],
)


class Group(TyperGroup):
    """Several commands; the help has the first sentence of each."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "rich_markup_mode": None})

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Return the names of --help, which leaves out nothing here."""
        return [*super().get_help_option_names(ctx), "--help-all"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options and the commands."""
        _write(formatter, _rows(ctx, self.get_params(ctx)))
        commands: list[Any] = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        _write(formatter, [(c.rich_help_panel or "Commands", c.name, c.get_short_help_str(_UNCUT)) for c in commands])


class _Command(TyperCommand):
    """A command; --help leaves out what was declared as hidden."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{**settings, "rich_markup_mode": None})
        self._seldom = [p for p in self.params if getattr(p, "hidden", False)]
        for param in self._seldom:  # a shell would not complete what stays hidden
            param.hidden = False  # type: ignore[attr-defined]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options. A command that leaves none out does not speak of --help-all."""
        left_out = [] if ctx.meta.get(_ALL) else self._seldom
        shown = [p for p in self.get_params(ctx) if p not in left_out]
        _write(formatter, _rows(ctx, [p for p in shown if self._seldom or p.name != "help_all"]))
        if left_out:
            more = counted(len(left_out), "more option")
            formatter.write(f"\n{ctx.command_path} --help-all shows {more}.\n")


def _rows(ctx: Any, params: Iterable[Any]) -> list[tuple[str, str, str]]:
    """Return of each parameter its heading, its name and its help. Arguments come first, then options that have no
    heading of their own."""
    arguments, options, under_headings = list[Any](), list[Any](), list[Any]()
    for param in params:
        name, help = param.get_help_record(ctx)
        if param.param_type_name == "argument":
            arguments.append(("Arguments", param.metavar or name, help))
        elif param.rich_help_panel:
            under_headings.append((param.rich_help_panel, name, help))
        else:
            options.append(("Options", name, help))
    return arguments + options + under_headings


def _write(formatter: Any, rows: list[tuple[str, str, str]]) -> None:
    """Write heading, name and help of each, names in one column and help in another."""
    width = min(_NAME_COLUMNS, max(len(name) for _, name, _ in rows))
    for heading in dict.fromkeys(heading for heading, _, _ in rows):
        with formatter.section(_bold(heading)):
            in_it = [(_bold(name.ljust(width)), help) for at, name, help in rows if at == heading]
            formatter.write_dl(in_it, col_max=width)


def _bold(text: str) -> str:
    """Return a text in bold, unless the terminal knows no bold. If stdout is no terminal, Typer leaves that out."""
    return text if os.environ.get("TERM") == "dumb" else typer.style(text, bold=True)
