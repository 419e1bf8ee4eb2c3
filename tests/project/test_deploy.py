"""docs/deploy.md and the pages in deploy/: their commands, and the files that they name."""

from __future__ import annotations

import re
import subprocess

import pytest
from helpers.command_lines import check_parses, commands_in
from helpers.paths import ROOT

PAGE = ROOT / "docs" / "deploy.md"
PAGES = [PAGE, *sorted((ROOT / "deploy").rglob("*.md"))]


def blocks(text: str) -> list[str]:
    """The shell's text in a page."""
    return re.findall(r"^ *```sh\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_are_of_this_version_and_their_files_are_there(page: object) -> None:
    for block in blocks(page.read_text()):  # type: ignore[attr-defined]
        subprocess.run(["bash", "-n", "-c", block], check=True)
        for words in commands_in(block):
            check_parses(words)
        named = set(re.findall(r"\b(?:deploy|docker)/[\w./-]+", block))
        made = {name for name in named if "/mine" in name or name in ("docker/.env", "docker/secrets")}
        assert all((ROOT / name).exists() for name in named - made), named


def test_the_arguments_of_sbatch_are_those_of_create() -> None:
    found = [line for page in PAGES for block in blocks(page.read_text()) for line in block.splitlines()]
    arguments = [line.partition("kvps.sbatch ")[2].split() for line in found if "kvps.sbatch " in line]
    assert len(arguments) >= 3
    for words in arguments:
        check_parses(["create", *words, "--job", "train", "--workers", "4"])
