"""docs/ARCHITECTURE.md holds against the code: its paths are of functions that exist, its tree of rooms."""

from __future__ import annotations

import importlib
import re
import tomllib

import pytest
from helpers.paths import ROOT

PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
PATHS = {
    title: re.findall(r"^\d+\. `([\w.]+)`", text, re.MULTILINE)
    for title, text in re.findall(r"^### ([^\n]+)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
}


def _module_of(name: str) -> tuple[str, object]:
    """The module in which a dotted name is, and what it names."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return ".".join(parts[:end]), found
    raise AssertionError(name)


@pytest.mark.parametrize("title", PATHS)
def test_a_path_is_of_functions_and_enters_no_module_twice(title: str) -> None:
    if "PyTorch" in title:
        pytest.importorskip("torch.nn")
    assert len(PATHS[title]) > 3
    modules = []
    for name in PATHS[title]:
        module, found = _module_of(name)
        assert callable(found), name
        modules.append(module)
    assert len(set(modules)) == len(modules), modules


def test_there_are_five_paths() -> None:
    assert len(PATHS) == 5


def test_the_tree_has_every_room() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    for package in build["targets"]["wheel"]["packages"]:
        tree = re.search(rf"^{package}/.*?(?=^\S)", PAGE, re.MULTILINE | re.DOTALL)
        assert tree, f"{package} is not in the tree"
        for room in (ROOT / package).iterdir():
            if (room / "__init__.py").exists():
                assert re.search(rf"\b{room.name}/", tree[0]), f"{room} is not in the tree"
