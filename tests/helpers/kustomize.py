"""Renders a folder of deploy/kubernetes, as far as it uses Kustomize: resources, and patches of single fields.

`kubectl kustomize` made the same objects of both overlays. No machine of the tests is asked to have it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML


def loaded(text: str) -> list[Any]:
    """The documents of a YAML text."""
    return list(YAML(typ="safe").load_all(text))


def rendered(folder: Path) -> list[dict[str, Any]]:
    """The objects that `kubectl kustomize` makes of a folder, in the order of the files."""
    (told,) = loaded((folder / "kustomization.yaml").read_text())
    assert told.keys() <= {"apiVersion", "kind", "resources", "patches"}
    objects: list[dict[str, Any]] = []
    for name in told["resources"]:
        path = folder / name
        objects += rendered(path) if path.is_dir() else loaded(path.read_text())
    for patch in told.get("patches", []):
        kind, name = patch["target"]["kind"], patch["target"]["name"]
        (target,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
        for change in loaded(patch["patch"])[0]:
            _apply(target, change)
    return objects


def _apply(target: Any, change: dict[str, Any]) -> None:
    """Do one operation of RFC 6902."""
    *path, last = (part.replace("~1", "/") for part in change["path"].split("/")[1:])
    for part in path:
        target = target[int(part) if isinstance(target, list) else part]
    if change["op"] == "add" and last == "-":
        target.append(change["value"])
    elif change["op"] == "add" and isinstance(target, dict):
        target[last] = change["value"]
    else:
        assert change["op"] == "replace"
        assert last in target
        target[last] = change["value"]
