"""docker/compose.yaml, and its servers as processes of this machine: where tests run there is no Docker engine."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.paths import ROOT
from ruamel.yaml import YAML

from kvps.machine.paths import server_program

COMPOSE: dict[str, Any] = YAML(typ="safe").load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NODES = [f"node-{number}" for number in range(1, 7)]
SECRETS = "/run/secrets"
USERS = ("administrator", "aggregator", "host", "reader", "submitter")
PASSWORDS = {name: f"{number}123456789abcdef" * 4 for number, name in enumerate(USERS)}
"""What the files in docker/secrets hold here."""


def server_command(service: str = "valkey") -> list[str]:
    """Return the command of a service that runs the server's image."""
    words = [*SERVICES[service]["entrypoint"], *SERVICES[service].get("command", [])]
    return [word.replace("$$", "$") for word in words]


def started_server(
    folder: Path, command: Sequence[str], options: str, passwords: Mapping[str, str] = PASSWORDS
) -> subprocess.Popen[bytes]:
    """Start a server as its container does, in a folder, which has its data and its secrets, with these options too."""
    (folder / "valkey-server").write_text(f'#!/bin/sh\nexec {shlex.quote(server_program())} "$@"\n')
    (folder / "valkey-server").chmod(0o700)
    for name, password in passwords.items():
        (file := folder / "secrets" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{password}\n")  # as `openssl ... > file` writes it
        file.chmod(0o600)
    shell, option, text, *words = command
    assert (shell, option) == ("sh", "-c")
    for named, here in (SECRETS, folder / "secrets"), ("--dir /data", f"--dir {folder}"), ("< /users", f"< {_USERS}"):
        text = text.replace(named, str(here))
    text = text.replace(" <<END", f" {options} <<END")
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([shell, option, text, *words], cwd=folder, env=environment, **pipes)


_USERS = ROOT / "docker" / COMPOSE["configs"]["users"]["file"]
