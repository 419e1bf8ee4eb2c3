"""What kvps is made of: the lock file of CI, the licences, and the question for known vulnerabilities."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kvps.machine.paths import bundled_server

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]


def _wanted(*extras: str) -> Iterator[Requirement]:
    """The requirements of kvps and some of its extras, and of the extras of kvps that those name."""
    yield from map(Requirement, PROJECT["dependencies"])
    for extra in extras:
        for each in map(Requirement, PROJECT["optional-dependencies"][extra]):
            if each.name == "kvps":
                yield from _wanted(*each.extras)
            else:
                yield each


# -- the locks ------------------------------------------------------------------------------------------------------

LOCKS = {  # file in requirements/: what it is for
    "ci.txt": [*_wanted("dev", "docs")],
    "image.txt": [*_wanted("demo", "metrics")],
    "image-cuda.txt": [*_wanted("demo", "metrics", "cuda12")],
    "build.txt": [*map(Requirement, PYPROJECT["build-system"]["requires"])],
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_each_package_in_an_allowed_version_with_hashes_and_names_no_place(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text()
    locked: dict[str, Version] = {}
    lines = re.sub(r" \\\n", "", text).splitlines()
    for line in (line for line in lines if not line.lstrip().startswith("#")):
        found = re.fullmatch(r"([a-z0-9-]+)==([^ ;]+)(?: ; [^/]*?)?((?: +--hash=sha256:[0-9a-f]{64})+)", line)
        assert found, f"no version with hashes: {line[:80]!r}"
        assert found[1] not in locked, "an audit asks only for the version that its own Python would take"
        locked[found[1]] = Version(found[2])
    for each in LOCKS[name]:
        version = locked.get(canonicalize_name(each.name))
        assert version, f"{each.name} is not locked: make lock"
        assert version in each.specifier, f"{each} is locked as {version}: make lock"
    assert "://" not in text
    assert not re.search(r"(^|\s)(/|--(index|extra|find|trusted))", text)


def test_make_checks_hashes_if_it_is_told_to_and_else_takes_what_pip_finds() -> None:
    def printed(*settings: str) -> str:
        command = ["make", "--dry-run", "--always-make", ".stamps/dev", ".stamps/docs", *settings]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    environment = {name: value for name, value in os.environ.items() if name not in ("LOCKED", "MAKEFLAGS")}
    assert "--require-hashes" not in printed()
    assert "-e '.[dev]'" in printed()
    assert printed("LOCKED=1").count("--require-hashes -r requirements/ci.txt") == 2
    assert "-e '.[" not in printed("LOCKED=1"), "pip would look for packages that have no hash"
    assert "export LOCKED=1" in (ROOT / ".ci" / "run").read_text()


# -- licences -------------------------------------------------------------------------------------------------------


def test_each_package_that_kvps_needs_is_listed_with_the_licence_that_it_states() -> None:
    licences = runpy.run_path(str(ROOT / "docs" / "licences.py"))
    rows = re.findall(r"^\| ([a-z0-9-]+) \| (\S.*?) \| ", licences["PAGE"].read_text(), re.MULTILINE)
    listed = dict(rows[1:])
    for each in _wanted("embedded", "demo"):
        name = canonicalize_name(each.name)
        assert listed.get(name) == licences["licence_of"](name), f"{name}: make licences"


# -- known vulnerabilities --------------------------------------------------------------------------------------------


KNOWN = '{"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}'
ANSWERS = {
    "one known": (
        f'{{"dependencies": [{KNOWN}]}}',
        1,
        "a 1: PYSEC-1, fixed in 2\n1 of 1 packages of LOCK are vulnerable",
    ),
    "not asked": (
        f'{{"dependencies": [{KNOWN}, {{"name": "b", "skip_reason": "no answer"}}]}}',
        2,
        "LOCK is not audited: there is no answer for 1 of 2 packages",
    ),
    "no network": ("", 2, "LOCK is not audited: ConnectionError: no route"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_audit_without_an_answer_fails_in_one_line(answer: str, tmp_path: Path) -> None:
    """pip-audit itself succeeds when it could not ask for a package. The answers are in the form of version 2.10."""
    said, status, printed = ANSWERS[answer]
    stub = f"import sys\nprint({said!r})\nif not {said!r}: sys.exit('Traceback\\n  ...\\nConnectionError: no route')"
    (tmp_path / "pip_audit.py").write_text(stub)
    done = subprocess.run(
        [sys.executable, ROOT / "requirements" / "audit.py", "one.txt", "other.txt"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    for lock in ("one.txt", "other.txt"):
        assert f"{printed}\n".replace("LOCK", lock) in done.stdout
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (status, 2 * (printed.count("\n") + 1), "")


# -- the server -------------------------------------------------------------------------------------------------------


def test_the_bundled_server_is_past_cve_2025_49844() -> None:
    """Lua in a Valkey before 8.1.4 or 9.0.0 can run code of its own in the server."""
    program = bundled_server()
    assert program
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    assert Version(re.findall(r" v=(\S+)", printed)[0]) >= Version("9.0.0")


def test_no_text_has_people_install_a_name_that_kvps_does_not_own() -> None:
    """Until there is a release, a package index has nothing under this name, or what a stranger has put there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if Path(name).suffix in (".py", ".md", ".yaml", ".sbatch")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths if path.exists()}
    wrong = [name for name, text in texts.items() if re.search(r"pip install (-\S+ )*['\"]?kvps\b", text)]
    assert not set(wrong) - {"CHANGELOG.md"}
