"""Shows the docstrings of kvps as they look in the code: their tables as lists, their examples as code.

A docstring of kvps explains attributes in aligned columns, and gives examples without a fence. Markdown would run both
together into one paragraph. Names of errors become links. This is an extension of griffe, which reads the docstrings
for mkdocstrings.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

from kvps import errors

_ROW = re.compile(r"(?P<names>[\w./-]+(?:, [\w./-]+)*) {2,}(?P<text>\S.*)")
_NAMES = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
_ERRORS = re.compile(rf"(?<![\w.`\[])({'|'.join(_NAMES)})(?![\w`\]])")
_CODE = re.compile(r"with .*:$|store = |[├└│]|KvpsError$")


class Docstrings(griffe.Extension):
    """Rewrites each docstring as Markdown, when griffe has read it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """The same docstring, with lists in place of aligned columns and fences around examples."""
    return "\n\n".join(_paragraph(each) for each in re.split(r"\n\s*\n", docstring))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if all(line.startswith("    ") for line in lines):  # Markdown's own form of code
        body = "\n".join(line[4:] for line in lines)
        return f"```python\n{body}\n```"
    if any(_CODE.match(line) for line in lines[:2]):
        return f"```{'text' if '├' in text else 'python'}\n{text}\n```"
    if not _ROW.fullmatch(lines[0]):
        return _ERRORS.sub(r"[\1][kvps.errors.\1]", text)
    out: list[str] = []
    for line in lines:
        if row := _ROW.fullmatch(line):
            names = ", ".join(f"`{name}`" for name in row["names"].split(", "))
            out.append(f"- {names}: {row['text']}")
        else:  # the row goes on
            out.append(f"  {line.strip()}")
    return "\n".join(out)
