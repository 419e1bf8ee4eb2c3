"""The documentation and the examples, as tests read them."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

from helpers.paths import ROOT


def python_in(page: str) -> list[str]:
    """Return the Python blocks of a page, whose path begins at the root of the repository."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def example_of(name: str) -> ModuleType:
    """Import an example; return its module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
