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
IMAGES = {"docker/Dockerfile": "image.txt", "docker/Dockerfile.cuda": "image-cuda.txt"}  # each with its lock
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
    source, opt = tmp_path / "src", tmp_path / "opt"
    source.mkdir()
    instructions = _instructions("docker/Dockerfile")
    clean = {name: os.environ[name] for name in os.environ.keys() - {"PYTHONPATH", "VIRTUAL_ENV"} if "KVPS" not in name}
    clean["PIP_COMPILE"] = "0"  # few of the modules are imported here, and to compile all takes most of the time
    for name, words in instructions[: [name for name, _ in instructions].index("FROM", 1)]:
        if name == "ENV":
            clean |= (each.split("=", 1) for each in words.split())
        elif name == "COPY":
            *each, target = words.split()
            _copy(each, source / target)
        elif name == "RUN":
            step = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", words).replace("/opt/", f"{opt}/")
            subprocess.run(["sh", "-e", "-c", step], cwd=source, env=clean, check=True, stdout=subprocess.DEVNULL)
    (entry,) = (words for name, words in instructions if name == "ENTRYPOINT")
    assert entry == '["kvps"]'
    clean["PATH"] = f"{opt / 'kvps' / 'bin'}{os.pathsep}{clean['PATH']}"
    ours = [each for each in SERVICES.values() if each["image"] in ("kvps", "kvps-cuda")]
    entries = {(*each.get("entrypoint", ["kvps"]), each["command"][0]) for each in ours}
    for command in [("kvps",), *entries]:
        done = subprocess.run([*command, "--help"], cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), command


def _copy(names: list[str], target: Path) -> None:
    """Copy files and the contents of folders, as COPY does."""
    target.mkdir(exist_ok=True)
    for path in map(ROOT.joinpath, names):
        if path.is_dir():
            shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copy(path, target)


@pytest.mark.parametrize("image", IMAGES)
def test_pip_takes_nothing_but_files_whose_hash_is_known(image: str) -> None:
    """What it would build, it would build with whatever it finds."""
    instructions = _instructions(image)
    assert ("ENV", "PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all:") in instructions
    steps = [step for name, words in instructions if name == "RUN" for step in words.split(" && ") if "pip " in step]
    assert [step.partition("/opt/kvps/bin/pip install ")[2] for step in steps] == [
        f"--require-hashes -r requirements/{IMAGES[image]}",
        "--target /opt/build --require-hashes -r requirements/build.txt",
        "--no-index --no-deps /opt/wheel/*.whl",
    ]
