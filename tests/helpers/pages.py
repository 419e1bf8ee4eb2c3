"""The documentation, as tests read it."""

from __future__ import annotations

import re

from helpers.paths import ROOT


def python_in(page: str) -> list[str]:
    """Return the Python blocks of a page, whose path begins at the root of the repository."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
