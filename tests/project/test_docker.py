"""The images and the compose file, as far as they can be checked without a Docker engine: their form, and their steps
run here, in an environment that has nothing else."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT
from ruamel.yaml import YAML

pytestmark = pytest.mark.slow  # each starts whole commands

COMPOSE = ROOT / "docker" / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = YAML(typ="safe").load(COMPOSE.read_text())["services"]
IMAGES = {"docker/Dockerfile": "[demo,metrics]", "docker/Dockerfile.cuda": "[demo,metrics,cuda12]"}
BIN = Path(sys.executable).parent


def _instructions(image: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (ROOT / image).read_text())
    found = (re.fullmatch("([A-Z]+) (.*)", line) for line in text.splitlines())
    return [(match[1], match[2]) for match in found if match]


def test_the_compose_file_fits_its_schema() -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_finds_nothing(image: str) -> None:
    done = subprocess.run([BIN / "hadolint", ROOT / image], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("image", IMAGES)
def test_nobody_is_root_and_each_base_has_a_version(image: str) -> None:
    instructions = _instructions(image)
    bases = [words.split()[0] for name, words in instructions if name == "FROM"]
    assert len(bases) == 2, "one builds, the other has no compiler and no sources"
    assert all(re.search(r":\d+\.\d+", base) for base in bases)
    assert [words for name, words in instructions if name == "USER"] == ["10001"]


def test_the_images_steps_and_entry_points_run_in_a_clean_environment(tmp_path: Path) -> None:
    source, home = tmp_path / "src", tmp_path / "kvps"
    source.mkdir()
    instructions = _instructions("docker/Dockerfile")
    for words in [words.split() for name, words in instructions if name == "COPY" and not words.startswith("--from")]:
        for each in words[:-1]:
            if (ROOT / each).is_dir():
                shutil.copytree(ROOT / each, source / words[-1], ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / each, source)
    clean = {name: os.environ[name] for name in os.environ.keys() - {"PYTHONPATH", "VIRTUAL_ENV"} if "KVPS" not in name}
    clean["PIP_COMPILE"] = "0"  # few of the modules are imported here, and to compile all takes most of the time
    for step in [words for name, words in instructions if name == "RUN" and "/opt/kvps" in words]:
        step = re.sub(r"^python3? ", f"{shlex.quote(sys.executable)} ", step).replace("/opt/kvps", str(home))
        subprocess.run(["sh", "-e", "-c", step], cwd=source, env=clean, check=True, stdout=subprocess.DEVNULL)
    (entry,) = (words for name, words in instructions if name == "ENTRYPOINT")
    assert entry == '["kvps"]'
    clean["PATH"] = f"{home / 'bin'}{os.pathsep}{clean['PATH']}"
    ours = [each for each in SERVICES.values() if each["image"] in ("kvps", "kvps-cuda")]
    entries = {(*each.get("entrypoint", ["kvps"]), each["command"][0]) for each in ours}
    for command in [("kvps",), *entries]:
        done = subprocess.run([*command, "--help"], cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), command


def test_both_images_are_made_of_the_same_things() -> None:
    """But for the extras, and the system's Python."""

    def steps(image: str) -> list[str]:
        lines = [
            f"{name} {words}" for name, words in _instructions(image) if name in ("COPY", "ENV", "ENTRYPOINT", "CMD")
        ]
        (install,) = (words for name, words in _instructions(image) if name == "RUN" and "pip install" in words)
        return [*lines, install.replace("python3 ", "python ").replace(IMAGES[image], "[]")]

    assert steps("docker/Dockerfile") == steps("docker/Dockerfile.cuda")
