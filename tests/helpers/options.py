"""What a command gets that is called with some options."""

from __future__ import annotations

import shlex
from typing import Any

import typer
from kvps_cli.connect import ServerOptions
from kvps_cli.options import with_shared
from kvps_cli.train.kept_files import KeptFiles
from kvps_cli.train.settings import JobOptions
from typer.testing import CliRunner


def settings_of(kind: type[JobOptions], line: str = "") -> Any:
    """Return the settings of this kind that the options in `line` say. Those of servers and files are known too."""
    got = list[JobOptions]()

    def command(settings: JobOptions, server: ServerOptions, kept: KeptFiles) -> None:
        got.append(settings)

    command.__annotations__.update(settings=kind, server=ServerOptions, kept=KeptFiles)
    app = typer.Typer()
    app.command()(with_shared(command))
    result = CliRunner().invoke(app, shlex.split(line), catch_exceptions=False)
    assert result.exit_code == 0, f"{line}: {result.output}"
    return got[0]
